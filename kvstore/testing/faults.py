"""Disks that fail on purpose: the real thing, wrapped.

Primitives:
  `FaultySystem`    SystemCalls with faults *below* the fall-backs: errno, short transfers, delay
  `FaultyBlockIO`   BlockIO with faults above them: errors, torn, lost, misdirected, flipped writes
  `at`, `from_nth`, `sometimes`   when a fault strikes

A `Decide` function sees every operation and names a fault or None; it may also block, to hold an
operation up. Operations are numbered from 1 within their kind. Thread-safe when `Decide` is.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal, TypeAlias

import numpy as np

from kvstore.blockio import (
    KERNEL,
    BlockIO,
    FileStatus,
    Mode,
    SegmentFile,
    SystemCalls,
    page_aligned,
)
from kvstore.types import PAGE_BYTES, ByteArray

Kind = Literal["open", "reserve", "read", "write", "sync"]


@dataclass(frozen=True)
class Operation:
    """What is about to happen. `number` counts operations of this kind; sizes in bytes."""

    kind: Kind
    number: int
    offset: int = 0
    length: int = 0
    path: Path | None = None


@dataclass(frozen=True)
class Fail:
    """Raise instead: an errno becomes an OSError (for FaultySystem), an exception itself."""

    error: int | Exception

    def strike(self) -> None:
        if isinstance(self.error, int):
            raise OSError(self.error, os.strerror(self.error))
        raise self.error


@dataclass(frozen=True)
class Short:
    """FaultySystem: transfer only the first `length` bytes and say so (direct: whole sectors)."""

    length: int


@dataclass(frozen=True)
class Slow:
    """Wait, then do it."""

    seconds: float


@dataclass(frozen=True)
class Torn:
    """FaultyBlockIO: only the first `length` bytes of a write reach the medium; success is told."""

    length: int


@dataclass(frozen=True)
class Lost:
    """FaultyBlockIO: a write reaches nothing; success is told."""


@dataclass(frozen=True)
class Misdirected:
    """FaultyBlockIO: a write lands `distance` bytes further on; success is told."""

    distance: int


@dataclass(frozen=True)
class Flipped:
    """FaultyBlockIO: one bit of a write changes on its way. `bit` counts from the write's start."""

    bit: int


Fault: TypeAlias = Fail | Short | Slow | Torn | Lost | Misdirected | Flipped
Decide: TypeAlias = Callable[[Operation], Fault | None]


def never(_: Operation) -> None:
    """No fault."""


def at(kind: Kind, number: int, fault: Fault) -> Decide:
    """The `number`-th operation of a kind, counted from 1."""
    return lambda operation: fault if (operation.kind, operation.number) == (kind, number) else None


def from_nth(kind: Kind, number: int, fault: Fault) -> Decide:
    """The `number`-th operation of a kind and every later one."""
    return lambda operation: (
        fault if operation.kind == kind and operation.number >= number else None
    )


def sometimes(random: Random, rates: dict[Kind, list[tuple[float, Fault]]]) -> Decide:
    """Each listed fault of an operation's kind with its probability; the seed is the caller's."""

    def decide(operation: Operation) -> Fault | None:
        for rate, fault in rates.get(operation.kind, ()):
            if random.random() < rate:
                return fault
        return None

    return decide


