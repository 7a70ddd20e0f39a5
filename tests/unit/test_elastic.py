"""The host tier gives memory back and takes it again while it serves; leased blocks stay."""

from __future__ import annotations

import os
from concurrent.futures import Executor, Future
from pathlib import Path

import numpy as np
import pytest
from store_kit import LAYOUT, on_nvme_only, tokens

from kvstore import elastic as elastic_module
from kvstore.arena import Arena
from kvstore.elastic import GROW_AFTER_SECONDS, Elastic, Pressure
from kvstore.rpc import control_pb2 as pb


@pytest.fixture
def full(make_harness):
    """128 blocks in 16 slabs, all durable."""
    harness = make_harness({"host.staging_slots_min": 1, "host.staging_share": 0.0})
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chains = [harness.chain(space, tokens(10, seed=seed)) for seed in range(12)]
    for chain in chains:
        harness.wait(engine.store(space, chain))
    harness.settle()
    return harness, space, engine, chains


def resize(harness, engine, count_bytes):
    return harness.wait(engine.call("Resize", pb.ResizeRequest(host_bytes=count_bytes)))


def filled(harness):
    return harness.service.elastic.filled_bytes


def test_it_shrinks_to_what_is_asked_and_still_serves(full):
    harness, space, engine, chains = full
    pool = harness.store.host_tier.pool
    target = resize(harness, engine, 4 * pool.slab_bytes).host_bytes
    assert target == 4 * pool.slab_bytes
    harness.sleep(2.0)
    assert filled(harness) == target
    harness.check()
    loaded = [harness.wait(engine.load([(space, chain)])) for chain in chains]
    assert loaded == [[10]] * len(chains)
    assert pool.statistics().slabs_retired == pool.slabs - 4


def test_what_it_gave_back_it_takes_again(full):
    harness, space, engine, chains = full
    everything = harness.store.host_tier.pool.slabs * harness.store.host_tier.pool.slab_bytes
    resize(harness, engine, 1)
    harness.sleep(2.0)
    assert filled(harness) == harness.store.host_tier.pool.slab_bytes
    assert resize(harness, engine, 0).host_bytes == everything
    harness.sleep(1.0)
    assert filled(harness) == everything
    for chain in chains:
        on_nvme_only(harness, space, chain, engine)
        assert harness.wait(engine.load([(space, chain)])) == [10]


def test_leased_blocks_stay_until_their_lease_ends(full):
    harness, space, engine, chains = full
    lease = harness.wait(engine.match([(space, chains[-1])]))
    harness.wait(engine.bring_up(lease))
    resize(harness, engine, 1)
    harness.sleep(1.0)
    assert harness.wait(engine.read_directory(space, chains[-1])) == 10
    held = filled(harness)
    assert held > harness.store.host_tier.pool.slab_bytes
    harness.wait(engine.release(lease))
    harness.sleep(1.0)
    assert filled(harness) == harness.store.host_tier.pool.slab_bytes < held


def test_nothing_goes_while_a_device_has_the_arena_pinned(full):
    harness, _, engine, _ = full
    everything = filled(harness)
    engine.session.pins_arena = True
    resize(harness, engine, 1)
    harness.sleep(1.0)
    assert filled(harness) == everything
    engine.die()
    harness.sleep(2.0)
    assert filled(harness) == harness.store.host_tier.pool.slab_bytes


def test_pressure_shrinks_it_and_calm_lets_it_grow(full, tmp_path):
    harness, *_ = full
    told = tmp_path / "memory"
    room = harness.service.writes._room
    elastic = Elastic(harness.store, room, Pressure(told, 10.0), bool, harness._workers[3])
    before = elastic.filled_bytes

    def after(now: float, percent: str) -> int:
        told.write_text(f"some avg10={percent} avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00\n")
        for _ in range(20):
            harness.call(elastic.turn, now)
            harness.sleep(0.01)
        return elastic.filled_bytes

    first = after(100.0, "25.00")
    assert first < before
    second = after(102.0, "25.00")
    assert second < first
    assert after(104.0, "0.00") == second
    assert second < after(104.0 + GROW_AFTER_SECONDS, "0.00") <= before
    told.unlink()
    assert Pressure(told, 10.0).percent() == 0.0


def test_pages_go_in_pieces_and_come_on_a_worker(full, monkeypatch):
    """64 MiB of them take the kernel 10 to 40 ms: not on the loop, and never under a pin."""
    harness, *_ = full
    monkeypatch.setattr(elastic_module, "DISCARD_BYTES", 64 << 10)
    jobs, gone, pins = [], [], []

    class Later(Executor):
        def submit(self, work, /, *arguments):
            jobs.append((Future(), work, arguments))
            return jobs[-1][0]

    monkeypatch.setattr(harness.arena, "discard", lambda *piece: gone.append(piece))
    room, slab = harness.service.writes._room, harness.store.host_tier.pool.slab_bytes
    calm = Pressure(Path("/nowhere"), 0.0)
    elastic = Elastic(harness.store, room, calm, lambda: bool(pins), Later())
    before, now = elastic.filled_bytes, harness.service.now()
    elastic.resize(before - slab)
    while elastic.filled_bytes == before:
        harness.call(elastic.turn, now)
    pins.append("a device")
    harness.call(elastic.turn, now)
    assert [length for _, length in gone] == [64 << 10], "the rest stays while it is pinned"
    pins.clear()
    harness.call(elastic.turn, now)
    harness.call(elastic.turn, now)
    assert sum(length for _, length in gone) == slab
    elastic.resize(before)
    for _ in range(3):
        harness.call(elastic.turn, now)
    ((future, populate, place),) = jobs
    assert elastic.filled_bytes == before - slab, "it does not serve before it has pages"
    future.set_result(populate(*place))
    harness.call(elastic.turn, now)
    assert elastic.filled_bytes == before


def test_memory_that_does_not_come_back_is_not_served(full, monkeypatch):
    harness, _, engine, _ = full
    slab = harness.store.host_tier.pool.slab_bytes
    everything = filled(harness)
    resize(harness, engine, everything - slab)
    harness.sleep(1.0)
    monkeypatch.setattr(harness.arena, "populate", lambda offset, length: False)
    resize(harness, engine, 0)
    harness.sleep(1.0)
    assert filled(harness) == everything - slab
    assert harness.service.elastic.target_bytes == everything - slab


def test_memory_goes_back_to_the_system_and_comes_again(tmp_path):
    base = "/dev/shm" if os.path.isdir("/dev/shm") else str(tmp_path)
    arena = Arena.create(
        Path(base) / f"kvstore-elastic-{os.getpid()}",
        bytes_total=8 << 20,
        region_bytes=4 << 20,
        header_bytes=4096,
    )
    try:
        [path] = [p for p in arena.directory.iterdir() if p.name == "region-0001"]
        view = arena.view(4 << 20, 4 << 20)
        view[:] = 7
        used = path.stat().st_blocks
        assert arena.discard(6 << 20, 2 << 20)
        assert path.stat().st_blocks <= used - (1 << 20) // 512
        assert arena.populate(6 << 20, 2 << 20)
        assert path.stat().st_blocks == used
        assert (view[: 2 << 20] == 7).all()
        assert not np.any(view[2 << 20 :])
    finally:
        arena.close()
