"""The durable index: fingerprint → record of its NVMe replica, in LMDB. The only module that
imports lmdb.

Primitives:
  `RECORD`            one block's fixed-size record
  `NamespaceRecord`   what must outlive the daemon about a namespace
  `Index.open / submit / scan / close`; namespaces and meta values beside the records
  `IndexDamaged`      it cannot be opened or read: set it aside and rebuild

One process, one handle, one writer thread. A submit is durable when its Future is done:
transactions commit with sync on, grouped for up to 20 ms or 256 records. Deletes name a generation
and spare any other. A full map refuses puts (TierFull) while deletes still go through in small
batches, for which head-room is kept.
"""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ConfigError, Overloaded, TierError, TierFull, TierIO
from kvstore.layout import BlockLayout, align_up
from kvstore.types import (
    FINGERPRINT_BYTES,
    PAGE_BYTES,
    PARTS_MAX,
    ByteArray,
    NamespaceId,
    NamespaceKind,
)

if TYPE_CHECKING:
    import lmdb

ENGINE = "lmdb-0.9"
"""Format of the index on disk; LMDB 1.0 cannot read it, nor the other way round."""
_ENGINE_MAJOR = 0
RECORD = np.dtype(
    [
        ("parent", f"V{FINGERPRINT_BYTES}"),
        ("namespace", "<u2"),
        ("clear_count", "<u4"),
        ("depth", "<u4"),
        ("slot", "<u8"),
        ("generation", "<u8"),
        ("length", "<u4"),
        ("checksums", "<u8", (PARTS_MAX,)),
        ("uses", "<u4"),
        ("stored_at", "<f8"),
    ]
)
_GENERATION = struct.Struct("<Q")
_GENERATION_OFFSET = int(RECORD.fields["generation"][1]) if RECORD.fields else 0
GROUP_SECONDS = 0.020
GROUP_RECORDS = 256
DELETE_BATCH = 16
"""Records one transaction deletes when the map is full."""
PENDING_RECORDS_MAX = 65536
_HEADROOM_PAGES_MIN = 64
_HEADROOM_BYTES_MAX = 64 << 20
_OWNER_FILE = "owner.lock"
_OPENING_FILE = "opening"
_DATA_FILE = "data.mdb"

_T = TypeVar("_T")

Put = tuple[bytes, bytes]
"""Fingerprint, RECORD bytes."""
Delete = tuple[bytes, int | None]
"""Fingerprint, generation the record must have (None: any)."""


class IndexDamaged(TierIO):
    """The index cannot be opened or read; set it aside and rebuild it from frame headers."""


class NamespaceRecord(msgspec.Struct, frozen=True):
    """One declared namespace as it outlives the daemon."""

    index: int
    id: bytes
    kind: NamespaceKind
    block_tokens: int
    layers: int
    layer_bytes: int
    ranks: int
    window_tokens: int = 0
    label: str = ""
    clear_count: int = 0

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.block_tokens, self.layers, self.layer_bytes, self.ranks)

    @property
    def namespace(self) -> NamespaceId:
        return NamespaceId(self.id)


@dataclass(frozen=True)
class IndexStatistics:
    """Counts since open; sizes in bytes."""

    records: int
    bytes_used: int
    bytes_max: int
    transactions: int
    records_written: int
    records_deleted: int
    puts_refused: int
    stale_readers_cleared: int
    pending_records: int


@dataclass(eq=False)
class _Job:
    """One submit on its way to the writer thread. `values` goes to the meta or namespace table."""

    puts: Sequence[Put] = ()
    deletes: Sequence[Delete] = ()
    values: Sequence[tuple[bytes, bytes]] = ()
    is_urgent: bool = False
    done: Future[None] = field(default_factory=Future)

    @property
    def records(self) -> int:
        return len(self.puts) + len(self.deletes)


