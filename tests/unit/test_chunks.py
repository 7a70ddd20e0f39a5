"""Chunks by hand against protobuf's own encoding, and blocks put together from them."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ChecksumMismatch, InvalidRequest
from kvstore.rpc import blocks_pb2 as pb
from kvstore.rpc.chunks import CHUNK_BYTES, Assembly, chunks_of, join_data, split_data

SIZES = [1, 100, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES]


def fields():
    return st.fixed_dictionaries(
        {
            "block": st.integers(0, 2**32 - 1),
            "offset": st.integers(0, 2**64 - 1),
            "last": st.booleans(),
            "xxh3": st.integers(0, 2**64 - 1),
            "missing": st.booleans(),
            "reason": st.sampled_from(["", "absent", "é" * 40]),
            "data": st.binary(max_size=300),
        }
    )


@given(fields())
@settings(max_examples=60, deadline=None)
def test_both_directions_agree_with_protobuf(values):
    whole = pb.Chunk(**values)
    chunk, data, problem = split_data(whole.SerializeToString())
    assert not problem
    assert bytes(data) == values["data"]
    assert pb.Chunk.FromString(join_data(chunk, data)) == whole


@given(st.binary(max_size=64))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_a_chunk_or_a_problem(message):
    """As strict as protobuf, but for what its own parser refuses inside `rest`."""
    found = split_data(message)
    try:
        expected = pb.Chunk.FromString(message)
    except Exception:  # noqa: BLE001 - any refusal will do
        assert found.problem
        return
    if not found.problem:
        expected.ClearField("data")
        assert found.chunk == expected


def test_fields_in_any_order_and_unknown_ones():
    head = pb.Chunk(block=7, xxh3=9).SerializeToString()
    data = pb.Chunk(data=b"abc").SerializeToString()
    unknown = bytes([12 << 3 | 2, 3]) + b"xyz" + bytes([13 << 3 | 5]) + bytes(4)
    chunk, found, problem = split_data(data + unknown + head)
    assert (chunk.block, chunk.xxh3, bytes(found), problem) == (7, 9, b"abc", "")


@pytest.mark.parametrize("size", SIZES)
def test_a_block_goes_through_its_chunks(size):
    payload = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    messages = list(chunks_of(3, payload))
    assert len(messages) == -(-size // CHUNK_BYTES)
    assert [split_data(message).chunk.last for message in messages] == [False] * (
        len(messages) - 1
    ) + [True]
    assert split_data(messages[-1]).chunk.xxh3 == xxhash.xxh3_64_intdigest(payload.data)
    row = np.zeros(size, np.uint8)
    assembly = Assembly(size)
    for _ in range(2):  # it is as new after a whole block
        row[:] = 0
        ends = [assembly.take(split_data(message), row) for message in messages]
        assert ends == [False] * (len(messages) - 1) + [True]
        assert np.array_equal(row, payload)


def test_a_damaged_block_is_told():
    payload = np.zeros(CHUNK_BYTES + 5, np.uint8)
    first, second = chunks_of(0, payload)
    row = np.empty_like(payload)
    assembly = Assembly(len(payload))
    assembly.take(split_data(first), row)
    chunk, _, _ = split_data(second)
    with pytest.raises(ChecksumMismatch):
        assembly.take(split_data(join_data(chunk, b"\0\0\1\0\0")), row)


def test_chunks_that_do_not_fit_are_told():
    assembly, row = Assembly(10), np.empty(10, np.uint8)
    for fields_, data in (
        ({"offset": 3}, b"x"),
        ({}, b""),
        ({}, bytes(11)),
        ({}, bytes(10)),
        ({"last": True}, bytes(5)),
    ):
        with pytest.raises(InvalidRequest):
            assembly.take(split_data(join_data(pb.Chunk(**fields_), data)), row)
