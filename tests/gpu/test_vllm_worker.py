"""The vLLM worker's half on torch tensors that lie as vLLM's do; no vLLM, no daemon.

On a GPU where there is one. Without, the same on the stand-in, whose memory torch sees as its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from bench.gpu_measure import PinnedBlocks, Places, Reservation
from engine_adapter import vllm_device
from engine_adapter.device_transfer import DeviceTransfers
from engine_adapter.vllm_device import Device, targets_mover
from engine_adapter.vllm_orders import BlockOrder, Lane, LoadOrder, StepOrders
from engine_adapter.vllm_settings import Settings
from engine_adapter.vllm_target import content_order, prove_target, target_of
from engine_adapter.vllm_worker import WorkerSide
from kvstore.device import open_device
from kvstore.errors import ConfigError
from kvstore.layout import BlockLayout
from kvstore.types import FINGERPRINT_BYTES, BlockStatus, NamespaceId

torch = pytest.importorskip("torch", reason="install torch")

NAMESPACE = NamespaceId(b"n" * 32)
LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 4, 64, 2, 16, 128
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
SECONDS_MAX = 60.0
BESIDE, INSIDE = list(range(27, 19, -1)), [40, 42, 41, 50, 51, 52, 53, 60]


class Store:
    """Client and daemon: slots of one arena, a block a name."""

    def __init__(self, layout: BlockLayout) -> None:
        self.id, self.layout = NAMESPACE, layout
        self.arena = np.zeros((BLOCKS, layout.slot_bytes), np.uint8)
        each = np.arange(BLOCKS, dtype=np.uint64) * np.uint64(layout.slot_bytes)
        self.places = np.uint64(self.arena.ctypes.data) + each
        self.slots: dict[bytes, int] = {}

    def namespace(self, *arguments: Any, **options: Any) -> Store:
        return self

    def match_each(self, order: BlockOrder) -> Any:
        return np.array([name in self.slots for name in names_of(order)])

    def find(self, order: BlockOrder) -> Any:
        return Found(self.places[[self.slots[name] for name in names_of(order)]])

    def reserve(self, order: BlockOrder, *, start: int, count: int) -> Any:
        return Grant(self, names_of(order)[start : start + count])

    def close(self) -> None:
        """Nobody is told."""


class Found(PinnedBlocks):
    def end(self, used: int) -> None:
        """Nobody held it."""


class Grant(Reservation):
    def __init__(self, store: Store, names: list[bytes]) -> None:
        first = len(store.slots)
        super().__init__(Places(store.places), list(range(first, first + len(names))))
        self._store, self._names = store, names
        self.granted = range(len(names))
        self.statuses = [BlockStatus.GRANTED] * len(names)

    def commit(self) -> list[BlockStatus]:
        self._store.slots.update(zip(self._names, self.offsets, strict=True))
        self.statuses = [BlockStatus.STORED] * len(self._names)
        return self.statuses


def names_of(order: BlockOrder) -> list[bytes]:
    return [order.parent_of(at + 1) for at in range(len(order))]


def order_of(contents: range, ids: list[int], number: int = 0) -> BlockOrder:
    joined = b"".join(content.to_bytes(FINGERPRINT_BYTES, "little") for content in contents)
    return BlockOrder(0, NAMESPACE, bytes(NAMESPACE), joined, ids, number)


def caches(layout: str, memory: Any) -> dict[str, Any]:
    """vLLM's views: bfloat16 [blocks, heads, tokens, content] a layer, of one allocation."""
    sizes = dict(zip("LBHNC", (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT), strict=True))
    whole = memory.view(torch.bfloat16).reshape([sizes[axis] for axis in layout])
    views = whole.permute([layout.index(axis) for axis in "LBHNC"])
    return {f"layer{at}": views[at] for at in range(LAYERS)}


MEMORY_BYTES = 2 * LAYERS * BLOCKS * HEADS * TOKENS * CONTENT
MakeWorker = Callable[[str], tuple[WorkerSide, Store, dict[str, Any]]]


