"""Bulk streams: how many there may be, and the end of those on which nothing moves.

Primitives: `Streams.one(context)` (one Get or Put), `Stream.moved()`, `Streams.close`.
A stream whose peer neither reads nor writes for too long is cancelled: its thread and its memory
are others' to use.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvstore.errors import Overloaded

LOOKS_PER_IDLE_TIME = 8


class Stream:
    """One Get or Put under way."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.last_moved = time.monotonic()

    def moved(self) -> None:
        """A message went out or came in."""
        self.last_moved = time.monotonic()


class Streams:
    """All bulk streams of one gateway; a thread of its own looks after them."""

    def __init__(self, streams_max: int, idle_seconds_max: float) -> None:
        self._streams_max = streams_max
        self._idle_seconds_max = idle_seconds_max
        self._open: set[Stream] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="kvstore-idle", daemon=True).start()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def one(self, context: Any) -> Iterator[Stream]:
        """A place for one stream. Raises Overloaded."""
        stream = Stream(context)
        with self._lock:
            if len(self._open) >= self._streams_max:
                raise Overloaded(
                    f"{self._streams_max} streams are open (gateway.streams_max); try again later"
                )
            self._open.add(stream)
        try:
            yield stream
        finally:
            with self._lock:
                self._open.discard(stream)

    def _watch(self) -> None:
        while not self._closing.wait(self._idle_seconds_max / LOOKS_PER_IDLE_TIME):
            since = time.monotonic() - self._idle_seconds_max
            with self._lock:
                idle = [stream for stream in self._open if stream.last_moved < since]
            for stream in idle:
                stream.context.cancel()

    def close(self) -> None:
        """No more looking; streams end with the server."""
        self._closing.set()
