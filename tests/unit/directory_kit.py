"""Both sides of a directory over one header in private memory, and names to put into it."""

from __future__ import annotations

import struct

import numpy as np

from kvstore.directory import DirectoryReader, DirectoryWriter, header_bytes
from kvstore.types import ByteArray, UIntArray

SLOTS = 64
NAMESPACES = 4
BOOT_ID = 77


class Directory:
    """Both sides over one header in private memory."""

    def __init__(self, slots: int = SLOTS, counters: int = 0) -> None:
        self.header = np.full(header_bytes(slots, NAMESPACES, counters), 7, np.uint8)
        self.writer = DirectoryWriter(
            self.header,
            slots=slots,
            namespaces_max=NAMESPACES,
            boot_id=BOOT_ID,
            counters=counters,
        )
        readable = self.header[:]
        readable.flags.writeable = False
        self.reader = DirectoryReader(readable)

    def publish(
        self, slots: list[int], names: list[bytes], namespace: int = 1, clear_count: int = 0
    ) -> UIntArray:
        """Slot s lies at byte 4096 * s and holds 100 + s bytes."""
        where = np.array(slots)
        return self.writer.publish(
            where,
            as_array(names),
            offsets=where.astype(np.uint64) * np.uint64(4096),
            lengths=where + 100,
            namespace=namespace,
            clear_count=clear_count,
        )

    def found(self, names: list[bytes], namespace: int = 1) -> list[int]:
        """Slots of the longest prefix."""
        slots: list[int] = self.reader.lookup(namespace, b"".join(names)).slots.tolist()
        return slots

    def found_each(self, names: list[bytes], namespace: int = 1) -> list[int | None]:
        """Slot of each name, None where there is none."""
        answer = self.reader.lookup_each(namespace, b"".join(names))
        pairs = zip(answer.mask.tolist(), answer.slots.tolist(), strict=True)
        return [slot if is_found else None for is_found, slot in pairs]

    def check(self, slots: list[int], names: list[bytes]) -> None:
        self.writer.check_integrity(np.array(slots, np.int64), as_array(names))
        assert self.writer.published == len(slots)
        for _ in self.writer.check_table():
            pass


def as_array(names: list[bytes]) -> ByteArray:
    return np.frombuffer(b"".join(names), np.uint8).reshape(-1, 32)


def name(home: int, upper: int = 5, salt: int = 0) -> bytes:
    """A fingerprint with a chosen home bucket and upper half of the tag."""
    return struct.pack("<IIQQQ", home, upper, salt, 0, 0)


def random_names(count: int, seed: int = 1) -> list[bytes]:
    data = np.random.default_rng(seed).integers(0, 256, (count, 32), dtype=np.uint8)
    return [row.tobytes() for row in data]
