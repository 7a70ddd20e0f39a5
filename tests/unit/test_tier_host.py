"""The host tier: slots, arena and directory move together, generation first."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from kvstore.arena import Arena, ClientLock
from kvstore.directory import DirectoryReader, DirectoryWriter, header_bytes
from kvstore.errors import InvariantViolated
from kvstore.slab import SlabPool, SlotState
from kvstore.testing.conformance import TierConformance
from kvstore.tier.host import HostTier

MIB = 1 << 20
SLAB = 1 * MIB
REGION = 4 * MIB
SLOT = 64 << 10
NAMESPACES = 4


@pytest.fixture
def directory():
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path / "arena"
    shutil.rmtree(path, ignore_errors=True)


def open_host(directory: Path, regions: int = 2) -> HostTier:
    pool = SlabPool(regions * REGION // SLAB, SLAB, 16 << 10, slabs_per_region=REGION // SLAB)
    arena = Arena.create(
        directory,
        bytes_total=regions * REGION,
        region_bytes=REGION,
        header_bytes=header_bytes(pool.slots_max, NAMESPACES),
    )
    writer = DirectoryWriter(
        arena.header.array, slots=pool.slots_max, namespaces_max=NAMESPACES, boot_id=77
    )
    for namespace in range(NAMESPACES):
        writer.set_clear_count(namespace, 0)
    return HostTier(pool, arena, writer)


@pytest.fixture
def host(directory):
    found = open_host(directory)
    yield found
    found.check_integrity()
    found.close()


@pytest.fixture
def reader(host):
    return DirectoryReader(host.arena.header.array)


def names(*seeds: int) -> np.ndarray:
    return np.stack([np.random.default_rng(seed).integers(0, 256, 32, np.uint8) for seed in seeds])


def publish(host: HostTier, slots: list[int], *seeds: int) -> np.ndarray:
    numbers = np.array(slots, np.int64)
    return host.publish(
        numbers,
        names(*seeds),
        namespace=1,
        clear_count=0,
        lengths=np.full(len(slots), 1000, np.int64),
    )


class HostHarness:
    def __init__(self, tier: HostTier) -> None:
        self.tier = tier

    def write(self, slot, payload):
        self.tier.view(slot, len(payload))[:] = payload
        self.tier.publish(
            np.array([slot]),
            names(slot),
            namespace=0,
            clear_count=0,
            lengths=np.array([len(payload)]),
        )

    def read(self, slot, length):
        return self.tier.view(slot, length).copy()

    def damage(self, slot):
        self.tier.view(slot, 1)[:] ^= 1


class TestConformance(TierConformance):
    @pytest.fixture
    def harness(self, host):
        return HostHarness(host)


def test_published_blocks_are_found_where_they_lie(host, reader):
    slots = host.take(SLOT, 3)
    for slot in slots:
        host.view(slot, 1000)[:] = slot
    generations = publish(host, slots, 1, 2, 3)
    found = reader.lookup(1, names(1, 2, 3))
    assert found.count == 3
    assert found.slots.tolist() == slots
    assert found.generations.tolist() == generations.tolist()
    for slot, offset in zip(slots, found.offsets.tolist(), strict=True):
        region, start = divmod(offset, REGION)
        assert (host.arena.regions[region].array[start : start + 1000] == slot).all()


def test_a_filling_slot_is_not_found(host, reader):
    host.take(SLOT, 3)
    assert reader.lookup(1, names(1, 2, 3)).count == 0


def test_a_retracted_slot_is_gone_for_readers_and_still_held(host, reader):
    slots = host.take(SLOT, 2)
    generations = publish(host, slots, 1, 2)
    host.retract(slots[:1])
    assert reader.lookup(1, names(1)).count == 0
    assert reader.lookup(1, names(2)).count == 1
    assert not reader.still_valid(77, np.array(slots), generations)
    assert host.pool.states_of(slots).tolist() == [SlotState.READY] * 2
    host.free(slots)


def test_freeing_voids_what_readers_hold_before_the_slot_is_free(host, reader, monkeypatch):
    slots = host.take(SLOT, 1)
    generations = publish(host, slots, 1)
    seen = []
    free = host.pool.free
    monkeypatch.setattr(
        host.pool,
        "free",
        lambda freed: (
            seen.append(reader.still_valid(77, np.array(slots), generations)),
            free(freed),
        ),
    )
    host.free(slots)
    assert seen == [False]
    assert host.take(SLOT, 1) == slots
    host.view(slots[0], 10)[:] = 9
    assert reader.lookup(1, names(1)).count == 0


def test_a_refused_free_changes_nothing(host, reader):
    slots = host.take(SLOT, 2)
    publish(host, slots, 1, 2)
    host.free(slots[:1])
    with pytest.raises(InvariantViolated):
        host.free(slots[:1])
    assert reader.lookup(1, names(2)).count == 1


def test_quarantined_slots_stay_out_of_use_until_freed(host):
    size_of_all = host.take(SLOT, 10_000)
    host.quarantine(size_of_all[:2])
    assert host.pool.states_of(size_of_all[:2]).tolist() == [SlotState.QUARANTINED] * 2
    assert host.take(SLOT, 1) == []
    host.free(size_of_all[:2])
    assert sorted(host.take(SLOT, 5)) == sorted(size_of_all[:2])


def test_slots_that_clients_of_the_last_daemon_may_write_wait(directory):
    first = open_host(directory)
    client = ClientLock.create(directory)
    first.arena.acknowledge_client(client.name)
    first.arena.close(unlink=False)
    second = open_host(directory)
    assert second.take(SLOT, 1) == []
    assert second.room(SLOT) == 0
    assert "wait for clients" in second.health()[0]
    second.recheck()
    assert second.take(SLOT, 1) == []
    slab = second._quarantined.pop()
    assert second.health() == [], "some slots can be had"
    assert "wait for clients" in second.remarks()[0]
    second._quarantined.append(slab)
    client.close()
    second.recheck()
    assert second.health() == []
    assert len(second.take(SLOT, 10_000)) == 2 * REGION // SLOT
    second.recheck()
    second.check_integrity()
    second.close()


def test_closing_voids_what_readers_hold(host, reader):
    slots = host.take(SLOT, 1)
    generations = publish(host, slots, 1)
    assert reader.still_valid(77, np.array(slots), generations)
    view = host.view(slots[0], 10)
    host.close()
    assert not reader.still_valid(77, np.array(slots), generations)
    assert len(view) == 10
    assert view.sum() >= 0


def test_generations_are_even_while_ready(host):
    slots = np.array(host.take(SLOT, 2))
    assert (host.generations(slots) % 2 == 1).all()
    publish(host, slots.tolist(), 1, 2)
    assert (host.generations(slots) % 2 == 0).all()
