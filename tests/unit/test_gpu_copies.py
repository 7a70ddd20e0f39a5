"""Which blocks have a copy in the GPU tier, and what becomes of it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from store_kit import LAYOUT, counters, drop_from_host, rows_of, tokens

from kvstore.assembly import open_gpu
from kvstore.config import Config
from kvstore.config_load import load
from kvstore.device import open_device
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.rpc import control_pb2 as pb
from kvstore.testing.harness import Harness

SLAB = 64 << 10
SETTINGS = {"gpu.bytes_max": 2 * SLAB, "gpu.slab_bytes": SLAB, "gpu.slot_bytes_min": 8192}


class World:
    """Chains of four blocks in a harness; 16 slots in the GPU tier."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.space, self.engine = harness.declare("a", LAYOUT), harness.engine()
        self.copies = harness.service.gpu.copies

    def stored(self, seed: int) -> Any:
        chain = self.harness.chain(self.space, tokens(4, seed=seed))
        self.harness.wait(self.engine.store(self.space, chain))
        return chain

    def used(self, *chains: Any) -> None:
        for chain in chains:
            assert self.harness.wait(self.engine.load([(self.space, chain)])) == [4]
            self.harness.sleep(0.3)

    def up(self, chain: Any) -> int:
        return int(np.count_nonzero(self.copies.has(rows_of(self.harness, chain))))


@pytest.fixture
def world(make_harness: Any) -> World:
    return World(make_harness(SETTINGS))


def test_blocks_come_up_once_they_are_used_and_say_so(world: World) -> None:
    chain = world.stored(1)
    world.harness.sleep(0.3)
    assert world.up(chain) == 0
    world.used(chain)
    assert world.up(chain) == 4
    _, mask = world.harness.wait(world.engine.exists(world.space, chain))
    assert (mask & 1).all()


def test_a_full_tier_keeps_what_the_policy_finds_worth_most(world: World) -> None:
    chains = [world.stored(seed) for seed in range(6)]
    world.used(*chains)
    assert [world.up(chain) for chain in chains] == [0, 0, 4, 4, 4, 4]
    assert counters(world.harness, "gpu_blocks:came", "gpu_blocks:left") == [24, 8]


def test_what_the_host_tier_drops_leaves_here_first(world: World) -> None:
    first, second = world.stored(1), world.stored(2)
    world.used(first, second)
    drop_from_host(world.harness, first)
    assert world.up(second) == 4
    assert len(world.copies) == 4
    world.harness.check()


def test_a_block_that_was_damaged_in_host_memory_is_found_out(world: World) -> None:
    chain = world.stored(1)
    row = rows_of(world.harness, chain)[2]
    slot = int(world.harness.store.catalog.host_slot[row])
    world.harness.store.host_tier.view(slot, 1)[:] ^= 1
    lease = world.harness.wait(world.engine.match([(world.space, chain)]))
    world.harness.wait(world.engine.release(lease))
    world.harness.sleep(0.3)
    assert counters(world.harness, "gpu_blocks:came", "dropped_blocks:checksum") == [2, 2]


def test_a_device_that_fails_takes_nothing_with_it(world: World) -> None:
    first, second = world.stored(1), world.stored(2)
    world.used(first)
    world.harness.device._fault("it fell off the bus")
    world.used(second, first)
    assert len(world.copies) == 0
    assert "it fell off the bus" in " ".join(world.harness.service.health())
    assert not world.harness.store.catalog.pins[: world.harness.store.catalog.rows_end].any()


def test_a_tier_that_cannot_be_opened_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert open_gpu(Config()) is None
    config = load(None, {}, {"gpu.bytes_max": "1GiB"})
    with pytest.raises(ConfigError, match=r"cupy does not import.*gpu.bytes_max = 0"):
        open_gpu(config)
    with pytest.raises(ConfigError, match="install cupy-cuda1"):
        open_device(0)
    with pytest.raises(ConfigError, match="not even one slab"):
        load(None, {}, {"gpu.bytes_max": "1MiB"})


def test_refused_memory_is_no_room(world: World) -> None:
    world.harness.device._memory.free_bytes = SLAB - 1
    world.used(world.stored(1))
    assert len(world.copies) == 0
    assert "no memory" in " ".join(world.harness.service.remarks())
    assert world.harness.service.health() == []
    assert not world.copies.failure


def test_without_the_tier_a_resize_says_how_to_turn_it_on(harness: Harness) -> None:
    with pytest.raises(InvalidRequest, match=r"set gpu\.bytes_max"):
        harness.wait(harness.engine().call("Resize", pb.ResizeRequest(gpu_bytes=1)))
