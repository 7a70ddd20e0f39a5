"""A Llama-3-8B-shaped model on a device, its prefix loaded behind the prefill of the rest.

Primitives:
  `Bed`          the model, a stored prefix in pinned memory, and the transfer engine between them
  `figures`      hidden share, time to first token against recompute, slowdown of decodes
  `timeline`     copy and compute stream layer by layer, as intervals; `draw` makes a picture of it

Everything is timed by events on the compute stream, in interleaved rounds. The cache, the load and
the waits are the transformers adapter's own. Weights are random: time does not depend on them.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from bench.gpu_measure import HIDDEN, SLOWDOWN, TTFT, PinnedBlocks
from bench.harness import Reading, spread
from engine_adapter.accelerator import Accelerator, DevicePrefixLoad
from engine_adapter.loader import Row
from engine_adapter.prefix import Prefix
from engine_adapter.transformers import BLOCK_TOKENS_DEFAULT, cache_name
from engine_adapter.transformers_cache import KVCache, ModelShape
from kvstore.types import ByteArray, UIntArray

WARM_UP = 2


@dataclass(frozen=True)
class Sizes:
    """Of a measurement; the defaults are what the figures are stated for."""

    prefix_tokens: int = 16 << 10
    suffix_tokens: int = 2 << 10
    block_tokens: int = BLOCK_TOKENS_DEFAULT
    decode_rows: int = 8
    decode_tokens: int = 1 << 10
    decode_steps: int = 24
    rounds: int = 7


def llama_8b(device: torch.device) -> Any:
    """Llama-3-8B's shape in bfloat16, built on the device."""
    config = transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=1 << 17,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


