"""The transfer engine on a real GPU; skipped without one. `bench/gpu_check.py` runs these first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from bench.gpu_kernels import ARGUMENTS, LENGTHS, SKEWS
from bench.gpu_measure import Rig
from engine_adapter.device_transfer import DeviceTransfers
from engine_adapter.quantised import (
    SCHEMES,
    Scheme,
    from_bfloat16,
    packed,
    piece_bytes,
    quantised_target,
    restored,
    to_bfloat16,
)
from engine_adapter.transfer_moves import KernelCopies, PinnedTables, QuantisingCopies
from engine_adapter.transfer_plan import Pieces
from kvstore.device import IPC_HANDLE_BYTES, Device, open_device
from kvstore.errors import ConfigError, DeviceError
from kvstore.tier.gpu import GpuTier
from kvstore.types import ClientId

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Device:
    try:
        return open_device(0)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def rig(device: Device) -> Iterator[Rig]:
    transfers = DeviceTransfers.open(0)
    found = Rig(device, transfers, 64, 24 << 10, 4)
    found.wait_pinned()
    yield found
    transfers.close()


def wait(device: Device, stream: int) -> None:
    event = device.make_event()
    device.record(event, stream)
    while not device.is_done(event):
        pass


def test_a_load_brings_the_bytes_and_a_save_takes_them_back(rig: Rig) -> None:
    rig.seconds_of(rig.load)
    rig.check()
    before = rig.arena.copy()
    rig.arena[:] = 0
    rig.seconds_of(rig.save)
    assert np.array_equal(rig.arena, before)


@pytest.mark.parametrize("skews", list(product(SKEWS, SKEWS)))
def test_the_copy_kernel_at_odd_sizes(device: Device, skews: tuple[int, int]) -> None:
    assert "copy_pieces" in ARGUMENTS
    kernel = KernelCopies(device, PinnedTables(device, None))
    stream = device.make_stream()
    room = sum(LENGTHS) + 64 * len(LENGTHS)
    host, back = device.allocate_pinned(room), device.allocate_pinned(room)
    there = device.allocate(room)
    host[:] = np.random.default_rng(1).integers(0, 256, room, np.uint8)
    back[:] = 0
    at = np.arange(len(LENGTHS), dtype=np.uint64) * np.uint64(room // len(LENGTHS) // 16 * 16)
    lengths = np.minimum(np.array(LENGTHS, np.uint64), at[1] - np.uint64(32))
    total = int(lengths.sum())
    ends = np.uint64(there + skews[0]) + at
    for memory, to_device in ((host, True), (back, False)):
        places = np.uint64(memory.ctypes.data + skews[1]) + at
        kernel.enqueue(Pieces(places, ends, lengths, total), to_device, stream)
    wait(device, stream)
    for start, length in zip(at.tolist(), lengths.tolist(), strict=True):
        span = slice(start + skews[1], start + skews[1] + length)
        assert np.array_equal(back[span], host[span])
    device.free(there)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_packing_equals_the_reference(device: Device, scheme: Scheme) -> None:
    tokens, dim, count = 16, 80, 24
    axes, shape = "block,kv,head,token,dim", (3, 2, 4, tokens, dim)
    bits = to_bfloat16(np.random.default_rng(3).normal(0, 3, (count, tokens * dim)))
    rows, back = device.allocate_pinned(bits.nbytes), device.allocate_pinned(bits.nbytes)
    rows[:] = bits.reshape(-1).view(np.uint8)
    there, stream = device.allocate(bits.nbytes), device.make_stream()
    strides = [2 * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    target = quantised_target([there], shape, strides, axes, "bfloat16", scheme)
    kernels = QuantisingCopies(device, PinnedTables(device, None), target)
    packs = device.allocate_pinned(count * piece_bytes(tokens, dim)).reshape(count, -1)
    at = np.arange(count, dtype=np.uint64)
    host = np.uint64(packs.ctypes.data) + at * np.uint64(packs.strides[0])
    pieces = np.uint64(there) + at * np.uint64(2 * tokens * dim)
    lengths = np.full(count, packs.strides[0], np.uint64)
    moved = Pieces(host, pieces, lengths, packs.nbytes)
    device.copy(there, rows.ctypes.data, len(rows), stream)
    kernels.enqueue(moved, False, stream)
    wait(device, stream)
    wanted = packed(from_bfloat16(bits), scheme)
    assert np.array_equal(packs, wanted)
    kernels.enqueue(moved, True, stream)
    device.copy(back.ctypes.data, there, len(back), stream)
    wait(device, stream)
    assert np.array_equal(back.view(np.uint16), to_bfloat16(restored(wanted, scheme)).reshape(-1))


def test_a_refused_registration_leaves_no_error_behind(device: Device) -> None:
    memory = np.zeros(1 << 20, np.uint8)
    device.register(memory.ctypes.data, len(memory))
    with pytest.raises(DeviceError):
        device.register(memory.ctypes.data, len(memory))
    device.unregister(memory.ctypes.data)
    wait(device, device.make_stream())


def test_the_tier_gives_back_what_was_put_in(device: Device) -> None:
    tier = GpuTier(device, 4 << 20, slab_bytes=2 << 20)
    size = 96 << 10
    lengths = np.full(3, size, np.uint64)
    slots = np.array(tier.take(size, 3))
    host, back = tier.staging(3 * size), device.allocate_pinned(3 * size)
    host[: 3 * size] = np.random.default_rng(2).integers(0, 256, 3 * size, np.uint8)
    at = np.arange(3, dtype=np.uint64) * np.uint64(size)
    event = tier.copy_in(slots, at + np.uint64(host.ctypes.data), lengths)
    while not tier.has_ended(event):
        pass
    stream = device.make_stream()
    for to, place in zip(at.tolist(), tier.addresses(slots).tolist(), strict=True):
        device.copy(back.ctypes.data + to, place, size, stream)
    wait(device, stream)
    assert np.array_equal(back, host[: 3 * size])
    assert len(tier.handles_for(ClientId(1))[0][1]) == IPC_HANDLE_BYTES
    tier.close()


def test_a_model_computes_while_its_prefix_arrives() -> None:
    torch = pytest.importorskip("torch", reason="install torch and the engine extra")
    transformers = pytest.importorskip("transformers", reason="install torch and the engine extra")
    from bench import gpu_model as model_of

    small = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    there = torch.device("cuda", 0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **heads))
    accelerator = model_of.Accelerator.open(there)
    sizes = model_of.Sizes(512, 64, 64, 2, 64, 6, 2)
    bed = model_of.Bed(accelerator, model.to(there, torch.bfloat16).eval(), sizes)
    bed.wait_pinned()
    cache, direct = bed.cache(512), bed.cache(512)
    load = bed.load(cache)
    cache.await_load(load)
    found = bed.forward(bed.suffix, cache)
    assert load.confirm() == ""
    assert bed.load(direct).confirm() == ""
    assert torch.equal(found, bed.forward(bed.suffix, direct))
    assert len(list(model_of.figures(bed))) == 3
    assert len(model_of.timeline(bed)["copy"]) == 4
    accelerator.transfers.close()


def test_blocks_come_out_of_device_memory(rig: Rig) -> None:
    base = rig.device.allocate(rig.size)
    rig.transfers._lanes.pins.lend(base, rig.size)  # a process cannot open its own export
    rig.fill(base)
    rig.seconds_of(lambda: rig.load(base))
    rig.check()
    rig.transfers._lanes.pins.take_back(base)
    rig.device.free(base)
