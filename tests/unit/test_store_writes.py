"""Reserve, fill, commit: who may write what, and when others see it; the store in one thread."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np
import pytest
from store_kit import (
    DROPPED,
    GRANTED,
    LARGE,
    LAYOUT,
    NO_PARENT,
    NO_ROOM,
    PRESENT,
    REFUSED,
    STORED,
    TWO_RANKS,
    WAITING,
    counters,
    drop_from_host,
    held_slots,
    host_slots,
    on_nvme_only,
    rows_of,
    tokens,
)

from kvstore.errors import InvalidRequest, LeaseError, Overloaded, ReservationUnknown
from kvstore.rpc import control_pb2 as pb
from kvstore.testing.engine import colour
from kvstore.types import NamespaceKind, ReplicaState


@pytest.fixture
def space(harness):
    return harness.declare("a", LAYOUT)


@pytest.fixture
def engine(harness):
    return harness.engine()


def state_of(harness, chain):
    return harness.store.catalog.host_state[rows_of(harness, chain)].tolist()


async def begun(harness, chain, commit):
    """The task of a commit whose checksums are being made."""
    task = harness.loop.create_task(commit)
    while ReplicaState.COMMITTED not in state_of(harness, chain):
        await asyncio.sleep(0)
    return task


# ------------------------------------------------------------------ reserve


def test_a_filling_block_counts_as_present_to_others(harness, space, engine):
    other, chain = harness.engine("other"), harness.chain(space, tokens(3))
    held = harness.wait(engine.reserve(space, chain, 0, 2))
    assert held.statuses == [GRANTED] * 2
    assert harness.wait(other.reserve(space, chain)).statuses == [PRESENT] * 2 + [GRANTED]
    assert harness.wait(other.exists(space, chain))[0] == 0, "present is not readable"
    assert harness.wait(other.read_directory(space, chain)) == 0


def test_what_lies_on_nvme_only_is_present(harness, space, engine):
    chain = harness.chain(space, tokens(3))
    on_nvme_only(harness, space, chain, engine)
    assert harness.wait(engine.store(space, chain)) == [PRESENT] * 3


def test_a_block_without_its_parent_is_not_stored(harness, space, engine):
    chain = harness.chain(space, tokens(3))
    assert harness.wait(engine.store(space, chain, 1)) == [NO_PARENT] * 2
    assert harness.wait(engine.store(space, chain, 1, anonymous=True)) == [NO_PARENT] * 2
    assert held_slots(harness) == 0
    assert len(harness.store.catalog) == 0
    assert counters(harness, "store_blocks:no_parent") == [4]


def test_flat_and_sliding_blocks_need_no_parent(harness, engine):
    for label, options in (("f", {"kind": NamespaceKind.FLAT}), ("s", {"window_tokens": 8})):
        space = harness.declare(label, LAYOUT, **options)
        chain = harness.chain(space, tokens(3))
        assert harness.wait(engine.store(space, chain, 1)) == [STORED] * 2
        assert harness.wait(engine.exists(space, chain))[1].astype(bool).tolist() == [0, 1, 1]


def test_a_parent_of_another_namespace_is_none(harness, space, engine):
    other = harness.declare("b", LAYOUT)
    theirs, ours = harness.chain(other, tokens(1)), harness.chain(space, tokens(1))
    harness.wait(engine.store(other, theirs))
    held = harness.wait(engine.reserve_names(space, bytes(theirs[0]), [bytes(ours[0])]))
    assert held.statuses == [NO_PARENT]
    with pytest.raises(InvalidRequest, match="parent has 3 bytes"):
        harness.wait(engine.reserve_names(space, b"abc", [bytes(ours[0])]))


def refused_names(harness, space, engine, foreign):
    """Each list of names holds one twice, or one of another namespace."""
    theirs, ours = harness.chain(foreign, tokens(1)), harness.chain(space, tokens(2))
    harness.wait(engine.store(foreign, theirs))
    return [bytes(ours[0]), bytes(ours[0])], [bytes(ours[0]), bytes(theirs[0])]


def test_names_given_twice_or_of_another_namespace_are_refused(harness, space, engine):
    """Not our bug: the daemon lives on, and no slot is lost."""
    for names in refused_names(harness, space, engine, harness.declare("b", LAYOUT)):
        with pytest.raises(InvalidRequest, match="fingerprints"):
            harness.wait(engine.reserve_names(space, space.id, names))
    assert held_slots(harness) == 1


def test_slots_are_not_named_twice_nor_for_another_namespace(harness, space, engine):
    for names in refused_names(harness, space, engine, harness.declare("b", LAYOUT)):
        held = harness.wait(engine.reserve_anonymous(space, 2))
        held.names = names
        with pytest.raises(InvalidRequest, match="fingerprints"):
            harness.wait(engine.commit(held, parent=space.id))
        assert harness.wait(engine.abort(held)) == 2
    assert held_slots(harness) == 1


def test_after_the_first_block_without_room_there_is_none(make_harness):
    harness = make_harness({"nvme.enabled": False})
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(200))
    statuses = harness.wait(engine.reserve(space, chain)).statuses
    granted = statuses.count(GRANTED)
    assert 100 < granted < 128
    assert statuses == [GRANTED] * granted + [NO_ROOM] * (200 - granted)


def test_storing_evicts_nothing_of_the_chain_it_extends(make_harness):
    """The new blocks' parent may be the least recently used leaf there is."""
    harness = make_harness({"nvme.enabled": False})
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    oldest = harness.chain(space, tokens(4))
    harness.wait(engine.store(space, oldest))
    harness.sleep(1)
    rest = harness.chain(space, tokens(harness.store.host_tier.room(8192), seed=1))
    assert set(harness.wait(engine.store(space, rest))) == {STORED}
    assert harness.store.host_tier.room(8192) == 0
    longer = harness.chain(space, tokens(40))
    statuses = harness.wait(engine.store(space, longer))
    assert statuses == [PRESENT] * 4 + [STORED] * 36
    assert harness.wait(engine.load([(space, longer)])) == [40]


