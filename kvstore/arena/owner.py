"""The daemon's side of the arena: reserves, maps, re-uses and removes its files."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore.arena.locks import is_gone, living_clients, lock_directory, sign
from kvstore.arena.mapping import Mapping, view_of
from kvstore.arena.names import CLIENTS, HEADER, LOCK, memory_files, region_name
from kvstore.arena.room import rooms
from kvstore.errors import ConfigError, InvalidRequest, TierIO
from kvstore.types import HUGE_PAGE_BYTES, PAGE_BYTES, ByteArray

COLLAPSE_STEP_BYTES = 32 << 20
_GROUP_WRITES = 0o020


@dataclass(frozen=True)
class ArenaStatistics:
    """Bytes and counts; `collapse_refused` says why some of the arena is on 4 KiB pages."""

    bytes_total: int
    header_bytes: int
    regions: int
    regions_reused: int
    regions_quarantined: int
    clients_waited_for: int
    collapsed_bytes: int
    collapse_refused: str


@dataclass(frozen=True)
class _Access:
    """Who may open the files."""

    mode: int
    gid: int | None

    def give(self, target: int | Path, mode: int) -> None:
        os.chown(target, -1, -1 if self.gid is None else self.gid)
        os.chmod(target, mode)


class Arena:
    """Owns one directory for one daemon's life. `header` and `regions` are mapped for writing.

    One thread, except `collapse_next`, which one other thread may call.
    """

    def __init__(self, directory: Path, lock_fd: int, region_bytes: int, access: _Access) -> None:
        self.directory = directory
        self.region_bytes = region_bytes
        self.collapsed_bytes = 0
        """Of the regions, on huge pages."""
        self._access = access
        self._lock_fd = lock_fd
        self._header: Mapping | None = None
        self._regions: tuple[Mapping, ...] = ()
        self._arrays: list[ByteArray] = []
        self._reused: tuple[int, ...] = ()
        self._waited_for: set[str] = set()
        self._collapse_at = (0, 0)
        self._collapse_refused = ""

    @classmethod
    def create(
        cls,
        directory: Path,
        *,
        bytes_total: int,
        region_bytes: int,
        header_bytes: int,
        mode: int = 0o600,
        gid: int | None = None,
    ) -> Arena:
        """Lock `directory`, void what a dead daemon left in it, reserve every byte, map it all.

        Regions of a dead daemon that fit are used again; if clients of it still live, those
        regions are quarantined. With `gid`, `mode` is 0o660: that group may map the regions for
        writing, and the header for reading only. Raises ConfigError when another daemon owns the
        directory or when the bytes do not fit; then nothing of ours is left behind.
        """
        for name, value, unit in (
            ("bytes", bytes_total, PAGE_BYTES),
            ("region_bytes", region_bytes, HUGE_PAGE_BYTES),
        ):
            if value <= 0 or value % unit:
                raise ConfigError(f"host.{name}={value}: must be a positive multiple of {unit}")
        try:
            lock_fd = lock_directory(directory)
            arena = cls(directory, lock_fd, region_bytes, _Access(mode, gid))
            try:
                arena._take_over(bytes_total, header_bytes)
            except BaseException:
                arena.close()
                raise
        except (OSError, TierIO) as error:
            raise ConfigError(
                f"host.directory: cannot reserve {bytes_total + header_bytes} bytes in {directory}:"
                f" {error}; lower host.bytes or use another directory"
            ) from error
        return arena

    def _take_over(self, bytes_total: int, header_bytes: int) -> None:
        sign(self._lock_fd)
        self._open_directory()
        _void_header(self.directory / HEADER)
        starts = range(0, bytes_total, self.region_bytes)
        sizes = [min(self.region_bytes, bytes_total - start) for start in starts]
        paths = [self.directory / region_name(number) for number in range(len(sizes))]
        fits = [_is_whole(path, size) for path, size in zip(paths, sizes, strict=True)]
        kept = {path for path, fit in zip(paths, fits, strict=True) if fit}
        for path in memory_files(self.directory) - kept:
            path.unlink()
        new_bytes = sum(size for size, fit in zip(sizes, fits, strict=True) if not fit)
        self._refuse_unless_room(bytes_total, new_bytes + header_bytes)
        self._reused = tuple(number for number, fit in enumerate(fits) if fit)
        living = living_clients(self.directory)
        self._waited_for = living if self._reused else set()
        unfinished = self.directory / f"{HEADER}.new"
        self._header = self._map(unfinished, header_bytes, self._access.mode & ~_GROUP_WRITES)
        self._regions = tuple(
            self._map(path, size, self._access.mode)
            for path, size in zip(paths, sizes, strict=True)
        )
        self._arrays = [region.array for region in self._regions]
        unfinished.rename(self.directory / HEADER)  # attaching finds a whole arena or none

    def _open_directory(self) -> None:
        clients = self.directory / CLIENTS
        clients.mkdir(0o700, exist_ok=True)
        shared = self._access.gid is not None
        self._access.give(self.directory, 0o750 if shared else 0o700)
        # set-group-id: the daemon can open lock files that other users of the group make
        self._access.give(clients, 0o2770 if shared else 0o700)

    def _refuse_unless_room(self, bytes_total: int, needed: int) -> None:
        for room in rooms(self.directory):
            if room.bytes_available < needed:
                raise ConfigError(
                    f"host.bytes={bytes_total}: needed {needed} bytes more, available"
                    f" {room.bytes_available} in {room.where}; lower host.bytes or make room there"
                )

    def _map(self, path: Path, length: int, mode: int) -> Mapping:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, length)
            self._access.give(fd, mode)
            return Mapping.map_file(fd, length, writable=True)
        finally:
            os.close(fd)

    @property
    def header(self) -> Mapping:
        """Zero bytes until its user writes; raises InvalidRequest once closed."""
        if self._header is None:
            raise InvalidRequest("arena: closed")
        return self._header

    @property
    def regions(self) -> tuple[Mapping, ...]:
        """In order of their numbers; empty once closed."""
        return self._regions

    def view(self, offset: int, length: int) -> ByteArray:
        """Writable uint8[length] at byte `offset` of all regions, inside one of them."""
        return view_of(self._arrays, self.region_bytes, offset, length)

    def discard(self, offset: int, length: int) -> bool:
        """Give memory that nobody uses back to the system, inside one region; whether it went."""
        number, start = divmod(offset, self.region_bytes)
        return not self._regions[number].discard(start, length)

    def populate(self, offset: int, length: int) -> bool:
        """Take such memory again; False when the system has too little."""
        number, start = divmod(offset, self.region_bytes)
        return not self._regions[number].populate(start, length)

    # ---------------------------------------------------------------- clients

    @property
    def quarantined_regions(self) -> tuple[int, ...]:
        """Regions that clients of the last daemon may still write into."""
        return self._reused if self._waited_for else ()

    def recheck_clients(self) -> bool:
        """Ask the kernel again; whether nobody is left to wait for, now and for ever."""
        self._waited_for = {name for name in self._waited_for if not is_gone(self.directory, name)}
        return not self._waited_for

    def acknowledge_client(self, lock_file: str) -> None:
        """This client attached to us: it knows that what it held from the last daemon is void."""
        self._waited_for.discard(lock_file)

    def client_gone(self, lock_file: str) -> bool:
        """Whether the process that held this lock ended or let go; its file is removed then.

        Raises InvalidRequest for anything but the name of a lock file.
        """
        gone = is_gone(self.directory, lock_file)
        if gone:
            self._waited_for.discard(lock_file)
        return gone

    # ---------------------------------------------------------------- huge pages

    def collapse_next(self) -> bool:
        """Put huge pages under one more step of 32 MiB; False once there is nothing left to do.

        For a background thread: some 60 ms a step, the GIL is free meanwhile. A refused step
        stays on 4 KiB pages and is named in the statistics.
        """
        number, offset = self._collapse_at
        mappings = (self._header, *self._regions)
        if number >= len(mappings) or (mapping := mappings[number]) is None:
            return False
        whole = len(mapping) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        length = min(COLLAPSE_STEP_BYTES, whole - offset)
        if length <= 0:
            self._collapse_at = (number + 1, 0)
            return True
        refused = mapping.collapse(offset, length)
        if refused:
            self._collapse_refused = refused
        elif number > 0:
            self.collapsed_bytes += length
        self._collapse_at = (number, offset + length)
        return True

    # ---------------------------------------------------------------- end

    def close(self, unlink: bool = True) -> None:
        """Let go of the mappings and of the directory; views keep their memory. Idempotent.

        With `unlink`, removes what is ours: header, regions, LOCK, lock files of dead clients. A
        lock file that is held stays, so that the next daemon can tell that its client lives.
        """
        if self._lock_fd < 0:
            return
        self._header = None
        self._regions = ()
        self._arrays = []
        try:
            if unlink:
                self._unlink_ours()
        finally:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _unlink_ours(self) -> None:
        with suppress(FileNotFoundError):  # whatever somebody removed before us
            for path in memory_files(self.directory):
                path.unlink()
            living_clients(self.directory)
        (self.directory / LOCK).unlink(missing_ok=True)
        for directory in (self.directory / CLIENTS, self.directory):
            with suppress(OSError):  # a living client's lock, or files of others, keep it
                directory.rmdir()

    def statistics(self) -> ArenaStatistics:
        """A snapshot, also while another thread collapses."""
        return ArenaStatistics(
            bytes_total=sum(len(region) for region in self._regions),
            header_bytes=len(self._header) if self._header is not None else 0,
            regions=len(self._regions),
            regions_reused=len(self._reused),
            regions_quarantined=len(self.quarantined_regions),
            clients_waited_for=len(self._waited_for),
            collapsed_bytes=self.collapsed_bytes,
            collapse_refused=self._collapse_refused,
        )


def _void_header(path: Path) -> None:
    """Readers of the last daemon's header learn that it is gone, before any byte is used again."""
    with suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.pwrite(fd, bytes(PAGE_BYTES), 0)
        finally:
            os.close(fd)


def _is_whole(path: Path, length: int) -> bool:
    """Whether `path` is a file of exactly `length` bytes, ours alone, with every page reserved."""
    with suppress(FileNotFoundError):
        found = path.lstat()
        return (
            stat.S_ISREG(found.st_mode)
            and found.st_uid == os.geteuid()
            and found.st_nlink == 1
            and found.st_size == length
            and found.st_blocks * 512 >= length
        )
    return False
