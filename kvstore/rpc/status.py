"""Typed errors over gRPC: class <-> (status code, trailing metadata `kvstore-error`).

Primitives: `abort` ends a server call with a typed error, `from_rpc_error` gives the client the
same class back. The status code is for foreign clients and tools; the metadata decides for ours.
Without metadata the failure came from the transport itself, and the code decides.
"""

from __future__ import annotations

from typing import Any, NoReturn

import grpc

from kvstore import errors
from kvstore.errors import InvariantViolated, KVStoreError

METADATA_KEY = "kvstore-error"
_DETAIL_CHARACTERS_MAX = 1024

_CODES: dict[type[KVStoreError], grpc.StatusCode] = {
    errors.KVStoreError: grpc.StatusCode.INTERNAL,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NamespaceUnknown: grpc.StatusCode.NOT_FOUND,
    errors.NamespaceConflict: grpc.StatusCode.ALREADY_EXISTS,
    errors.ReservationUnknown: grpc.StatusCode.NOT_FOUND,
    errors.ClientForked: grpc.StatusCode.FAILED_PRECONDITION,
    errors.VersionMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.PeerGone: grpc.StatusCode.UNAVAILABLE,
    errors.AccessDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.LeaseError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LeaseExpired: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LeaseUnknown: grpc.StatusCode.NOT_FOUND,
    errors.LeaseTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DataError: grpc.StatusCode.DATA_LOSS,
    errors.ChecksumMismatch: grpc.StatusCode.DATA_LOSS,
    errors.GenerationMismatch: grpc.StatusCode.ABORTED,
    errors.FrameMalformed: grpc.StatusCode.DATA_LOSS,
    errors.TierError: grpc.StatusCode.INTERNAL,
    errors.TierFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TierIO: grpc.StatusCode.INTERNAL,
    errors.DeviceError: grpc.StatusCode.INTERNAL,
    errors.ForeignData: grpc.StatusCode.FAILED_PRECONDITION,
}
_BY_NAME = {kind.__name__: kind for kind in _CODES}
_TRANSPORT: dict[grpc.StatusCode, type[KVStoreError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.PeerGone,
    grpc.StatusCode.CANCELLED: errors.PeerGone,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.Unavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.UNIMPLEMENTED: errors.VersionMismatch,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
}


def code_of(error: KVStoreError) -> grpc.StatusCode:
    """Status code of the nearest class in the table, so that a subclass made later still maps."""
    return _CODES[_known_class(error)]


def trailing_metadata(error: KVStoreError) -> tuple[tuple[str, str], ...]:
    """What tells our own clients the class."""
    return ((METADATA_KEY, _known_class(error).__name__),)


async def abort(context: Any, error: KVStoreError) -> NoReturn:
    """End a grpc.aio server call with `error`; never returns (the context raises)."""
    await context.abort(code_of(error), _details(error), trailing_metadata(error))
    raise InvariantViolated("context.abort returned")


def abort_blocking(context: Any, error: KVStoreError) -> NoReturn:
    """The same for a server on threads."""
    context.set_trailing_metadata(trailing_metadata(error))
    context.abort(code_of(error), _details(error))
    raise InvariantViolated("context.abort returned")


def _details(error: KVStoreError) -> str:
    return str(error)[:_DETAIL_CHARACTERS_MAX]


def from_rpc_error(error: grpc.RpcError) -> KVStoreError:
    """The typed error a failed call stands for; raise it `from error`."""
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    details = (error.details() if hasattr(error, "details") else None) or str(code)
    metadata = (error.trailing_metadata() if hasattr(error, "trailing_metadata") else None) or ()
    for key, value in metadata:
        if key == METADATA_KEY and value in _BY_NAME:
            return _BY_NAME[value](details)
    return _TRANSPORT.get(code, errors.Unavailable)(f"{details} [{code.name}]")


def _known_class(error: KVStoreError) -> type[KVStoreError]:
    return next(kind for kind in type(error).__mro__ if kind in _CODES)
