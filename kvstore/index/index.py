"""`Index`: one LMDB environment, one writer thread.

One process, one handle, one writer thread. A submit is durable when its Future is done:
transactions commit with sync on, grouped for up to 20 ms or 256 records. Deletes name a generation
and spare any other. A full map refuses puts (TierFull) while deletes still go through in small
batches, for which head-room is kept.
"""

from __future__ import annotations

import errno
import os
import queue
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import Overloaded, TierError, TierFull, TierIO, check
from kvstore.index.opening import OPENING_FILE, check_length, own, verify_after_crash
from kvstore.index.records import ENGINE_MAJOR, RECORD, Delete, IndexDamaged, NamespaceRecord, Put
from kvstore.layout import align_up
from kvstore.types import FINGERPRINT_BYTES, PAGE_BYTES, ByteArray

if TYPE_CHECKING:
    import lmdb

_GENERATION = struct.Struct("<Q")
_GENERATION_OFFSET = int(RECORD.fields["generation"][1]) if RECORD.fields else 0
GROUP_SECONDS = 0.020
GROUP_RECORDS = 256
DELETE_BATCH = 16
"""Records one transaction deletes when the map is full."""
PENDING_RECORDS_MAX = 65536
_HEADROOM_PAGES_MIN = 64
_HEADROOM_BYTES_MAX = 64 << 20
_T = TypeVar("_T")


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
    reader_slots: int
    """Most read transactions that ever ran at once."""
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
        self.failure = ""
        """Why the last transaction failed; "" when it did not."""
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
        owner_fd = own(path)
        try:
            verify_after_crash(path)
            (path / OPENING_FILE).touch()
            try:
                environment = lmdb.open(
                    str(path),
                    map_size=align_up(map_bytes, PAGE_BYTES),
                    max_dbs=2,
                    mode=0o600,
                    writemap=False,
                    readahead=False,
                    lib_version=ENGINE_MAJOR,
                )
            except lmdb.Error as error:
                raise IndexDamaged(f"{path}: {error}") from error
            try:
                check_length(path, environment)
                index = cls(path, environment, owner_fd)
            except lmdb.Error as error:
                environment.close()
                raise IndexDamaged(f"{path}: {error}") from error
            except BaseException:
                environment.close()
                raise
        except BaseException:
            (path / OPENING_FILE).unlink(missing_ok=True)
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
        for name, record in puts:
            check(len(name) == FINGERPRINT_BYTES, "a fingerprint has its size", size=len(name))
            check(len(record) == RECORD.itemsize, "a record has its size", size=len(record))
        job = _Job(puts, deletes)
        self._enqueue(job)
        return job.done

    def put_values(self, values: Mapping[str, bytes]) -> None:
        """Store meta values together; durable when this returns. Raises TierFull, TierIO."""
        items = [(b"meta:" + key.encode(), value) for key, value in values.items()]
        job = _Job(values=items, is_urgent=True)
        self._enqueue(job)
        job.done.result()

    def put_namespace(self, record: NamespaceRecord) -> None:
        """Store or replace a namespace; durable when this returns. Raises TierFull, TierIO."""
        data = msgspec.msgpack.encode(record)
        job = _Job(values=[(b"namespace:" + record.id, data)], is_urgent=True)
        self._enqueue(job)
        job.done.result()

    def _enqueue(self, job: _Job) -> None:
        # From here on nobody can cancel it: what is queued is done.
        job.done.set_running_or_notify_cancel()
        failure: TierError | Overloaded | None = None
        with self._queue_lock:
            if self._is_closed:
                failure = TierIO(f"{self._path}: the index is closed")
            elif job.puts and self._pending + job.records > PENDING_RECORDS_MAX:
                failure = Overloaded(f"{PENDING_RECORDS_MAX} records wait for the index already")
            else:
                self._pending += job.records
                self._queue.put(job)
        if failure is not None:
            job.done.set_exception(failure)

    def _run(self) -> None:
        """The writer thread: gather a group, commit it, tell everyone."""
        is_open = True
        group: list[_Job] = []
        try:
            while is_open:
                is_open = self._gather(group)
                self._commit(group)
                with self._queue_lock:
                    self._pending -= sum(job.records for job in group)
                group.clear()
        finally:
            self._fail_left(group)

    def _fail_left(self, group: list[_Job]) -> None:
        """The writer ends: nobody may wait for ever. After a normal close there is nobody left."""
        with self._queue_lock:
            self.failure = "" if self._is_closed else "the index writer ended"
            self._is_closed = True
        while not self._queue.empty():
            job = self._queue.get()
            group += [job] if job is not None else []
        for job in group:
            if not job.done.done():
                job.done.set_exception(TierIO(f"{self._path}: the index writer ended"))

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
        if not group:
            return
        try:
            self._transact(group)
        except TierError:
            for job in group:
                self._commit_alone(job)
        else:
            self.failure = ""
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
        self.failure = "" if failure is None else str(failure)
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
                    if job.puts or job.values:
                        self._check_headroom(transaction)
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
                count = transaction.stat(self._blocks)["entries"]
                names = b"".join(transaction.cursor().iternext(keys=True, values=False))
                records = b"".join(transaction.cursor().iternext(keys=False, values=True))
        except lmdb.Error as error:
            raise IndexDamaged(f"{self._path}: {error}") from error
        if (len(names), len(records)) != (count * FINGERPRINT_BYTES, count * RECORD.itemsize):
            raise IndexDamaged(f"{self._path}: {count} records of another size")
        (self._path / OPENING_FILE).unlink(missing_ok=True)
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
        """Raises IndexDamaged."""

        def read(transaction: lmdb.Transaction[bytes]) -> tuple[int, int, int]:
            records = transaction.stat(self._blocks)["entries"]
            readers = self._environment.info()["num_readers"]
            return records, self._used_bytes(transaction), readers

        records, used, readers = self._read(read)
        return IndexStatistics(
            records=records,
            bytes_used=used,
            bytes_max=self._map_bytes,
            transactions=self._transactions,
            records_written=self._written,
            records_deleted=self._deleted,
            puts_refused=self._refused,
            stale_readers_cleared=self._stale_readers,
            reader_slots=readers,
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
        (self._path / OPENING_FILE).unlink(missing_ok=True)
        os.close(self._owner_fd)


def _translated(error: Exception, path: Path) -> TierError:
    import lmdb

    is_full = isinstance(error, lmdb.MapFullError)
    code = getattr(error, "code", 0) or getattr(error, "errno", 0)
    if is_full or code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        way_out = "raise nvme.index_map_bytes" if is_full else "free disk space"
        return TierFull(f"{path}: {error}; {way_out}")
    return TierIO(f"{path}: {error}")
