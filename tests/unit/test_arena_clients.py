"""The clients' side of the arena: attaching harms nobody, views outlive everything, locks prove."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from arena_kit import HEADER, REGION, child, create, listing, mapped_bytes

from kvstore.arena import Arena, ArenaView, ClientLock, Mapping
from kvstore.errors import InvalidRequest, PeerGone, TierIO
from kvstore.types import HUGE_PAGE_BYTES, PAGE_BYTES

ATTACH = "view = ArenaView.attach(path, 4 << 20, 2); assert view.read_view(0, 4)[0] == 42\n"


@pytest.fixture
def arena() -> Iterator[Arena]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvstore-test-") as scratch:
        arena = create(Path(scratch) / "arena")
        arena.regions[0].array[:] = 42
        yield arena
        arena.close()


@pytest.fixture
def view(arena: Arena) -> ArenaView:
    return ArenaView.attach(arena.directory, REGION, 2)


# -------------------------------------------------------------------- views


def test_both_sides_see_the_same_bytes(arena: Arena, view: ArenaView) -> None:
    assert (view.read_view(0, REGION) == 42).all()
    view.write_view(REGION + 7, 3)[:] = [1, 2, 3]
    assert arena.view(REGION + 6, 5).tolist() == [0, 1, 2, 3, 0]
    arena.header.array[3] = 9
    assert view.header[3] == 9
    assert len(view.header) == HEADER


def test_loads_cannot_write(view: ArenaView) -> None:
    for array in (view.header, view.read_view(0, 8)):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    assert view.read_view(0, 8).ctypes.data % HUGE_PAGE_BYTES == 0
    assert view.write_view(0, 8).ctypes.data % HUGE_PAGE_BYTES == 0


def test_regions_are_mapped_for_writing_when_needed(arena: Arena, view: ArenaView) -> None:
    before = mapped_bytes(arena.directory)
    first = view.write_view(0, 8)
    assert mapped_bytes(arena.directory) == before + REGION
    assert view.write_view(100, 8).ctypes.data == first.ctypes.data + 100
    assert mapped_bytes(arena.directory) == before + REGION


@pytest.mark.parametrize(("offset", "length"), [(REGION - 1, 2), (2 * REGION, 1), (-5, 1)])
def test_out_of_bounds_is_refused(view: ArenaView, offset: int, length: int) -> None:
    with pytest.raises(InvalidRequest, match="does not lie in one of 2 regions"):
        view.read_view(offset, length)
    with pytest.raises(InvalidRequest, match="does not lie in one of 2 regions"):
        view.write_view(offset, length)


def test_old_views_are_memory_and_new_ones_refused_after_close(
    arena: Arena, view: ArenaView
) -> None:
    """HOST-7, HOST-8"""
    before = mapped_bytes(arena.directory)
    held = [view.read_view(0, 100), view.write_view(200, 100), view.header]
    del view._files[1].array  # nothing but the view object itself refers to the second region
    view.close()
    view.close()
    assert mapped_bytes(arena.directory) - before == 0  # + writable region 0, - region 1
    assert (held[0] == 42).all()
    for ask in (view.read_view, view.write_view):
        with pytest.raises(InvalidRequest):
            ask(0, 100)
    assert len(view.header) == 0
    held.clear()
    assert before - mapped_bytes(arena.directory) == 2 * REGION + HEADER


def test_a_view_read_while_the_process_ends_is_no_crash(arena: Arena) -> None:
    """HOST-7: threads may still read when the interpreter is torn down."""
    ended = child(
        ATTACH
        + """
array = view.read_view(0, 4 << 20)
view.close()
try:
    view.read_view(0, 1)
except KVStoreError:
    print("refused")
def read():
    while True:
        array.sum()
for _ in range(2):
    threading.Thread(target=read, daemon=True).start()
time.sleep(0.1)
raise SystemExit(3)
""",
        arena.directory,
    )
    assert (ended.returncode, ended.stdout) == (3, "refused\n"), ended.stderr


# -------------------------------------------------------------------- attaching

ENDINGS = {
    "return": ("", 0),
    "exception": ("raise RuntimeError", 1),
    "exit": ("sys.exit(5)", 5),
    "hard exit": ("os._exit(6)", 6),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", -9),
    "term": ("os.kill(os.getpid(), signal.SIGTERM)", -15),
    "abort": ("os.abort()", -6),
    "fault": ("os.kill(os.getpid(), signal.SIGSEGV)", -11),
    "closed": ("view.close()", 0),
    "written": ("view.write_view(4 << 20, 1)[:] = 1", 0),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_attached_process_may_end_in_any_way(arena: Arena, ending: str) -> None:
    """HOST-5"""
    code, status = ENDINGS[ending]
    ended = child(ATTACH + code, arena.directory)
    assert ended.returncode == status, ended.stderr
    assert "leaked" not in ended.stderr
    again = ArenaView.attach(arena.directory, REGION, 2)
    assert (again.read_view(0, REGION) == 42).all()
    assert {"header", "region-0000", "region-0001"} <= listing(arena.directory)


def test_a_failed_attach_leaves_everything_in_place(arena: Arena, view: ArenaView) -> None:
    """HOST-6"""
    ended = child(
        """
used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (5 << 20), resource.RLIM_INFINITY))
try:
    ArenaView.attach(path, 4 << 20, 2)
