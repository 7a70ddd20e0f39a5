"""8-bit KV: the reference, and the transfer engine that packs and restores with it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from bench.gpu_measure import PinnedBlocks, Places, Reservation
from bench.gpu_world import Baton
from engine_adapter.device_transfer import DeviceTransfers
from engine_adapter.lanes import Lanes
from engine_adapter.quantised import (
    HEAD_BYTES,
    SCHEMES,
    Scheme,
    error_of,
    from_bfloat16,
    packed,
    piece_bytes,
    quantised_target,
    restored,
    to_bfloat16,
)
from engine_adapter.transfer import LoadPlan, SavePlan
from kvstore.errors import InvalidRequest
from kvstore.testing.fake_device import FakeDevice, Step

BLOCKS, TOKENS, HEADS, DIM, LAYERS = 5, 4, 2, 16, 2
AXES = {
    "kv,block,token,head,dim": (2, BLOCKS, TOKENS, HEADS, DIM),
    "block,kv,head,token,dim": (BLOCKS, 2, HEADS, TOKENS, DIM),
}


def normal(*shape: int) -> Any:
    numbers = np.random.default_rng(7).normal(0, 2, shape).astype(np.float32)
    return from_bfloat16(to_bfloat16(numbers))


# ---------------------------------------------------------------------- the reference


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_was_restored_is_packed_to_the_same_codes(scheme: Scheme) -> None:
    pieces = packed(normal(6, 64), scheme)
    again = packed(restored(pieces, scheme), scheme)
    assert np.mean(pieces[:, HEAD_BYTES:] == again[:, HEAD_BYTES:]) > 0.99


def test_the_loss_is_what_eight_bits_cost() -> None:
    numbers = normal(64, 2048)
    assert 0.005 < error_of(numbers, "int8") < 0.012
    assert 0.02 < error_of(numbers, "fp8_e4m3") < 0.03


@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers_that_are_not_finite_have_a_place(scheme: Scheme) -> None:
    numbers = np.array([[1.0, -2.0, np.nan, np.inf, -np.inf, 0.0, 2.0, 0.5]], np.float32)
    back = restored(packed(numbers, scheme), scheme)
    assert back[0, [2, 5]].tolist() == [0.0, 0.0]
    assert back[0, [3, 4]].tolist() == [2.0, -2.0]
    assert np.allclose(back[0, [0, 1, 6, 7]], [1, -2, 2, 0.5], rtol=0.07)
    assert (restored(packed(np.zeros((1, 8), np.float32), scheme), scheme) == 0).all()


def test_e4m3_is_the_nearest_of_all_its_numbers() -> None:
    every = restored(np.concatenate([_one(), _codes()])[None], "fp8_e4m3")[0]
    values = np.random.default_rng(3).uniform(-448, 448, 4000).astype(np.float32)
    values[0] = 448
    found = restored(packed(values[None], "fp8_e4m3"), "fp8_e4m3")[0]
    nearest = np.abs(values[:, None] - every[None]).min(axis=1)
    assert np.allclose(np.abs(found - values), nearest, atol=1e-6)


def _one() -> Any:
    head = np.zeros(HEAD_BYTES, np.uint8)
    head[:4] = np.frombuffer(np.float32(1).tobytes(), np.uint8)
    return head


def _codes() -> Any:
    codes = np.arange(256, dtype=np.uint8)
    return codes[(codes & 0x7F) != 0x7F]


# ---------------------------------------------------------------------- on the device


def bodies(scheme: Scheme) -> dict[str, Any]:
    """The packing kernels for the stand-in, by the reference."""

    def pack(device: FakeDevice, arguments: tuple[int, ...]) -> Iterator[Step]:
        packs, rows, count, tokens, dim, stride, _ = arguments
        for number in range(count):
            yield partial(pack_one, device, packs, rows, number, (tokens, dim, stride))

    def ends(device: FakeDevice, packs: int, rows: int, number: int, shape: Any) -> Any:
        tokens, dim, stride = shape
        to, start = (device.words_at(table + 8 * number, 1)[0] for table in (packs, rows))
        pieces = device.bytes_at(to, piece_bytes(tokens, dim))[None]
        each = [device.bytes_at(start + t * stride, 2 * dim).view(np.uint16) for t in range(tokens)]
        return pieces, each

    def pack_one(device: FakeDevice, packs: int, rows: int, number: int, shape: Any) -> None:
        pieces, each = ends(device, packs, rows, number, shape)
        pieces[:] = packed(from_bfloat16(np.concatenate(each))[None], scheme)

    def restore(device: FakeDevice, arguments: tuple[int, ...]) -> Iterator[Step]:
        packs, rows, count, tokens, dim, stride, _ = arguments
        for number in range(count):
            yield partial(restore_one, device, packs, rows, number, (tokens, dim, stride))

    def restore_one(device: FakeDevice, packs: int, rows: int, number: int, shape: Any) -> None:
        pieces, each = ends(device, packs, rows, number, shape)
        numbers = to_bfloat16(restored(pieces, scheme)).reshape(len(each), -1)
        for row, values in zip(each, numbers, strict=True):
            row[:] = values

    return {
        "scale_pieces": lambda device, arguments: iter(()),
        "quantise_pieces": pack,
        "restore_pieces": restore,
    }


@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_blocks_are_packed_on_their_way_out_and_restored_on_their_way_in(
    scheme: Scheme, axes: str, is_pinned: bool
) -> None:
    device = FakeDevice(5, mood="random", kernels=bodies(scheme))
    lanes = Lanes(device, now=time.monotonic, pause=lambda: device.advance(5))
    baton = Baton()
    transfers, compute = DeviceTransfers(lanes, baton), device.make_compute_stream()
    shape = AXES[axes]
    strides = [2 * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    size = 2 * int(np.prod(shape))
    places = [device.allocate(size) for _ in range(LAYERS)]
    target = quantised_target(places, shape, strides, axes, "bfloat16", scheme)
    layers = [device.bytes_at(at, size).view(np.uint16).reshape(shape) for at in places]
    for layer in layers:
        layer[:] = to_bfloat16(normal(*shape))
    arena = np.zeros((3, target.layout.slot_bytes), np.uint8)
    if is_pinned:
        transfers.pin([arena.reshape(-1)])
    run_tasks(baton)
    slots = arena.ctypes.data + np.arange(3, dtype=np.uint64) * np.uint64(arena.strides[0])
    saved, loaded = np.array([0, 2, 4]), np.array([1, 3, 0])
    stored: Any = Places(slots)
    reservation: Any = Reservation(stored, [0, 1, 2])
    save = transfers.start_save(SavePlan(target, reservation, saved, np.arange(3)), compute)
    finish(baton, save)
    by_block = [np.moveaxis(layer, axes.split(",").index("block"), 0) for layer in layers]
    names = [name for name in axes.split(",") if name != "block"]
    order = [0, *(1 + names.index(name) for name in ("kv", "head", "token", "dim"))]
    plain = [block.transpose(order).copy() for block in by_block]
    for layer, numbers in enumerate(plain):
        wanted = packed(from_bfloat16(numbers[saved]).reshape(12, -1), scheme)
        at = target.layout.layer_offset(0, layer)
        found = arena[:, at : at + target.layout.layer_bytes]
        assert np.array_equal(found.reshape(12, -1), wanted)
    source: Any = PinnedBlocks(slots)
    load = transfers.start_load(LoadPlan(target, source, loaded), compute)
    finish(baton, load)
    for block, numbers in zip(by_block, plain, strict=True):
        lossy = packed(from_bfloat16(numbers[saved]).reshape(12, -1), scheme)
        back = to_bfloat16(restored(lossy, scheme)).reshape(3, 2, HEADS, TOKENS, DIM)
        assert np.array_equal(block.transpose(order)[loaded], back)
    assert transfers.describe()["bytes_by_way"]["quantising"] > 0  # type: ignore[index]


def run_tasks(baton: Baton) -> None:
    chance = random.Random(2)
    while baton.step(chance):
        pass


def finish(baton: Baton, handle: Any) -> None:
    run_tasks(baton)
    assert handle.wait_ended(60)
    assert handle.failure == ""


@pytest.mark.parametrize(
    ("axes", "dtype", "shape", "reason"),
    [
        ("kv,block,packed,head,dim", "bfloat16", (2, 5, 4, 2, 16), "not plain"),
        ("kv,block,token,head,dim", "uint8", (2, 5, 4, 2, 16), "uint8"),
        ("kv,block,token,head,dim", "bfloat16", (2, 5, 3, 2, 6), "no multiple of 16"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(
    axes: str, dtype: str, shape: tuple[int, ...], reason: str
) -> None:
    strides = [2 * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    with pytest.raises(InvalidRequest, match=reason):
        quantised_target([0], shape, strides, axes, dtype, "int8")
