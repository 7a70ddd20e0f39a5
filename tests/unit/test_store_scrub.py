"""Verification while the store lives, and over a directory whose daemon is stopped."""

from __future__ import annotations

import asyncio

import pytest
from store_kit import LAYOUT, STORED, on_nvme_only, rows_of, tokens

from kvstore.assembly import lock_data
from kvstore.errors import ConfigError, TierIO
from kvstore.offline import verify_offline


@pytest.fixture
def life(harness):
    """(harness, namespace, engine, chain): six durable blocks."""
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(6))
    on_nvme_only(harness, space, chain, engine)
    return harness, space, engine, chain


def place_of(harness, row):
    """(file, byte offset of the frame) of a durable block."""
    segments = harness.store.nvme._segments
    slot = int(harness.store.catalog.nvme_slot[row])
    size = harness.store.nvme.slot_bytes_for(int(harness.store.catalog.length[row]))
    path = segments._table[segments.geometry.segment_of(slot)].path
    return path, segments.geometry.offset_of(slot, size)


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def findings(harness, **options):
    async def verify():
        steps = [step async for step in harness.service.scrubber.verify(**options)]
        assert steps[-1].is_done
        return [finding for step in steps for finding in step.findings], steps

    return harness.wait(verify())


def test_a_whole_store_has_no_findings(life):
    harness = life[0]
    found, steps = findings(harness, payloads=True, fix=True)
    assert found == []
    assert steps[-1].checked_blocks == steps[-1].total_blocks == 6


def test_without_a_disk_there_is_nothing_to_verify(make_harness):
    harness = make_harness({"nvme.enabled": False})
    assert findings(harness, payloads=True, fix=True)[0] == []


@pytest.mark.parametrize("fix", [False, True])
def test_a_flipped_byte_is_found_in_payloads_only(life, fix):
    harness, space, engine, chain = life
    path, offset = place_of(harness, rows_of(harness, chain)[3])
    flip(path, offset + 4096 + 7)
    assert findings(harness, payloads=False, fix=fix)[0] == []
    found, _ = findings(harness, payloads=True, fix=fix)
    assert len(found) == 1
    assert bytes(chain[3]).hex()[:16] in found[0]
    blocks = 3 if fix else 6
    assert (
        harness.wait(engine.match([(space, chain)], want_lease=False)).boundary_tokens == 4 * blocks
    )
    if fix:
        harness.sleep(1)
        assert findings(harness, payloads=True, fix=False)[0] == []
        harness.crash()
        harness.start()
        assert harness.recovered.kept == 3


@pytest.mark.parametrize("offset", [0, 100, 200])
def test_a_damaged_header_is_found(life, offset):
    harness, _, _, chain = life
    path, start = place_of(harness, rows_of(harness, chain)[5])
    flip(path, start + offset)
    assert len(findings(harness, payloads=True, fix=False)[0]) == 1


def test_a_frame_of_another_block_is_found(life):
    harness, _, _, chain = life
    rows = rows_of(harness, chain)
    (path, one), (_, other) = place_of(harness, rows[4]), place_of(harness, rows[5])
    with path.open("r+b") as file:
        file.seek(other)
        frame = file.read(3 * 4096)
        file.seek(one)
        file.write(frame)
    found, _ = findings(harness, payloads=True, fix=True)
    assert len(found) == 1
    assert bytes(chain[4]).hex()[:16] in found[0]


def test_a_record_that_is_gone_is_found(life):
    harness, _, _, chain = life
    row = rows_of(harness, chain)[5]
    generation = int(harness.store.catalog.nvme_generation[row])
    harness.store.nvme.forget([(bytes(chain[5]), generation)]).result()
    assert len(findings(harness, payloads=False, fix=False)[0]) == 1


def test_a_stray_record_is_found_and_removed(life):
    harness, _, _, chain = life
    index = harness.store.nvme._ledger._index
    record = index.get(bytes(chain[0])).copy()
    index.submit([(b"s" * 32, record.tobytes())], []).result()
    assert "not in the catalog" in findings(harness, payloads=False, fix=True)[0][0]
    assert index.get(b"s" * 32) is None
    assert findings(harness, payloads=False, fix=False)[0] == []


def test_what_is_written_during_the_scan_is_no_stray(life):
    """Its record is newer than the view of the catalog: it must not be deleted."""
    harness, space, engine, _ = life
    new = harness.chain(space, tokens(6, seed=4))

    async def verify_while_storing():
        verifying = harness.loop.create_task(_all(harness, fix=True))
        await engine.store(space, new)
        durable = await engine.flush(space, new)
        return durable, await verifying

    durable, found = harness.wait(verify_while_storing())
    assert durable == [True] * 6
    assert found == []
    harness.crash()
    harness.start()
    assert harness.recovered.kept == 12