class Index:
    """See the module. Made by `open`; `submit` and the readers may be called from any thread."""

    def __init__(self, path: Path, environment: lmdb.Environment, owner_fd: int) -> None:
        self._path = path
        self._environment = environment
        self._owner_fd = owner_fd
        self._blocks = environment.open_db(b"blocks")
        self._values = environment.open_db(b"values")
        self._page_bytes = environment.stat()["psize"]
        self._map_bytes = environment.info()["map_size"]
        self._headroom_bytes = max(
            _HEADROOM_PAGES_MIN * self._page_bytes, min(self._map_bytes // 8, _HEADROOM_BYTES_MAX)
        )
        self._stale_readers = environment.reader_check()
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pending = 0
        self._queue_lock = threading.Lock()
        self._transactions = self._written = self._deleted = self._refused = 0
        self._is_closed = False
        self._writer = threading.Thread(target=self._run, name="kvstore-index", daemon=True)
        self._writer.start()

    @classmethod
    def open(cls, path: Path, *, map_bytes: int) -> Index:
        """Open or create the index in directory `path`.

        Raises ConfigError when any process, this one included, has it open; IndexDamaged when it
        cannot be used.
        """
        import lmdb

        path = Path(path).resolve()
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner_fd = _own(path)
        try:
            _verify_after_crash(path)
            (path / _OPENING_FILE).touch()
            try:
                environment = lmdb.open(
                    str(path),
                    map_size=align_up(map_bytes, PAGE_BYTES),
                    max_dbs=2,
                    mode=0o600,
                    writemap=False,
                    readahead=False,
                    lib_version=_ENGINE_MAJOR,
                )
            except lmdb.Error as error:
                raise IndexDamaged(f"{path}: {error}") from error
            try:
                _check_length(path, environment)
                index = cls(path, environment, owner_fd)
            except lmdb.Error as error:
                environment.close()
                raise IndexDamaged(f"{path}: {error}") from error
            except BaseException:
                environment.close()
                raise
        except BaseException:
            (path / _OPENING_FILE).unlink(missing_ok=True)
            os.close(owner_fd)
            raise
        return index

    # ------------------------------------------------------------------ writing

    def submit(self, puts: Sequence[Put], deletes: Sequence[Delete]) -> Future[None]:
        """Queue record changes; within one submit deletes come first. The Future is done once they
        are durable.

        It raises TierFull (the map or the disk is full; deletes of the same submit were done all
        the same unless the disk is), TierIO, or Overloaded (too many puts wait already; nothing was
        done).
        """
        job = _Job(puts, deletes)
        with self._queue_lock:
            is_over = bool(puts) and self._pending + job.records > PENDING_RECORDS_MAX
            if not is_over:
                self._pending += job.records
        if is_over:
            job.done.set_exception(
                Overloaded(f"{PENDING_RECORDS_MAX} records wait for the index already")
            )
        else:
            self._enqueue(job)
        return job.done

    def put_value(self, key: str, value: bytes) -> None:
        """Store a meta value; durable when this returns. Raises TierFull, TierIO."""
        job = _Job(values=[(b"meta:" + key.encode(), value)], is_urgent=True)
        self._enqueue(job)
        job.done.result()

    def put_namespace(self, record: NamespaceRecord) -> None:
        """Store or replace a namespace; durable when this returns. Raises TierFull, TierIO."""
        data = msgspec.msgpack.encode(record)
        job = _Job(values=[(b"namespace:" + record.id, data)], is_urgent=True)
        self._enqueue(job)
        job.done.result()

    def set_clear_count(self, namespace: bytes, count: int) -> None:
        """Durable when this returns. Raises TierIO for a namespace that was never put."""
        for record in self.load_namespaces():
            if record.id == namespace:
                self.put_namespace(msgspec.structs.replace(record, clear_count=count))
                return
        raise TierIO(f"namespace {namespace.hex()[:16]} is not in the index")

    def _enqueue(self, job: _Job) -> None:
        with self._queue_lock:
            if not self._is_closed:
                self._queue.put(job)
                return
        job.done.set_exception(TierIO(f"{self._path}: the index is closed"))

    def _run(self) -> None:
        """The writer thread: gather a group, commit it, tell everyone."""
        is_open = True
        while is_open:
            group: list[_Job] = []
            is_open = self._gather(group)
            if group:
                self._commit(group)
                with self._queue_lock:
                    self._pending -= sum(job.records for job in group)

    def _gather(self, group: list[_Job]) -> bool:
        """Fill `group` for up to GROUP_SECONDS or GROUP_RECORDS; False once the index closes."""
        job = self._queue.get()
        end = monotonic() + GROUP_SECONDS
        records = 0
        while job is not None:
            group.append(job)
            records += job.records
            if job.is_urgent or records >= GROUP_RECORDS:
                return True
            try:
                job = self._queue.get(timeout=max(0.0, end - monotonic()))
            except queue.Empty:
                return True
        return False

    def _commit(self, group: list[_Job]) -> None:
        """The whole group in one transaction; when that fails, each job by itself, so that one
        cannot fail others.
        """
        try:
            self._transact(group)
        except TierError:
            for job in group:
                self._commit_alone(job)
        else:
            for job in group:
                job.done.set_result(None)

    def _commit_alone(self, job: _Job) -> None:
        failure: TierError | None = None
        for start in range(0, len(job.deletes), DELETE_BATCH):
            try:
                self._transact([_Job(deletes=job.deletes[start : start + DELETE_BATCH])])
            except TierError as error:
                failure = error
        if failure is None and (job.puts or job.values):
            try:
                self._transact([_Job(puts=job.puts, values=job.values)])
            except TierError as error:
                failure = error
        if failure is None:
            job.done.set_result(None)
        else:
            self._refused += len(job.puts)
            job.done.set_exception(failure)

    def _transact(self, jobs: list[_Job]) -> None:
        import lmdb

        written = deleted = 0
        try:
            with self._environment.begin(write=True) as transaction:
                for job in jobs:
                    for name, generation in job.deletes:
                        deleted += self._delete(transaction, name, generation)
                if any(job.puts or job.values for job in jobs):
                    self._check_headroom(transaction)
                for job in jobs:
                    for name, record in job.puts:
                        transaction.put(name, record, db=self._blocks)
                    for name, value in job.values:
                        transaction.put(name, value, db=self._values)
                    written += len(job.puts)
        except (lmdb.Error, OSError) as error:
            raise _translated(error, self._path) from error
        self._transactions += 1
        self._written += written
        self._deleted += deleted

    def _delete(
        self, transaction: lmdb.Transaction[bytes], name: bytes, generation: int | None
    ) -> bool:
        found = transaction.get(name, db=self._blocks)
        if found is None:
            return False
        if generation is not None and (
            _GENERATION.unpack_from(found, _GENERATION_OFFSET)[0] != generation
        ):
            return False
        return transaction.delete(name, db=self._blocks)

    def _check_headroom(self, transaction: lmdb.Transaction[bytes]) -> None:
        used = self._used_bytes(transaction)
        if used > self._map_bytes - self._headroom_bytes:
            raise TierFull(
                f"the index uses {used} of {self._map_bytes} bytes, the rest is kept for deletes; "
                "raise nvme.index_map_bytes"
            )

    def _used_bytes(self, transaction: lmdb.Transaction[bytes]) -> int:
        pages = 0
        for database in (self._blocks, self._values):
            found = transaction.stat(database)
            pages += found["branch_pages"] + found["leaf_pages"] + found["overflow_pages"]
        return pages * self._page_bytes

    # ------------------------------------------------------------------ reading

    def scan(self) -> tuple[ByteArray, NDArray[np.void]]:
        """Every record in one pass: fingerprints uint8[n, 32] and records RECORD[n]. Raises
        IndexDamaged.
        """
        import lmdb

        try:
            with self._environment.begin(db=self._blocks) as transaction:
                items = list(transaction.cursor())
        except lmdb.Error as error:
            raise IndexDamaged(f"{self._path}: {error}") from error
        names = b"".join([name for name, _ in items])
        records = b"".join([record for _, record in items])
        if len(names) != len(items) * FINGERPRINT_BYTES or len(records) != (
            len(items) * RECORD.itemsize
        ):
            raise IndexDamaged(f"{self._path}: records of another size")
        (self._path / _OPENING_FILE).unlink(missing_ok=True)
        return (
            np.frombuffer(names, np.uint8).reshape(-1, FINGERPRINT_BYTES),
            np.frombuffer(records, RECORD),
        )

    def get(self, fingerprint: bytes) -> NDArray[np.void] | None:
        """One block's record, RECORD[()]; None when there is none. Raises IndexDamaged."""
        found = self._read(lambda transaction: transaction.get(fingerprint, db=self._blocks))
        return None if found is None else np.frombuffer(found, RECORD)[0]

    def get_value(self, key: str) -> bytes | None:
        """A meta value, None when absent. Raises IndexDamaged."""
        return self._read(lambda transaction: transaction.get(b"meta:" + key.encode()))

    def load_namespaces(self) -> list[NamespaceRecord]:
        """In index order. Raises IndexDamaged."""

        def read(transaction: lmdb.Transaction[bytes]) -> list[NamespaceRecord]:
            return [
                msgspec.msgpack.decode(value, type=NamespaceRecord)
                for name, value in transaction.cursor()
                if name.startswith(b"namespace:")
            ]

        return sorted(self._read(read), key=lambda record: record.index)

    def _read(self, read: Callable[[lmdb.Transaction[bytes]], _T]) -> _T:
        import lmdb

        try:
            with self._environment.begin(db=self._values) as transaction:
                return read(transaction)
        except (lmdb.Error, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise IndexDamaged(f"{self._path}: {error}") from error

    def statistics(self) -> IndexStatistics:
        with self._environment.begin() as transaction:
            records = transaction.stat(self._blocks)["entries"]
            used = self._used_bytes(transaction)
        return IndexStatistics(
            records=records,
            bytes_used=used,
            bytes_max=self._map_bytes,
            transactions=self._transactions,
            records_written=self._written,
            records_deleted=self._deleted,
            puts_refused=self._refused,
            stale_readers_cleared=self._stale_readers,
            pending_records=self._pending,
        )

    def close(self) -> None:
        """Commit what is queued, end the writer, release the directory. Twice is a no-op."""
        with self._queue_lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._queue.put(None)
        self._writer.join()
        self._environment.close()
        (self._path / _OPENING_FILE).unlink(missing_ok=True)
        os.close(self._owner_fd)


def _own(path: Path) -> int:
    """Take the lock file of the index directory; the descriptor holds it. Raises ConfigError naming
    the owner.
    """
    fd = os.open(path / _OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise ConfigError(
            f"{path}: the index is open in process {owner} already; stop that daemon or set another "
            "daemon.data_dir"
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _verify_after_crash(path: Path) -> None:
    """When an earlier start ended inside the index, walk its pages without LMDB first: damage there
    can kill us.
    """
    data = path / _DATA_FILE
    if not (path / _OPENING_FILE).exists() or not data.exists():
        return
    from lmdb import verify

    try:
        findings = verify.verify(str(data))  # type: ignore[no-untyped-call]
    except (verify.VerifyError, OSError) as error:
        raise IndexDamaged(f"{data}: {error}") from error
    if findings:
        raise IndexDamaged(f"{data}: {findings[0]} ({len(findings)} findings)")


def _check_length(path: Path, environment: lmdb.Environment) -> None:
    """A shortened file is refused before a page past its end is touched: that would be a SIGBUS."""
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    found = (path / _DATA_FILE).stat().st_size
    if found < needed:
        raise IndexDamaged(f"{path / _DATA_FILE}: {found} bytes, its pages need {needed}")


def _translated(error: Exception, path: Path) -> TierError:
    import lmdb

    is_full = isinstance(error, lmdb.MapFullError)
    code = getattr(error, "code", 0) or getattr(error, "errno", 0)
    if is_full or code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        way_out = "raise nvme.index_map_bytes" if is_full else "free disk space"
        return TierFull(f"{path}: {error}; {way_out}")
    return TierIO(f"{path}: {error}")