def test_a_slot_pool_has_a_bound_per_client(make_harness):
    harness = make_harness({"host.write_pool_bytes_per_client_max": 5 * LAYOUT.slot_bytes})
    space, engine, other = harness.declare("a", LAYOUT), harness.engine(), harness.engine("b")
    assert len(harness.wait(engine.reserve_anonymous(space, 99)).offsets) == 5
    assert harness.wait(engine.reserve_anonymous(space, 1)).reservation == 0
    assert len(harness.wait(other.reserve_anonymous(space, 3)).offsets) == 3


def test_the_bound_of_a_slot_pool_counts_bytes_whatever_the_size(make_harness):
    harness = make_harness({"host.write_pool_bytes_per_client_max": 8 * LAYOUT.slot_bytes})
    small, large = harness.declare("a", LAYOUT), harness.declare("b", LARGE)
    engine = harness.engine()
    assert len(harness.wait(engine.reserve_anonymous(small, 4)).offsets) == 4
    assert len(harness.wait(engine.reserve_anonymous(large, 4)).offsets) == 1
    assert harness.wait(engine.reserve_anonymous(small, 1)).reservation == 0


def test_clients_that_left_and_may_still_write_have_a_bound(make_harness):
    harness = make_harness({"limits.clients_max": 2})
    left = [harness.engine(f"e{number}") for number in range(2)]
    for engine in left:
        harness.call(engine.leave)
    with pytest.raises(Overloaded, match="2 clients left"):
        harness.engine()
    harness.call(left[0].die)
    harness.sleep(1)
    harness.engine()


def test_a_chain_with_names_of_others_in_between_is_linked_as_named(harness, space, engine):
    """Whoever names a block after one that is held hangs it there, whatever stands before."""
    held, new = harness.chain(space, tokens(2)), harness.chain(space, tokens(3, seed=1))
    harness.wait(engine.store(space, held))
    names = [bytes(new[0]), bytes(held[1]), bytes(new[1]), bytes(new[2])]
    found = harness.wait(engine.reserve_names(space, space.id, names))
    assert found.statuses == [GRANTED, PRESENT, GRANTED, GRANTED]
    rows, columns = harness.store.catalog.rows(b"".join(names)), harness.store.catalog
    assert columns.parent[rows].tolist() == [-1, int(rows_of(harness, held)[0]), rows[1], rows[2]]
    assert columns.depth[rows].tolist() == [0, 1, 2, 3]
    harness.wait(engine.abort(found))
    assert held_slots(harness) == 2


