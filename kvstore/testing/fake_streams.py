"""The streams of a fake device: queues of work that a seeded scheduler runs late and in pieces.

Primitives of `FakeStreams`: `push`, `step`, `run_head`, `run_for`, `drain`, `held`.

First in, first out within a stream; no order between streams but for waits, and for the default
stream (0) against blocking ones. Moods: `lazy` runs only what somebody asks for, `eager`
everything as it is pushed, `random` leaves it to its caller's steps.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, TypeAlias

Mood: TypeAlias = Literal["lazy", "eager", "random"]
Step: TypeAlias = Callable[[], None]


@dataclass(eq=False)
class Mark:
    """One recording of an event: a place in a stream."""

    stream: int
    is_done: bool = False
    at_seconds: float = 0.0


@dataclass(eq=False)
class _Work:
    """One entry of a stream's queue: a mark, a wait for one, or steps."""

    number: int
    mark: Mark | None = None
    until: Mark | None = None
    steps: Iterator[Step] = field(default_factory=lambda: iter(()))


class FakeStreams:
    """A seed is a schedule. `error`, once set, stops everything for good."""

    def __init__(self, chance: random.Random, mood: Mood) -> None:
        self.mood = mood
        self.error = ""
        self.now_seconds = 0.0
        """What the work that ran would have taken, one piece after the other."""
        self.held: set[int] = set()
        """Streams that make no progress."""
        self.blocking: set[int] = set()
        self._chance = chance
        self._numbers = count()
        self._queues: dict[int, deque[_Work]] = {0: deque()}

    @property
    def is_idle(self) -> bool:
        return not any(self._queues.values())

    def open(self, stream: int) -> None:
        self._queues[stream] = deque()

    def close(self, stream: int) -> bool:
        """Whether it had no work left."""
        return not self._queues.pop(stream)

    def push(
        self,
        stream: int,
        *,
        mark: Mark | None = None,
        until: Mark | None = None,
        steps: Iterator[Step] | None = None,
    ) -> None:
        work = _Work(next(self._numbers), mark, until, steps or iter(()))
        self._queues[stream].append(work)
        if self.mood == "eager":
            self.drain()

    def step(self) -> bool:
        """One piece of any work that may run; False if there is none."""
        ready = [
            stream for stream, queue in self._queues.items() if queue and self._may_run(stream)
        ]
        return bool(ready) and self.run_head(self._chance.choice(ready))

    def drain(self) -> None:
        while self.step():
            pass

    def run_head(self, stream: int) -> bool:
        """One piece of the first work of a stream; False if it may not run."""
        if self.error or not self._may_run(stream):
            return False
        work = self._queues[stream][0]
        step = next(work.steps, None)
        if step is not None:
            step()
            return True
        if work.mark is not None:
            work.mark.is_done, work.mark.at_seconds = True, self.now_seconds
        self._queues[stream].popleft()
        return True

    def run_for(self, mark: Mark) -> None:
        """Run what `mark` depends on, and as little else as that takes."""
        while not mark.is_done and not self.error:
            queue = self._queues[mark.stream]
            head = queue[0] if queue else None
            if head is not None and head.until is not None and not head.until.is_done:
                self.run_for(head.until)
                if not head.until.is_done:
                    return
            elif not self.run_head(mark.stream) and (mark.stream in self.held or not self.step()):
                return

    def _may_run(self, stream: int) -> bool:
        queue = self._queues[stream]
        if not queue or stream in self.held:
            return False
        work = queue[0]
        if work.until is not None and not work.until.is_done:
            return False
        others = self.blocking if stream == 0 else (0,) if stream in self.blocking else ()
        for other in others:
            if self._queues[other] and self._queues[other][0].number < work.number:
                return False
        return True
