"""The index: durable groups, generations, a full map, one owner, damage that does not kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import lmdb
import numpy as np
import pytest

from kvstore.errors import ConfigError, InvariantViolated, Overloaded, TierFull, TierIO
from kvstore.index import RECORD, Index, IndexDamaged, NamespaceRecord
from kvstore.index import index as index_module
from kvstore.types import FINGERPRINT_BYTES, NamespaceKind

MIB = 1 << 20


def name(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(FINGERPRINT_BYTES)


def record(generation: int, **fields: object) -> bytes:
    found = np.zeros((), RECORD)
    found["generation"] = generation
    for field, value in fields.items():
        found[field] = value
    return found.tobytes()


def put(index: Index, seeds: range, generation: int = 1) -> None:
    index.submit([(name(seed), record(generation, slot=seed)) for seed in seeds], []).result(10)


def held(index: Index) -> dict[bytes, int]:
    """Fingerprint → generation."""
    names, records = index.scan()
    return {
        found.tobytes(): int(generation)
        for found, generation in zip(names, records["generation"], strict=True)
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "index"


@pytest.fixture
def index(path):
    found = Index.open(path, map_bytes=64 * MIB)
    yield found
    found.close()


def test_the_record_is_pinned():
    """Data on disk outlives this program: a change here needs another format."""
    assert RECORD.itemsize == 138
    offsets = {field: RECORD.fields[field][1] for field in RECORD.names}
    assert offsets == {
        "parent": 0,
        "namespace": 32,
        "clear_count": 34,
        "depth": 38,
        "slot": 42,
        "generation": 50,
        "length": 58,
        "checksums": 62,
        "uses": 126,
        "stored_at": 130,
    }


def test_records_come_back_field_by_field(index, path):
    data = record(
        5, parent=np.void(name(9)), namespace=3, clear_count=4, depth=6, slot=1 << 40, length=77,
        checksums=np.arange(8) << 50, uses=8, stored_at=1.25,
    )  # fmt: skip
    index.submit([(name(1), data)], []).result(10)
    index.close()
    again = Index.open(path, map_bytes=64 * MIB)
    names, records = again.scan()
    assert names.tobytes() == name(1)
    assert records.tobytes() == data
    assert again.get(name(1)).tobytes() == data
    assert again.get(name(2)) is None
    again.close()


def test_a_delete_spares_another_generation(index):
    put(index, range(3), generation=7)
    index.submit([], [(name(0), 7), (name(1), 6), (name(2), None), (name(99), 7)]).result(10)
    assert held(index) == {name(1): 7}


def test_within_one_submit_deletes_come_first(index):
    put(index, range(1), generation=1)
    index.submit([(name(0), record(2))], [(name(0), None)]).result(10)
    assert held(index) == {name(0): 2}


def test_submits_take_effect_in_their_order(index):
    """Also within one group: a delete queued after a put removes it."""
    index.submit([(name(1), record(1))], [])
    index.submit([(name(2), record(1))], [(name(1), None)]).result(10)
    assert held(index) == {name(2): 1}


def test_a_group_shares_one_transaction(index):
    before = index.statistics().transactions
    done = [index.submit([(name(seed), record(1))], []) for seed in range(100)]
    for future in done:
        future.result(10)
    assert index.statistics().transactions - before <= 3
    assert len(held(index)) == 100


def test_done_means_durable_for_another_process(index, path):
    """The Future is done: a copy of the file, as a power cut would leave it, has the record."""
    put(index, range(50))
    copy = path.parent / "copy"
    copy.mkdir()
    (copy / "data.mdb").write_bytes((path / "data.mdb").read_bytes())
    found = Index.open(copy, map_bytes=64 * MIB)
    assert len(held(found)) == 50
    found.close()


def test_a_cancelled_waiter_neither_cancels_nor_stops_the_writer(index):
    future = index.submit([(name(1), record(1))], [])
    assert not future.cancel()
    future.result(10)
    put(index, range(2, 4))
    assert len(held(index)) == 3


def test_malformed_records_are_our_bug(index):
    with pytest.raises(InvariantViolated):
        index.submit([(b"short", record(1))], [])
    with pytest.raises(InvariantViolated):
        index.submit([(name(1), b"short")], [])


def test_too_many_waiting_puts_are_refused_deletes_never(index, monkeypatch):
    monkeypatch.setattr(index_module, "PENDING_RECORDS_MAX", 10)
    future = index.submit([(name(seed), record(1)) for seed in range(11)], [])
    with pytest.raises(Overloaded):
        future.result(10)
    index.submit([], [(name(seed), 1) for seed in range(11)]).result(10)
    put(index, range(5))
    assert index.statistics().pending_records == 0


def test_after_close_submits_fail_and_queued_ones_are_committed(path):
    index = Index.open(path, map_bytes=64 * MIB)
    futures = [index.submit([(name(seed), record(1))], []) for seed in range(20)]
    index.close()
    index.close()
    assert all(future.result(0) is None for future in futures)
    with pytest.raises(TierIO, match="closed"):
        index.submit([(name(1), record(1))], []).result(10)
    with pytest.raises(TierIO, match="closed"):
        index.put_values({"key": b"value"})


def test_a_dying_writer_leaves_nobody_waiting(index, monkeypatch):
    def die(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(index, "_commit", die)
    future = index.submit([(name(1), record(1))], [])
    with pytest.raises(TierIO, match="writer ended"):
        future.result(10)
    with pytest.raises(TierIO, match="closed"):
        index.submit([(name(1), record(1))], []).result(10)


# ---------------------------------------------------------------------- a full map


@pytest.fixture
def full(path, monkeypatch):
    """A 1 MiB map filled until not even one record is taken; the seeds that made it."""
    monkeypatch.setattr(index_module, "GROUP_SECONDS", 0.001)
    index = Index.open(path, map_bytes=MIB)
    seeds: list[int] = []
    for batch in (200, 20, 1):
        refusal = ""
        while not refusal:
            more = range(len(seeds), len(seeds) + batch)
            try:
                put(index, more)
                seeds += more
            except TierFull as error:
                refusal = str(error)
    assert "nvme.index_map_bytes" in refusal
    yield index, seeds
    index.close()


def test_a_full_map_refuses_puts_and_keeps_what_it_has(full):
    index, seeds = full
    assert set(held(index)) == {name(seed) for seed in seeds}
    assert index.statistics().puts_refused == 221


def test_a_full_map_takes_a_bulk_delete_and_then_puts_again(full):
    index, seeds = full
    index.submit([], [(name(seed), 1) for seed in seeds]).result(30)
    assert held(index) == {}
    put(index, range(200_000, 200_500))
    assert len(held(index)) == 500


def test_a_full_map_filled_and_emptied_again_and_again(full):
    index, seeds = full
    for turn in range(2):
        index.submit([], [(name(seed), None) for seed in seeds]).result(30)
        seeds = list(range(turn * 10_000, turn * 10_000 + 1_500))
        for start in range(0, len(seeds), 50):
            put(index, range(seeds[start], seeds[start] + 50), generation=turn)
        assert len(held(index)) == len(seeds)


def test_a_refused_put_in_a_group_fails_alone(full):
    index, seeds = full
    deleted: Future[None] = index.submit([], [(name(seeds[0]), 1)])
    refused = index.submit([(name(500_000), record(1))], [(name(seeds[1]), 1)])
    deleted.result(10)
    with pytest.raises(TierFull):
        refused.result(10)
    kept = held(index)
    assert name(seeds[0]) not in kept
    assert name(seeds[1]) not in kept
    assert name(500_000) not in kept


# ---------------------------------------------------------------------- one owner


def test_a_second_open_names_the_owner_and_leaves_the_first_whole(index, path, monkeypatch):
    link = path.parent / "link"
    link.symlink_to(path)
    monkeypatch.chdir(path.parent)
    for spelling in (path, link, type(path)("index"), path.parent / "x" / ".." / "index"):
        with pytest.raises(ConfigError, match=rf"process {os.getpid()}"):
            Index.open(spelling, map_bytes=64 * MIB)
    for seed in range(100):
        index.submit([(name(seed), record(seed))], [])
    put(index, range(1000, 1001))
    assert all(index.get(name(seed))["generation"] == seed for seed in range(100))


SECOND = """
import sys
from pathlib import Path
from kvstore.errors import ConfigError
from kvstore.index import Index
try:
    Index.open(Path(sys.argv[1]), map_bytes=1 << 26)