# ------------------------------------------------------------------ commit


def test_a_commit_is_checked_whole_before_anything_changes(harness, space, engine):
    chain = harness.chain(space, tokens(4))
    held = harness.wait(engine.reserve(space, chain, 0, 3))
    engine.fill(space, held)
    before = state_of(harness, chain)
    wrong = [
        ([0, 0], "one slot is named twice"),
        ([0, 3], "no slot of this reservation"),
    ]
    held.names.append(bytes(chain[3]))
    held.offsets.append(1 << 40)
    for positions, reason in wrong:
        with pytest.raises(InvalidRequest, match=reason):
            harness.wait(engine.commit(held, positions))
    held.names[0], held.names[1] = held.names[1], held.names[0]
    with pytest.raises(InvalidRequest, match="not granted this slot"):
        harness.wait(engine.commit(held, [0, 2]))
    held.names[0], held.names[1] = held.names[1], held.names[0]
    assert state_of(harness, chain) == before
    assert harness.wait(engine.commit(held, [0, 1, 2])) == [STORED] * 3


def test_a_commit_counts_once(harness, space, engine):
    chain = harness.chain(space, tokens(2))
    held = harness.wait(engine.reserve(space, chain))
    engine.fill(space, held)
    assert harness.wait(engine.commit(held, [0])) == [STORED]
    with pytest.raises(InvalidRequest, match="no slot of this reservation"):
        harness.wait(engine.commit(held, [0]))
    assert harness.wait(engine.commit(held, [1])) == [STORED]
    with pytest.raises(ReservationUnknown):
        harness.wait(engine.commit(held, [1]))


def test_a_reservation_is_its_engines_own(harness, space, engine):
    chain, stranger = harness.chain(space, tokens(1)), harness.engine("stranger")
    held = harness.wait(engine.reserve(space, chain))
    with pytest.raises(ReservationUnknown):
        harness.wait(stranger.commit(held))
    with pytest.raises(ReservationUnknown):
        harness.wait(stranger.abort(held))
    rank_of_same_engine = harness.engine()
    rank_of_same_engine.fill(space, held)
    assert harness.wait(rank_of_same_engine.commit(held)) == [STORED]


def test_ranks_publish_together(harness, engine):
    space, second = harness.declare("tp", TWO_RANKS), harness.engine()
    chain = harness.chain(space, tokens(2))
    held = harness.wait(engine.reserve(space, chain))
    engine.fill(space, held)
    assert harness.wait(engine.commit(held, rank=0)) == [GRANTED] * 2
    assert harness.wait(engine.commit(held, rank=0)) == [GRANTED] * 2, "said twice is said once"
    assert harness.wait(engine.exists(space, chain))[0] == 0
    assert harness.wait(second.commit(held, [1], rank=1)) == [WAITING]
    assert harness.wait(engine.exists(space, chain))[0] == 0
    assert harness.wait(second.commit(held, [0], rank=1)) == [STORED]
    assert harness.wait(engine.load([(space, chain)])) == [2]
    held = harness.wait(engine.reserve(space, harness.chain(space, tokens(1, seed=1))))
    with pytest.raises(InvalidRequest, match="rank 2"):
        harness.wait(engine.commit(held, rank=2))


def test_one_rank_may_end_while_another_still_copies(harness, engine):
    """Its slots wait for the other rank's word (or death): nobody else gets them before."""
    space, second = harness.declare("tp", TWO_RANKS), harness.engine()
    chain = harness.chain(space, tokens(2))
    held = harness.wait(engine.reserve(space, chain))
    harness.wait(engine.commit(held, [0], rank=0, end=True))
    assert host_slots(harness)["quarantined"] == 2
    with pytest.raises(LeaseError, match="expired"):
        harness.wait(second.commit(held, [0], rank=1))
    harness.wait(second.abort(held))
    assert held_slots(harness) == 0
    assert len(harness.store.catalog) == 0


