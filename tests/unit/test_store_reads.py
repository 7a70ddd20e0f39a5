"""Match, exists, clear counts, condemned rows and their reclaim; the whole store, one thread."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from store_kit import (
    LARGE,
    LAYOUT,
    PRESENT,
    REFUSED,
    STORED,
    counters,
    drop_from_host,
    dropped,
    held_slots,
    on_nvme_only,
    rows_of,
    tokens,
)

from kvstore.errors import InvalidRequest, InvariantViolated, LeaseTooLarge
from kvstore.fingerprint import KVIdentity, chain, namespace_of
from kvstore.laws import check_integrity
from kvstore.store import READY
from kvstore.types import NamespaceKind, Tier

HOST, NVME = 1 << Tier.HOST, 1 << Tier.NVME


def matched(harness, engine, *groups, prompt_tokens=0):
    """Boundary in tokens; the lease is released at once."""
    found = harness.wait(engine.match(groups, prompt_tokens, want_lease=False))
    return found.boundary_tokens


# ------------------------------------------------------------------ one group


def test_what_was_stored_is_matched_and_read(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored = harness.chain(space, tokens(5))
    assert harness.wait(engine.store(space, stored)) == [STORED] * 5
    longer = harness.chain(space, [*tokens(5), 9, 9, 9, 9])
    assert matched(harness, engine, (space, longer)) == 20
    assert harness.wait(engine.load([(space, longer)])) == [5]
    assert harness.wait(engine.read_directory(space, longer)) == 5


@pytest.mark.parametrize(("prompt_tokens", "boundary"), [(0, 20), (19, 16), (3, 0), (99, 20)])
def test_a_prompt_caps_the_match(harness, prompt_tokens, boundary):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored = harness.chain(space, tokens(5))
    harness.wait(engine.store(space, stored))
    assert matched(harness, engine, (space, stored), prompt_tokens=prompt_tokens) == boundary


def test_matches_end_where_the_tokens_part(harness):
    """KEY-11: cut at every offset of every block."""
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    known = tokens(5)
    harness.wait(engine.store(space, harness.chain(space, known)))
    for cut in range(20):
        other = [*known[:cut], 77, *known[cut + 1 :]]
        asked = harness.chain(space, other)
        assert matched(harness, engine, (space, asked)) == cut // 4 * 4
        assert harness.wait(engine.read_directory(space, asked)) == cut // 4


def test_a_match_runs_through_both_tiers(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored = harness.chain(space, tokens(6))
    on_nvme_only(harness, space, stored, engine)
    head = harness.chain(space, tokens(2))
    assert harness.wait(engine.load([(space, head)])) == [2]
    lease = harness.wait(engine.match([(space, stored)]))
    assert lease.groups[0].tiers == [Tier.HOST] * 2 + [Tier.NVME] * 4
    assert harness.wait(engine.exists(space, stored))[1].tolist() == [HOST | NVME] * 2 + [NVME] * 4
    assert harness.wait(engine.load([(space, stored)])) == [6]
    assert counters(harness, "hit_blocks:host", "hit_blocks:nvme") == [2 + 2, 2 + 4 + 4]


def test_names_that_are_no_chain_match_as_far_as_they_are_one(harness):
    """Repeated, skipped or exchanged names: a broken client gets less, and harms nobody."""
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored = harness.chain(space, tokens(4))
    on_nvme_only(harness, space, stored, engine)
    names = list(stored)
    for broken, blocks in (
        ([names[0], names[0], names[1]], 1),
        ([names[1], names[2]], 0),
        ([names[0], names[2], names[1]], 1),
        ([names[3], names[2], names[1], names[0]], 0),
    ):
        asked = harness.chain(space, tokens(len(broken)))
        asked._joined[:] = b"".join(broken)
        assert harness.wait(engine.load([(space, asked)])) == [blocks]


def test_flat_names_may_repeat(harness):
    space, engine = harness.declare("f", LAYOUT, kind=NamespaceKind.FLAT), harness.engine()
    stored = harness.chain(space, tokens(3))
    on_nvme_only(harness, space, stored, engine)
    asked = harness.chain(space, tokens(4))
    asked._joined[:] = stored[2] + stored[0] + stored[2] + stored[1]
    assert harness.wait(engine.load([(space, asked)])) == [4]


def test_a_match_without_groups_or_beyond_the_lease_is_refused(make_harness):
    harness = make_harness({"lease.blocks_max": 3})
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored = harness.chain(space, tokens(4))
    harness.wait(engine.store(space, stored))
    with pytest.raises(InvalidRequest, match="no KV group"):
        harness.wait(engine.match([]))
    with pytest.raises(LeaseTooLarge, match="blocks_max"):
        harness.wait(engine.match([(space, stored)]))
    assert not harness.store.catalog.leases.any()


# ------------------------------------------------------------------ several groups


def test_groups_share_the_largest_boundary_of_all(harness):
    """Full attention with blocks of 4 tokens, another full group with blocks of 8."""
    one, engine = harness.declare("full 4", LAYOUT), harness.engine()
    two = harness.declare("full 8", replace(LARGE, block_tokens=8))
    a, b = harness.chain(one, tokens(6)), harness.chain(two, tokens(6))
    harness.wait(engine.store(one, a, 0, 5))
    harness.wait(engine.store(two, b))
    assert matched(harness, engine, (one, a), (two, b)) == 16
    assert matched(harness, engine, (one, a)) == 20
    assert matched(harness, engine, (two, b)) == 24
    assert harness.wait(engine.load([(one, a), (two, b)])) == [4, 2]


def test_a_sliding_group_needs_its_window_only(harness):
    full, engine = harness.declare("full", LAYOUT), harness.engine()
    sliding = harness.declare("sliding", LAYOUT, window_tokens=8)
    a, b = harness.chain(full, tokens(6)), harness.chain(sliding, tokens(6))
    harness.wait(engine.store(full, a))
    harness.wait(engine.store(sliding, b, 3, 6))
    found = harness.wait(engine.match([(full, a), (sliding, b)]))
    assert found.boundary_tokens == 24
    assert [(group.first, group.blocks) for group in found.groups] == [(0, 6), (4, 6)]
    leased = harness.store.catalog.leases[rows_of(harness, b)[3:]]
    assert leased.tolist() == [0, 1, 1], "the window is leased, nothing before it"
    names = ("queries", "queried_blocks", "hit_tokens:host", "missed_tokens:absent")
    assert counters(harness, *names) == [1, 6 + 2, 24, 0], "each token once, none missed"
    drop = harness.chain(sliding, tokens(6))
    harness.wait(engine.release(found))
    harness.call(harness.store.forget, rows_of(harness, drop)[5:], "deleted", 0.0)
    assert matched(harness, engine, (full, a), (sliding, b)) == 20


def test_a_sliding_group_is_promoted_as_well(harness):
    full, engine = harness.declare("full", LAYOUT), harness.engine()
    sliding = harness.declare("sliding", LARGE, window_tokens=9)
    a, b = harness.chain(full, tokens(6)), harness.chain(sliding, tokens(6))
    for space, names in ((full, a), (sliding, b)):
        on_nvme_only(harness, space, names, engine)
    assert harness.wait(engine.load([(full, a), (sliding, b)], layer_order=True)) == [6, 3]
    assert harness.wait(engine.load([(sliding, b), (full, a)])) == [3, 6]


def test_a_group_that_has_nothing_leaves_nothing_to_lease(harness):
    one, two = harness.declare("a", LAYOUT), harness.declare("b", LAYOUT)
    engine = harness.engine()
    a = harness.chain(one, tokens(2))
    harness.wait(engine.store(one, a))
    found = harness.wait(engine.match([(one, a), (two, harness.chain(two, tokens(2)))]))
    assert (found.boundary_tokens, found.lease) == (0, 0)


# ------------------------------------------------------------------ identity

IDENTITY = KVIdentity("m", "A", "bf16", "NHD", 4, 2, 8, 64)
CHANGES = {
    "model": "n",
    "weights_digest": "B",
    "kv_dtype": "fp8",
    "layout": "HND",
    "layers": 3,
    "kv_heads_per_rank": 4,
    "head_size": 32,
    "quantization": "int8",
    "adapter_digest": "x",
    "positions": "yarn",
    "attention": "eager",
    "tp_size": 2,
    "tp_rank_first": 1,
    "pp_stage": 1,
    "tenant_salt": "t",
    "extra": (("codec", "1"),),
}


def of_identity(harness, identity):
    name = namespace_of(identity)
    space = harness.wait(harness.service.declare(name, "chained", LAYOUT, 0, "x"))
    return space, chain(name, tokens(8), 4)


@pytest.mark.parametrize("tier", ["host", "nvme", "nvme after a restart"])
def test_one_changed_field_reaches_nothing(harness, tier):
    """KEY-1, KEY-2, KEY-3, KEY-8, KEY-9, in every tier."""
    (space, names), engine = of_identity(harness, IDENTITY), harness.engine()
    harness.wait(engine.store(space, names))
    if tier != "host":
        on_nvme_only(harness, space, names, engine)
    if "restart" in tier:
        harness.crash()
        harness.start()
        engine = harness.engine()
    for field, value in CHANGES.items():
        if len(harness.store.namespaces) > 14:
            break
        other, other_names = of_identity(harness, replace(IDENTITY, **{field: value}))
        assert matched(harness, engine, (other, other_names)) == 0, field
        # Not even with the right names under the wrong namespace, or the other way round.
        assert matched(harness, engine, (other, names)) == 0, field
        assert matched(harness, engine, (space, other_names)) == 0, field
    space, names = of_identity(harness, IDENTITY)
    assert matched(harness, engine, (space, names)) == 32
    assert harness.wait(engine.load([(space, names)])) == [8]


def test_a_name_is_compared_whole(harness):
    """KEY-10: equal in all bytes but one, in the catalog as in the directory."""
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored = harness.chain(space, tokens(1))
    harness.wait(engine.store(space, stored))
    for byte in range(32):
        asked = harness.chain(space, tokens(1))
        name = bytearray(stored[0])
        name[byte] ^= 1
        asked._joined[:32] = name
        assert matched(harness, engine, (space, asked)) == 0
        assert harness.wait(engine.read_directory(space, asked)) == 0


# ------------------------------------------------------------------ exists, uses


def test_exists_takes_no_lease_and_counts_no_use(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored = harness.chain(space, tokens(3))
    harness.wait(engine.store(space, stored))
    harness.settle()
    before = harness.store.counters.snapshot()
    prefix, tiers = harness.wait(engine.exists(space, harness.chain(space, tokens(4))))
    assert (prefix, tiers.tolist()) == (3, [HOST | NVME] * 3 + [0])
    assert harness.store.counters.snapshot() == before
    rows = rows_of(harness, stored)
    assert harness.store.catalog.uses[rows].tolist() == [0] * 3
    assert not harness.store.catalog.leases.any()


def test_a_match_is_a_use(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored = harness.chain(space, tokens(3))
    harness.wait(engine.store(space, stored))
    harness.wait(engine.load([(space, harness.chain(space, tokens(2)))]))
    harness.sleep(0.001)
    assert harness.store.catalog.uses[rows_of(harness, stored)].tolist() == [1, 1, 0]


# ------------------------------------------------------------------ leases


def test_a_lease_keeps_blocks_and_its_end_frees_them(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored = harness.chain(space, tokens(3))
    harness.wait(engine.store(space, stored))
    lease = harness.wait(engine.match([(space, stored)]))
    drop_from_host(harness, stored)
    assert harness.wait(engine.read_directory(space, stored)) == 3
    assert harness.wait(engine.release(lease)) == 1
    assert harness.wait(engine.release(lease)) == 0
    harness.settle()
    drop_from_host(harness, stored)
    assert harness.wait(engine.read_directory(space, stored)) == 0


def test_a_client_that_vanishes_protects_one_lease_time_longer(make_harness):
    """HOST-9, HOST-20."""
    harness = make_harness({"lease.read_seconds": 5.0})
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored = harness.chain(space, tokens(3))
    harness.wait(engine.store(space, stored))
    harness.wait(engine.match([(space, stored)]))
    engine.leave()
    rows = rows_of(harness, stored)
    harness.sleep(4.9)
    assert not harness.store.is_idle(rows).any()
    harness.sleep(0.2)
    assert harness.store.is_idle(rows).all()


# ------------------------------------------------------------------ clear


def test_nothing_stored_before_a_clear_matches_again(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    other = harness.declare("b", LAYOUT)
    stored, spared = harness.chain(space, tokens(4)), harness.chain(other, tokens(4))
    on_nvme_only(harness, space, harness.chain(space, tokens(2)), engine)
    harness.wait(engine.store(space, stored))
    harness.wait(engine.store(other, spared))
    harness.wait(harness.service.clear(space))
    for asked, blocks in ((stored, 0), (spared, 4)):
        where = space if asked is stored else other
        assert matched(harness, engine, (where, asked)) == blocks * 4
        assert harness.wait(engine.read_directory(where, asked)) == blocks
        assert harness.wait(engine.exists(where, asked))[0] == blocks
    harness.sleep(1)
    assert held_slots(harness) == 4
    assert rows_of(harness, stored).tolist() == [-1] * 4
    assert harness.wait(engine.store(space, stored)) == [STORED] * 4
    assert matched(harness, engine, (space, stored)) == 16


def test_a_clear_outlives_a_kill(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored = harness.chain(space, tokens(4))
    on_nvme_only(harness, space, stored, engine)
    harness.wait(harness.service.clear(space))
    harness.crash()
    harness.start()
    assert (harness.recovered.cleared, harness.recovered.kept) == (4, 0)
    engine = harness.engine()
    space = harness.declare("a", LAYOUT)
    assert space.clear_count == 1
    assert matched(harness, engine, (space, stored)) == 0
    assert harness.wait(engine.store(space, stored)) == [STORED] * 4
    assert harness.wait(engine.read_directory(space, stored)) == 4


def test_leased_blocks_of_a_cleared_namespace_go_with_the_lease(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored = harness.chain(space, tokens(4))
    harness.wait(engine.store(space, stored))
    harness.settle()
    lease = harness.wait(engine.match([(space, harness.chain(space, tokens(2)))]))
    harness.wait(harness.service.clear(space))
    assert matched(harness, engine, (space, stored)) == 0
    assert harness.wait(engine.store(space, stored)) == [REFUSED] * 4
    harness.sleep(1)
    assert held_slots(harness) == 2
    harness.wait(engine.release(lease))
    harness.sleep(1)
    assert held_slots(harness) == 0
    assert len(harness.store.catalog) == 0
    assert dropped(harness) == {"cleared": 4 + 4}
    assert harness.wait(engine.store(space, stored)) == [STORED] * 4


def test_clears_at_once_count_once_each_or_together(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored = harness.chain(space, tokens(2))
    harness.wait(engine.store(space, stored))

    async def both():
        first = harness.loop.create_task(harness.service.clear(space))
        second = harness.loop.create_task(harness.service.clear(space))
        await first
        await second

    harness.wait(both())
    assert space.clear_count in (1, 2)
    assert matched(harness, engine, (space, stored)) == 0
    harness.crash()
    harness.start()
    assert harness.declare("a", LAYOUT).clear_count == space.clear_count


# ------------------------------------------------------------------ condemned rows


def test_a_deleted_block_takes_what_follows_it_along(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored = harness.chain(space, tokens(5))
    branch = harness.chain(space, [*tokens(2), *tokens(2, seed=7)])
    harness.wait(engine.store(space, stored))
    harness.wait(engine.store(space, branch))
    harness.settle()
    assert harness.wait(harness.service.delete(space, bytes(stored[2]))) == 3
    harness.sleep(1)
    assert dropped(harness) == {"deleted": 3 + 3}, "each copy once"
    assert matched(harness, engine, (space, stored)) == 8
    assert matched(harness, engine, (space, branch)) == 16
    harness.crash()
    harness.start()
    engine, space = harness.engine(), harness.declare("a", LAYOUT)
    assert matched(harness, engine, (space, stored)) == 8


def test_deleting_what_is_not_there_deletes_nothing(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    other = harness.declare("b", LAYOUT)
    stored = harness.chain(space, tokens(2))
    harness.wait(engine.store(space, stored))
    assert harness.wait(harness.service.delete(space, b"x" * 32)) == 0
    assert harness.wait(harness.service.delete(other, bytes(stored[0]))) == 0
    assert harness.wait(harness.service.delete(space, bytes(stored[0]))) == 2
    assert harness.wait(harness.service.delete(space, bytes(stored[0]))) == 0


def test_a_flat_block_is_deleted_alone(harness):
    space, engine = harness.declare("f", LAYOUT, kind=NamespaceKind.FLAT), harness.engine()
    stored = harness.chain(space, tokens(3))
    harness.wait(engine.store(space, stored))
    assert harness.wait(harness.service.delete(space, bytes(stored[0]))) == 1
    assert harness.wait(engine.exists(space, stored))[1].astype(bool).tolist() == [0, 1, 1]


def test_a_condemned_block_may_be_stored_anew_once_it_is_gone(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored = harness.chain(space, tokens(3))
    harness.wait(engine.store(space, stored))
    harness.settle()
    lease = harness.wait(engine.match([(space, stored)]))
    harness.wait(harness.service.delete(space, bytes(stored[0])))
    assert set(harness.wait(engine.store(space, stored))) == {REFUSED}
    harness.wait(engine.release(lease))
    harness.sleep(1)
    assert harness.wait(engine.store(space, stored)) == [STORED] * 3


def test_a_leased_condemned_block_yields_nothing_when_loaded(harness):
    """Its copy below is not brought up any more; the client is told so."""
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored = harness.chain(space, tokens(3))
    on_nvme_only(harness, space, stored, engine)
    lease = harness.wait(engine.match([(space, stored)]))
    harness.wait(harness.service.delete(space, bytes(stored[1])))
    harness.wait(engine.bring_up(lease))
    assert lease.groups[0].whole == 1
    assert harness.wait(engine.read_directory(space, stored)) == 1
    harness.wait(engine.release(lease))
    harness.sleep(1)
    assert len(harness.store.catalog) == 1


def test_reclaim_goes_in_slices_and_waits_for_what_is_held(make_harness):
    harness = make_harness(tasks=False)
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chains = [harness.chain(space, tokens(3, seed=seed)) for seed in range(30)]
    for stored in chains:
        harness.wait(engine.store(space, stored))
    lease = harness.wait(engine.match([(space, chains[4])]))
    harness.wait(harness.service.clear(space))
    store = harness.store
    held = []
    for _ in range(20):
        harness.call(store.reclaim_slice, 0.0)
        held.append(held_slots(harness))
    assert held == sorted(held, reverse=True)
    assert held[-1] == 3
    harness.wait(engine.release(lease))
    while harness.call(store.reclaim_slice, 0.0):
        pass
    harness.call(store.reclaim_slice, 0.0)
    assert held_slots(harness) == 0


# ------------------------------------------------------------------ the laws are looked at


def test_broken_laws_are_found(make_harness):
    """Each of these is our bug; the integrity check names it."""
    harness = make_harness(tasks=False)
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored = harness.chain(space, tokens(4))
    harness.wait(engine.store(space, stored))
    store, rows = harness.store, rows_of(harness, stored)
    harness.check()

    def refused(law):
        return pytest.raises(InvariantViolated, match=law)

    store.catalog.pins[rows[0]] = -1
    with refused("negative"):
        check_integrity(store)
    store.catalog.pins[rows[0]] = 0
    store.catalog.leases[rows[0]] += 1
    with refused("I4"):
        check_integrity(store)
    store.catalog.leases[rows[0]] -= 1
    slot = store.catalog.host_slot[rows[1]]
    store.host_tier.directory.retract(np.array([slot]))
    with refused("READY"):
        check_integrity(store)
    assert store.catalog.host_state[rows[1]] == READY
    store.host_tier.directory.publish(
        np.array([slot]),
        store.catalog.fingerprints[rows[1:2]],
        offsets=store.host_tier.pool.offsets_of([slot]),
        lengths=store.catalog.length[rows[1:2]].astype(np.int64),
        namespace=space.index,
        clear_count=0,
    )
    harness.check()
    (leaked,) = store.host_tier.take(LAYOUT.slot_bytes, 1)
    with refused("books"):
        check_integrity(store)
    store.host_tier.free([leaked])
    assert harness.wait(engine.store(space, stored)) == [PRESENT] * 4