except ConfigError as error:
    print(error)
    sys.exit(7)
"""


def test_another_process_is_refused_and_told_who_owns_it(index, path):
    done = subprocess.run(
        [sys.executable, "-c", SECOND, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 7
    assert f"process {os.getpid()}" in done.stdout
    assert "daemon.data_dir" in done.stdout
    put(index, range(10))
    assert len(held(index)) == 10


def test_readers_of_many_threads_take_few_slots(index):
    put(index, range(64))
    wrong = []

    def look(seed: int) -> None:
        if index.get(name(seed % 64)) is None:
            wrong.append(seed)

    for wave in range(20):
        threads = [threading.Thread(target=look, args=(wave * 32 + at,)) for at in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert index.statistics().reader_slots <= 32


def test_concurrent_writers_and_readers_of_one_key_see_whole_records(index):
    stop = threading.Event()
    torn = []

    def look() -> None:
        while not stop.is_set():
            found = index.get(name(1))
            if found is not None and set(found["checksums"].tolist()) != {int(found["generation"])}:
                torn.append(found)

    readers = [threading.Thread(target=look) for _ in range(4)]
    for reader in readers:
        reader.start()
    futures = [
        index.submit([(name(1), record(turn, checksums=turn))], []) for turn in range(1, 300)
    ]
    for future in futures:
        future.result(10)
    stop.set()
    for reader in readers:
        reader.join()
    assert torn == []
    assert held(index) == {name(1): 299}


# ---------------------------------------------------------------------- ends and damage


BUSY = """
import os, sys, time
from pathlib import Path
from kvstore.index import Index, RECORD
import numpy as np
index = Index.open(Path(sys.argv[1]), map_bytes=1 << 26)
index.scan()
print("busy", flush=True)
seed = 0
while True:
    seed += 1
    index.submit([(seed.to_bytes(32, "little"), bytes(RECORD.itemsize))], []).result()
    index.scan()
