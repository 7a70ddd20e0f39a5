"""The tools against a real daemon, and what a second daemon in its place is told (RPC-1)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from kvstore import cli
from tests.conftest import DaemonProcess


def test_tools_talk_to_a_real_daemon(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    socket = ["--socket", str(daemon.socket)]
    assert cli.run(["stat", "--json", *socket]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["health"] == ["ok"]
    assert tree["host"]["slabs"]["bytes_total"] == 32 << 20
    assert cli.run(["stat", *socket]) == 0
    assert "bytes_total" in capsys.readouterr().out
    assert cli.run(["verify", "--payloads", *socket]) == 0
    assert capsys.readouterr().out == "0 blocks checked, no findings\n"
    assert cli.run(["clear", "--all", *socket]) == 0
    assert capsys.readouterr().out == "cleared 0 namespaces\n"


def test_a_stopped_directory_is_verified_and_a_live_one_refused(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    offline = ["verify", "--data-dir", str(daemon.data_dir), "--set", "nvme.segment_bytes=16MiB"]
    offline += ["--set", "nvme.bytes_max=256MiB"]
    assert cli.run(offline) == cli.EXIT_REFUSED
    assert daemon.process is not None
    assert str(daemon.process.pid) in capsys.readouterr().err, "names who holds it"
    assert daemon.stop() == 0
    assert cli.run(offline) == 0
    assert capsys.readouterr().out == "0 blocks checked, no findings\n"


@pytest.mark.parametrize("shared", ["socket", "data directory"])
def test_a_second_daemon_is_refused_and_the_first_stays(
    make_daemon: Callable[..., DaemonProcess], shared: str
) -> None:
    first, other = make_daemon().start(), make_daemon()
    same = {
        "socket": {"daemon.socket": str(first.socket)},
        "data directory": {"daemon.data_dir": str(first.data_dir)},
    }
    before = first.stat()["boot_id"]
    done = subprocess.run(
        other.command(**same[shared]), check=False, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == cli.EXIT_REFUSED
    assert first.process is not None
    assert str(first.process.pid) in done.stderr, "names who holds it"
    assert "Traceback" not in done.stderr
    assert first.socket.exists()
    assert first.stat()["boot_id"] == before
