"""Packed arrays and typed errors survive the wire; bad lengths are typed refusals."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore import errors
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.rpc import status, wire


def test_arrays_round_trip_little_endian() -> None:
    offsets = np.array([0, 4096, wire.NO_OFFSET], np.uint64)
    assert wire.pack_u64(offsets)[8:16] == b"\x00\x10" + bytes(6)
    assert wire.unpack_u64(wire.pack_u64(offsets), "offsets", 3).tolist() == offsets.tolist()
    assert wire.unpack_u64(wire.pack_u64(np.array([-1])), "o").tolist() == [wire.NO_OFFSET]
    mixed = [4096, wire.NO_OFFSET, 2**63 + 1]
    assert wire.unpack_u64(wire.pack_u64(mixed), "o").tolist() == mixed
    assert wire.unpack_u8(b"\x00\xff", "x", 2).tolist() == [0, 255]
    assert wire.unpack_u64(b"", "x", 0).size == 0


def test_bad_lengths_name_the_field() -> None:
    for call in (
        lambda: wire.unpack_u64(b"1234567", "offsets"),
        lambda: wire.unpack_u64(bytes(16), "offsets", 3),
        lambda: wire.split_fingerprints(bytes(33), "offsets"),
        lambda: wire.split_fingerprints(bytes(96), "offsets", 2),
        lambda: wire.unpack_name(bytes(31), "offsets"),
        lambda: wire.each_ready(bytes(9), "offsets"),
    ):
        with pytest.raises(InvalidRequest, match="offsets"):
            call()


def test_unpacked_views_are_read_only() -> None:
    assert not wire.split_fingerprints(bytes(64), "x").flags.writeable
    assert not wire.unpack_u64(bytes(8), "x").flags.writeable


def test_ready_records_round_trip() -> None:
    data = np.array([(1, 3, 7), (1, 0, 70000)], wire.READY).tobytes()
    assert len(data) == 2 * wire.READY.itemsize == 16
    assert list(wire.each_ready(data, "ready")) == [(1, 3, 7), (1, 0, 70000)]


class FakeContext:
    """Records what abort was called with, and raises like the real one."""

    def __init__(self) -> None:
        self.aborted: tuple[Any, ...] = ()

    async def abort(self, *arguments: Any) -> None:
        self.aborted = arguments
        raise asyncio.CancelledError


class FakeRpcError(grpc.RpcError):  # type: ignore[misc]
    def __init__(self, code: grpc.StatusCode, details: str, metadata: Any) -> None:
        self._facts = (code, details, metadata)

    def code(self) -> grpc.StatusCode:
        return self._facts[0]

    def details(self) -> str:
        return self._facts[1]

    def trailing_metadata(self) -> Any:
        return self._facts[2]


def _classes() -> list[type[KVStoreError]]:
    return [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, KVStoreError)
    ]


@pytest.mark.parametrize("kind", _classes())
def test_every_class_comes_back_as_itself(kind: type[KVStoreError]) -> None:
    context = FakeContext()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(status.abort(context, kind("what, where, way out")))
    code, details, metadata = context.aborted
    back = status.from_rpc_error(FakeRpcError(code, details, metadata))
    assert type(back) is kind
    assert str(back) == "what, where, way out"


def test_a_later_subclass_maps_to_its_nearest_known_class() -> None:
    class Newer(errors.LeaseExpired):
        pass

    assert status.trailing_metadata(Newer("x"))[0][1] == "LeaseExpired"
    assert status.code_of(Newer("x")) is status.code_of(errors.LeaseExpired("x"))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.PeerGone),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.Unavailable),
        (grpc.StatusCode.UNIMPLEMENTED, errors.VersionMismatch),
        (grpc.StatusCode.UNKNOWN, errors.Unavailable),
    ],
)
def test_transport_failures_are_typed_by_code(
    code: grpc.StatusCode, kind: type[KVStoreError]
) -> None:
    back = status.from_rpc_error(FakeRpcError(code, "socket closed", None))
    assert type(back) is kind
    assert "socket closed" in str(back)
    assert code.name in str(back)


def test_long_details_are_cut_to_what_metadata_can_carry() -> None:
    context = FakeContext()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(status.abort(context, KVStoreError("x" * 10**6)))
    assert len(context.aborted[1]) == 1024