"""


def test_killed_owners_leave_nothing_to_clean_up(path):
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", BUSY, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "busy\n"
        time.sleep(0.05)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    index = Index.open(path, map_bytes=64 * MIB)
    assert len(index.scan()[0]) > 0
    put(index, range(1000, 1010))
    assert index.statistics().reader_slots <= 1
    index.close()


def damaged(path) -> Index:
    """Opens and reads everything, as a start does."""
    index = Index.open(path, map_bytes=64 * MIB)
    try:
        index.scan()
    finally:
        index.close()
    return index


def test_a_shortened_file_is_refused_before_it_can_kill(index, path):
    put(index, range(2000))
    index.close()
    os.truncate(path / "data.mdb", 3 * 4096)
    with pytest.raises(IndexDamaged, match="its pages need"):
        damaged(path)


@pytest.mark.parametrize("content", [b"", b"not lmdb at all" * 1000, bytes(100)])
def test_a_file_that_is_no_index_is_damage(index, path, content):
    index.close()
    (path / "data.mdb").write_bytes(content)
    if content:
        with pytest.raises(IndexDamaged):
            damaged(path)
    else:
        damaged(path)  # LMDB starts a new one


def test_the_other_engine_is_damage_not_a_surprise(path):
    path.mkdir()
    lmdb.open(str(path), lib_version=1).close()
    with pytest.raises(IndexDamaged):
        damaged(path)


def test_after_a_start_that_died_inside_pages_are_walked_first(index, path):
    put(index, range(2000))
    index.close()
    data = bytearray((path / "data.mdb").read_bytes())
    for page in range(3, len(data) // 4096, 2):
        data[page * 4096 + 8 : page * 4096 + 24] = os.urandom(16)
    (path / "data.mdb").write_bytes(bytes(data))
    (path / "opening").touch()
    with pytest.raises(IndexDamaged, match="findings"):
        damaged(path)


def test_after_a_start_that_died_inside_a_whole_index_opens(index, path):
    put(index, range(500))
    index.close()
    (path / "opening").touch()
    again = Index.open(path, map_bytes=64 * MIB)
    assert len(again.scan()[0]) == 500
    assert not (path / "opening").exists()
    again.close()


def test_records_of_another_size_are_damage(index, path):
    index.close()
    with lmdb.open(str(path), max_dbs=2, lib_version=0) as environment:
        database = environment.open_db(b"blocks")
        with environment.begin(write=True, db=database) as transaction:
            transaction.put(name(1), b"short")
    with pytest.raises(IndexDamaged, match="another size"):
        damaged(path)


def test_engine_and_safety_settings(index):
    assert index._environment.lib_version()[:2] == (0, 9)
    flags = index._environment.flags()
    assert not flags["writemap"]
    assert flags["sync"]
    assert flags["metasync"]


# ---------------------------------------------------------------------- what is beside the records


def test_namespaces_and_values_survive(index, path):
    records = [
        NamespaceRecord(number, name(number), NamespaceKind.CHAINED, 16, 32, 4096, 1, label="ö")
        for number in (2, 0, 1)
    ]
    for item in records:
        index.put_namespace(item)
    index.put_values({"uuid": b"value"})
    index.close()
    again = Index.open(path, map_bytes=64 * MIB)
    assert again.load_namespaces() == sorted(records, key=lambda item: item.index)
    assert again.load_namespaces()[0].layout.block_bytes == 32 * 4096
    assert again.get_value("uuid") == b"value"
    assert again.get_value("other") is None
    assert held(again) == {}
    again.close()


def test_a_namespace_that_does_not_decode_is_damage(index, path):
    index.close()
    with lmdb.open(str(path), max_dbs=2, lib_version=0) as environment:
        database = environment.open_db(b"values")
        with environment.begin(write=True, db=database) as transaction:
            transaction.put(b"namespace:x", b"\xc1")
    again = Index.open(path, map_bytes=64 * MIB)
    with pytest.raises(IndexDamaged):
        again.load_namespaces()
    again.close()


def test_an_environment_that_failed_is_a_typed_error(index, monkeypatch):
    class Failed:
        def begin(self, **_):
            raise lmdb.PanicError("on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(index, "_environment", Failed())
        with pytest.raises(IndexDamaged, match="on purpose"):
            index.statistics()
