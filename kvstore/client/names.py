"""Names of blocks as the client's verbs take them: chained (`Chain`), opaque keys
(`FlatNames`), or made elsewhere (`RawNames`).

Primitives: `Names` (what both offer), `FlatNames`, `RawNames`, `stretch`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvstore.errors import InvalidRequest
from kvstore.fingerprint import flat_fingerprint
from kvstore.types import FINGERPRINT_BYTES, NamespaceId

BLOCKS_PER_CALL_MAX = 65_536
"""2 MiB of fingerprints: half of what one message may carry."""


class Names(Protocol):
    """Consecutive blocks of one namespace; `kvstore.fingerprint.Chain` is one."""

    @property
    def namespace(self) -> NamespaceId: ...
    @property
    def joined(self) -> bytes:
        """32 bytes a block."""

    def __len__(self) -> int: ...
    def parent_of(self, depth: int) -> bytes:
        """Name of the block before `depth`; the namespace itself for the first."""


class FlatNames:
    """Opaque keys of a flat namespace; no block depends on another."""

    def __init__(self, namespace: NamespaceId, keys: Iterable[bytes]) -> None:
        self.namespace = namespace
        self.joined = b"".join(flat_fingerprint(namespace, key) for key in keys)

    def __len__(self) -> int:
        return len(self.joined) // FINGERPRINT_BYTES

    def parent_of(self, depth: int) -> bytes:
        return self.namespace


class RawNames:
    """Fingerprints made elsewhere, 32 bytes each, back to back.

    `parent`: what the first one follows in a chained namespace; by default the root.
    """

    def __init__(self, namespace: NamespaceId, joined: bytes, parent: bytes = b"") -> None:
        """Raises InvalidRequest when `joined` or `parent` is ragged."""
        self.namespace = namespace
        self.joined = joined
        self._parent = parent or namespace
        if len(joined) % FINGERPRINT_BYTES or len(self._parent) != FINGERPRINT_BYTES:
            raise InvalidRequest(
                f"names: {len(joined)} bytes after a parent of {len(self._parent)}; "
                f"every name has {FINGERPRINT_BYTES}"
            )

    def __len__(self) -> int:
        return len(self.joined) // FINGERPRINT_BYTES

    def parent_of(self, depth: int) -> bytes:
        if not depth:
            return self._parent
        return self.joined[(depth - 1) * FINGERPRINT_BYTES : depth * FINGERPRINT_BYTES]


def stretch(names: Names, namespace: bytes, start: int, count: int) -> bytes:
    """Fingerprints of blocks [start, start + count), joined.

    Raises InvalidRequest when `names` are of another namespace, too few, or too many for one call.
    """
    if names.namespace != namespace:
        raise InvalidRequest(
            f"these names belong to namespace {names.namespace.hex()[:16]}…, "
            f"this handle to {namespace.hex()[:16]}…"
        )
    if start < 0 or count < 0 or start + count > len(names):
        raise InvalidRequest(
            f"blocks [{start}, {start + count}) do not exist, {len(names)} are named"
        )
    if start + count > BLOCKS_PER_CALL_MAX:
        raise InvalidRequest(
            f"{start + count} blocks in one call, the limit is {BLOCKS_PER_CALL_MAX}; "
            "use larger blocks or a shorter chain"
        )
    return names.joined[start * FINGERPRINT_BYTES : (start + count) * FINGERPRINT_BYTES]
