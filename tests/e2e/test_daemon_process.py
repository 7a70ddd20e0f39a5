"""The daemon as a process: what it refuses, what it takes, how it ends, what it leaves behind.

Field cases HOST-1 to HOST-4, HOST-18, HOST-19, RPC-1, RPC-5, RPC-6 and LIFE-5.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.cli import EXIT_REFUSED, run
from kvstore.layout import BlockLayout
from kvstore.types import BlockStatus
from tests.conftest import MIB, DaemonProcess
from tests.e2e.kit import (
    SECONDS_MAX,
    Engine,
    RawClient,
    Script,
    assert_books,
    attempt,
    bytes_used,
    eventually,
    mounted,
)

MakeDaemon = Callable[..., DaemonProcess]
SHM = Path("/dev/shm")
DRAIN_SECONDS = 5
CONTROL = "kvstore.v1.Control"


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in shared memory of this test's own."""
    directory = SHM / f"test-{uuid.uuid4().hex[:12]}"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


def bytes_below(directory: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*"))


def refused(daemon: DaemonProcess, **more: str) -> str:
    """What a start says that must be refused; nothing may be left of it."""
    done = subprocess.run(
        daemon.command(**more), check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == EXIT_REFUSED, done.stderr
    assert "Traceback" not in done.stderr
    assert not daemon.socket.is_socket()
    assert not daemon.arena.exists()
    return done.stderr.replace("\\n", " ")


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[host]\nbyts = '1GiB'\n", ["byts", "did you mean host.bytes"]),
        ("[host]\nbytes = 'much'\n", ["host.bytes", "much"]),
        ("[host]\nbytes = 0\n", ["host.bytes"]),
        ("[host]\nbytes = '5MiB'\nregion_bytes='2MiB'\nslab_bytes='2MiB'\n", ["host.bytes"]),
        ("[nvme]\nbytes_max = '1MiB'\n", ["nvme.bytes_max", "segment"]),
        ("[limits]\ncalls_inflight_max = 32\n", ["limits.calls_inflight_max", "clients_max"]),
        ("[disk]\n", ["disk"]),
        ("host = 3\n", ["host"]),
        ("[host\n", ["not valid TOML"]),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, named: list[str]
) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text(content)
    assert run(["serve", "--config", str(file), "--data-dir", str(tmp_path / "data")]) == (
        EXIT_REFUSED
    )
    said = capsys.readouterr().err
    assert said.count("\n") == 1, "one line"
    for name in (str(file) if "clients_max" not in named else "calls", *named):
        assert name in said
    assert not (tmp_path / "data").exists()


def test_a_directory_of_another_geometry_is_refused(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    assert daemon.stop() == 0
    said = refused(daemon, **{"nvme.segment_bytes": "8MiB"})
    assert "nvme.segment_bytes=16777216" in said, "names the setting that fits"
    assert "mv " in said, "and the other way out"
    superblock = daemon.data_dir / "superblock.json"
    whole = superblock.read_bytes()
    superblock.write_bytes(whole[: len(whole) // 2])
    assert "damaged" in refused(daemon)
    superblock.unlink()
    assert "missing" in refused(daemon)
    superblock.write_bytes(whole)
    daemon.start()


def test_what_is_in_the_sockets_place_is_not_removed(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    daemon.socket.write_text("somebody's notes")
    assert str(daemon.socket) in refused(daemon)
    assert daemon.socket.read_text() == "somebody's notes"
    daemon.socket.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(daemon.socket))
        other.listen()
        done = subprocess.run(
            daemon.command(), check=False, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == EXIT_REFUSED
        assert "listens" in done.stderr
        assert daemon.socket.is_socket()
    daemon.start()


def test_a_second_daemon_harms_nobody(make_daemon: MakeDaemon) -> None:
    """RPC-1: equal settings, or only one place in common; a client of the first works on."""
    first, other = make_daemon().start(), make_daemon()
    with Engine(first) as engine:
        chain = engine.durable(1, 8)
        boot_id = engine.client.boot_id
        for command in (first.command(), other.command(**{"daemon.name": first.name})):
            second = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            while second.poll() is None:
                engine.loads_whole(chain)
                engine.handle.exists(chain)
            said = second.communicate()[0].decode()
            assert second.returncode == EXIT_REFUSED
            assert first.process is not None
            assert f"{first.process.pid}" in said, "names the owner"
            assert first.socket.is_socket()
            assert (first.arena / "header").exists()
            assert engine.client.boot_id == boot_id
        engine.durable(2, 8)
    assert_books(first)
    assert not other.socket.exists()


# ---------------------------------------------------------------------- shared memory


def test_memory_that_is_not_there_is_refused(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """HOST-1: before a byte is touched, with both numbers."""
    with mounted(tmp_path / "small", MIB) as small:
        sizes = {"host.bytes": "4MiB", "host.region_bytes": "2MiB", "host.directory": str(small)}
        said = refused(make_daemon(sizes))
        assert "needed" in said
        available = [int(word) for word in said.replace(",", " ").split() if word.isdigit()]
        assert any(4 * MIB <= number < 5 * MIB for number in available), "what is needed"
        assert any(0 < number <= MIB for number in available), "what is available"
        assert bytes_used(small) == 0
        assert list(small.iterdir()) == []


def occupies(mount: Path, used: int) -> bool:
    """Threads and garbage of a closed client may hold the last life's header for a moment more."""
    gc.collect()
    return bytes_used(mount) == used


def test_killed_lives_leave_no_memory_behind(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """HOST-2, HOST-3: the mount holds one tier and 5 %; killed while full, started again."""
    with mounted(tmp_path / "exact", 16 * MIB * 105 // 100) as mount:
        daemon = make_daemon({"host.bytes": "16MiB", "host.directory": str(mount)})
        used = 0
        entries: set[int] = set()
        for number in range(5):
            daemon.start()
            used = used or bytes_used(mount)
            eventually(partial(occupies, mount, used), f"{used} bytes used, as in the first life")
            entries.add(len([path for path in mount.rglob("*") if path.suffix != ".lock"]))
            with Engine(daemon) as engine:
                engine.stored(number, 150)
                daemon.kill()
        assert len(entries) == 1, entries
        daemon.start()
        assert daemon.stop() == 0
        eventually(partial(occupies, mount, 0), "nothing is left")
        assert list(mount.iterdir()) == []


def test_only_its_own_dead_files_are_removed(make_daemon: MakeDaemon, shm: Path) -> None:
    """HOST-4: not a live instance's, not another name's, not other programs'."""
    mine, live = (
        make_daemon({"host.directory": str(shm)}),
        make_daemon({"host.directory": str(shm)}),
    )
    live.start()
    with Engine(live) as engine:
        chain = engine.stored(1, 8)
        dead, other = (shm / f"kvstore-{os.getuid()}-{name}" for name in (mine.name, "elsewhere"))
        for directory in (dead, other):
            (directory / "clients").mkdir(parents=True)
            (directory / "region-0000").write_bytes(bytes(4096))
            (directory / "region-0009").write_bytes(bytes(4096))
            (directory / "header").write_bytes(bytes(4096))
        (dead / "notes").write_text("keep")
        foreign = shm / "psm_other_program"
        foreign.write_bytes(bytes(4096))
        mine.start()
        assert not (dead / "region-0009").exists()
        assert (dead / "notes").read_text() == "keep"
        assert (other / "region-0009").exists()
        assert foreign.exists()
        engine.loads_whole(chain)
        assert mine.stop() == 0
        assert sorted(path.name for path in dead.iterdir()) == ["notes"]
        engine.loads_whole(chain)


@pytest.mark.parametrize("units", [5, 9, 17])
def test_memory_taken_is_memory_configured(make_daemon: MakeDaemon, shm: Path, units: int) -> None:
    """HOST-18: sizes that are no powers of two."""
    size = units * 4 * MIB
    daemon = make_daemon({"host.directory": str(shm), "host.bytes": str(size)})
    daemon.settings.pop("host.region_bytes")
    daemon.settings.pop("host.slab_bytes")
    daemon.start()
    assert size * 0.95 <= bytes_below(shm) <= size * 1.05
    tree: Any = daemon.stat()
    assert size * 0.95 <= tree["host"]["arena"]["bytes_total"] <= size


@contextlib.contextmanager
def control_group(limit_bytes: int) -> Iterator[Path]:
    """A memory control group, version 1 or 2; the test is skipped where none may be made."""
    root = Path("/sys/fs/cgroup")
    parent = root / "memory" if (root / "memory").is_dir() else root
    group = parent / f"kvstore-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"may not make a control group: {error}")
    try:
        files = [group / name for name in ("memory.limit_in_bytes", "memory.max")]
        limits = [file for file in files if file.exists()]
        if not limits:
            pytest.skip("the memory controller is not on here")
        limits[0].write_text(str(limit_bytes))
        yield group
    finally:
        eventually(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
        group.rmdir()


@pytest.mark.parametrize(("share", "fits"), [(1.3, True), (0.8, False)])
def test_a_control_groups_limit_counts(make_daemon: MakeDaemon, share: float, fits: bool) -> None:
    """HOST-19: the tier and the daemon itself fit into the group, or the start is refused."""
    size = 512 * MIB
    daemon = make_daemon({"host.bytes": str(size), "host.region_bytes": "0"})
    limit = int(size * share) // 4096 * 4096
    with control_group(limit) as group:
        inside = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)]
        plain = DaemonProcess.command
        setattr(daemon, "command", lambda **more: [*inside, *plain(daemon, **more)])  # noqa: B010
        if fits:
            daemon.start()
            assert daemon.stop() == 0
        else:
            said = refused(daemon)
            assert f"{limit} bytes" in said
            assert str(size) in said


# ---------------------------------------------------------------------- tiers


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nvme.enabled": "false"},
        {"host.bytes": "2MiB", "host.region_bytes": "2MiB"},
        {"nvme.segment_bytes": "2MiB", "nvme.bytes_max": "5MiB"},
        {
            "host.bytes": "2MiB",
            "host.region_bytes": "2MiB",
            "nvme.segment_bytes": "2MiB",
            "nvme.bytes_max": "5MiB",
        },
        {"nvme.direct": "off"},
    ],
    ids=["both", "host only", "smallest host", "smallest nvme", "smallest both", "buffered"],
)
def test_every_combination_of_tiers_stores_and_loads(
    make_daemon: MakeDaemon, settings: dict[str, str]
) -> None:
    """LIFE-5"""
    daemon = make_daemon(settings).start()
    with Engine(daemon) as engine:
        for number in range(12):
            chain = engine.chain(number, 6)
            assert set(engine.store(chain)) <= {BlockStatus.STORED, BlockStatus.WAITING}
            assert engine.loads_whole(chain).from_host == 6
            durable = engine.handle.flush(chain, deadline_seconds=SECONDS_MAX)
            assert durable.all() == (settings.get("nvme.enabled") != "false")
        found = [engine.load(engine.chain(number, 6)).blocks for number in range(12)]
        assert found[-1] == 6
        assert sum(found) >= 18, found
    assert_books(daemon)


def test_blocks_larger_than_a_slab(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    layout = BlockLayout(block_tokens=16, layers=5, layer_bytes=1 << 20)
    with Engine(daemon, layout=layout) as engine:
        chains = [engine.durable(number, 2) for number in range(6)]
        for chain in chains:
            engine.loads_whole(chain)
    assert_books(daemon)


# ---------------------------------------------------------------------- what it offers


def test_health_reflection_and_what_is_loaded(daemon: DaemonProcess) -> None:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", CONTROL):
            reply = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=SECONDS_MAX)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        server: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = next(server.ServerReflectionInfo(iter([question]), timeout=SECONDS_MAX))
        services = {service.name for service in answer.list_services_response.service}
        assert {CONTROL, "grpc.health.v1.Health"} <= services
    assert daemon.process is not None
    mapped = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    assert "lmdb" in mapped
    assert not [line for line in mapped.splitlines() if "torch" in line or "cupy" in line]


# ---------------------------------------------------------------------- ends


def test_nothing_is_left_after_a_stop(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    with Engine(daemon) as engine:
        engine.durable(1, 4)
    assert daemon.stop() == 0
    assert not daemon.arena.exists()
    assert sorted(path.name for path in daemon.directory.iterdir()) == ["data", "log"]
    held = {path.name for path in daemon.data_dir.iterdir()}
    assert held == {"superblock.json", "segments", "index"}


def test_a_stop_during_the_start_leaves_nothing(make_daemon: MakeDaemon) -> None:
    """SIGTERM as soon as the arena is there, long before SERVING is told."""
    daemon = make_daemon()
    process = subprocess.Popen(daemon.command(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    eventually(daemon.arena.exists, "the arena is made")
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert not daemon.arena.exists()
    assert not daemon.socket.exists()


@pytest.mark.parametrize("round_", range(3))
def test_a_stop_under_load_keeps_what_was_acknowledged(
    make_daemon: MakeDaemon, round_: int
) -> None:
    """RPC-5, RPC-6: in time, in order, and every block called stored is there afterwards."""
    daemon = make_daemon({"daemon.drain_seconds": f"{DRAIN_SECONDS}s"}).start()
    acknowledged: list[int] = []
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(Engine(daemon, f"e{number}")) for number in range(3)]
        raw = stack.enter_context(RawClient(daemon.socket))
        stopping = threading.Event()

        def store(lane: int, engine: Engine) -> None:
            number = lane * 10_000
            while not stopping.is_set():
                statuses = engine.store(engine.chain(number, 3))
                if set(statuses) == {BlockStatus.STORED}:
                    acknowledged.append(number)
                elif engine.client.boot_id == 0:
                    return
                number += 1

        def call() -> None:
            while attempt(lambda: raw.call("Stat")) is None and not stopping.is_set():
                pass

        threads = [threading.Thread(target=store, args=pair) for pair in enumerate(engines)]
        threads += [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(acknowledged) > 8 + 20 * round_, "stores are under way")
        started = time.monotonic()
        code = daemon.stop()
        took = time.monotonic() - started
        stopping.set()
        for thread in threads:
            thread.join(SECONDS_MAX)
        assert code == 0, daemon.log()
        assert took < DRAIN_SECONDS + 5
        left = {path.name for path in daemon.arena.rglob("*") if path.suffix != ".lock"}
        assert left <= {"clients"}, "memory is given back, locks of those who live are not ours"
        daemon.start()
        for engine in engines:
            engine.wait_new_life(0)
        for number in acknowledged:
            engines[0].loads_whole(engines[0].chain(number, 3))
    assert_books(daemon)


def test_a_frozen_client_does_not_hold_up_the_end(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon({"daemon.drain_seconds": "1s"}).start()
    source = """
        from types import SimpleNamespace
        engine = Engine(SimpleNamespace(socket=Path(sys.argv[1])), "frozen")
        chain = engine.stored(1, 4)
        reservation = engine.handle.reserve(engine.chain(2, 4))
        say("holding")
        sys.stdin.readline()
    """
    with Script(source, str(daemon.socket)) as client:
        assert client.read() == "holding"
        os.kill(client.pid, signal.SIGSTOP)
        started = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - started < 1 + 5
        assert [path.name for path in daemon.arena.rglob("*")] != [], "its lock proves it alive"
        daemon.start()
        assert daemon.stat()["health"] == ["ok"], "new files, not those it may still write to"
        os.kill(client.pid, signal.SIGCONT)


FAILING = """
import asyncio, signal, sys, threading
import kvstore.cli, kvstore.daemon
from kvstore.errors import InvariantViolated
real = kvstore.daemon.serve
def serve(config, on_ready):
    def ready(daemon):
        fail = lambda: daemon.fail(InvariantViolated("I0: this test's"))
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, fail)
        if "hangs" in sys.argv:
            daemon._pools[0].submit(threading.Event().wait)
        on_ready(daemon)
    return real(config, ready)
kvstore.daemon.serve = serve
kvstore.cli.main([word for word in sys.argv[1:] if word != "hangs"])
"""


@pytest.mark.parametrize("hangs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_violated_invariant_ends_the_daemon(make_daemon: MakeDaemon, hangs: bool) -> None:
    """At once a miss for engines, soon the end of the process, also with a disk that hangs."""
    daemon = make_daemon({"daemon.drain_seconds": "1s"})
    plain = daemon.command()
    daemon.command = lambda: [
        *(plain[0], "-c", FAILING, *plain[3:]),
        *(["hangs"] if hangs else []),
    ]
    daemon.start()
    with Engine(daemon) as engine:
        durable = engine.durable(1, 4)
        assert engine.handle.match(durable) == 4
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGUSR1)
        assert daemon.process.wait(30) == 1, daemon.log()
        assert "invariant violated" in daemon.log()
        assert engine.handle.match(durable) == 0
        daemon.command = lambda: plain
        daemon.start()
        engine.wait_new_life(0)
        engine.loads_whole(durable)


SLOW_START = """
import kvstore.cli, kvstore.daemon, sys, time
real = kvstore.daemon.recover
def recover(*tiers):
    print("recovering", flush=True)
    time.sleep(60)
    return real(*tiers)
kvstore.daemon.recover = recover
kvstore.cli.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_start_that_takes_long_heeds_sigterm(make_daemon: MakeDaemon) -> None:
    """The watchdog ends it; the next start finds nothing in its way."""
    daemon = make_daemon({"daemon.drain_seconds": "1s"})
    plain = daemon.command()
    slow = [plain[0], "-c", SLOW_START, *plain[3:]]
    with subprocess.Popen(slow, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"recovering\n"
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    assert daemon.start().stop() == 0


# ---------------------------------------------------------------------- files that go away


def test_a_segment_removed_under_a_running_daemon(daemon: DaemonProcess) -> None:
    """Its blocks are misses or served from shared memory; what is stored later is durable again."""
    with Engine(daemon) as engine:
        chains = [engine.durable(number, 10) for number in range(4)]
        for path in (daemon.data_dir / "segments").iterdir():
            path.unlink()
        for chain in chains:
            assert engine.loads_whole(chain).from_host == 10

        def is_counted() -> bool:
            tree: Any = daemon.stat()
            return bool(tree["nvme"]["segments_lost"] >= 1)

        eventually(is_counted, "the loss is counted")
        number = iter(range(100, 1000))

        def is_durable_again() -> bool:
            chain = engine.chain(next(number), 3)
            engine.store(chain)
            return bool(engine.handle.flush(chain, deadline_seconds=2).all())

        eventually(is_durable_again, "blocks become durable again")
        boot_id = engine.client.boot_id
        daemon.kill()
        daemon.start()
        engine.wait_new_life(boot_id)
        for chain in chains:
            engine.load(chain)
        engine.loads_whole(engine.chain(next(number) - 1, 3))
    assert_books(daemon)


def test_a_full_disk_sheds_and_heals(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 72 * MIB) as disk:
        daemon = make_daemon({"daemon.data_dir": str(disk / "data"), "nvme.segment_bytes": "2MiB"})
        daemon.start()
        with Engine(daemon) as engine:
            first = engine.durable(0, 10)
            filler = disk / "filler"
            with filler.open("wb") as file:
                free = os.statvfs(disk)
                with contextlib.suppress(OSError):
                    os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
            for number in range(1, 40):
                engine.stored(number, 10)
            engine.loads_whole(engine.chain(39, 10))
            engine.load(first)
            eventually(lambda: daemon.stat()["health"] != ["ok"], "it says that it cannot grow")
            filler.unlink()
            number = iter(range(1000, 2000))

            def grows_again() -> bool:
                chain = engine.stored(next(number), 10)
                durable = engine.handle.flush(chain, deadline_seconds=2).all()
                return bool(durable) and daemon.stat()["health"] == ["ok"]

            eventually(grows_again, "it grows again", 60)
        assert_books(daemon)
        assert daemon.stop() == 0, daemon.log()
