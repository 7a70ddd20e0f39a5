"""Pins with their budgets and ends, listings page by page, loads that do not stay."""

from __future__ import annotations

import numpy as np
import pytest
from store_kit import LAYOUT, counters, drop_from_host, on_nvme_only, rows_of, tokens

from kvstore import pins
from kvstore.errors import InvalidRequest
from kvstore.rpc import control_pb2 as pb
from kvstore.store import READY
from kvstore.types import FINGERPRINT_BYTES, Tier

BLOCK = LAYOUT.block_bytes
HOST, NVME = 1 << Tier.HOST, 1 << Tier.NVME


def pin(harness, engine, space, chain, seconds=60.0, *, hard=True, tenant="t"):
    request = pb.PinRequest(
        client=engine.client,
        namespace=space.id,
        fingerprints=chain.joined,
        seconds=seconds,
        hard=hard,
        tenant=tenant,
    )
    reply = harness.wait(engine.call("Pin", request))
    return reply.pinned, reply.short_reason


def unpin(harness, engine, space, chain, tenant="t"):
    request = pb.UnpinRequest(
        client=engine.client, namespace=space.id, fingerprints=chain.joined, tenant=tenant
    )
    return harness.wait(engine.call("Unpin", request)).unpinned


def pinned(harness):
    return harness.service.pins.statistics()


def stored(harness, engine, space, blocks, seed=0):
    chain = harness.chain(space, tokens(blocks, seed=seed))
    harness.wait(engine.store(space, chain))
    return chain


def evict_all(harness, engine, space, chain):
    """Everything of `chain` that may leave the host tier leaves; blocks that stayed."""
    assert all(harness.wait(engine.flush(space, chain)))  # what is being written is held too
    drop_from_host(harness, chain)
    rows = rows_of(harness, chain)
    rows = rows[rows >= 0]
    return int(np.count_nonzero(harness.store.catalog.host_state[rows] == READY))


def listed(harness, engine, space, page=0):
    names, tiers, cursor, calls = b"", b"", 0, 0
    while cursor or not calls:
        request = pb.ListRequest(namespace=space.id, cursor=cursor, blocks_max=page)
        reply = harness.wait(engine.call("List", request))
        assert len(reply.fingerprints) == FINGERPRINT_BYTES * len(reply.tiers)
        assert not page or len(reply.tiers) <= page
        names, tiers, cursor, calls = (
            names + reply.fingerprints,
            tiers + reply.tiers,
            reply.cursor,
            calls + 1,
        )
    found = [names[at : at + 32] for at in range(0, len(names), 32)]
    return dict(zip(found, tiers, strict=True)), calls


# ------------------------------------------------------------------ pins