async def _all(harness, *, fix, payloads=True):
    found = []
    async for step in harness.service.scrubber.verify(payloads=payloads, fix=fix):
        found += step.findings
        await asyncio.sleep(0.003)
    return found


def test_what_is_deleted_during_the_check_is_no_finding(make_harness):
    slow = {"now": 0.001}
    harness = make_harness(job_seconds=lambda random: slow["now"])
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(6))
    on_nvme_only(harness, space, chain, engine)

    async def verify_while_deleting():
        slow["now"] = 1.0
        verifying = harness.loop.create_task(_all(harness, fix=True))
        await asyncio.sleep(0.1)
        slow["now"] = 0.001
        assert await harness.service.delete(space, bytes(chain[2])) == 4
        return await verifying

    assert harness.wait(verify_while_deleting()) == []
    assert harness.store.counters["dropped_blocks:checksum"] == 0


def test_dropping_two_damaged_blocks_condemns_no_innocent_row(life):
    """Between the two the first one's rows are freed and become other blocks' rows."""
    harness, space, engine, chain = life
    rows = rows_of(harness, chain)
    for block in (2, 4):
        path, offset = place_of(harness, rows[block])
        flip(path, offset + 5000)
    new = harness.chain(space, tokens(12, seed=8))

    async def verify_while_storing():
        verifying = harness.loop.create_task(_all(harness, fix=True))
        stored = []
        for at in range(12):
            stored += await engine.store(space, new, at, at + 1)
            await asyncio.sleep(0.01)
        await verifying
        return stored

    assert harness.wait(verify_while_storing()) == [STORED] * 12
    harness.sleep(1)
    assert harness.wait(engine.load([(space, new)])) == [12]
    assert harness.wait(engine.load([(space, chain)])) == [2]


# ------------------------------------------------------------------ offline


def offline(harness, **options):
    return [text for step in verify_offline(harness.config, **options) for text in step.findings]


def test_a_stopped_directory_is_verified(life):
    harness, _, _, chain = life
    path, offset = place_of(harness, rows_of(harness, chain)[3])
    harness.stop()
    assert offline(harness, payloads=True, fix=False) == []
    flip(path, offset + 4096)
    assert len(offline(harness, payloads=True, fix=True)) == 1
    assert offline(harness, payloads=True, fix=False) == []
    harness.start()
    assert harness.recovered.kept == 3


def contents(harness):
    """Every file below the data directory but those that only say who has it open."""
    paths = harness._directory.rglob("*")
    return {path: path.read_bytes() for path in paths if path.is_file() and "lock" not in path.name}


def test_a_look_at_a_stopped_directory_changes_nothing(life):
    """Not even what every start would drop, remove or count."""
    harness, _, _, chain = life
    generation = int(harness.store.catalog.nvme_generation[rows_of(harness, chain)[2]])
    harness.store.nvme.forget([(bytes(chain[2]), generation)]).result()
    index = harness.store.nvme._ledger._index
    record = index.get(bytes(chain[0])).copy()
    record["slot"] = 1 << 40
    index.submit([(b"s" * 32, record.tobytes())], []).result()
    harness.stop()
    (harness._directory / "segments" / "note").write_text("of somebody else")
    wrong = ["1 records that point to no slot of a segment"]
    wrong += ["3 records whose parent is not on NVMe"]
    before = contents(harness)
    for payloads in (False, True):
        assert offline(harness, payloads=payloads, fix=False) == wrong
        assert contents(harness) == before
    assert offline(harness, payloads=True, fix=True) == wrong
    assert offline(harness, payloads=True, fix=False) == []
    harness.start()
    assert harness.recovered.kept == 2


def test_a_damaged_index_is_named_and_built_again_only_to_fix(life):
    harness = life[0]
    harness.stop()
    (harness._directory / "index" / "data.mdb").write_bytes(b"no index")
    before = contents(harness)
    with pytest.raises(TierIO, match="--fix"):
        offline(harness, payloads=True, fix=False)
    assert contents(harness) == before
    (finding,) = offline(harness, payloads=True, fix=True)
    assert "built again" in finding
    assert offline(harness, payloads=True, fix=False) == []
    harness.start()
    assert harness.recovered.kept == 6


def test_a_directory_in_use_is_left_alone(life):
    """IDX-2."""
    harness = life[0]
    harness.stop()
    held = lock_data(harness.config)
    with pytest.raises(ConfigError, match="held by another process"):
        offline(harness, payloads=False, fix=False)
    held.close()
    assert offline(harness, payloads=False, fix=False) == []
