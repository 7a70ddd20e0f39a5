"""Verbs on a namespace's blocks that are one call each and move no bytes.

Primitives: `ControlVerbs`, the base of `NamespaceHandle`; `Existence`, `ListedPage`, its answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstore.client.names import Names, stretch
from kvstore.client.session import Session
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc.wire import unpack_u8
from kvstore.types import BoolArray, ByteArray, NamespaceId


@dataclass(frozen=True)
class Existence:
    """Where blocks are.

    `tiers` uint8 [n]: bit `1 << Tier` a tier that holds the block; 0 is absent.
    """

    prefix_blocks: int
    tiers: ByteArray


@dataclass(frozen=True)
class ListedPage:
    """`names` 32 bytes a block; `tiers` as in Existence; `cursor` of the next page, 0: none."""

    names: bytes
    tiers: ByteArray
    cursor: int


class ControlVerbs:
    """Over one session, on one namespace."""

    id: NamespaceId
    _session: Session

    def exists(self, names: Names) -> Existence:
        """Residency by tier; takes no lease, counts no use. Raises KVStoreError."""
        joined = stretch(names, self.id, 0, len(names))
        request = pb.ExistsRequest(namespace=self.id, fingerprints=joined)
        reply = self._session.call("Exists", request)
        return Existence(reply.prefix_blocks, unpack_u8(reply.tiers, "tiers", len(names)))

    def prefetch(self, names: Names) -> int:
        """Hint that these blocks will be asked for soon; blocks accepted. Raises KVStoreError."""
        joined = stretch(names, self.id, 0, len(names))
        group = pb.Group(namespace=self.id, fingerprints=joined)
        request = pb.PrefetchRequest(client=self._client_number(), groups=[group])
        return int(self._session.call("Prefetch", request).accepted)

    def list(self, cursor: int = 0, blocks_max: int = 0) -> ListedPage:
        """A page of what is stored, from a page's `cursor` on. Raises KVStoreError."""
        request = pb.ListRequest(namespace=self.id, cursor=cursor, blocks_max=blocks_max)
        reply = self._session.call("List", request)
        return ListedPage(reply.fingerprints, unpack_u8(reply.tiers, "tiers"), reply.cursor)

    def pin(
        self, names: Names, seconds: float, *, hard: bool = False, tenant: str = ""
    ) -> tuple[int, str]:
        """Keep the leading stored blocks; (how many, why not all: "", "absent", "budget").

        At most 2,048 names. Raises KVStoreError.
        """
        request = pb.PinRequest(
            client=self._client_number(),
            namespace=self.id,
            fingerprints=stretch(names, self.id, 0, len(names)),
            seconds=seconds,
            hard=hard,
            tenant=tenant,
        )
        reply = self._session.call("Pin", request)
        return reply.pinned, reply.short_reason

    def unpin(self, names: Names, *, tenant: str = "") -> int:
        """End pins of this tenant; how many there were. Raises KVStoreError."""
        request = pb.UnpinRequest(
            client=self._client_number(),
            namespace=self.id,
            fingerprints=stretch(names, self.id, 0, len(names)),
            tenant=tenant,
        )
        return int(self._session.call("Unpin", request).unpinned)

    def score(self, names: Names, prompt_tokens: int = 0) -> tuple[dict[int, int], float]:
        """({tier: tokens of the prefix there}, predicted seconds to the first token or 0)."""
        joined = stretch(names, self.id, 0, len(names))
        request = pb.ScoreRequest(
            namespace=self.id, fingerprints=joined, prompt_tokens=prompt_tokens
        )
        reply = self._session.call("Score", request)
        return dict(reply.tokens_by_tier), reply.predicted_ttft_seconds

    def _client_number(self) -> int:
        life = self._session.life
        return life.client if life else 0

    def flush(self, names: Names, *, deadline_seconds: float = 10.0) -> BoolArray:
        """bool [n]: which blocks are durable by the deadline. Raises KVStoreError."""
        joined = stretch(names, self.id, 0, len(names))
        request = pb.FlushRequest(
            namespace=self.id, fingerprints=joined, deadline_ms=max(1, int(deadline_seconds * 1000))
        )
        reply = self._session.call("Flush", request, deadline_seconds + 0.25)
        durable: BoolArray = unpack_u8(reply.durable, "durable", len(names)) != 0
        return durable

    def delete(self, names: Names, block: int) -> int:
        """Drop one block and all that follows it; blocks dropped. Raises KVStoreError."""
        name = stretch(names, self.id, block, 1)
        request: Any = pb.DeleteRequest(namespace=self.id, fingerprint=name)
        return int(self._session.call("Delete", request).deleted_blocks)

    def clear(self) -> None:
        """No block stored before this call matches again, for any engine. Raises KVStoreError."""
        self._session.call("Clear", pb.ClearRequest(namespace=self.id))
