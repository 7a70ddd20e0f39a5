"""vLLM's halves of the connector without vLLM: an engine that paints what it computes.

Primitives:
  `FakeRequest`   what the connector reads of a request
  `FakeEngine`    blocks, a scheduler that hands them out, steps as vLLM makes them
  `DeviceEngine`  the same with its blocks on the stand-in for a GPU, which works late

A block's bytes are a function of its name, so that any block says whether it holds what it should.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.workload import Painter
from engine_adapter.device_transfer import DeviceTransfers
from engine_adapter.lanes import Lanes
from engine_adapter.transfer import PagedTarget, Plane
from engine_adapter.vllm_blocks import LanePages
from engine_adapter.vllm_device import Device, targets_mover
from engine_adapter.vllm_host import pages_mover
from engine_adapter.vllm_mover import Mover
from engine_adapter.vllm_orders import Lane, StepOrders
from engine_adapter.vllm_scheduler import SchedulerSide
from engine_adapter.vllm_settings import Settings
from engine_adapter.vllm_worker import WorkerSide
from kvstore.client import KVClient
from kvstore.fingerprint import KVIdentity, chain, namespace_of
from kvstore.layout import BlockLayout
from kvstore.testing.fake_device import FakeDevice
from kvstore.types import ByteArray
from tests.e2e.kit import SECONDS_MAX

BLOCK = 16
LAYERS = 2
LAYER_BYTES = 4096
ENGINE_BLOCKS = 512


@dataclass
class FakeRequest:
    """`all_token_ids` grows as tokens are sampled."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    resumable: bool = False

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.all_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        return [bytes([at % 256]) * 32 for at in range(self.num_tokens // BLOCK)]


def lane(
    group: int = 0, window: int = 0, rank: int = 0, name: str = "fake", block: int = BLOCK
) -> Lane:
    identity = KVIdentity(
        model=name,
        weights_digest="w",
        kv_dtype="u8",
        layout="rows",
        block_tokens=block,
        layers=LAYERS,
        kv_heads_per_rank=1,
        head_size=1,
        kv_group=f"{group} {window}",
        tp_rank_first=rank,
    )
    return Lane(
        group,
        rank,
        namespace_of(identity),
        BlockLayout(block, LAYERS, LAYER_BYTES * block // BLOCK),
        window,
        tuple(f"layer{at}" for at in range(LAYERS)),
    )


class FakeEngine:
    """One KV group unless more lanes are given; lanes of one group share block ids."""

    def __init__(
        self, socket: Path, *lanes: Lane, settings: Settings | None = None, **options: Any
    ) -> None:
        self.lanes = lanes or (lane(),)
        self.settings = settings or Settings(
            socket=str(socket),
            layerwise="never",
            plan=False,  # a forward pass takes next to nothing here
            lookup_seconds=SECONDS_MAX,
            load_seconds=SECONDS_MAX,
        )
        deadline = options.pop("deadline", SECONDS_MAX)
        clients = [KVClient(str(socket), deadline_seconds=deadline) for _ in range(2)]
        self.is_connected = all(
            client.wait_connected(options.pop("attach", 20)) for client in clients
        )
        options = {"adapter_digest": lambda lora: str(lora), "step_tokens_max": 2048, **options}
        self.scheduler = SchedulerSide(clients[0], self.lanes, self.settings, **options)
        self.worker = WorkerSide(clients[1], self.lanes, 0, self.settings)
        self.memory = {
            at: [self.make_memory(one.layout.layer_bytes) for _ in range(LAYERS)]
            for at, one in enumerate(self.lanes)
        }
        self.worker.use(self.make_mover())
        self.next_block = 1
        self.copied: list[int] = []
        """Numbers of saves that no longer read the engine's blocks."""

    # ------------------------------------------------------------------ where blocks lie

    def make_memory(self, layer_bytes: int) -> ByteArray:
        """A layer's blocks, zeros."""
        return np.zeros((ENGINE_BLOCKS, layer_bytes), np.uint8)

    def make_mover(self) -> Mover:
        mine = self.worker.side.mine.items()
        return pages_mover(
            self.worker.side, {at: LanePages(one, self.memory[at]) for at, one in mine}
        )

    def write(self, page: ByteArray, row: ByteArray) -> None:
        """A block is computed."""
        page[:] = row

    def settle(self) -> None:
        """Until everything computed and loaded so far is there."""

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()
        self.scheduler.close()

    # ------------------------------------------------------------------ what vLLM does

    def ids(self, tokens: int, computed: int = 0) -> list[list[int]]:
        """A block table a group for a request of `tokens`, blocks behind windows left out."""
        tables: dict[int, list[int]] = {}
        for one in self.lanes:
            if one.group in tables:
                continue
            count = -(-tokens // one.block_tokens)
            table = list(range(self.next_block, self.next_block + count))
            self.next_block = (self.next_block + count) % (ENGINE_BLOCKS - 300) + 1
            if one.window_tokens:
                skipped = max(computed - one.window_tokens, 0) // one.block_tokens
                table[:skipped] = [0] * skipped
            tables[one.group] = table
        return [tables[group] for group in sorted(tables)]

    def ask(self, request: FakeRequest, computed: int = 0) -> tuple[int, bool]:
        """As the scheduler asks at every step until there is an answer."""
        until = time.monotonic() + SECONDS_MAX
        while True:
            tokens, is_async = self.scheduler.matched(request, computed)  # type: ignore[arg-type]
            if tokens is not None:
                return tokens, is_async
            assert time.monotonic() < until
            self.step({})

    def step(
        self,
        scheduled: dict[str, int],
        tables: dict[str, list[list[int]]] | None = None,
        requests: dict[str, FakeRequest] | None = None,
        preempted: tuple[str, ...] = (),
    ) -> SimpleNamespace:
        """One engine step: loads, a forward pass that paints, saves, and the report."""
        orders: StepOrders = self.scheduler.step_orders(
            scheduled, preempted, lambda request: (tables or {}).get(request)
        )
        worker = self.worker
        worker.begin(orders)
        if any(order.is_layerwise for order in orders.loads):
            worker.start_loads()
        if scheduled:
            for name in self.lanes[0].layer_names:
                worker.wait_for_layer(name)
        for request_id, tokens in scheduled.items():
            request = (requests or {})[request_id]
            self.paint(request, (tables or {})[request_id], request.num_computed_tokens, tokens)
        worker.start_loads()
        worker.end_forward()
        result = SimpleNamespace(
            received=worker.received(),
            failed=worker.failed(),
            bad=worker.bad_block_ids(),
            report=worker.report(),
        )
        if result.report is not None:
            self.copied += result.report.copied
        self.scheduler.step_ended(result.report, result.received)
        return result

    def chain(self, at: int, request: FakeRequest) -> Any:
        one = self.lanes[at]
        from engine_adapter.vllm_requests import contents_of

        contents = contents_of(request, lambda lora: str(lora))  # type: ignore[arg-type]
        return chain(one.namespace, request.all_token_ids, one.block_tokens, contents)

    def paint(self, request: FakeRequest, table: list[list[int]], start: int, tokens: int) -> None:
        """The forward pass: whole blocks in [start, start + tokens) get their right bytes."""
        for at, one in enumerate(self.lanes):
            names, painter = self.chain(at, request), Painter(one.layout.block_bytes)
            for block in range(start // one.block_tokens, (start + tokens) // one.block_tokens):
                row = painter.painted(names[block]).reshape(LAYERS, -1)
                for layer in range(LAYERS):
                    self.write(self.memory[at][layer][table[one.group][block]], row[layer])

    def holds(self, request: FakeRequest, table: list[list[int]], at: int, block: int) -> bool:
        """Whether an engine block holds the bytes of this block of the request."""
        self.settle()
        one = self.lanes[at]
        name = self.chain(at, request)[block]
        row = np.concatenate([m[table[one.group][block]] for m in self.memory[at]])
        return Painter(one.layout.block_bytes).is_painted(name, row)

    # ------------------------------------------------------------------ whole requests

    def compute(self, request: FakeRequest) -> list[list[int]]:
        """Prefill all of it in one step; the block tables."""
        self.scheduler.arrived(request)  # type: ignore[arg-type]
        self.ask(request)
        table = self.ids(request.num_tokens)
        self.step(
            {request.request_id: request.num_tokens},
            {request.request_id: table},
            {request.request_id: request},
        )
        self.scheduler.finished(request.request_id)
        assert self.worker.wait_idle(SECONDS_MAX)
        self.step({})
        return table

    def admit(self, request: FakeRequest) -> tuple[int, list[list[int]]]:
        """Arrive and get blocks: how many tokens are to be loaded, and the tables."""
        self.scheduler.arrived(request)  # type: ignore[arg-type]
        tokens, _ = self.ask(request)
        table = self.ids(request.num_tokens, tokens)
        self.scheduler.allocated(request, table, tokens)  # type: ignore[arg-type]
        return tokens, table

    def load(self, request: FakeRequest) -> tuple[int, list[list[int]], SimpleNamespace]:
        """Arrive, load what is found beside the forward pass; (tokens, tables, last step)."""
        tokens, table = self.admit(request)
        last = SimpleNamespace(received=set(), failed=set(), bad=set(), report=None)
        until = time.monotonic() + SECONDS_MAX
        while tokens and request.request_id not in last.received:
            last = self.step({})
            assert time.monotonic() < until
        return tokens, table, last


class DeviceEngine(FakeEngine):
    """What it computes is written when the compute stream gets there."""

    def __init__(
        self, socket: Path, *lanes: Lane, fake: FakeDevice | None = None, **options: Any
    ) -> None:
        self.fake = fake or FakeDevice(1)
        self.compute_stream = self.fake.make_compute_stream()

        def pause() -> None:
            self.fake.advance(50)
            time.sleep(0.0002)

        self.lanes_of_device = Lanes(self.fake, now=time.monotonic, pause=pause)
        self.transfers = DeviceTransfers(self.lanes_of_device, ThreadPoolExecutor(2))
        super().__init__(socket, *lanes, **options)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        assert self.fake.error == ""

    def make_memory(self, layer_bytes: int) -> ByteArray:
        size = ENGINE_BLOCKS * layer_bytes
        memory = self.fake.bytes_at(self.fake.allocate(size), size)
        memory[:] = 0
        return memory.reshape(ENGINE_BLOCKS, layer_bytes)

    def make_mover(self) -> Mover:
        targets = {}
        for at, one in self.worker.side.mine.items():
            size = one.layout.layer_bytes
            planes = tuple((Plane(m.ctypes.data, size, size),) for m in self.memory[at])
            targets[at] = PagedTarget(one.layout, planes, ENGINE_BLOCKS)
        device = Device(self.transfers, targets, lambda: self.compute_stream)
        return targets_mover(self.worker.side, device, ThreadPoolExecutor(1))

    def write(self, page: ByteArray, row: ByteArray) -> None:
        self.fake.enqueue(self.compute_stream, lambda: np.copyto(page, row))

    def settle(self) -> None:
        self.fake.drain()
