"""Declared namespaces: identity digest → index, layout, clear count.

Primitives: `Namespace`; `NamespaceTable`: `propose` and `add` (between them the caller makes it
durable), `get`, `at`, `clear_counts`. May not touch tiers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kvstore.errors import (
    ConfigError,
    InvalidRequest,
    NamespaceConflict,
    NamespaceUnknown,
    Overloaded,
)
from kvstore.layout import BlockLayout
from kvstore.types import (
    FINGERPRINT_BYTES,
    BoolArray,
    IntArray,
    NamespaceId,
    NamespaceKind,
)

LABEL_CHARS_MAX = 200


@dataclass
class Namespace:
    """One declared namespace. `index` is its position in every per-namespace table, stable across
    restarts.
    """

    index: int
    id: NamespaceId
    kind: NamespaceKind
    layout: BlockLayout
    window_tokens: int = 0
    """0: full attention. Else the sliding window in tokens."""
    label: str = ""
    clear_count: int = 0

    @property
    def is_prefix_closed(self) -> bool:
        """Blocks need their parent (I5). Flat and sliding namespaces are exempt."""
        return self.kind is NamespaceKind.CHAINED and self.window_tokens == 0

    @property
    def slot_bytes(self) -> int:
        return self.layout.slot_bytes

    def same_shape(self, other: Namespace) -> bool:
        """Whether both describe the same bytes."""
        return (self.kind, self.layout, self.window_tokens) == (
            other.kind,
            other.layout,
            other.window_tokens,
        )


class NamespaceTable:
    """All namespaces this daemon knows; changed on its loop only."""

    def __init__(self, namespaces_max: int) -> None:
        self._by_id: dict[bytes, Namespace] = {}
        self._by_index: list[Namespace] = []
        self._namespaces_max = namespaces_max
        self.leaf_exempt: BoolArray = np.zeros(namespaces_max, np.bool_)
        """By index: blocks may be evicted although they have children in the tier."""
        self.block_tokens: IntArray = np.zeros(namespaces_max, np.int64)
        """By index; 0 beyond those known."""
        self.clear_counts = np.zeros(namespaces_max, np.uint32)
        """By index: records with another clear count never match."""

    def __len__(self) -> int:
        return len(self._by_index)

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_index)

    def get(self, namespace: bytes) -> Namespace:
        """Raises NamespaceUnknown, InvalidRequest for an id of the wrong size."""
        found = self._by_id.get(namespace)
        if found is None:
            if len(namespace) != FINGERPRINT_BYTES:
                raise InvalidRequest(
                    f"namespace id has {len(namespace)} bytes, must be {FINGERPRINT_BYTES}"
                )
            raise NamespaceUnknown(f"namespace {namespace.hex()[:16]}… was never declared here")
        return found

    def at(self, index: int) -> Namespace:
        return self._by_index[index]

    def propose(
        self,
        namespace: bytes,
        kind: str,
        layout: BlockLayout,
        window_tokens: int,
        label: str,
    ) -> tuple[Namespace, bool]:
        """The namespace as declared, and whether it is new (then `add` it once it is durable).

        Raises NamespaceConflict, InvalidRequest, Overloaded.
        """
        if len(namespace) != FINGERPRINT_BYTES:
            raise InvalidRequest(
                f"namespace id has {len(namespace)} bytes, must be {FINGERPRINT_BYTES}"
            )
        if kind not in set(NamespaceKind):
            raise InvalidRequest(f"namespace kind {kind!r} must be 'chained' or 'flat'")
        proposed = Namespace(
            len(self._by_index),
            NamespaceId(namespace),
            NamespaceKind(kind),
            layout,
            window_tokens,
            label[:LABEL_CHARS_MAX],
        )
        known = self._by_id.get(namespace)
        if known is not None:
            if not known.same_shape(proposed):
                raise NamespaceConflict(
                    f"namespace {namespace.hex()[:16]}… is {known.kind} with {known.layout} and "
                    f"window {known.window_tokens}; declared again as {kind} with {layout} and "
                    f"window {window_tokens}. Whatever differs must be part of the identity"
                )
            return known, False
        if len(self._by_index) >= self._namespaces_max:
            raise Overloaded(
                f"{self._namespaces_max} namespaces are known already; raise limits.namespaces_max"
            )
        return proposed, True

    def add(self, namespace: Namespace) -> Namespace:
        """Make it known; if a concurrent declaration won, return that one."""
        known = self._by_id.get(namespace.id)
        if known is not None:
            return known
        namespace.index = len(self._by_index)
        self._by_index.append(namespace)
        self._by_id[namespace.id] = namespace
        self.leaf_exempt[namespace.index] = not namespace.is_prefix_closed
        self.block_tokens[namespace.index] = namespace.layout.block_tokens
        self.clear_counts[namespace.index] = namespace.clear_count
        return namespace

    def restore(self, namespaces: Iterable[Namespace]) -> None:
        """Recovery: take what an earlier life declared, in index order. Raises ConfigError."""
        found = sorted(namespaces, key=lambda item: item.index)
        if len(found) > self._namespaces_max:
            raise ConfigError(
                f"limits.namespaces_max={self._namespaces_max}, but {len(found)} namespaces are "
                f"known already; raise it to {len(found)}"
            )
        for namespace in found:
            self.add(namespace)

    def set_clear_count(self, namespace: Namespace, count: int) -> None:
        namespace.clear_count = count
        self.clear_counts[namespace.index] = count
