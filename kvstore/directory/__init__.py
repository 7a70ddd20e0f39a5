"""The table of READY host blocks in the arena's header: one writer, readers without lock or call.

Primitives:
  `header_bytes(...)`   bytes the header needs
  `DirectoryWriter`     the daemon's side: retract before any re-use, publish when whole
  `DirectoryReader`     any process: lookup (longest prefix), lookup_each, and still_valid last
  `filter_counters`     size of the filter that tells which names are not below (below.py)
  `STORE_ORDER_TRUSTED` whether this processor keeps stores in order; where not, use leases

Layout, little-endian: page 0 (`PAGE_0`), then, each on 64 bytes: a space word a namespace,
generations u64 a slot, records of 64 bytes a slot, buckets of 64 bytes, filter counters u8. After
the last slot comes one row that is never readable. A bucket holds the upper half of eight tags and
their eight slots (all ones: empty); a tag is a fingerprint's first 8 bytes, its home bucket is
tag & mask, and an entry lies there or, while buckets are full, in the next one.

The protocol is a seqlock on x86-64, which keeps the order of stores and the order of loads:
  writer  generation odd, entry removed, (re-use), record written, generation even, entry inserted
  reader  entry, generation, record, generation again, copy, generation and boot word again
The tag only finds candidates, the full fingerprint decides. Readers may miss a block for a moment;
they never take other bytes for it. What a reader takes from the header is clipped to it.

Pure numpy over memory that someone else mapped: no I/O, no knowledge of the arena's files. Here
lie layout (sizes and views), writer and reader.
"""

from kvstore.directory.below import filter_counters
from kvstore.directory.layout import STORE_ORDER_TRUSTED, header_bytes
from kvstore.directory.reader import DirectoryReader, Found, FoundEach
from kvstore.directory.writer import DirectoryWriter

__all__ = [
    "STORE_ORDER_TRUSTED",
    "DirectoryReader",
    "DirectoryWriter",
    "Found",
    "FoundEach",
    "filter_counters",
    "header_bytes",
]