class Bed:
    """One model and one prefix. Everything enqueues on the calling thread's stream."""

    def __init__(self, accelerator: Accelerator, model: Any, sizes: Sizes) -> None:
        self.accelerator = accelerator
        self.device = accelerator.transfers._lanes.device
        self.model = model
        self.sizes = sizes
        self._cache_name = cache_name(model)
        config = model.config
        heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        windows = (None,) * config.num_hidden_layers
        self.shape = ModelShape(windows, heads, size, size, model.dtype, accelerator.device)
        self.tensors = self.shape.tensors(sizes.block_tokens)
        blocks = sizes.prefix_tokens // sizes.block_tokens
        self.arena, self.places = self._stored(blocks)
        accelerator.transfers.pin([self.arena])
        ids = torch.randint(3, config.vocab_size, (1, sizes.prefix_tokens + sizes.suffix_tokens))
        self.ids = ids.to(accelerator.device)

    def _stored(self, blocks: int) -> tuple[ByteArray, UIntArray]:
        """Slots with plausible numbers, and where each block lies among them."""
        slot = self.tensors.block_layout.slot_bytes
        arena: ByteArray = np.empty(blocks * slot, np.uint8)
        numbers = torch.randn(slot // self.model.dtype.itemsize).to(self.model.dtype)
        arena.reshape(blocks, slot)[:] = numbers.view(torch.uint8).numpy()
        order = np.random.default_rng(1).permutation(blocks).astype(np.uint64)
        return arena, np.uint64(arena.ctypes.data) + order * np.uint64(slot)

    def wait_pinned(self) -> None:
        while self.accelerator.transfers.describe()["pinned_bytes"] != len(self.arena):
            time.sleep(0.01)

    # ------------------------------------------------------------------ what is timed

    def cache(self, tokens: int, batch: int = 1) -> KVCache:
        """With `tokens` columns that nobody has filled."""
        made = KVCache(self.shape.windows, tokens, empty=self.accelerator.empty)
        made.restore(self.shape, batch, tokens, [0] * batch, 2 * tokens)
        return made

    def load(self, cache: KVCache) -> DevicePrefixLoad:
        source: Any = PinnedBlocks(self.places)
        row = Row(Prefix(source), self.sizes.prefix_tokens, 0, (0,))
        return DevicePrefixLoad(self.accelerator, self.tensors, [row], cache.whole(), 60.0)

    def forward(self, ids: torch.Tensor, cache: KVCache | None) -> Any:
        """One pass over `ids` behind what is in the cache; logits of the last token."""
        cache = cache if cache is not None else self._empty(ids.shape[1])
        with torch.no_grad():
            here = {self._cache_name: cache}
            return self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **here).logits

    def _empty(self, tokens: int) -> KVCache:
        return KVCache(self.shape.windows, tokens, empty=self.accelerator.empty)

    def seconds(self, work: Callable[[], object]) -> float:
        """Device seconds of what `work` enqueues on the compute stream."""
        first, last = (self.device.make_event(timed=True) for _ in range(2))
        stream = self.accelerator.stream()
        self.device.record(first, stream)
        work()
        self.device.record(last, stream)
        self._wait(last)
        taken = self.device.seconds_between(first, last)
        for event in (first, last):
            self.device.drop_event(event)
        return taken

    def _wait(self, event: int) -> None:
        while not self.device.is_done(event):
            time.sleep(5e-5)

    def load_seconds(self) -> float:
        cache = self.cache(self.sizes.prefix_tokens)
        last = len(self.shape.windows) - 1
        return self.seconds(lambda: self.load(cache).wait(last))

    def compute_seconds(self) -> float:
        cache = self.cache(self.sizes.prefix_tokens)
        assert self.load(cache).confirm() == ""
        return self.seconds(lambda: self.forward(self.suffix, cache))

    @property
    def suffix(self) -> torch.Tensor:
        return self.ids[:, self.sizes.prefix_tokens :]

    def overlapped_seconds(self) -> float:
        """Load and prefill of the suffix, layer i of the one waiting for layer i of the other."""
        cache = self.cache(self.sizes.prefix_tokens)
        loads: list[DevicePrefixLoad] = []

        def both() -> None:
            loads.append(self.load(cache))
            cache.await_load(loads[0])
            self.forward(self.suffix, cache)

        taken = self.seconds(both)
        assert loads[0].confirm() == ""
        return taken

    def recompute_seconds(self) -> float:
        return self.seconds(lambda: self.forward(self.ids, None))

    # ------------------------------------------------------------------ decodes

    def steps(self, *, while_loading: bool) -> list[float]:
        """Seconds of each step of running decodes; loads of the prefix follow each other."""
        sizes = self.sizes
        cache = self.cache(sizes.decode_tokens, sizes.decode_rows)
        ids = self.ids[:1, :1].expand(sizes.decode_rows, 1)
        into = self.cache(sizes.prefix_tokens)
        stream = self.accelerator.stream()
        marks = [self.device.make_event(timed=True) for _ in range(sizes.decode_steps + 1)]
        running: list[DevicePrefixLoad] = []
        self.device.record(marks[0], stream)
        for mark in marks[1:]:
            if while_loading and all(one.is_ended for load in running for one in load._loads):
                running = [self.load(into)]
            self.forward(ids, cache)
            self.device.record(mark, stream)
            self._wait(mark)
        taken = [self.device.seconds_between(a, b) for a, b in pairwise(marks)]
        for load in running:
            assert load.confirm() == ""
        for mark in marks:
            self.device.drop_event(mark)
        return taken[WARM_UP:]


def figures(bed: Bed) -> Iterator[Reading]:
    """The three figures, each a median over interleaved rounds."""
    sizes = bed.sizes
    shares: list[float] = []
    ratios: list[float] = []
    times: list[tuple[float, float, float, float]] = []
    for turn in range(sizes.rounds + WARM_UP):
        load, compute = bed.load_seconds(), bed.compute_seconds()
        both, whole = bed.overlapped_seconds(), bed.recompute_seconds()
        if turn >= WARM_UP:
            shares.append((load + compute - both) / min(load, compute))
            ratios.append(both / whole)
            times.append((load, compute, both, whole))
    load, compute, both, whole = (
        1000 * float(np.median(column)) for column in zip(*times, strict=True)
    )
    what = (
        f"{sizes.prefix_tokens} tokens from host, {sizes.suffix_tokens} computed: load {load:.1f} "
        f"ms, compute {compute:.1f} ms, overlapped {both:.1f} ms, all computed {whole:.1f} ms"
    )
    yield Reading(HIDDEN.name, float(np.median(shares)), f"{what}; {spread(shares)}")
    yield Reading(TTFT.name, float(np.median(ratios)), f"{what}; {spread(ratios)}")
    slower: list[float] = []
    for turn in range(sizes.rounds + 1):
        calm = float(np.median(bed.steps(while_loading=False)))
        busy = float(np.median(bed.steps(while_loading=True)))
        if turn:
            slower.append(busy / calm)
    note = (
        f"{sizes.decode_rows} rows behind {sizes.decode_tokens} tokens, {1000 * calm:.1f} ms a "
        f"step, loads of {len(bed.arena) / (1 << 30):.1f} GiB one after the other; {spread(slower)}"
    )
    yield Reading(SLOWDOWN.name, float(np.median(slower)), note)


