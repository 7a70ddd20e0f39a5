"""Stores and write reservations: what is copied where, what is committed when, what comes back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_kit import (
    LAYOUT,
    SECONDS,
    STORED,
    TWO_RANKS,
    chain_of,
    coloured,
    eventually,
    fill,
    open_space,
)

from kvstore.client import spare, storing
from kvstore.errors import InvalidRequest, Overloaded, ReservationUnknown
from kvstore.hints import SESSION, SYSTEM_PROMPT, Hint
from kvstore.rpc.wire import split_fingerprints
from kvstore.types import BlockStatus

Make = Callable[..., Any]


def warm_up(space: Any, client: Any, blocks: int) -> None:
    """Store once, so that slots are kept in reserve from then on."""
    space.store(chain_of(space, blocks, seed=99), coloured(blocks)).result(SECONDS)
    eventually(lambda: client.statistics().spare_slots >= blocks)


def named_in(commit: Any) -> list[bytes]:
    return [row.tobytes() for row in split_fingerprints(commit.fingerprints, "x")]


# ---------------------------------------------------------------- store


def test_what_is_stored_is_found_and_loaded(make_fake: Make, make_client: Make) -> None:
    make_fake()
    client = make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 6), coloured(6)
    ticket = space.store(chain, blocks)
    assert ticket.result(SECONDS) == (STORED,) * 6
    assert ticket.is_done
    assert ticket.reason == ""
    into = np.zeros_like(blocks)
    assert space.load(chain, into).blocks == 6
    assert (into == blocks).all()


def test_hints_go_along_with_the_commit_block_by_block(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space, each = open_space(client), LAYOUT.block_tokens
    chain = chain_of(space, 6)
    hints = [Hint(end_tokens=2 * each, is_system_prompt=True), Hint(4 * each, is_session=True)]
    expected = [SYSTEM_PROMPT] * 2 + [0] * 2 + [SESSION] * 2
    # In slots reserved now, the first of them present already, and in slots at hand.
    space.store(chain, coloured(1)).result(SECONDS)
    space.store(chain, coloured(3), hints=hints).result(SECONDS)
    eventually(lambda: client.statistics().spare_slots >= 3)
    space.store(chain, coloured(6)[3:], start=3, hints=hints).result(SECONDS)
    told = [list(commit.hint_classes) for commit in fake.called("Commit")]
    assert told[:2] == [[], expected[1:3]]
    later = [kind for commit in told[2:] for kind in commit]
    assert later == expected[3:], "however many reservations the slots came from"


def test_a_second_store_uses_slots_at_hand_and_asks_nobody(
    make_fake: Make, make_client: Make
) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    warm_up(space, client, 4)
    before = len(fake.calls)
    fake.hold["Commit"] = threading.Event()
    chain, blocks = chain_of(space, 4), list(coloured(4))
    ticket = space.store(chain, blocks)
    with pytest.raises(TimeoutError):
        ticket.result(0.01)
    fake.hold["Commit"].set()
    assert ticket.result(SECONDS) == (STORED,) * 4
    named = [call for verb, call in fake.calls[before:] if verb == "Reserve" and call.fingerprints]
    assert not named
    assert client.statistics().spare_stores == 1
    assert space.match(chain) == 4


@pytest.mark.parametrize("warm", [False, True])
def test_a_long_store_is_committed_in_portions(
    make_fake: Make, make_client: Make, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    """So that no commit holds the daemon's loop for long."""
    monkeypatch.setattr(storing, "COMMIT_BLOCKS_MAX", 3)
    fake, client = make_fake(), make_client()
    space = open_space(client)
    if warm:
        warm_up(space, client, 8)
    before = len(fake.called("Commit"))
    chain, blocks = chain_of(space, 8), coloured(8)
    assert space.store(chain, blocks).result(SECONDS) == (STORED,) * 8
    sizes = [len(named_in(commit)) for commit in fake.called("Commit")[before:]]
    assert sum(sizes) == 8
    assert max(sizes) == 3
    into = np.zeros_like(blocks)
    assert space.load(chain, into).blocks == 8
    assert (into == blocks).all()