except KVStoreError as error:
    print(type(error).__name__, error)
print(Path("/proc/self/maps").read_text().count(str(path)))
""",
        arena.directory,
    )
    assert "TierIO cannot map" in ended.stdout, ended.stderr
    assert "ulimit -v" in ended.stdout
    assert ended.stdout.endswith("\n0\n")  # what was mapped before the failure is gone
    assert (view.read_view(0, REGION) == 42).all()
    assert child(ATTACH, arena.directory).returncode == 0


def test_attaching_finds_a_whole_arena_or_none(arena: Arena) -> None:
    with pytest.raises(PeerGone, match="not of"):
        ArenaView.attach(arena.directory, 2 * REGION, 2)
    with pytest.raises(PeerGone, match="not of"):
        ArenaView.attach(arena.directory, HUGE_PAGE_BYTES, 1)
    with pytest.raises(FileNotFoundError, match="region-0002"):
        ArenaView.attach(arena.directory, REGION, 3)
    arena.close()
    with pytest.raises(FileNotFoundError, match="header"):
        ArenaView.attach(arena.directory, REGION, 2)


def test_a_region_of_the_next_daemon_is_not_written(arena: Arena, view: ArenaView) -> None:
    arena.close()
    following = create(arena.directory)
    with pytest.raises(PeerGone, match="replaced"):
        view.write_view(0, 1)
    assert not following.view(0, 1).any()
    following.close()


def test_a_region_that_went_is_a_daemon_that_went(arena: Arena, view: ArenaView) -> None:
    (arena.directory / "region-0001").unlink()
    with pytest.raises(PeerGone, match="region-0001 cannot be mapped"):
        view.write_view(REGION, 1)


def test_a_file_too_short_is_not_mapped(arena: Arena) -> None:
    before = reserved_bytes()
    with (arena.directory / "region-0000").open("rb") as file:
        with pytest.raises(TierIO, match=f"cannot map {REGION + 1} bytes of a file of {REGION}"):
            Mapping.map_file(file.fileno(), REGION + 1, writable=False)
        for _ in range(64):
            with pytest.raises(TierIO, match="Permission denied"):
                Mapping.map_file(file.fileno(), REGION, writable=True)
    assert reserved_bytes() - before < 8 * REGION


def reserved_bytes() -> int:
    """Address space of this process, with or without memory behind it."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES


# -------------------------------------------------------------------- locks


def test_a_lock_tells_whether_the_client_lives(arena: Arena) -> None:
    lock = ClientLock.create(arena.directory)
    assert lock.name.startswith(f"{os.getpid()}-")
    assert not arena.client_gone(lock.name)
    lock.close()
    lock.close()
    assert arena.client_gone(lock.name)
    assert listing(arena.directory / "clients") == set()


def test_a_killed_client_is_proved_gone(arena: Arena) -> None:
    ended = child(
        "print(ClientLock.create(path).name, flush=True); os.kill(os.getpid(), signal.SIGKILL)",
        arena.directory,
    )
    name = ended.stdout.strip()
    assert listing(arena.directory / "clients") == {name}
    assert arena.client_gone(name)
    assert listing(arena.directory / "clients") == set()


def test_a_lock_file_that_cannot_be_opened_proves_nothing(arena: Arena) -> None:
    """Nor may it end the daemon, which asks on its loop."""
    name = f"{os.getpid()}-{'0' * 16}.lock"
    (arena.directory / "clients" / name).symlink_to(arena.directory / "header")
    assert not arena.client_gone(name)
    before = os.umask(0o077)
    try:
        lock = ClientLock.create(arena.directory)
    finally:
        os.umask(before)
    mode = (arena.directory / "clients" / lock.name).stat().st_mode & 0o777
    lock.close()
    assert mode == 0o640, "the daemon's group may open it"


def test_a_forked_child_does_not_take_the_lock_away(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = ClientLock.create(arena.directory)
    copy = os.dup(lock._fd)  # what the parent still holds
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        lock.close()
    assert listing(arena.directory / "clients") == {lock.name}
    assert not arena.client_gone(lock.name)
    os.close(copy)
    assert arena.client_gone(lock.name)


@pytest.mark.parametrize(
    "name", ["", "../LOCK", "1-0123456789abcdef.lock/x", "/etc/passwd", "1-0123456789ABCDEF.lock"]
)
def test_only_names_of_lock_files_are_taken(arena: Arena, name: str) -> None:
    with pytest.raises(InvalidRequest, match="lock file"):
        arena.client_gone(name)


def test_a_lock_file_taken_while_it_is_made_is_made_anew(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, stolen = os.open, []

    def steal(path: Path, flags: int, mode: int = 0o777) -> int:
        fd = real(path, flags, mode)
        if not stolen:
            stolen.append(Path(path).name)
            Path(path).unlink()  # as a daemon does with a lock file that nobody holds yet
        return fd

    monkeypatch.setattr(os, "open", steal)
    lock = ClientLock.create(arena.directory)
    monkeypatch.undo()
    assert lock.name != stolen[0]
    assert listing(arena.directory / "clients") == {lock.name}
    lock.close()


def test_no_arena_no_lock(arena: Arena) -> None:
    arena.close()
    with pytest.raises(FileNotFoundError):
        ClientLock.create(arena.directory)