class _Numbering:
    """Counts operations by kind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def operation(
        self, kind: Kind, path: Path | None = None, offset: int = 0, length: int = 0
    ) -> Operation:
        with self._lock:
            self.counts[kind] += 1
            return Operation(kind, self.counts[kind], offset, length, path)


class FaultySystem:
    """SystemCalls over another. `decide` may be replaced at any time."""

    def __init__(self, decide: Decide = never, system: SystemCalls = KERNEL) -> None:
        self.decide = decide
        self._system = system
        self._numbering = _Numbering()

    @property
    def counts(self) -> Counter[str]:
        """Operations so far, by kind."""
        return self._numbering.counts

    def _struck(self, operation: Operation) -> Fault | None:
        fault = self.decide(operation)
        if isinstance(fault, Fail):
            fault.strike()
        if isinstance(fault, Slow):
            time.sleep(fault.seconds)
        return fault

    def open(self, path: Path, flags: int) -> int:
        self._struck(self._numbering.operation("open", path))
        return self._system.open(path, flags)

    def fallocate(self, fd: int, length: int) -> None:
        self._struck(self._numbering.operation("reserve", length=length))
        self._system.fallocate(fd, length)

    def preadv(self, fd: int, views: Sequence[ByteArray], offset: int) -> int:
        operation = self._numbering.operation("read", None, offset, _total(views))
        fault = self._struck(operation)
        return self._system.preadv(fd, _shortened(views, fault), offset)

    def pwritev(self, fd: int, views: Sequence[ByteArray], offset: int) -> int:
        operation = self._numbering.operation("write", None, offset, _total(views))
        fault = self._struck(operation)
        return self._system.pwritev(fd, _shortened(views, fault), offset)

    def fdatasync(self, fd: int) -> None:
        self._struck(self._numbering.operation("sync"))
        self._system.fdatasync(fd)


class FaultyBlockIO:
    """BlockIO over another. `decide` may be replaced at any time. Opens count as "open"."""

    def __init__(self, inner: BlockIO, decide: Decide = never) -> None:
        self.decide = decide
        self._inner = inner
        self._numbering = _Numbering()

    @property
    def counts(self) -> Counter[str]:
        """Operations so far, by kind."""
        return self._numbering.counts

    @property
    def mode(self) -> Mode:
        return self._inner.mode

    @property
    def mode_reason(self) -> str:
        return self._inner.mode_reason

    @property
    def reserve_reason(self) -> str:
        return self._inner.reserve_reason

    def struck(
        self, kind: Kind, path: Path | None = None, offset: int = 0, length: int = 0
    ) -> Fault | None:
        """Count one operation; raise or wait if that is its fault, else return the fault."""
        fault = self.decide(self._numbering.operation(kind, path, offset, length))
        if isinstance(fault, Fail):
            fault.strike()
        if isinstance(fault, Slow):
            time.sleep(fault.seconds)
        return fault

    def open_segment(self, path: Path, length: int, create: bool) -> SegmentFile:
        self.struck("open", path, 0, length)
        return _FaultyFile(self, path, self._inner.open_segment(path, length, create))


class _FaultyFile:
    """One open file of a FaultyBlockIO."""

    def __init__(self, io: FaultyBlockIO, path: Path, inner: SegmentFile) -> None:
        self._io = io
        self._path = path
        self._inner = inner

    def preadv(self, views: Sequence[ByteArray], offset: int) -> None:
        self._io.struck("read", self._path, offset, _total(views))
        self._inner.preadv(views, offset)

    def pwritev(self, views: Sequence[ByteArray], offset: int) -> None:
        total = _total(views)
        match self._io.struck("write", self._path, offset, total):
            case Lost():
                return
            case Torn(length):
                whole = length // PAGE_BYTES * PAGE_BYTES
                if whole:
                    self._inner.pwritev([_joined(views)[:whole]], offset)
            case Misdirected(distance):
                self._inner.pwritev(views, offset + distance)
            case Flipped(bit):
                data = _joined(views)
                data[bit // 8 % total] ^= np.uint8(1 << bit % 8)
                self._inner.pwritev([data], offset)
            case _:
                self._inner.pwritev(views, offset)

    def fdatasync(self) -> None:
        self._io.struck("sync", self._path)
        self._inner.fdatasync()

    def status(self) -> FileStatus:
        return self._inner.status()

    def close(self) -> None:
        self._inner.close()


def _total(views: Sequence[ByteArray]) -> int:
    return sum(len(view) for view in views)


def _joined(views: Sequence[ByteArray]) -> ByteArray:
    """A page-aligned copy of all views."""
    data = page_aligned(_total(views))
    np.concatenate(list(views), out=data)
    return data


def _shortened(views: Sequence[ByteArray], fault: Fault | None) -> Sequence[ByteArray]:
    """The first bytes of `views` when the fault is Short."""
    if not isinstance(fault, Short):
        return views
    left, kept = fault.length, []
    for view in views:
        if left > 0:
            kept.append(view[:left])
        left -= len(view)
    return kept