def test_the_callers_memory_is_free_when_store_returns(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    warm_up(space, client, 2)
    fake.hold["Commit"] = threading.Event()
    chain, blocks = chain_of(space, 2), coloured(2)
    kept = blocks.copy()
    ticket = space.store(chain, blocks)
    blocks[:] = 0
    fake.hold["Commit"].set()
    ticket.result(SECONDS)
    into = np.zeros_like(kept)
    assert space.load(chain, into).blocks == 2
    assert (into == kept).all()


def test_present_blocks_are_neither_copied_nor_named(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    warm_up(space, client, 6)
    chain, blocks = chain_of(space, 6), coloured(6)
    for index in (0, 3):
        fake.put(space.id, chain[index], blocks[index].tobytes())
    copied = client.statistics().store_copied
    before = len(fake.called("Commit"))
    statuses = space.store(chain, blocks).result(SECONDS)
    present = BlockStatus.PRESENT
    assert statuses == (present, STORED, STORED, present, STORED, STORED)
    assert client.statistics().store_copied == copied + 4
    commits = fake.called("Commit")[before:]
    assert [(commit.parent, named_in(commit)) for commit in commits] == [
        (chain[0], [chain[1], chain[2]]),
        (chain[3], [chain[4], chain[5]]),
    ]
    again = len(fake.calls)
    assert space.store(chain, blocks).result(0) == (present,) * 6
    assert {verb for verb, _ in fake.calls[again:]} <= {"Report"}


def test_the_parent_is_the_block_before_or_the_namespace(
    make_fake: Make, make_client: Make
) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    warm_up(space, client, 2)
    chain, blocks = chain_of(space, 4), coloured(4)
    space.store(chain, blocks[:2]).result(SECONDS)
    space.store(chain, blocks[2:], start=2).result(SECONDS)
    assert [commit.parent for commit in fake.called("Commit")[-2:]] == [space.id, chain[1]]


def test_a_store_that_must_reserve_waits_for_its_parents_commit(
    make_fake: Make, make_client: Make
) -> None:
    fake, client = make_fake(slots=128), make_client()
    space = open_space(client)
    warm_up(space, client, 2)
    chain, blocks = chain_of(space, 40), coloured(40)
    fake.hold["Commit"] = threading.Event()
    first = space.store(chain, blocks[:2])
    threading.Timer(0.05, fake.hold["Commit"].set).start()
    second = space.store(chain, blocks[2:40], start=2)
    assert set(first.result(SECONDS) + second.result(SECONDS)) == {STORED}


def test_no_room_is_a_status(make_fake: Make, make_client: Make) -> None:
    make_fake(slots=5)
    space = open_space(make_client())
    statuses = space.store(chain_of(space, 7), coloured(7)).result(SECONDS)
    assert statuses == (STORED,) * 5 + (BlockStatus.NO_ROOM,) * 2


def test_a_refused_commit_drops_its_blocks_and_returns_the_slots(
    make_fake: Make, make_client: Make
) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    warm_up(space, client, 2)
    eventually(lambda: client.statistics().spare_slots == 4)
    fake.fail_with["Commit"] = Overloaded("not now")
    ticket = space.store(chain_of(space, 2), coloured(2))
    assert ticket.result(SECONDS) == (BlockStatus.DROPPED,) * 2
    assert ticket.reason == "Overloaded: not now"
    eventually(lambda: fake.called("Abort"))
    del fake.fail_with["Commit"]
    eventually(lambda: len(fake.free) + 2 + client.statistics().spare_slots == fake.slots)
    assert space.store(chain_of(space, 2), coloured(2)).result(SECONDS) == (STORED,) * 2


def test_a_daemon_that_dies_before_the_commit(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    warm_up(space, client, 2)
    eventually(lambda: client.statistics().spare_slots == 4)
    fake.hold["Commit"] = threading.Event()
    tickets = [space.store(chain_of(space, 2, seed), coloured(2)) for seed in range(2)]
    fake.kill()
    for ticket in tickets:
        assert ticket.result(SECONDS) == (BlockStatus.DROPPED,) * 2
        assert "PeerGone" in ticket.reason


def test_a_callback_that_fails_is_its_callers_affair(make_fake: Make, make_client: Make) -> None:
    """For instance one that wakes a loop which is closed by now."""
    fake, client = make_fake(), make_client()
    space = open_space(client)
    fake.hold["Commit"] = threading.Event()
    ticket = space.store(chain_of(space, 1), coloured(1))

    def fail() -> None:
        raise RuntimeError("Event loop is closed")

    ticket.when_done(fail)
    fake.hold["Commit"].set()
    assert ticket.result(SECONDS) == (STORED,)
    assert space.store(chain_of(space, 1, 1), coloured(1)).result(SECONDS) == (STORED,)


def test_a_bug_of_ours_in_a_commit_costs_that_commit_only(
    make_fake: Make, make_client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fake()
    space = open_space(make_client())
    with monkeypatch.context() as broken:
        broken.setattr("kvstore.client.committer.unpack_statuses", lambda *_: 1 / 0)
        ticket = space.store(chain_of(space, 1), coloured(1))
        assert ticket.result(SECONDS) == (BlockStatus.DROPPED,)
        assert "ZeroDivisionError" in ticket.reason
    assert space.store(chain_of(space, 1, 1), coloured(1)).result(SECONDS) == (STORED,)


@pytest.mark.parametrize("warm", [False, True])
def test_an_interrupted_copy_gives_its_slots_back(
    make_fake: Make, make_client: Make, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    if warm:
        warm_up(space, client, 2)
        eventually(lambda: client.statistics().spare_slots == 4)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(storing, "copy_in", interrupt)
        with pytest.raises(KeyboardInterrupt):
            space.store(chain_of(space, 2), coloured(2))
    eventually(lambda: fake.called("Abort"))
    assert space.store(chain_of(space, 2), coloured(2)).result(SECONDS) == (STORED,) * 2


def test_a_full_queue_of_commits_refuses(
    make_fake: Make, make_client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.committer.QUEUE_COMMITS_MAX", 0)
    make_fake()
    space = open_space(make_client())
    ticket = space.store(chain_of(space, 1), coloured(1))
    assert (ticket.result(0), ticket.reason) == ((BlockStatus.REFUSED,), "busy")


@pytest.mark.parametrize(
    ("blocks", "start"),
    [
        (np.zeros((2, 100), np.uint8), 0),
        (np.zeros((2, LAYOUT.block_bytes), np.float16), 0),
        (np.zeros((4, LAYOUT.block_bytes), np.uint8), 0),
        (np.zeros((2, LAYOUT.block_bytes), np.uint8), 2),
        (np.zeros((2, LAYOUT.block_bytes), np.uint8), -1),
    ],
)
def test_blocks_that_do_not_fit_are_the_callers_mistake(
    make_client: Make, blocks: Any, start: int
) -> None:
    space = open_space(make_client(wait=False))
    with pytest.raises(InvalidRequest):
        space.store(chain_of(space, 3), blocks, start=start)


# ---------------------------------------------------------------- slots in reserve


def test_reserved_slots_are_renewed(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(write_seconds=3.0), make_client()
    space = open_space(client)
    warm_up(space, client, 2)
    eventually(lambda: fake.called("Renew"))
    assert space.store(chain_of(space, 2), coloured(2)).result(SECONDS) == (STORED,) * 2
    assert client.statistics().spare_stores == 1


def test_expired_reserves_are_given_up_with_an_acknowledgement(
    make_fake: Make, make_client: Make
) -> None:
    fake, client = make_fake(write_seconds=3.0), make_client()
    space = open_space(client)
    warm_up(space, client, 2)
    (lost,) = fake.reservations
    fake.expire(lost)
    eventually(lambda: lost in [abort.reservation for abort in fake.called("Abort")])
    eventually(lambda: client.statistics().spare_slots == 4)
    assert lost not in fake.reservations


def test_idle_reserves_go_back(
    make_fake: Make, make_client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare, "IDLE_SECONDS", 0.3)
    fake, client = make_fake(), make_client()
    space = open_space(client)
    warm_up(space, client, 2)
    eventually(lambda: not fake.reservations)
    assert client.statistics().spare_slots == 0
    assert len(fake.free) == fake.slots - 2


def test_reserves_stay_within_their_share_of_the_arena(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(slots=128, region_bytes=4 << 20), make_client()
    space = open_space(client)
    warm_up(space, client, 25)
    eventually(lambda: client.statistics().spare_slots == spare.SPARE_SLOTS_MAX)
    assert max(r.count for r in fake.called("Reserve")) <= spare.SPARE_SLOTS_MAX


def test_close_gives_reserves_back(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    warm_up(space, client, 2)
    client.close()
    assert not fake.reservations
    assert len(fake.free) == fake.slots - 2


def test_a_new_life_starts_with_no_slots_of_the_old(make_fake: Make, make_client: Make) -> None:
    first, client = make_fake(), make_client()
    space = open_space(client)
    warm_up(space, client, 2)
    first.kill()
    second = make_fake()
    eventually(lambda: client.boot_id == second.boot_id)
    assert space.store(chain_of(space, 2), coloured(2)).result(SECONDS) == (STORED,) * 2


# ---------------------------------------------------------------- reservations


def test_filling_in_place(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 4), coloured(4)
    fake.put(space.id, chain[0], blocks[0].tobytes())
    with space.reserve(chain) as reservation:
        assert reservation.granted == (1, 2, 3)
        assert reservation.statuses[0] is BlockStatus.PRESENT
        assert 29 < reservation.seconds_left <= 30
        for block in reservation.granted:
            reservation.view(block)[:] = blocks[block]
        with pytest.raises(InvalidRequest, match="no slot"):
            reservation.view(0)
        assert space.match(chain) == 1, "invisible before the commit"
        assert reservation.commit() == (BlockStatus.PRESENT, STORED, STORED, STORED)
    assert not fake.called("Abort")
    into = np.zeros_like(blocks)
    assert space.load(chain, into).blocks == 4
    assert (into == blocks).all()
    with pytest.raises(ReservationUnknown):
        reservation.view(1)


def test_a_part_of_the_chain(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain = chain_of(space, 5)
    fake.put(space.id, chain[1], bytes(LAYOUT.block_bytes))
    with space.reserve(chain, start=2, count=2) as reservation:
        assert reservation.granted == (0, 1)
    (request,) = fake.called("Reserve")
    assert request.parent == chain[1]
    assert request.fingerprints == chain[2] + chain[3]


@pytest.mark.parametrize("fails", [False, True])
def test_leaving_without_commit_aborts(make_fake: Make, make_client: Make, fails: bool) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    outcome = pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext()
    with outcome, space.reserve(chain_of(space, 2)) as reservation:
        reservation.view(0)[:] = 1 // (not fails)
    eventually(lambda: not fake.reservations)
    assert len(fake.free) == fake.slots
    assert len(fake.called("Abort")) == 1


def test_each_rank_commits_its_part(make_fake: Make, make_client: Make) -> None:
    make_fake()
    scheduler, other = make_client(engine="e"), make_client(engine="e")
    spaces = [open_space(client, TWO_RANKS) for client in (scheduler, other)]
    chain, blocks = chain_of(spaces[0], 2), coloured(2, TWO_RANKS)
    reservation = spaces[0].reserve(chain)
    joined = spaces[1].join(reservation.share())
    for rank, mine in enumerate((reservation, joined)):
        with mine:
            start = TWO_RANKS.rank_offset(rank)
            for block in mine.granted:
                part = blocks[block][start : start + TWO_RANKS.rank_payload_bytes]
                mine.rank_view(block, rank)[:] = part
            expected = STORED if rank else BlockStatus.GRANTED
            assert mine.commit(rank=rank) == (expected,) * 2
    into = np.zeros((2, TWO_RANKS.rank_payload_bytes), np.uint8)
    for rank in range(2):
        assert spaces[1].load(chain, into, rank=rank).blocks == 2
        start = TWO_RANKS.rank_offset(rank)
        assert (into == blocks[:, start : start + TWO_RANKS.rank_payload_bytes]).all()
    with pytest.raises(InvalidRequest, match="rank 2"):
        reservation.rank_view(0, 2)


def test_a_rank_of_another_daemon_life_gets_nothing(make_fake: Make, make_client: Make) -> None:
    first, client = make_fake(), make_client()
    space = open_space(client)
    shared = space.reserve(chain_of(space, 1)).share()
    first.kill()
    second = make_fake()
    eventually(lambda: client.boot_id == second.boot_id)
    late = space.join(shared)
    assert late.reason == "away"
    with pytest.raises(ReservationUnknown):
        late.view(0)
    with pytest.raises(InvalidRequest, match="another namespace"):
        client.namespace(b"o" * 32, LAYOUT).join(shared)


def test_a_late_commit_is_a_typed_error_and_an_acknowledgement(
    make_fake: Make, make_client: Make
) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    reservation = space.reserve(chain_of(space, 1))
    (number,) = fake.reservations
    fake.expire(number)
    with pytest.raises(ReservationUnknown, match="expired"):
        reservation.commit()
    eventually(lambda: [abort.reservation for abort in fake.called("Abort")] == [number])
    with pytest.raises(ReservationUnknown, match="ended"):
        reservation.commit()


def test_slots_whose_answer_was_lost_are_given_back(
    make_fake: Make, make_client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name and beforehand: the daemon stood still while it was asked."""
    monkeypatch.setattr("kvstore.client.keeper.RETRY_SECONDS", 0.05)
    fake, client = make_fake(), make_client(deadline_seconds=0.3)
    space = open_space(client)
    fake.hold |= {"Reserve": threading.Event(), "Abort": threading.Event()}
    assert space.reserve(chain_of(space, 1)).reason
    space.store(chain_of(space, 2, seed=5), coloured(2))
    # Beforehand is asked by one thread: the first was given up once there is a second.
    eventually(lambda: sum(ask.count > 0 for ask in fake.called("Reserve")) >= 2)
    named = [ask.reservation for ask in fake.called("Reserve") if not ask.count]
    lost = {*named, next(ask.reservation for ask in fake.called("Reserve") if ask.count)}
    fake.hold["Reserve"].set()
    eventually(lambda: lost <= set(fake.reservations))
    fake.hold["Abort"].set()
    eventually(lambda: not lost & set(fake.reservations))


def test_slots_are_given_back_after_a_ctrl_c_while_they_were_asked_for(
    make_fake: Make, make_client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    call = client._session.call_until_closed

    def interrupted(method: str, *arguments: Any) -> Any:
        reply = call(method, *arguments)
        if method == "Reserve":
            raise KeyboardInterrupt
        return reply

    monkeypatch.setattr(client._session, "call_until_closed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        space.reserve(chain_of(space, 1))
    (asked,) = [ask.reservation for ask in fake.called("Reserve") if not ask.count]
    eventually(lambda: asked in [abort.reservation for abort in fake.called("Abort")])


def test_an_abort_that_finds_the_daemon_busy_is_sent_again(
    make_fake: Make, make_client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.keeper.RETRY_SECONDS", 0.05)
    fake, client = make_fake(), make_client()
    space = open_space(client)
    fill(fake, space, chain_of(space, 1), coloured(1), 1)
    fake.fail_with["Abort"] = Overloaded("not now")
    space.reserve(chain_of(space, 1, seed=5)).abort()
    eventually(lambda: len(fake.called("Abort")) >= 2)
    del fake.fail_with["Abort"]
    eventually(lambda: not fake.reservations)
