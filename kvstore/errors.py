"""The error tree, and `check()` for our own bugs.

    KVStoreError
     +- ConfigError                      refuse to start; names the key, the value and the way out
     +- InvalidRequest                   the caller's mistake: sizes, foreign reservation
     |   +- NamespaceUnknown
     |   +- NamespaceConflict            the same identity declared with another layout
     |   +- ReservationUnknown           ended, foreign, or never granted
     |   +- ClientForked                 a client object used in a forked child
     |   +- VersionMismatch              client and daemon speak different protocol majors
     +- Unavailable                      retry elsewhere or recompute
     |   +- Draining
     |   +- Overloaded                   a stated limit was reached
     |   +- PeerGone                     the daemon is away, or lives a new life (boot id changed)
     +- AccessDenied                     the gateway does not let this caller do that
     |   +- Unauthenticated              no token or certificate, or an unknown one
     +- LeaseError
     |   +- LeaseExpired
     |   +- LeaseUnknown
     |   +- LeaseTooLarge
     +- DataError                        always becomes a miss
     |   +- ChecksumMismatch
     |   +- GenerationMismatch
     |   +- FrameMalformed
     +- TierError
         +- TierFull
         +- TierIO
         +- DeviceError                  a GPU refused, or earlier work on it failed
         +- ForeignData                  a data directory of another geometry or format
     x  InvariantViolated                not a KVStoreError: our bug, fatal

"No room" and "not found" are normal answers, never exceptions.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Root of everything this package raises on purpose."""


class ConfigError(KVStoreError):
    """The configuration cannot be used; the message names key, value and the way out."""


class InvalidRequest(KVStoreError):
    """The caller asked for something that can never work."""


class NamespaceUnknown(InvalidRequest):
    """No such namespace was declared to this daemon."""


class NamespaceConflict(InvalidRequest):
    """A namespace was declared again with a different layout or kind."""


class ReservationUnknown(InvalidRequest):
    """The reservation ended, belongs to another engine, or never existed."""


class ClientForked(InvalidRequest):
    """A client object was used in a forked child; open a new client there."""


class VersionMismatch(InvalidRequest):
    """Client and daemon speak different protocol majors."""


class Unavailable(KVStoreError):
    """Cannot serve now; the caller recomputes or tries another daemon."""


class Draining(Unavailable):
    """The daemon is shutting down."""


class Overloaded(Unavailable):
    """A stated limit was reached."""


class PeerGone(Unavailable):
    """The daemon is away, or it is a new life of it that does not know this client."""


class AccessDenied(KVStoreError):
    """The caller is known, and may not do that."""


class Unauthenticated(AccessDenied):
    """The caller did not say who it is, or is not known."""


class LeaseError(KVStoreError):
    """A lease cannot be used."""


class LeaseExpired(LeaseError):
    """The lease ran out before the call."""


class LeaseUnknown(LeaseError):
    """The lease was released or never granted."""


class LeaseTooLarge(LeaseError):
    """More blocks or more leases than one client may hold."""


class DataError(KVStoreError):
    """The bytes are not what was stored; always turned into a miss."""


class ChecksumMismatch(DataError):
    """A part's checksum differs from the one kept in the index."""


class GenerationMismatch(DataError):
    """The slot was re-used between lookup and use."""


class FrameMalformed(DataError):
    """A frame header does not parse or names another block."""


class TierError(KVStoreError):
    """A tier could not do its work."""


class TierFull(TierError):
    """The medium has no room although the books said so."""


class TierIO(TierError):
    """The medium failed."""


class DeviceError(TierError):
    """A GPU refused a call, or reports that earlier work failed."""


class ForeignData(TierError):
    """A data directory was written with another geometry or format."""


class InvariantViolated(Exception):
    """A conservation law failed: our bug, never the world's. The daemon drops the arena and
    exits.
    """


def check(condition: object, law: str, **facts: object) -> None:
    """Raise InvariantViolated unless `condition` holds. Survives `python -O`."""
    if not condition:
        detail = ", ".join(f"{name}={value!r}" for name, value in facts.items())
        raise InvariantViolated(f"{law} ({detail})" if detail else law)
