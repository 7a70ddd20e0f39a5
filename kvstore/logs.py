"""What the daemon says: one event and its facts a line, repeated events held back.

Primitives:
  `get_logger(name)`   a `Logger`; cheap, usable at import time
  `configure(...)`     the daemon's choice of level, form (console or JSON) and stream
  `RateLimiter`        at most one message of a kind in 10 s, with a count of those held back

Until `configure` is called, messages go to the standard library's `logging` under "kvstore", so
that an engine that embeds a client keeps its own format. Only `configure` imports structlog.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, TextIO

from kvstore.clock import Clock, SystemClock

if TYPE_CHECKING:
    from structlog.typing import Processor

REPEAT_SECONDS = 10.0
KINDS_MAX = 1024
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

Sink = Callable[[str, str, Mapping[str, object]], None]
"""Writes one message: level name, event, facts."""


class RateLimiter:
    """Lets one message of a kind through every `seconds`; counts the others. Thread-safe."""

    def __init__(self, clock: Clock, seconds: float = REPEAT_SECONDS) -> None:
        self._clock = clock
        self._seconds = seconds
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, ...], tuple[float, int]] = {}

    def admit(self, kind: tuple[str, ...]) -> int | None:
        """None: hold it back. Else write it, saying how many like it were held back before."""
        now = self._clock.monotonic()
        with self._lock:
            last, held = self._kinds.get(kind, (-self._seconds, 0))
            if now - last < self._seconds:
                self._kinds[kind] = (last, held + 1)
                return None
            if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
                self._kinds.pop(next(iter(self._kinds)))
            self._kinds[kind] = (now, 0)
            return held

    def overdue(self, *, everything: bool = False) -> list[tuple[tuple[str, ...], int]]:
        """Kinds whose last repeats nobody was told of, with their number; forgets quiet kinds.

        Their time has passed, or `everything` is asked for (the end of the process).
        """
        now = self._clock.monotonic()
        with self._lock:
            due = [
                kind
                for kind, (last, _) in self._kinds.items()
                if everything or now - last >= self._seconds
            ]
            counts = [(kind, self._kinds.pop(kind)[1]) for kind in due]
        return [(kind, held) for kind, held in counts if held]


class Logger:
    """Writes events with facts: `log.warning("disk is full", tier="nvme", free_bytes=0)`.

    Events of one logger and level with equal text are one kind, whatever their facts: keep variable
    things out of the text.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def debug(self, event: str, **facts: object) -> None:
        _output.write("debug", self.name, event, facts)

    def info(self, event: str, **facts: object) -> None:
        _output.write("info", self.name, event, facts)

    def warning(self, event: str, **facts: object) -> None:
        _output.write("warning", self.name, event, facts)

    def error(self, event: str, **facts: object) -> None:
        _output.write("error", self.name, event, facts)

    def exception(self, event: str, **facts: object) -> None:
        """An error with the traceback of the exception being handled, or of `exc_info`."""
        _output.write("error", self.name, event, {"exc_info": True} | facts)


def get_logger(name: str) -> Logger:
    """The logger of a module; `name` is shown with each message ("nvme", "rpc")."""
    return Logger(name)


def configure(
    level: Literal["debug", "info", "warning", "error"] = "info",
    form: Literal["auto", "console", "json"] = "auto",
    stream: TextIO | None = None,
    clock: Clock | None = None,
) -> None:
    """Write to `stream` (default: standard error) from now on, other libraries' warnings too."""
    stream = stream or sys.stderr
    as_json = form == "json" or (form == "auto" and not stream.isatty())
    _output.open(_structlog_sink(stream, as_json), level, clock or SystemClock())
    logging.getLogger().addHandler(_bridge)


def tell_held_back(*, everything: bool = False) -> None:
    """Write how often finished bursts repeated; with `everything` (at exit) the others too."""
    _output.tell_held_back(everything=everything)


def reset() -> None:
    """Undo `configure`; for tests."""
    _output.open(None, "info", SystemClock())
    logging.getLogger().removeHandler(_bridge)


class _Output:
    """The process-wide way out; swapped as a whole."""

    def __init__(self) -> None:
        self._sink: Sink | None
        self.open(None, "info", SystemClock())

    def open(self, sink: Sink | None, level: str, clock: Clock) -> None:
        """None as `sink`: the standard library's logging."""
        self._sink, self._least, self._limiter = sink, LEVELS[level], RateLimiter(clock)

    def write(self, level: str, name: str, event: str, facts: Mapping[str, object]) -> None:
        if LEVELS[level] < self._least:
            return
        held = self._limiter.admit((level, name, event))
        if held is None:
            return
        self._send(level, name, event, {**facts, "suppressed": held} if held else facts)

    def tell_held_back(self, *, everything: bool) -> None:
        for (level, name, event), held in self._limiter.overdue(everything=everything):
            self._send(level, name, event, {"suppressed": held})

    def _send(self, level: str, name: str, event: str, facts: Mapping[str, object]) -> None:
        if self._sink is not None:
            self._sink(level, event, {"logger": name, **facts})
            return
        exc_info: Any = facts.get("exc_info")
        shown = " ".join(f"{key}={value}" for key, value in facts.items() if key != "exc_info")
        logger = logging.getLogger(f"kvstore.{name}")
        logger.log(LEVELS[level], "%s %s", event, shown, exc_info=exc_info)


_output = _Output()


class _Bridge(logging.Handler):
    """Brings other libraries' records (asyncio, grpc) into the same stream, limited alike."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        level = "error" if record.levelno >= logging.ERROR else "warning"
        facts: dict[str, object] = {"detail": record.getMessage()}
        if record.exc_info:
            facts["exc_info"] = record.exc_info
        _output.write(level, record.name, str(record.msg).splitlines()[0], facts)


_bridge = _Bridge()


def _structlog_sink(stream: TextIO, as_json: bool) -> Sink:
    with _hidden("rich"):
        import structlog
    processors: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if as_json:
        processors += [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ]
    else:
        processors.append(structlog.dev.ConsoleRenderer(colors=stream.isatty()))
    bound = structlog.wrap_logger(
        structlog.WriteLogger(stream),
        processors=processors,
        wrapper_class=structlog.BoundLogger,
    )

    def write(level: str, event: str, facts: Mapping[str, object]) -> None:
        # A closed terminal or a full log disk must not stop the daemon; there is nobody to tell.
        with suppress(OSError, ValueError):
            getattr(bound, level)(event, **facts)

    return write


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Keep `package` from being imported: structlog drags rich in (0.1 s) where it finds it."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