def test_anonymous_slots_are_named_at_commit(harness, space, engine):
    chain = harness.chain(space, tokens(5))
    harness.wait(engine.store(space, chain, 0, 2))
    held = harness.wait(engine.reserve_anonymous(space, 4))
    held.names = [bytes(chain[at]) for at in (1, 2, 3, 4)]
    engine.fill(space, held)
    statuses = harness.wait(engine.commit(held, [0, 1, 2], parent=chain.parent_of(1)))
    assert statuses == [PRESENT, STORED, STORED]
    assert harness.wait(engine.commit(held, [3], parent=chain.parent_of(4))) == [STORED]
    assert harness.wait(engine.load([(space, chain)])) == [5]
    assert held_slots(harness) == 5


def test_an_anonymous_commit_is_whole_and_of_held_slots(harness, engine):
    space = harness.declare("tp", TWO_RANKS)
    chain = harness.chain(space, tokens(2))
    held = harness.wait(engine.reserve_anonymous(space, 1))
    held.names = [bytes(chain[0])]
    with pytest.raises(InvalidRequest, match="committed whole"):
        harness.wait(engine.commit(held, rank=0, parent=space.id))
    held.names, held.offsets = [bytes(name) for name in chain], held.offsets * 2
    with pytest.raises(InvalidRequest, match="named twice"):
        harness.wait(engine.commit(held, [0, 1], parent=space.id))


# ------------------------------------------------------------------ parents across reservations


def test_a_committed_child_is_invisible_until_its_parent_is_ready(harness, space, engine):
    chain, other = harness.chain(space, tokens(4)), harness.engine("other")
    parents = harness.wait(engine.reserve(space, chain, 0, 2))
    assert harness.wait(other.store(space, chain, 2)) == [WAITING] * 2
    assert harness.wait(other.exists(space, chain))[1].tolist() == [0] * 4
    assert harness.wait(other.match([(space, chain)])).boundary_tokens == 0
    for block in range(2, 4):
        assert not engine.directory.lookup_each(space.index, bytes(chain[block])).mask.any()
    engine.fill(space, parents)
    assert harness.wait(engine.commit(parents, [1])) == [WAITING]
    assert harness.wait(other.match([(space, chain)])).boundary_tokens == 0
    assert harness.wait(engine.commit(parents, [0])) == [STORED]
    assert harness.wait(other.load([(space, chain)])) == [4]


@pytest.mark.parametrize("how", ["abort", "expire", "leave", "die", "end"])
def test_a_child_is_dropped_when_its_parent_never_comes(harness, space, engine, how):
    chain, other = harness.chain(space, tokens(4)), harness.engine("other")
    parents = harness.wait(engine.reserve(space, chain, 0, 2))
    assert harness.wait(other.store(space, chain, 2)) == [WAITING] * 2
    if how == "abort":
        harness.wait(engine.abort(parents))
    elif how == "end":
        harness.wait(engine.commit(parents, [], end=True))
    elif how == "expire":
        harness.sleep(31)
    elif how == "leave":
        engine.leave()
    else:
        engine.die()
    late = {"expire": 2, "leave": 2}.get(how, 0)
    assert host_slots(harness)["quarantined"] == late
    assert held_slots(harness) == late
    assert len(harness.store.catalog) == 0
    assert counters(harness, "dropped_blocks:parent_lost") == [2]
    assert harness.wait(other.store(space, chain)) == [STORED] * 4


def test_siblings_and_their_children_wait_and_fall_together(harness, space, engine):
    trunk = harness.chain(space, tokens(1))
    parent = harness.wait(engine.reserve(space, trunk))
    branches = [harness.chain(space, [*tokens(1), *tokens(3, seed=seed)]) for seed in (1, 2, 3)]
    for branch in branches:
        assert harness.wait(engine.store(space, branch, 1, 3)) == [WAITING] * 2
        held = harness.wait(engine.reserve(space, branch, 3, 4))
        assert held.statuses == [GRANTED]
    harness.wait(engine.abort(parent))
    assert host_slots(harness)["filling"] == 3, "granted slots stay their engine's"
    engine.fill(space, held)
    assert harness.wait(engine.commit(held)) == [DROPPED]
    harness.sleep(31)
    engine.die()
    harness.sleep(1)
    assert held_slots(harness) == 0
    assert len(harness.store.catalog) == 0
    assert not harness.store.waiting