# ---------------------------------------------------------------------- timeline


def timeline(bed: Bed) -> dict[str, list[tuple[float, float]]]:
    """(begin, end) of each layer on either stream, in seconds from the hand-over.

    The copy of a layer begins where the one before ended."""
    device, stream = bed.device, bed.accelerator.stream()
    events = bed.accelerator.transfers._lanes.events
    events._free = [device.make_event(timed=True) for _ in range(8 + 2 * len(bed.shape.windows))]
    marks: list[int] = []

    def mark(*_: Any) -> None:
        marks.append(device.make_event(timed=True))
        device.record(marks[-1], stream)

    layers = bed.model.model.layers
    hooks = [one.register_forward_pre_hook(mark) for one in layers]
    hooks += [one.register_forward_hook(mark) for one in layers]
    cache = bed.cache(bed.sizes.prefix_tokens)
    try:
        mark()
        load = bed.load(cache)
        transfer: Any = load._loads[0]
        gates = [transfer._gates[number] for number in transfer._program_of]
        cache.await_load(load)
        bed.forward(bed.suffix, cache)
        assert load.confirm() == ""
        bed._wait(marks[-1])
        start, *rest = marks
        at = [device.seconds_between(start, one) for one in rest]
        arrived = [device.seconds_between(start, gate) for gate in gates]
    finally:
        for hook in hooks:
            hook.remove()
    return {
        "copy": list(zip([0.0, *arrived], arrived, strict=False)),
        "compute": list(zip(at[::2], at[1::2], strict=True)),
    }


COLOURS = {"copy": (38, 110, 180), "compute": (214, 120, 30)}
WIDTH, ROW, GAP = 1600, 60, 20


def draw(found: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """A bar a layer, copies above, computation below; a tick every ten milliseconds. The same
    numbers as JSON beside it."""
    end = max(stop for spans in found.values() for _, stop in spans) or 1.0
    image = np.full((2 * ROW + 3 * GAP, WIDTH, 3), 255, np.uint8)
    for at in range(0, int(end * 100) + 1):
        image[:, int(at / 100 / end * (WIDTH - 1))] = 200
    for number, (stream, spans) in enumerate(found.items()):
        top = GAP + number * (ROW + GAP)
        for layer, (begin, stop) in enumerate(spans):
            left, right = (int(seconds / end * (WIDTH - 1)) for seconds in (begin, stop))
            shade = np.array(COLOURS[stream]) + (40 if layer % 2 else 0)
            image[top : top + ROW, left : max(right, left + 1)] = shade.astype(np.uint8)
    height = len(image)
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)
    head = struct.pack(">IIBBBBB", WIDTH, height, 8, 2, 0, 0, 0)
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (
            (b"IHDR", head),
            (b"IDAT", zlib.compress(rows.tobytes())),
            (b"IEND", b""),
        )
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    path.with_suffix(".json").write_text(json.dumps(found))


def measure(folder: Path, *, quick: bool) -> Iterator[Reading]:
    """On CUDA device 0; the timeline goes to `folder`."""
    device = torch.device("cuda", 0)
    accelerator = Accelerator.open(device)
    try:
        bed = Bed(accelerator, llama_8b(device), Sizes(rounds=3 if quick else 7))
        bed.wait_pinned()
        yield from figures(bed)
        draw(timeline(bed), folder / "gpu_timeline.png")
    finally:
        accelerator.transfers.close()
