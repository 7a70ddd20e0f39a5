"""OPS-9: a repeated message is written at most once per 10 s, with a count of those held back."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from kvstore import logs
from kvstore.testing.clock import VirtualClock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    yield VirtualClock()
    logs.reset()


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_when_not_on_a_terminal(clock: VirtualClock) -> None:
    stream = io.StringIO()
    logs.configure(stream=stream, clock=clock)
    logs.get_logger("nvme").warning("the disk is full", tier="nvme", free_bytes=7)
    (line,) = lines(stream)
    assert line["event"] == "the disk is full"
    assert (line["level"], line["logger"]) == ("warning", "nvme")
    assert (line["tier"], line["free_bytes"]) == ("nvme", 7)


def test_console_on_a_terminal(clock: VirtualClock) -> None:
    stream = Terminal()
    logs.configure(stream=stream, clock=clock)
    logs.get_logger("rpc").info("listening", socket="/run/x.sock")
    assert "listening" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_levels_below_the_chosen_one_are_not_written(clock: VirtualClock) -> None:
    stream = io.StringIO()
    logs.configure("warning", stream=stream, clock=clock)
    logs.get_logger("a").info("quiet")
    logs.get_logger("a").error("loud")
    assert [line["event"] for line in lines(stream)] == ["loud"]


def test_repeats_within_ten_seconds_are_held_back_and_counted(clock: VirtualClock) -> None:
    stream = io.StringIO()
    logs.configure(stream=stream, clock=clock)
    log = logs.get_logger("nvme")
    for slot in range(100):
        log.warning("read failed", slot=slot)
        clock.advance(0.09)
    assert len(lines(stream)) == 1
    clock.advance(2.0)
    log.warning("read failed", slot=100)
    first, second = lines(stream)
    assert "suppressed" not in first
    assert second["suppressed"] == 99
    assert second["slot"] == 100


def test_different_messages_do_not_hold_each_other_back(clock: VirtualClock) -> None:
    stream = io.StringIO()
    logs.configure(stream=stream, clock=clock)
    logs.get_logger("a").warning("one")
    logs.get_logger("a").warning("two")
    logs.get_logger("a").error("one")
    logs.get_logger("b").warning("one")
    assert len(lines(stream)) == 4


def test_the_end_of_a_burst_is_told(clock: VirtualClock) -> None:
    stream = io.StringIO()
    logs.configure(stream=stream, clock=clock)
    for _ in range(3):
        logs.get_logger("a").warning("burst")
    logs.get_logger("a").warning("single")
    logs.tell_held_back()
    assert len(lines(stream)) == 2
    clock.advance(logs.REPEAT_SECONDS)
    logs.tell_held_back()
    assert lines(stream)[2:] == [{**lines(stream)[2], "event": "burst", "suppressed": 2}]
    logs.tell_held_back(everything=True)
    assert len(lines(stream)) == 3


def test_held_back_messages_are_told_at_exit(clock: VirtualClock) -> None:
    stream = io.StringIO()
    logs.configure(stream=stream, clock=clock)
    for _ in range(3):
        logs.get_logger("a").warning("burst")
    logs.tell_held_back(everything=True)
    assert lines(stream)[-1]["suppressed"] == 2


def test_the_limiter_remembers_a_bounded_number_of_kinds(clock: VirtualClock) -> None:
    limiter = logs.RateLimiter(clock)
    for number in range(logs.KINDS_MAX + 10):
        assert limiter.admit((str(number),)) == 0
    assert limiter.admit((str(logs.KINDS_MAX + 9),)) is None
    assert limiter.admit(("0",)) == 0


def test_a_traceback_comes_along(clock: VirtualClock) -> None:
    stream = io.StringIO()
    logs.configure(stream=stream, clock=clock)
    try:
        raise LookupError("gone")
    except LookupError:
        logs.get_logger("a").exception("a job failed")
    assert "LookupError: gone" in str(lines(stream)[0]["exception"])


def test_a_traceback_of_an_exception_kept_for_later(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    error = LookupError("gone")
    logs.get_logger("a").exception("before", exc_info=error)
    assert "LookupError: gone" in caplog.text
    stream = io.StringIO()
    logs.configure(stream=stream, clock=clock)
    logs.get_logger("a").exception("after", exc_info=error)
    assert "LookupError: gone" in str(lines(stream)[0]["exception"])


def test_other_libraries_come_along_with_the_same_limit(clock: VirtualClock) -> None:
    stream = io.StringIO()
    logs.configure(stream=stream, clock=clock)
    for number in range(5):
        logging.getLogger("asyncio").warning("slow callback %s", number)
    (line,) = lines(stream)
    assert (line["logger"], line["detail"]) == ("asyncio", "slow callback 0")


def test_without_configuration_the_host_process_decides(caplog: pytest.LogCaptureFixture) -> None:
    logs.reset()
    logs.get_logger("client").warning("the daemon is away", socket="/run/x.sock")
    assert caplog.records[0].name == "kvstore.client"
    assert caplog.records[0].getMessage() == "the daemon is away socket=/run/x.sock"


def test_a_closed_stream_does_not_stop_the_daemon(clock: VirtualClock) -> None:
    stream = io.StringIO()
    logs.configure(stream=stream, clock=clock)
    stream.close()
    logs.get_logger("a").error("nobody hears this")


def test_configuring_imports_no_terminal_library() -> None:
    import subprocess

    code = (
        "import sys; from kvstore import logs; logs.configure(); "
        "logs.get_logger('a').info('x'); assert 'structlog' in sys.modules; "
        "sys.exit('rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