def test_a_hard_pin_stays_until_its_end(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = stored(harness, engine, space, 3)
    assert pin(harness, engine, space, chain, seconds=5.0) == (3, "")
    assert evict_all(harness, engine, space, chain) == 3
    harness.sleep(6.0)
    assert pinned(harness)["blocks"] == 0
    assert evict_all(harness, engine, space, chain) == 0


def test_unpinned_by_its_tenant_only(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = stored(harness, engine, space, 2)
    pin(harness, engine, space, chain)
    assert unpin(harness, engine, space, chain, tenant="other") == 0
    assert evict_all(harness, engine, space, chain) == 2
    assert unpin(harness, engine, space, chain) == 2
    assert unpin(harness, engine, space, chain) == 0
    assert evict_all(harness, engine, space, chain) == 0


def test_pinned_again_it_ends_later_and_may_grow_hard(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = stored(harness, engine, space, 1)
    pin(harness, engine, space, chain, seconds=5.0, hard=False)
    pin(harness, engine, space, chain, seconds=60.0, hard=True)
    pin(harness, engine, space, chain, seconds=1.0, hard=False)
    harness.sleep(10.0)
    assert pinned(harness) == {"blocks": 1, "hard_blocks": 1, "bytes": BLOCK, "tenants": 1}
    assert evict_all(harness, engine, space, chain) == 1


def test_a_soft_pin_is_a_use_now_and_then(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain, other = stored(harness, engine, space, 1), stored(harness, engine, space, 1, seed=1)
    pin(harness, engine, space, chain, hard=False)
    harness.sleep(20.0)
    rows = np.concatenate([rows_of(harness, chain), rows_of(harness, other)])
    last = harness.store.catalog.last_use[rows]
    assert last[0] > last[1] + 10.0
    assert evict_all(harness, engine, space, chain) == 0  # nothing holds it


def test_budgets_bound_a_tenant_and_all(make_harness):
    harness = make_harness(
        {
            "limits.pinned_bytes_per_tenant_max": 2 * BLOCK,
            "limits.pinned_bytes_max": 3 * BLOCK,
        }
    )
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = stored(harness, engine, space, 4)
    assert pin(harness, engine, space, chain, tenant="a") == (2, "budget")
    assert pin(harness, engine, space, chain, tenant="a") == (2, "budget")
    assert pin(harness, engine, space, chain, tenant="b") == (1, "budget")
    unpin(harness, engine, space, chain, tenant="a")
    assert pin(harness, engine, space, chain, tenant="b") == (2, "budget")


def test_absent_blocks_end_what_is_pinned(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored(harness, engine, space, 2)
    longer = harness.chain(space, tokens(4))
    assert pin(harness, engine, space, longer) == (2, "absent")


def test_cleared_and_deleted_blocks_lose_their_pins(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain, other = stored(harness, engine, space, 3), stored(harness, engine, space, 2, seed=1)
    pin(harness, engine, space, chain)
    pin(harness, engine, space, other)
    request = pb.DeleteRequest(namespace=space.id, fingerprint=chain[1])
    assert harness.wait(engine.call("Delete", request)).deleted_blocks == 2
    harness.sleep(1.0)
    assert pinned(harness)["hard_blocks"] == 3
    harness.wait(engine.call("Clear", pb.ClearRequest(namespace=space.id)))
    harness.sleep(1.0)
    assert pinned(harness)["blocks"] == 0
    assert len(harness.store.catalog) == 0


def test_a_block_that_came_back_is_pinned_anew(make_harness):
    """Its old pin, the tenant's only one, ends; the new one ends in its time as well."""
    harness = make_harness(tasks=False)
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = stored(harness, engine, space, 1)
    pin(harness, engine, space, chain, hard=False)
    drop_from_host(harness, chain)
    stored(harness, engine, space, 1, seed=1)  # takes the row
    harness.wait(engine.store(space, chain))
    assert pin(harness, engine, space, chain, seconds=1.0) == (1, "")
    assert pinned(harness) == {"blocks": 1, "hard_blocks": 1, "bytes": BLOCK, "tenants": 1}
    harness.call(harness.service.pins.tend, harness.service.now() + 2.0)
    assert pinned(harness) == {"blocks": 0, "hard_blocks": 0, "bytes": 0, "tenants": 0}
    assert not harness.store.catalog.pins.any()


def test_tenants_without_pins_leave_nothing_behind(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    for tenant in ("a", "b", "c"):
        absent = harness.chain(space, tokens(1))
        assert pin(harness, engine, space, absent, tenant=tenant) == (0, "absent")
    assert pinned(harness)["tenants"] == 0


def test_many_pins_are_looked_at_in_turns(harness, monkeypatch):
    monkeypatch.setattr(pins, "PINS_PER_TURN", 4)
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = stored(harness, engine, space, 11)
    assert pin(harness, engine, space, chain, seconds=1.0) == (11, "")
    harness.sleep(2.0)
    assert pinned(harness)["blocks"] == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_pin_needs_an_end(harness, seconds):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = stored(harness, engine, space, 1)
    with pytest.raises(InvalidRequest, match="seconds"):
        pin(harness, engine, space, chain, seconds=seconds)


# ------------------------------------------------------------------ listing


def test_a_listing_has_every_block_once_with_its_tiers(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    other = harness.declare("b", LAYOUT)
    below = harness.chain(space, tokens(5))
    on_nvme_only(harness, space, below, engine)
    above = stored(harness, engine, space, 4, seed=1)
    stored(harness, engine, other, 3, seed=2)
    assert all(harness.wait(engine.flush(space, above)))
    expected = {below[at]: NVME for at in range(5)} | {above[at]: HOST | NVME for at in range(4)}
    assert listed(harness, engine, space)[0] == expected
    paged, calls = listed(harness, engine, space, page=2)
    assert paged == expected
    assert calls >= 5


def test_what_was_cleared_is_not_listed(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    stored(harness, engine, space, 3)
    harness.wait(engine.call("Clear", pb.ClearRequest(namespace=space.id)))
    assert listed(harness, engine, space)[0] == {}


# ------------------------------------------------------------------ staging


def stage(harness, engine, space, chain):
    """The blocks a staging load brings up, with the lease that still holds them."""

    async def run():
        lease = await engine.match([(space, chain)])
        await engine.bring_up(lease, staging=True)
        return lease

    return harness.wait(run())


def test_what_was_staged_leaves_with_its_lease(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(4))
    on_nvme_only(harness, space, chain, engine)
    kept = stored(harness, engine, space, 3, seed=1)
    lease = stage(harness, engine, space, chain)
    assert lease.groups[0].whole == 4
    assert harness.wait(engine.read_directory(space, chain)) == 4
    harness.wait(engine.release(lease))
    assert harness.wait(engine.read_directory(space, chain)) == 0
    assert harness.wait(engine.exists(space, chain))[1].tolist() == [NVME] * 4
    assert harness.wait(engine.read_directory(space, kept)) == 3
    assert counters(harness, "dropped_blocks:staged") == [4]


def test_what_the_policy_would_not_keep_leaves_with_its_load(harness, monkeypatch):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(4))
    on_nvme_only(harness, space, chain, engine)
    policy = harness.store.policy
    monkeypatch.setattr(policy, "promote", lambda rows, now: np.arange(rows.size) < 2)
    assert harness.wait(engine.load([(space, chain)])) == [4]
    assert harness.wait(engine.read_directory(space, chain)) == 2


def test_staged_blocks_that_somebody_used_stay(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(4))
    on_nvme_only(harness, space, chain, engine)
    lease = stage(harness, engine, space, chain)
    head = harness.chain(space, tokens(2))
    used = pb.Group(namespace=space.id, fingerprints=head.joined)
    harness.wait(engine.call("Report", pb.ReportRequest(client=engine.client, used=[used])))
    harness.wait(engine.release(lease))
    assert harness.wait(engine.read_directory(space, chain)) == 2


def test_staged_blocks_leave_when_the_lease_runs_out(harness):
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(2))
    on_nvme_only(harness, space, chain, engine)
    stage(harness, engine, space, chain)
    harness.sleep(60.0)
    assert harness.wait(engine.exists(space, chain))[1].tolist() == [NVME] * 2
