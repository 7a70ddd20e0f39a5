"""The engine adapter's core against plain arrays: no engine, no torch, no daemon."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from engine_adapter import loader as loader_module
from engine_adapter import saver as saver_module
from engine_adapter.loader import LayerBuffers, LoadFailed, LoadThreads, PrefixLoad, Row
from engine_adapter.prefix import Prefix, find
from engine_adapter.saver import HostSaveJob, Saver
from engine_adapter.statistics import RequestReport, Tally
from engine_adapter.tensors import KVTensors
from kvstore.client.inplace import Span
from kvstore.errors import InvalidRequest, PeerGone
from kvstore.fingerprint import Chain
from kvstore.layout import BlockLayout
from kvstore.types import BlockStatus, ByteArray, NamespaceId, Tier

TENSORS = KVTensors(layers=3, heads=2, key_bytes=96, value_bytes=32, block_tokens=16)
"""A part a layer: 4 KiB each."""
SIZE = TENSORS.block_tokens
BLOCKS = 4
SLOT_BYTES = TENSORS.block_layout.slot_bytes
SPACE = NamespaceId(bytes(range(32)))


class Source:
    """Blocks in place: `arrive` says what becomes readable, a turn each."""

    def __init__(
        self,
        blocks: int = BLOCKS,
        arrive: Callable[[Source], Iterator[None]] | None = None,
        tier: Tier = Tier.HOST,
    ) -> None:
        self.blocks = self.whole = blocks
        self.tiers: ByteArray = np.full(blocks, tier, np.uint8)
        self.reason = ""
        generator = np.random.default_rng(blocks)
        self.slots: ByteArray = generator.integers(0, 256, (blocks, SLOT_BYTES), np.uint8)
        self.readable = np.full((len(TENSORS.block_layout.parts), blocks), arrive is None)
        self.is_valid = True
        self.used: list[int] = []
        self._arrive = arrive

    def arrivals(self, deadline_seconds: float) -> Iterator[None]:
        if self._arrive is None:
            yield
        else:
            yield from self._arrive(self)

    def is_readable(self, part: int, first: int, stop: int) -> bool:
        return bool(self.readable[part, first:stop].all())

    def spans(self, first: int, stop: int) -> Iterator[Span]:
        """Two runs of slots, so that a copy has to find its place."""
        middle = (first + stop) // 2
        for start, end in ((first, middle), (middle, stop)):
            if end > start:
                yield Span(start, self.slots[start:end])

    def valid(self) -> bool:
        return self.is_valid

    def end(self, used: int) -> None:
        self.used.append(used)


def buffers(rows: int, columns: int, first_columns: tuple[int, ...] = (0, 0, 0)) -> Any:
    return [
        LayerBuffers(
            np.full((rows, TENSORS.heads, columns, TENSORS.key_bytes), 7, np.uint8),
            np.full((rows, TENSORS.heads, columns, TENSORS.value_bytes), 7, np.uint8),
            first,
        )
        for first in first_columns
    ]


def expected(source: Source, layer: int, token: int) -> tuple[bytes, bytes]:
    """Keys and values of one token, read the long way."""
    slot = source.slots[token // SIZE]
    at = layer * TENSORS.layer_bytes
    keys = slot[at : at + TENSORS.heads * SIZE * 96].reshape(TENSORS.heads, SIZE, 96)
    at += TENSORS.heads * SIZE * 96
    values = slot[at : at + TENSORS.heads * SIZE * 32].reshape(TENSORS.heads, SIZE, 32)
    return keys[:, token % SIZE].tobytes(), values[:, token % SIZE].tobytes()


def holds(target: LayerBuffers, row: int, column: int) -> tuple[bytes, bytes]:
    return target.keys[row, :, column].tobytes(), target.values[row, :, column].tobytes()


def load_of(rows: list[Row], target: Any, deadline_seconds: float = 5.0) -> PrefixLoad:
    return PrefixLoad(TENSORS, rows, target, deadline_seconds, Tally())


# ---------------------------------------------------------------------- tensors


def test_sizes_become_a_block_layout() -> None:
    assert TENSORS.layer_bytes == 2 * 16 * (96 + 32)
    assert TENSORS.block_layout == BlockLayout(16, 3, TENSORS.layer_bytes)


@pytest.mark.parametrize("field", ["layers", "heads", "key_bytes", "value_bytes", "block_tokens"])
def test_empty_shapes_are_refused(field: str) -> None:
    sizes = {"layers": 1, "heads": 1, "key_bytes": 1, "value_bytes": 1, "block_tokens": 1}
    with pytest.raises(InvalidRequest, match=field):
        KVTensors(**{**sizes, field: 0})


def test_views_write_through() -> None:
    slots = np.zeros((3, SLOT_BYTES), np.uint8)[1:]
    TENSORS.keys(slots, 1)[1, 1, 15, 95] = 1
    TENSORS.values(slots, 2)[0, 0, 0, 0] = 2
    at = TENSORS.layer_bytes + TENSORS.heads * SIZE * 96 - 1
    assert slots[1, at] == 1
    assert slots[0, 2 * TENSORS.layer_bytes + TENSORS.heads * SIZE * 96] == 2
    assert np.count_nonzero(slots) == 2


# ---------------------------------------------------------------------- loader


def test_every_token_lands_in_its_column() -> None:
    source, target = Source(), buffers(1, 80)
    load = load_of([Row(Prefix(source), BLOCKS * SIZE, 0, (0,))], target)
    load.run()
    for layer in range(3):
        load.wait(layer)
        for token in range(BLOCKS * SIZE):
            assert holds(target[layer], 0, token) == expected(source, layer, token)
        assert (target[layer].keys[:, :, BLOCKS * SIZE :] == 7).all()
    assert load.confirm() == ""


def test_rows_of_a_batch_share_one_length() -> None:
    """The second row is padded by 10 columns and ends inside a block; the first is repeated."""
    one, two, target = Source(), Source(3), buffers(3, 80)
    columns = 3 * SIZE + 10 - 16
    rows = [Row(Prefix(one), columns, 0, (0, 1)), Row(Prefix(two), columns - 10, 10, (2,))]
    load = load_of(rows, target)
    load.run()
    assert load.confirm() == ""
    for layer in range(3):
        for column in range(columns):
            for row in (0, 1):
                assert holds(target[layer], row, column) == expected(one, layer, column)
            if column >= 10:
                assert holds(target[layer], 2, column) == expected(two, layer, column - 10)
        assert (target[layer].keys[:, :, columns:] == 7).all()
        assert (target[layer].keys[2, :, :10] == 7).all()


def test_windows_need_only_their_blocks() -> None:
    """Layer 1 sees columns from 40 on: the block that holds column 40 and the later ones."""

    def arrive(source: Source) -> Iterator[None]:
        source.readable[:, 2:] = True
        source.readable[0] = source.readable[2] = True
        yield

    source, target = Source(arrive=arrive), buffers(1, 80, (0, 40, 0))
    load = load_of([Row(Prefix(source), BLOCKS * SIZE, 0, (0,))], target)
    load.run()
    assert load.confirm() == ""
    assert (target[1].keys[:, :, :32] == 7).all()
    for column in range(32, BLOCKS * SIZE):
        assert holds(target[1], 0, column) == expected(source, 1, column)


def test_a_layer_waits_for_its_own_part_only() -> None:
    gate = threading.Event()

    def arrive(source: Source) -> Iterator[None]:
        source.readable[0] = True
        yield
        assert gate.wait(5)
        source.readable[:] = True
        yield

    source, target = Source(arrive=arrive), buffers(1, 80)
    load = load_of([Row(Prefix(source), BLOCKS * SIZE, 0, (0,))], target)
    threads = LoadThreads()
    threads.start(load)
    load.wait(0)
    assert holds(target[0], 0, 5) == expected(source, 0, 5)
    assert (target[1].keys == 7).all()
    gate.set()
    load.wait(2)
    assert load.confirm() == ""
    threads.close()


def test_a_load_that_comes_to_nothing_opens_its_gates() -> None:
    def arrive(source: Source) -> Iterator[None]:
        source.readable[0] = True
        source.reason = "failed"
        yield

    load = load_of([Row(Prefix(Source(arrive=arrive)), SIZE, 0, (0,))], buffers(1, 80))
    load.run()
    with pytest.raises(LoadFailed, match="failed"):
        load.wait(0)
    assert load.confirm() == "failed"


def test_an_error_of_the_client_is_the_reason() -> None:
    def arrive(source: Source) -> Iterator[None]:
        raise PeerGone("the daemon went away")
        yield

    load = load_of([Row(Prefix(Source(arrive=arrive)), SIZE, 0, (0,))], buffers(1, 80))
    load.run()
    assert load.confirm() == "PeerGone: the daemon went away"


def test_a_fault_of_ours_is_a_miss_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def arrive(source: Source) -> Iterator[None]:
        raise ZeroDivisionError
        yield

    load = load_of([Row(Prefix(Source(arrive=arrive)), SIZE, 0, (0,))], buffers(1, 80))
    threads = LoadThreads()
    threads.start(load)
    with pytest.raises(LoadFailed, match=loader_module.UNFINISHED):
        load.wait(0)
    threads._pool.shutdown(wait=True)
    assert "a background task failed" in caplog.text


def test_nobody_waits_past_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "GRACE_SECONDS", 0.02)
    load = load_of([Row(Prefix(Source()), SIZE, 0, (0,))], buffers(1, 80), 0.02)
    began = time.monotonic()
    with pytest.raises(LoadFailed, match=loader_module.DEADLINE):
        load.wait(0)
    assert time.monotonic() - began >= 0.03


def test_a_load_given_up_copies_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "GRACE_SECONDS", 0.0)
    target = buffers(1, 80)
    load = load_of([Row(Prefix(Source()), SIZE, 0, (0,))], target, 0.0)
    assert load.confirm() == loader_module.DEADLINE
    load.run()
    assert (target[0].keys == 7).all()


@pytest.mark.parametrize("bad", [0, 1])
def test_every_source_must_be_valid_in_the_end(bad: int) -> None:
    sources = [Source(), Source()]
    sources[bad].is_valid = False
    rows = [Row(Prefix(source), SIZE, 0, (at,)) for at, source in enumerate(sources)]
    load = load_of(rows, buffers(2, 80))
    load.run()
    assert load.confirm() == loader_module.CHANGED


# ---------------------------------------------------------------------- prefix


def test_a_prompt_shorter_than_a_block_asks_nobody() -> None:
    found = find(object(), np.arange(3, dtype=np.uint32), 0, 1.0)  # type: ignore[arg-type]
    assert (found.blocks, found.reason) == (0, "prompt shorter than a block")
    found.end()


def test_tokens_below_host_memory_are_told_apart() -> None:
    source = Source(tier=Tier.NVME)
    source.tiers[:2] = Tier.HOST
    prefix = Prefix(source)
    assert [prefix.below_host(blocks) for blocks in range(BLOCKS + 1)] == [0, 0, 0, 1, 2]
    prefix.end(3)
    assert source.used == [3]


# ---------------------------------------------------------------------- saver


class Handle:
    """A namespace of plain memory; `statuses` is what reserve answers for blocks not yet held."""

    id = SPACE
    layout = TENSORS.block_layout

    def __init__(self) -> None:
        self.held: dict[bytes, ByteArray] = {}
        self.refusal: BlockStatus | None = None
        self.error: Exception | None = None
        self.before = threading.Event()
        self.before.set()

    def chain(self, tokens: Any) -> Chain:
        chain = Chain(SPACE, SIZE)
        chain.extend(tokens)
        return chain

    def match(self, chain: Chain) -> int:
        self.before.wait(5)
        return next((at for at in range(len(chain)) if chain[at] not in self.held), len(chain))

    def reserve(self, chain: Chain, *, start: int, count: int) -> Reservation:
        if self.error is not None:
            raise self.error
        return Reservation(self, [chain[at] for at in range(start, start + count)])


class Reservation:
    reason = ""

    def __init__(self, handle: Handle, names: list[bytes]) -> None:
        self.handle, self.names = handle, names
        new = handle.refusal or BlockStatus.GRANTED
        self.statuses = [BlockStatus.PRESENT if n in handle.held else new for n in names]
        self.granted = tuple(
            at for at, status in enumerate(self.statuses) if status is BlockStatus.GRANTED
        )
        self.slots = np.zeros((len(names), SLOT_BYTES), np.uint8)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def commit(self) -> None:
        for at in self.granted:
            self.handle.held[self.names[at]] = self.slots[at]
            self.statuses[at] = BlockStatus.STORED


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Saver, Handle, Tally]]:
    def spans(_: Handle, reservation: Reservation) -> Iterator[Span]:
        for at in reservation.granted:
            yield Span(at, reservation.slots[at : at + 1])

    monkeypatch.setattr(saver_module, "granted_spans", spans)
    monkeypatch.setattr(saver_module, "BLOCKS_PER_RESERVATION", 2)
    tally = Tally()
    saver = Saver(tally)
    yield saver, Handle(), tally
    saver.close(5)


def job_of(handle: Handle, source: Source, first: int = 0, column: int = 5) -> HostSaveJob:
    """What a load of `source` would leave in buffers, as a job; row 1 of 2."""
    target = buffers(2, 100)
    load = load_of([Row(Prefix(source), BLOCKS * SIZE, column, (1,))], target)
    load.run()
    return HostSaveJob(
        handle,  # type: ignore[arg-type]
        TENSORS,
        np.arange(BLOCKS * SIZE + 3, dtype=np.uint32),
        first,
        BLOCKS,
        column,
        [layer.keys[1] for layer in target],
        [layer.values[1] for layer in target],
    )


def test_what_is_saved_is_what_was_loaded(saved: tuple[Saver, Handle, Tally]) -> None:
    saver, handle, tally = saved
    source = Source()
    saver.submit(job_of(handle, source))
    assert saver.wait_idle(5)
    payload = TENSORS.layers * TENSORS.layer_bytes
    assert [block[:payload].tobytes() for block in handle.held.values()] == [
        slot[:payload].tobytes() for slot in source.slots
    ]
    assert tally.snapshot().saved_blocks == BLOCKS


def test_blocks_that_are_there_are_not_saved_again(saved: tuple[Saver, Handle, Tally]) -> None:
    saver, handle, tally = saved
    job = job_of(handle, Source())
    chain = handle.chain(job.tokens)
    handle.held[chain[0]] = handle.held[chain[2]] = np.zeros(1, np.uint8)
    saver.submit(job)
    saver.submit(job)
    assert saver.wait_idle(5)
    counted = tally.snapshot()
    assert (counted.saved_blocks, counted.present_blocks) == (2, 2 + BLOCKS)


def test_a_restored_prefix_is_not_saved(saved: tuple[Saver, Handle, Tally]) -> None:
    saver, handle, _ = saved
    job = job_of(handle, Source(), first=3)
    saver.submit(job)
    assert saver.wait_idle(5)
    assert list(handle.held) == [handle.chain(job.tokens)[3]]


def test_no_room_ends_a_job_and_is_counted(saved: tuple[Saver, Handle, Tally]) -> None:
    saver, handle, tally = saved
    handle.refusal = BlockStatus.NO_ROOM
    saver.submit(job_of(handle, Source()))
    assert saver.wait_idle(5)
    assert tally.snapshot().save_reasons == {"no_room": BLOCKS}


def test_an_error_ends_a_job_and_is_counted(saved: tuple[Saver, Handle, Tally]) -> None:
    saver, handle, tally = saved
    handle.error = PeerGone("the daemon went away: again")
    saver.submit(job_of(handle, Source()))
    assert saver.wait_idle(5)
    handle.error = None
    saver.submit(job_of(handle, Source()))
    assert saver.wait_idle(5)
    assert tally.snapshot().saved_blocks == BLOCKS
    assert tally.snapshot().save_reasons == {"PeerGone": BLOCKS}


def test_too_many_jobs_are_refused(
    saved: tuple[Saver, Handle, Tally], monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, handle, tally = saved
    monkeypatch.setattr(saver_module, "JOBS_MAX", 2)
    job = job_of(handle, Source())
    handle.before.clear()
    for _ in range(5):
        saver.submit(job)
    handle.before.set()
    assert saver.wait_idle(5)
    refused = tally.snapshot().save_reasons[saver_module.BUSY]
    assert refused in (2 * BLOCKS, 3 * BLOCKS)


def test_after_close_everything_is_refused(saved: tuple[Saver, Handle, Tally]) -> None:
    saver, handle, tally = saved
    saver.close(5)
    saver.submit(job_of(handle, Source()))
    assert tally.snapshot().save_reasons == {saver_module.CLOSED: BLOCKS}


# ---------------------------------------------------------------------- statistics


def test_reports_add_up() -> None:
    tally = Tally()
    tally.request(RequestReport(100, 64, 16, miss_reason="LeaseExpired: lease 1f ran out"))
    tally.request(RequestReport(50, plain_reason="use_cache=False"))
    total = tally.snapshot()
    assert (total.requests, total.plain, total.hits) == (2, 1, 1)
    assert (total.prompt_tokens, total.hit_tokens) == (150, 80)
    assert total.miss_reasons == {"LeaseExpired": 1}
    tally.request(RequestReport(1))
    assert total.requests == 2, "a snapshot stays what it was"