def test_a_lost_parent_may_be_reserved_again_while_its_child_is_being_filled(
    harness, space, engine
):
    """The child's granted slot outlives the parent's reservation; nothing deadlocks."""
    chain, other = harness.chain(space, tokens(2)), harness.engine("other")
    parent = harness.wait(engine.reserve(space, chain, 0, 1))
    child = harness.wait(other.reserve(space, chain, 1, 2))
    assert child.statuses == [GRANTED]
    harness.wait(engine.abort(parent))
    again = harness.wait(engine.reserve(space, chain, 0, 1))
    assert again.statuses in ([GRANTED], [REFUSED])
    other.fill(space, child)
    outcome = harness.wait(other.commit(child))
    assert outcome in ([WAITING], [DROPPED])
    if again.statuses == [GRANTED]:
        engine.fill(space, again)
        assert harness.wait(engine.commit(again)) == [STORED]
    assert set(harness.wait(other.store(space, chain))) <= {STORED, PRESENT}
    assert harness.wait(other.load([(space, chain)])) == [2]


# ------------------------------------------------------------------ ends


def test_an_aborted_reservation_frees_at_once(harness, space, engine):
    held = harness.wait(engine.reserve(space, harness.chain(space, tokens(3))))
    assert harness.wait(engine.abort(held)) == 3
    assert held_slots(harness) == 0
    with pytest.raises(ReservationUnknown):
        harness.wait(engine.abort(held))


@pytest.mark.parametrize("end", [True, False])
def test_an_expired_reservation_waits_for_its_writers_last_word(harness, space, engine, end):
    """A late commit without `end` is not it: other slots may still be copied into."""
    held = harness.wait(engine.reserve_anonymous(space, 3))
    late = harness.chain(space, tokens(3))
    held.names = [bytes(late[at]) for at in range(3)]
    harness.sleep(31)
    assert host_slots(harness)["quarantined"] == 3
    assert counters(harness, "expired_reservations") == [1]
    with pytest.raises(LeaseError, match="nothing was stored"):
        harness.wait(engine.commit(held, [0], parent=late.parent_of(0), end=end))
    if not end:
        harness.wait(harness.engine("other").store(space, harness.chain(space, tokens(99, seed=1))))
        engine.fill(space, held)  # the late copies
        harness.check_bytes()
        assert harness.wait(engine.abort(held)) == 3
    assert host_slots(harness)["quarantined"] == 0
    assert counters(harness, "late_commits") == [1]


def test_an_expired_reservation_of_an_engine_waits_for_every_process_of_it(harness, space, engine):
    second, third = harness.engine(), harness.engine()
    held = harness.wait(engine.reserve(space, harness.chain(space, tokens(3))))
    harness.sleep(31)
    assert harness.wait(engine.abort(held)) == 0
    second.die()
    harness.sleep(1)
    assert host_slots(harness)["quarantined"] == 3
    third.leave()
    harness.sleep(1)
    assert host_slots(harness)["quarantined"] == 3, "its stream ended, its process may copy"
    third.die()
    harness.sleep(1)
    assert held_slots(harness) == 0


def test_a_late_writer_hurts_nobody(harness, space, engine):
    """LIFE-4: what it overwrites after its time is no other block's."""
    late = harness.wait(engine.reserve(space, harness.chain(space, tokens(8))))
    harness.sleep(31)
    other, chain = harness.engine("other"), harness.chain(space, tokens(100, seed=1))
    harness.wait(other.store(space, chain))
    engine.fill(space, late)
    stored = harness.wait(other.load([(space, chain)]))
    assert stored[0] > 50


