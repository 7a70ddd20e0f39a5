"""The command line against a stand-in daemon: what it prints, asks and exits with."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore import cli, cli_options, cli_through, logs
from kvstore.config import Config
from kvstore.errors import ConfigError, KVStoreError, Overloaded
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc import control_pb2_grpc
from kvstore.rpc.status import code_of, trailing_metadata
from kvstore.units import GIB

NAMESPACE = bytes(range(32))
TREE = {
    "uptime_seconds": 12.345678,
    "host": {"bytes": 1 << 30, "ready_blocks": 512, "reasons": [], "huge_pages": True},
    "nvme": {"mode": "direct", "bytes_used": 1536, "counters": {"bytes_written": 0}},
    "namespaces": [
        {"id": NAMESPACE.hex(), "label": "mine", "block_bytes": 2048},
        {"id": "00ff", "label": "twice", "block_bytes": 2048},
        {"id": "00fe", "label": "twice", "block_bytes": 2048},
        {"id": "00fd", "label": "", "block_bytes": 2048},
    ],
    "latencies": {
        "Match": {"seconds": 0.1, "buckets": {"0.001": 98, "0.01": 100, "+Inf": 100}},
        "Stat": {"seconds": 9.0, "buckets": {"0.001": 0, "0.01": 1, "+Inf": 2}},
        "Load": {"seconds": 0.0, "buckets": {"0.001": 0, "0.01": 0, "+Inf": 0}},
    },
    "counters": {"hit_blocks:host": 3, "hit_blocks:nvme": 0},
}


class StandIn(control_pb2_grpc.ControlServicer):
    """Answers what the tools ask; `error` and `stall` make it misbehave."""

    def __init__(self) -> None:
        self.findings: list[str] = []
        self.asked: list[Any] = []
        self.before_answer: Callable[[grpc.ServicerContext], None] = lambda context: None

    def Stat(self, request: pb.StatRequest, context: grpc.ServicerContext) -> pb.StatReply:
        self.before_answer(context)
        return pb.StatReply(json=json.dumps(TREE))

    def Attach(self, requests: object, context: grpc.ServicerContext) -> Iterator[pb.AttachReply]:
        self.before_answer(context)
        yield pb.AttachReply()

    def Clear(self, request: pb.ClearRequest, context: grpc.ServicerContext) -> pb.ClearReply:
        self.asked.append(request)
        return pb.ClearReply(namespaces=3 if request.all else 1)

    def Resize(self, request: pb.ResizeRequest, context: grpc.ServicerContext) -> pb.ResizeReply:
        self.asked.append(request)
        return pb.ResizeReply(host_bytes=request.host_bytes or 8 << 30, gpu_bytes=request.gpu_bytes)

    def Verify(
        self, request: pb.VerifyRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.VerifyReply]:
        self.asked.append(request)
        yield pb.VerifyReply(checked_blocks=10, total_blocks=20)
        yield pb.VerifyReply(checked_blocks=20, total_blocks=20, findings=self.findings, done=True)


def refusing(error: KVStoreError) -> Callable[[grpc.ServicerContext], None]:
    def refuse(context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata(trailing_metadata(error))
        context.abort(code_of(error), str(error))

    return refuse


class Shell:
    """Runs command lines against one socket and keeps what they printed."""

    def __init__(self, socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.socket = socket
        self._capsys = capsys
        self.out = self.err = ""

    def run(self, *arguments: str) -> int:
        code = cli.run(arguments)
        self.out, self.err = self._capsys.readouterr()
        return code

    def ask(self, *arguments: str) -> int:
        return self.run(*arguments, "--socket", str(self.socket))

    def assert_one_line(self, *words: str) -> None:
        assert self.err.startswith("kvstore: ")
        assert len(self.err.splitlines()) == 1
        for word in words:
            assert word in self.err


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path / "s.sock", capsys)


@pytest.fixture
def daemon(shell: Shell) -> Iterator[StandIn]:
    stand_in = StandIn()
    server = grpc.server(ThreadPoolExecutor(2))
    control_pb2_grpc.add_ControlServicer_to_server(stand_in, server)
    server.add_insecure_port(f"unix:{shell.socket}")
    server.start()
    yield stand_in
    server.stop(None).wait()


# ---------------------------------------------------------------- stat


def test_stat_for_people(shell: Shell, daemon: StandIn) -> None:
    assert shell.ask("stat") == 0
    assert shell.out.splitlines() == [
        "uptime_seconds  12.35",
        "host",
        "  bytes         1.0 GiB",
        "  ready_blocks  512",
        "  reasons       none",
        "  huge_pages    yes",
        "nvme",
        "  mode        direct",
        "  bytes_used  1.5 KiB",
        "  counters",
        "    bytes_written  0 B",
        "namespaces",
        f"  id {NAMESPACE.hex()}, label mine, block_bytes 2.0 KiB",
        "  id 00ff, label twice, block_bytes 2.0 KiB",
        "  id 00fe, label twice, block_bytes 2.0 KiB",
        "  id 00fd, label none, block_bytes 2.0 KiB",
        "latencies",
        "  Match           100 calls, mean 1.00 ms, P99 at most 10 ms",
        "  Stat              2 calls, mean 4500.00 ms, P99 above 0.01 s",
        "counters",
        "  hit_blocks:host  3",
    ]


def test_stat_for_programs(shell: Shell, daemon: StandIn) -> None:
    assert shell.ask("stat", "--json") == 0
    assert json.loads(shell.out) == TREE


def test_a_daemon_that_is_away(shell: Shell) -> None:
    for command in (["stat"], ["verify"], ["clear", "--all"]):
        assert shell.ask(*command) == cli.EXIT_AWAY
        shell.assert_one_line(str(shell.socket), "No such file", "kvstore serve")
        assert shell.out == ""


@pytest.mark.parametrize("command", [["stat"], ["ls"]])
def test_a_socket_that_may_not_be_opened(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(cli_options, "why_silent", lambda path: PermissionError(13, "denied"))
    assert shell.ask(*command) == cli.EXIT_REFUSED
    shell.assert_one_line(str(shell.socket), "may not open", "host.group")


def test_why_a_daemon_does_not_let_us_in(
    shell: Shell, daemon: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.before_answer = refusing(Overloaded("64 clients; raise limits.clients_max"))
    monkeypatch.setattr(cli_through, "CONNECT_SECONDS_MAX", 1.0)
    assert shell.ask("ls") == cli.EXIT_REFUSED
    shell.assert_one_line(str(shell.socket), "raise limits.clients_max")
    logs.reset()


def test_an_error_of_the_daemon_is_one_line(shell: Shell, daemon: StandIn) -> None:
    daemon.before_answer = refusing(Overloaded("512 calls are served already;\n try again later"))
    assert shell.ask("stat") == cli.EXIT_REFUSED
    shell.assert_one_line("512 calls are served already; try again later")


def test_a_daemon_that_does_not_answer_is_given_up(
    shell: Shell, daemon: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    released = threading.Event()
    daemon.before_answer = lambda context: released.wait(5) and None
    monkeypatch.setattr(cli, "CALL_SECONDS_MAX", 0.1)
    assert shell.ask("stat") == cli.EXIT_REFUSED
    released.set()
    shell.assert_one_line("DEADLINE_EXCEEDED")


# ---------------------------------------------------------------- verify


def test_verify_without_findings(shell: Shell, daemon: StandIn) -> None:
    assert shell.ask("verify") == 0
    assert shell.out == "20 blocks checked, no findings\n"
    assert daemon.asked == [pb.VerifyRequest()]


def test_verify_prints_a_line_a_finding(shell: Shell, daemon: StandIn) -> None:
    daemon.findings = ["block 00ff: checksum of part 3 differs"]
    assert shell.ask("verify", "--payloads", "--fix") == cli.EXIT_FINDINGS
    assert shell.out.splitlines() == [*daemon.findings, "20 blocks checked, 1 finding"]
    assert daemon.asked == [pb.VerifyRequest(payloads=True, fix=True)]


def test_verify_of_a_stopped_directory(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, bool, bool]] = []

    def verify_offline(
        config: Config, *, payloads: bool, fix: bool
    ) -> Iterator[types.SimpleNamespace]:
        calls.append((config.daemon.data_dir, payloads, fix))
        yield types.SimpleNamespace(checked_blocks=1, total_blocks=2, findings=["stray record"])
        yield types.SimpleNamespace(checked_blocks=2, total_blocks=2, findings=["lost frame"])

    offline = types.ModuleType("kvstore.offline")
    offline.verify_offline = verify_offline  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvstore.offline", offline)
    assert shell.run("verify", "--data-dir", str(tmp_path), "--payloads") == cli.EXIT_FINDINGS
    assert calls == [(str(tmp_path), True, False)]
    assert shell.out.splitlines() == ["stray record", "lost frame", "2 blocks checked, 2 findings"]


def test_verify_refuses_what_is_no_data_directory(shell: Shell, tmp_path: Path) -> None:
    assert shell.run("verify", "--data-dir", str(tmp_path / "typo")) == cli.EXIT_REFUSED
    shell.assert_one_line(str(tmp_path / "typo"), "superblock.json", "daemon.data_dir")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- clear


def test_clear_one_namespace(shell: Shell, daemon: StandIn) -> None:
    assert shell.ask("clear", NAMESPACE.hex()) == 0
    assert shell.out == "cleared 1 namespace\n"
    assert daemon.asked == [pb.ClearRequest(namespace=NAMESPACE)]


def test_clear_everything(shell: Shell, daemon: StandIn) -> None:
    assert shell.ask("clear", "--all") == 0
    assert shell.out == "cleared 3 namespaces\n"
    assert daemon.asked == [pb.ClearRequest(all=True)]


def test_clear_by_a_label_that_only_one_has(shell: Shell, daemon: StandIn) -> None:
    assert shell.ask("clear", "mine") == 0
    assert daemon.asked == [pb.ClearRequest(namespace=NAMESPACE)]


@pytest.mark.parametrize(
    "arguments", [[], [""], [NAMESPACE.hex(), "--all"], ["zz"], ["00ff"], ["twice"]]
)
def test_clear_needs_exactly_one_good_target(
    shell: Shell, daemon: StandIn, arguments: list[str]
) -> None:
    assert shell.ask("clear", *arguments) == cli.EXIT_REFUSED
    shell.assert_one_line("64 hex digits")
    assert daemon.asked == []


# ---------------------------------------------------------------- config


def test_config_shows_what_is_in_effect(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_NVME__READERS", "7")
    for option in ([], ["--show"]):
        assert shell.run("config", "--set", "host.bytes=2GiB", *option) == 0
        assert 'bytes = "2 GiB"  # from flag --set' in shell.out
        assert "readers = 7  # from environment variable KVSTORE_NVME__READERS" in shell.out
        assert 'region_bytes = "1 GiB"' in shell.out


def test_config_reads_the_named_file(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "k.toml"
    path.write_text("[nvme]\nwriters = 9\n")
    assert shell.run("config", "--config", str(path)) == 0
    assert f"writers = 9  # from file {path}" in shell.out
    monkeypatch.setenv("KVSTORE_CONFIG", str(path))
    assert shell.run("config") == 0
    assert "writers = 9" in shell.out


def test_config_prints_the_defaults(shell: Shell) -> None:
    assert shell.run("config", "--defaults") == 0
    assert "region_bytes = 0\n" in shell.out
    assert shell.run("config", "--defaults", "--show") == cli.EXIT_REFUSED
    shell.assert_one_line("give one")


# ---------------------------------------------------------------- serve


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Config]]:
    """Configurations that the (replaced) daemon was started with; it ends at once with code 0."""
    configs: list[Config] = []

    def serve(config: Config, on_ready: Callable[[object], None]) -> int:
        if config.daemon.name == "refused":
            raise ConfigError("the arena needs 1 GiB, /dev/shm has 64 MiB; lower host.bytes")
        configs.append(config)
        on_ready(object())
        return 5 if config.daemon.name == "failing" else 0

    module = types.ModuleType("kvstore.daemon")
    module.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvstore.daemon", module)
    yield configs
    logs.reset()


def test_serve_needs_no_configuration_and_says_what_it_chose(
    shell: Shell, served: list[Config]
) -> None:
    assert shell.run("serve") == 0
    assert served[0].host.bytes == GIB
    starting, serving = map(json.loads, shell.err.splitlines())
    assert starting["event"] == "starting"
    assert starting["host"].startswith("1 GiB in /dev/shm/")
    assert starting["nvme"].startswith("up to 10 GiB in /")
    assert "defaults" in starting["settings"]
    assert serving["event"] == "serving"
    assert serving["socket"] == starting["socket"] == served[0].daemon.socket


def test_serve_flags_reach_the_daemon(shell: Shell, served: list[Config]) -> None:
    flags = ["--host-bytes", "2GiB", "--nvme-bytes", "5 GB", "--data-dir", "/d", "-s"]
    assert shell.ask("serve", *flags, "nvme.readers=1") == 0
    (config,) = served
    assert config.host.bytes == 2 * GIB
    assert config.nvme.bytes_max == 5 * 10**9
    assert config.nvme.readers == 1
    assert (config.daemon.data_dir, config.daemon.socket) == ("/d", str(shell.socket))
    assert "host.bytes from flag --host-bytes" in shell.err


def test_serve_without_nvme_says_so(shell: Shell, served: list[Config]) -> None:
    assert shell.run("serve", "--set", "nvme.enabled=false") == 0
    assert json.loads(shell.err.splitlines()[0])["nvme"] == "off"


def test_serve_exits_with_the_code_of_the_daemon(shell: Shell, served: list[Config]) -> None:
    assert shell.run("serve", "--set", "daemon.name=failing") == 5


def test_a_refusal_at_start_is_one_line(shell: Shell, served: list[Config]) -> None:
    arguments = ["--set", "daemon.name=refused", "--set", "daemon.log_level=error"]
    assert shell.run("serve", *arguments) == cli.EXIT_REFUSED
    shell.assert_one_line("lower host.bytes")


# ---------------------------------------------------------------- the rest


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sevre"], ["sevre", "--help"]),
        (["stat", "--bogus"], ["--bogus", "--help"]),
        (["config", "left", "over"], ["left", "--help"]),
        (["config", "--set", "host.bytes"], ["section.key=value"]),
        (["serve", "--host-bytes", "lots"], ["--host-bytes", "host.bytes", "'lots'", "64 MiB"]),
        (["stat", "--config", "/does/not/exist.toml"], ["/does/not/exist.toml"]),
        (["ls", "--gateway", "x:1", "--token-file", "/no/token"], ["/no/token: No such file"]),
    ],
)
def test_a_mistake_is_one_line(
    shell: Shell, served: list[Config], arguments: list[str], words: list[str]
) -> None:
    assert shell.run(*arguments) == cli.EXIT_REFUSED
    shell.assert_one_line(*words)
    assert shell.out == ""
    assert served == []


@pytest.mark.parametrize(
    ("size", "asked", "said"),
    [("4 GiB", 4 << 30, "4 GiB"), ("all", 0, "8 GiB"), ("0", 1, "1 B")],
)
def test_resize(shell: Shell, daemon: StandIn, size: str, asked: int, said: str) -> None:
    assert shell.ask("resize", size) == 0
    assert daemon.asked[0].host_bytes == asked
    assert shell.out == f"the host tier fills at most {said} from now on\n"


def test_resize_of_the_gpu_tier_leaves_the_host_tier_alone(shell: Shell, daemon: StandIn) -> None:
    assert shell.ask("resize", "--gpu", "1 GiB") == 0
    assert not daemon.asked[0].HasField("host_bytes")
    assert shell.out == "the GPU tier fills at most 1 GiB from now on\n"
    assert shell.ask("resize") == cli.EXIT_REFUSED


def test_resize_names_what_is_no_size(shell: Shell, daemon: StandIn) -> None:
    assert shell.ask("resize", "much") == cli.EXIT_REFUSED
    shell.assert_one_line("resize", "much", "MiB")
    assert daemon.asked == []


@pytest.mark.parametrize(
    "command", ["", "serve", "stat", "top", "verify", "clear", "resize", "config"]
)
def test_every_command_has_help(shell: Shell, command: str) -> None:
    assert shell.run(*command.split(), "--help") == 0
    assert "Usage: kvstore" in shell.out
    assert shell.err == ""


def test_version(shell: Shell) -> None:
    assert shell.run("--version") == 0
    assert shell.out.startswith("kvstore 0.")


def test_importing_the_command_line_is_cheap() -> None:
    heavy = ["grpc", "rich", "lmdb", "structlog", "uvloop", "kvstore.daemon"]
    code = f"import sys, kvstore.cli; sys.exit(', '.join(m for m in {heavy} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stderr.strip() == ""


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -c 'from kvstore.cli import main; main([\"config\"])' | true"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