@pytest.fixture(
    params=[
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("stand-in", marks=pytest.mark.engines),
    ]
)
def make_worker(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeWorker]:
    monkeypatch.setattr(vllm_device, "find_in_host", Store.find)
    monkeypatch.setattr(vllm_device, "let_in", lambda *_: None)
    monkeypatch.setattr(DeviceTransfers, "attend", lambda *_: None)
    made: list[WorkerSide] = []

    def make(layout: str) -> tuple[WorkerSide, Store, dict[str, Any]]:
        block = BlockLayout(TOKENS, LAYERS, 2 * HEADS * TOKENS * CONTENT)
        store: Any = Store(block)
        lane = Lane(0, 0, NAMESPACE, block, 0, tuple(f"layer{at}" for at in range(LAYERS)))
        worker = WorkerSide(store, [lane], 0, Settings(load_seconds=SECONDS_MAX))
        made.append(worker)
        if request.param == "cuda":
            views = on_cuda(layout, worker)
        else:
            views = caches(layout, stand_in(worker, layout))
        transfers = worker._mover.saver._device.transfers  # type: ignore[attr-defined]
        transfers.pin([store.arena.reshape(-1)])
        return worker, store, views

    yield make
    for worker in made:
        worker.close()


def on_cuda(layout: str, worker: WorkerSide) -> dict[str, Any]:
    try:
        open_device(0)
    except ConfigError as error:
        pytest.skip(str(error))
    views = caches(layout, torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device="cuda"))
    worker.register(views, BLOCKS, layout)
    return views


def stand_in(worker: WorkerSide, layout: str) -> Any:
    """Device memory that torch sees; the device works whenever it is asked."""
    from engine_adapter.lanes import Lanes
    from kvstore.testing.fake_device import FakeDevice

    fake = FakeDevice(1)

    def pause() -> None:
        fake.advance(50)
        time.sleep(0.0002)

    transfers = DeviceTransfers(Lanes(fake, now=time.monotonic, pause=pause), ThreadPoolExecutor(2))
    memory = torch.from_numpy(fake.bytes_at(fake.allocate(MEMORY_BYTES), MEMORY_BYTES))
    views, compute = caches(layout, memory), fake.make_compute_stream()
    (lane,) = worker.side.lanes
    target = target_of(lane, views, BLOCKS, layout)
    prove_target(transfers, target, list(views.values()), layout, compute)
    device = Device(transfers, {0: target}, lambda: compute)
    worker.use(targets_mover(worker.side, device, ThreadPoolExecutor(1)))
    return memory


def step(worker: WorkerSide, orders: StepOrders) -> None:
    worker.begin(orders)
    worker.start_loads()
    worker.end_forward()


def until(ask: Callable[[], Any]) -> Any:
    """What `ask` answers once that is something."""
    last = time.monotonic() + SECONDS_MAX
    while not (found := ask()):
        assert time.monotonic() < last
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_go_into_slots_and_come_back(make_worker: MakeWorker, layout: str) -> None:
    """Saved, compared byte by byte, loaded beside a forward pass and inside one."""
    worker, store, views = make_worker(layout)
    for view in views.values():
        view.copy_(torch.randn(view.shape))
    step(worker, StepOrders(saves=(order_of(range(8), list(range(1, 9)), number=1),)))
    assert worker.wait_idle(SECONDS_MAX)
    assert until(worker.report).copied == [1]
    inner = (0, 1, 2) if content_order(layout) == "HNC" else (1, 0, 2)
    for content in range(8):
        slot = store.arena[store.slots[content.to_bytes(FINGERPRINT_BYTES, "little")]]
        for at, view in enumerate(views.values()):
            start = store.layout.layer_offset(0, at)
            block = view[content + 1].permute(inner).contiguous().view(torch.uint8)
            found = slot[start : start + store.layout.layer_bytes]
            assert np.array_equal(found, block.cpu().numpy().reshape(-1))

    step(worker, StepOrders(loads=(LoadOrder("a", False, (order_of(range(8), BESIDE),)),)))
    assert until(worker.received) == {"a"}
    worker.begin(StepOrders(loads=(LoadOrder("b", True, (order_of(range(8), INSIDE),)),)))
    worker.start_loads()
    seen = []
    for name, view in views.items():
        worker.wait_for_layer(name)
        seen.append(view[INSIDE])
    worker.end_forward()
    assert not worker.bad_block_ids()
    for view, read in zip(views.values(), seen, strict=True):
        assert torch.equal(view[BESIDE], view[1:9])
        assert torch.equal(view[INSIDE], view[1:9])
        assert not view.is_cuda or torch.equal(read, view[1:9]), "read behind its own event"