def test_quarantine_has_a_bound_for_each_client(make_harness):
    harness = make_harness({"lease.quarantine_bytes_per_client_max": 3 * LAYOUT.slot_bytes})
    space, engine, other = harness.declare("a", LAYOUT), harness.engine(), harness.engine("b")
    held = harness.wait(engine.reserve(space, harness.chain(space, tokens(3))))
    harness.sleep(31)
    with pytest.raises(Overloaded, match="quarantine_bytes_per_client_max"):
        harness.wait(engine.reserve(space, harness.chain(space, tokens(1))))
    with pytest.raises(Overloaded, match="quarantine_bytes_per_client_max"):
        harness.wait(engine.reserve_anonymous(space, 1))
    assert harness.wait(other.store(space, harness.chain(space, tokens(1)))) == [STORED]
    harness.wait(engine.abort(held))
    assert harness.wait(engine.store(space, harness.chain(space, tokens(2)))) == [PRESENT, STORED]


def test_a_reservation_may_be_named_by_who_asks(harness, space, engine):
    """So it can be given back although the answer was lost."""
    chain = harness.chain(space, tokens(3))
    asked = pb.ReserveRequest(
        client=engine.client,
        namespace=space.id,
        parent=space.id,
        fingerprints=chain.joined,
        reservation=77,
    )
    unnamed = pb.ReserveRequest(client=engine.client, namespace=space.id, count=2, reservation=78)
    for request in (asked, unnamed):
        assert harness.wait(engine.call("Reserve", request)).reservation == request.reservation
    for _ in ("live", "held"):
        for request in (asked, unnamed):
            with pytest.raises(InvalidRequest, match="exists already"):
                harness.wait(engine.call("Reserve", request))
        assert held_slots(harness) == 5
        harness.sleep(31)
    for request in (asked, unnamed):
        gone = pb.AbortRequest(client=engine.client, reservation=request.reservation)
        harness.wait(engine.call("Abort", gone))
    assert held_slots(harness) == 0


def test_a_renewed_reservation_lives_on(harness, space, engine):
    held = harness.wait(engine.reserve(space, harness.chain(space, tokens(1))))
    harness.sleep(20)
    harness.service.renew(engine.session, 0, held.reservation)
    harness.sleep(20)
    engine.fill(space, held)
    assert harness.wait(engine.commit(held)) == [STORED]


# ------------------------------------------------------------------ clears and kills on the way


@pytest.mark.parametrize("anonymous", [False, True])
def test_what_was_reserved_before_a_clear_commits_to_nothing(harness, space, engine, anonymous):
    chain = harness.chain(space, tokens(2))
    if anonymous:
        held = harness.wait(engine.reserve_anonymous(space, 2))
        held.names = [bytes(name) for name in chain]
    else:
        held = harness.wait(engine.reserve(space, chain))
    engine.fill(space, held)
    harness.wait(harness.service.clear(space))
    statuses = harness.wait(engine.commit(held, parent=space.id))
    if anonymous:  # named after the clear: these are new blocks
        assert statuses == [STORED] * 2
    else:
        assert statuses == [DROPPED] * 2
        assert held_slots(harness) == 0
        assert len(harness.store.catalog) == 0


def test_a_clear_while_checksums_are_made_drops_the_blocks(harness, space, engine):
    chain = harness.chain(space, tokens(3))
    held = harness.wait(engine.reserve(space, chain))
    engine.fill(space, held)

    async def both():
        commit = await begun(harness, chain, engine.commit(held))
        await harness.service.clear(space)
        return await commit

    statuses = harness.wait(both())
    assert set(statuses) <= {STORED, DROPPED}
    assert harness.wait(engine.match([(space, chain)])).boundary_tokens == 0
    harness.sleep(1)
    assert held_slots(harness) == 0
    assert len(harness.store.catalog) == 0


def test_a_delete_while_checksums_are_made_drops_the_blocks(harness, space, engine):
    chain = harness.chain(space, tokens(3))
    held = harness.wait(engine.reserve(space, chain))
    engine.fill(space, held)

    async def both():
        commit = await begun(harness, chain, engine.commit(held))
        assert await harness.service.delete(space, bytes(chain[1])) == 2
        return await commit

    assert harness.wait(both()) == [STORED, DROPPED, DROPPED]
    assert harness.wait(engine.match([(space, chain)])).boundary_tokens == 4


