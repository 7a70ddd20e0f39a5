"""Parts of a block on their way from or to NVMe: which are read together, and whether they hold.

Primitives: `runs_of`, `verify`. Runs on worker threads; checksums drop the GIL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

from kvstore.errors import ChecksumMismatch
from kvstore.layout import Part, align_up
from kvstore.types import PAGE_BYTES, ByteArray, UIntArray

READ_BYTES_MAX = 2 << 20
"""One read; larger ones were no faster, and a piece this size is hashed while it is in the cache.
"""


def runs_of(parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
    """Adjacent parts, together up to READ_BYTES_MAX (a larger part alone)."""
    start = 0
    for at in range(1, len(parts) + 1):
        if at < len(parts):
            before, part = parts[at - 1], parts[at]
            size = part.offset + part.length - parts[start].offset
            follows = align_up(before.offset + before.length, PAGE_BYTES) == part.offset
            if follows and size <= READ_BYTES_MAX:
                continue
        yield parts[start:at]
        start = at


def verify(parts: Sequence[Part], payload: ByteArray, checksums: UIntArray, where: str) -> None:
    """Raises ChecksumMismatch, naming `where`, unless every part is what was stored."""
    for part in parts:
        view = payload[part.offset : part.offset + part.length]
        found = xxhash.xxh3_64_intdigest(view)  # type: ignore[arg-type]  # a buffer
        if found != int(checksums[part.index]):
            raise ChecksumMismatch(f"{where}: part {part.index} is not what was stored")
