"""An event loop without waiting: time jumps to whatever comes next, and one seed decides the order.

Primitives:
  `VirtualLoop`      an asyncio loop on a `VirtualClock`; it never sleeps and never polls
  `VirtualExecutor`  an Executor whose jobs run on the loop's own thread, each when its time is up
  `Standstill`       every task waits for something that nobody will ever do

One thread, no real time: two runs with one seed take the same steps. A job's effects come at once
at its end, the latest moment they could: whoever re-uses a buffer too early finds it overwritten.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import Context
from random import Random
from typing import Any, TypeVar, TypeVarTuple, Unpack

from kvstore.testing.clock import VirtualClock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Standstill(RuntimeError):
    """No callback is ready and no timer is set: the tasks that are left wait for ever."""


class _Jumps(selectors.SelectSelector):
    """Instead of waiting for files, let the time pass that the loop would have waited."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Standstill("every task waits for something that nobody will do")
        if timeout > 0:
            self._clock.advance(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """For `asyncio.Runner(loop_factory=lambda: VirtualLoop(clock))`. Other threads cannot reach it.

    Nothing that waits for files or sockets works here.
    """

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_Jumps(clock))
        self.clock = clock

    def time(self) -> float:
        return self.clock.monotonic()

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """The one thread there is calls: nobody has to be woken."""
        return self.call_soon(callback, *args, context=context)


class VirtualExecutor(Executor):
    """`threads` jobs at a time, in their order; `seconds(random)` is how long one takes."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        random: Random,
        threads: int = 1,
        seconds: Callable[[Random], float] = lambda random: random.uniform(1e-4, 2e-3),
    ) -> None:
        self._loop = loop
        self._random = random
        self._seconds = seconds
        self._idle = threads
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._is_shut = False
        self._is_dead = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Queue a job. Raises RuntimeError after `shutdown`."""
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[T] = Future()
        self._waiting.append((future, lambda: fn(*args, **kwargs)))
        self._begin()
        return future

    def _begin(self) -> None:
        while self._idle and self._waiting:
            self._idle -= 1
            seconds = self._seconds(self._random)
            self._loop.call_later(seconds, self._end, *self._waiting.popleft())

    def _end(self, future: Future[Any], work: Callable[[], Any]) -> None:
        if self._is_dead:
            return
        self._idle += 1
        if future.set_running_or_notify_cancel():
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001  # whoever waits for the job gets it
                future.set_exception(error)
            else:
                future.set_result(result)
        self._begin()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more jobs. Those that run end in their time, whatever `wait` says."""
        self._is_shut = True
        if cancel_futures:
            while self._waiting:
                self._waiting.popleft()[0].cancel()

    def die(self) -> None:
        """The process was killed: nothing that runs or waits ends any more."""
        self._is_shut = self._is_dead = True
        self._waiting.clear()