def test_rows_in_the_middle_of_a_commit_are_not_recycled(harness, space, engine):
    """While checksums are made, everything else of the store goes and new blocks come."""
    chain = harness.chain(space, tokens(3))
    held = harness.wait(engine.reserve(space, chain))
    engine.fill(space, held)

    async def both():
        commit = await begun(harness, chain, engine.commit(held))
        await harness.service.delete(space, bytes(chain[0]))
        other = harness.chain(space, tokens(20, seed=5))
        assert await engine.store(space, other) == [STORED] * 20
        assert await commit == [DROPPED] * 3
        return other

    other = harness.wait(both())
    assert harness.wait(engine.load([(space, other)])) == [20]


def test_a_caller_that_gives_up_leaves_nothing_half_done(harness, space, engine):
    chain = harness.chain(space, tokens(3))
    held = harness.wait(engine.reserve(space, chain))
    engine.fill(space, held)

    async def give_up():
        commit = await begun(harness, chain, engine.commit(held))
        commit.cancel()
        await asyncio.gather(commit, return_exceptions=True)

    harness.wait(give_up())
    harness.sleep(1)
    assert harness.wait(engine.load([(space, chain)])) == [3]


def test_a_stale_block_in_the_middle_of_a_chain_ends_what_is_granted(harness, space, engine):
    """A deleted block that a reader still leases: it and what follows wait, nothing is lost."""
    chain = harness.chain(space, tokens(5))
    harness.wait(engine.store(space, chain, 0, 3))
    harness.settle()
    lease = harness.wait(engine.match([(space, harness.chain(space, tokens(3)))]))
    harness.wait(harness.service.delete(space, bytes(chain[1])))
    for anonymous in (False, True):
        statuses = harness.wait(engine.store(space, chain, anonymous=anonymous))
        assert statuses[0] == PRESENT
        assert not {STORED, GRANTED, WAITING} & set(statuses[1:])
    harness.wait(engine.release(lease))
    harness.sleep(1)
    assert harness.wait(engine.store(space, chain)) == [PRESENT] + [STORED] * 4


def test_checksums_are_those_of_the_parts(harness, space, engine):
    import xxhash

    chain = harness.chain(space, tokens(1))
    harness.wait(engine.store(space, chain))
    (row,) = rows_of(harness, chain)
    bytes_of = colour(bytes(chain[0]), LAYOUT.block_bytes)
    wanted = [
        xxhash.xxh3_64_intdigest(bytes_of[part.offset : part.offset + part.length])
        for part in LAYOUT.parts
    ]
    assert harness.store.catalog.checksums[row].tolist() == wanted + [0] * 6


def test_random_stores_keep_the_books(make_harness):
    """HOST-10, HOST-14: every way a reservation can end, in any order."""
    harness = make_harness({"nvme.enabled": False, "lease.write_seconds": 2.0})
    space = harness.declare("a", LAYOUT)
    random = np.random.default_rng(7)
    engines, held = [harness.engine(str(at)) for at in range(4)], []
    for step in range(250):
        engine = engines[random.integers(4)]
        seed, count = int(random.integers(12)), int(random.integers(1, 9))
        choice = random.integers(6)
        if choice < 2:
            chain = harness.chain(space, tokens(count, seed=seed))
            found = harness.wait(engine.reserve(space, chain))
            if found.reservation:
                held.append((engine, found))
        elif choice == 2 and held:
            owner, found = held.pop(int(random.integers(len(held))))
            if owner.is_attached:
                owner.fill(space, found)
                with suppress(LeaseError, InvalidRequest):
                    harness.wait(owner.commit(found, end=bool(random.integers(2))))
        elif choice == 3 and held:
            owner, found = held.pop(int(random.integers(len(held))))
            if owner.is_attached:
                with suppress(InvalidRequest):
                    harness.wait(owner.abort(found))
        elif choice == 4:
            harness.sleep(float(random.uniform(0, 1)))
        elif step % 7 == 0:
            at = int(random.integers(4))
            engines[at].die()
            engines[at] = harness.engine(str(at))
        if step % 10 == 0:
            harness.check()
    for engine in engines:
        engine.die()
    harness.sleep(3)
    harness.check()
    assert host_slots(harness)["filling"] == host_slots(harness)["quarantined"] == 0
    drop_from_host(harness, harness.chain(space, tokens(1)))
