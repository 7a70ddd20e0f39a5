"""Loads, matches and read leases: the stored bytes or a miss, and no call where none is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_kit import (
    LAYOUT,
    SECONDS,
    SPACE,
    TWO_RANKS,
    chain_of,
    coloured,
    eventually,
    fill,
    open_space,
)

from engine_adapter.prefix import find
from kvstore.client import copying, life
from kvstore.errors import (
    InvalidRequest,
    LeaseExpired,
    LeaseUnknown,
    Overloaded,
    PeerGone,
)
from kvstore.layout import BlockLayout
from kvstore.types import NamespaceId, NamespaceKind

Make = Callable[..., Any]


def calls_of(fake: Any) -> set[str]:
    return {verb for verb, _ in fake.calls} - {"Attach", "Declare", "Report"}


# ---------------------------------------------------------------- from the host tier


def test_blocks_in_the_directory_are_loaded_without_a_call(
    make_fake: Make, make_client: Make
) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 5), coloured(5)
    fill(fake, space, chain, blocks, 5)
    into = np.zeros_like(blocks)
    assert space.match(chain) == 5
    result = space.load(chain, into)
    assert (result.blocks, result.from_host, result.reason) == (5, 5, "")
    assert (into == blocks).all()
    assert not calls_of(fake)


def test_uses_are_reported_afterwards(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 3), coloured(3)
    fill(fake, space, chain, blocks, 3)
    space.load(chain, np.zeros_like(blocks))
    eventually(lambda: fake.called("Report"))
    (report,) = fake.called("Report")
    assert report.used[0].namespace == SPACE
    assert report.used[0].fingerprints == chain.joined
    eventually(lambda: client.statistics().reported == 3)


def test_reports_are_bounded_and_what_is_dropped_is_counted(
    make_fake: Make, make_client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.keeper.REPORT_BLOCKS_MAX", 4)
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 3), coloured(3)
    fill(fake, space, chain, blocks, 3)
    for _ in range(2):
        space.load(chain, np.zeros_like(blocks))
    assert client.statistics().reports_dropped == 3


def test_a_slot_reused_during_the_copy_makes_the_whole_load_a_miss(
    make_fake: Make, make_client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 2), coloured(2)
    fill(fake, space, chain, blocks, 2)
    real = copying.copy_out

    def copy_while_evicted(*arguments: Any) -> None:
        fake.evict(chain[1])
        fake.put(space.id, b"x" * 32, bytes(LAYOUT.block_bytes))
        real(*arguments)

    monkeypatch.setattr(copying, "copy_out", copy_while_evicted)
    result = space.load(chain, np.zeros_like(blocks))
    assert (result.blocks, result.reason) == (0, "changed")
    assert client.statistics().loads_changed == 1


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_shape_of_destination_and_any_start(
    make_fake: Make, make_client: Make, threads: int
) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 7), coloured(7)
    for index, block in enumerate(blocks):
        if index in (0, 4):
            fake.put(space.id, bytes([index]) * 32, b"between the others")
        fake.put(space.id, chain[index], block.tobytes())
    rows = [np.zeros(LAYOUT.block_bytes, np.uint8) for _ in range(4)]
    assert space.load(chain, rows, start=2, copy_threads=threads).blocks == 4
    assert (np.stack(rows) == blocks[2:6]).all()
    wide = np.zeros((5, 2 * LAYOUT.block_bytes), np.uint8)
    into = wide[:, : LAYOUT.block_bytes]
    assert space.load(chain, into, start=1, copy_threads=threads).blocks == 5
    assert (into == blocks[1:6]).all()
    assert not wide[:, LAYOUT.block_bytes :].any()


def test_one_ranks_part(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client, TWO_RANKS)
    chain, blocks = chain_of(space, 4), coloured(4, TWO_RANKS)
    fill(fake, space, chain, blocks, 2)
    for rank in range(2):
        into = np.zeros((4, TWO_RANKS.rank_payload_bytes), np.uint8)
        assert space.load(chain, into, rank=rank).blocks == 4
        start = TWO_RANKS.rank_offset(rank)
        assert (into == blocks[:, start : start + TWO_RANKS.rank_payload_bytes]).all()


@pytest.mark.parametrize(
    "into",
    [
        np.zeros((2, 100), np.uint8),
        np.zeros((2, LAYOUT.block_bytes), np.int8),
        np.zeros((4, LAYOUT.block_bytes), np.uint8),
        np.broadcast_to(np.zeros(LAYOUT.block_bytes, np.uint8), (2, LAYOUT.block_bytes)),
        [np.zeros(LAYOUT.block_bytes, np.uint8), np.zeros(9, np.uint8)],
    ],
    ids=["width", "dtype", "rows", "read-only", "one of them"],
)
def test_a_destination_that_does_not_fit_is_the_callers_mistake(
    make_client: Make, into: Any
) -> None:
    space = open_space(make_client(wait=False))
    with pytest.raises(InvalidRequest):
        space.load(chain_of(space, 3), into)


def test_names_of_another_namespace_and_too_many_are_refused(make_client: Make) -> None:
    client = make_client(wait=False)
    space = open_space(client)
    other = client.namespace(NamespaceId(b"o" * 32), LAYOUT)
    with pytest.raises(InvalidRequest, match="belong to namespace"):
        space.match(chain_of(other, 1))
    with pytest.raises(InvalidRequest, match="limit is 65536"):
        space.match(space.chain(bytes(65_537 * 16 * 4)))
    with pytest.raises(InvalidRequest, match="rank 1"):
        space.load(chain_of(space, 1), [], rank=1)


def test_match_each_looks_at_every_block(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client, kind=NamespaceKind.FLAT)
    names = space.keys([b"a", b"b", b"c"])
    fake.put(space.id, names.joined[32:64], bytes(LAYOUT.block_bytes))
    assert space.match_each(names).tolist() == [False, True, False]
    with pytest.raises(InvalidRequest, match="flat namespace only"):
        client.namespace(NamespaceId(b"c" * 32), LAYOUT).keys([b"a"])


# ---------------------------------------------------------------- from below


def test_what_is_on_disk_is_promoted_and_copied_as_it_comes(
    make_fake: Make, make_client: Make
) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 6), coloured(6)
    fill(fake, space, chain, blocks, 2)
    into = np.zeros_like(blocks)
    result = space.load(chain, into)
    assert (result.blocks, result.from_host, result.from_nvme, result.reason) == (6, 2, 4, "")
    assert (into == blocks).all()
    assert len(fake.called("Match")) == len(fake.called("Load")) == 1
    eventually(lambda: not fake.leases)
    assert not fake.called("Report"), "the daemon counted these uses itself"


def test_a_load_that_starts_late_in_the_chain(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 6), coloured(6)
    fill(fake, space, chain, blocks, 3)
    into = np.zeros_like(blocks[2:])
    result = space.load(chain, into, start=2)
    assert (result.blocks, result.from_host, result.from_nvme) == (4, 1, 3)
    assert (into == blocks[2:]).all()


def test_blocks_stored_nowhere_end_the_prefix(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 5), coloured(3)
    fill(fake, space, chain, blocks, 3)
    into = np.zeros((5, LAYOUT.block_bytes), np.uint8)
    result = space.load(chain, into)
    assert (result.blocks, result.reason) == (3, "absent")
    assert (into[:3] == blocks).all()
    assert not fake.called("Load")


@pytest.mark.parametrize("in_host", [0, 3])
def test_a_miss_costs_no_call(make_fake: Make, make_client: Make, in_host: int) -> None:
    """The filter in the header says that nothing more is below; the daemon is told later."""
    fake, client = make_fake(counters=4096), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 5), coloured(5)
    fill(fake, space, chain, blocks[:in_host], in_host)
    into = np.zeros_like(blocks)
    result = space.load(chain, into)
    assert (result.blocks, result.reason) == (in_host, "absent")
    assert (into[:in_host] == blocks[:in_host]).all()
    assert not calls_of(fake)
    eventually(lambda: sum(r.missed_blocks for r in fake.called("Report")) == 5 - in_host)


def test_a_lease_over_nothing_costs_no_call(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(counters=4096), make_client()
    space = open_space(client)
    window = client.namespace(NamespaceId(b"w" * 32), LAYOUT, window_tokens=64)
    chain = chain_of(space, 3)
    assert space.lease(chain).reason == "absent"
    assert client.match_groups([chain, chain_of(window, 3)]).reason == "absent"
    assert not calls_of(fake)
    window.lease(chain_of(window, 3))
    assert calls_of(fake) == {"Match"}, "a window may begin behind blocks that nobody has"
    client.close()
    told = fake.called("Report")
    assert sum(report.missed_blocks for report in told) == 3 + 2 * 3
    assert sum(report.missed_tokens for report in told) == 48 + 48, "the same tokens twice"


@pytest.mark.parametrize("counted", [3, 1, 0])
def test_a_prefix_is_counted_once_by_the_daemon_or_by_its_client(
    make_fake: Make, make_client: Make, counted: int
) -> None:
    """Host memory has three of five blocks: a Match that finds no more has counted these, one that
    a plan cut its first; one that was not answered none."""
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 3), coloured(3)
    fill(fake, space, chain, blocks, 3)
    if not counted:
        fake.fail_with["Match"] = Overloaded("busy")
    elif counted < 3:
        fake.ready.pop(chain[counted])
    prefix = find(space, np.arange(5 * 16, dtype=np.uint32), 5, SECONDS)
    assert (prefix.blocks, bool(prefix.reason)) == (3, True)
    assert "Match" in calls_of(fake)
    prefix.end(3)
    client.close()
    used = [group.fingerprints for report in fake.called("Report") for group in report.used]
    assert b"".join(used) == chain.part(counted, 3)


def test_what_may_be_below_is_asked_for(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(counters=4096), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 4), coloured(4)
    fill(fake, space, chain, blocks, 2)
    names = np.frombuffer(b"".join(chain[at] for at in (2, 3)), np.uint8).reshape(2, 32)
    fake.directory.count_below(names, 1)
    into = np.zeros_like(blocks)
    result = space.load(chain, into)
    assert (result.blocks, result.from_host, result.from_nvme) == (4, 2, 2)
    assert (into == blocks).all()


def test_a_failed_block_ends_the_prefix(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 5), coloured(5)
    fill(fake, space, chain, blocks, 1)
    fake.on_disk[chain[3]] = b"broken"
    into = np.zeros_like(blocks)
    result = space.load(chain, into)
    assert (result.blocks, result.from_nvme, result.reason) == (3, 2, "failed")
    assert (into[:3] == blocks[:3]).all()


def test_the_deadline_ends_a_load_with_what_has_come(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 4), coloured(4)
    fill(fake, space, chain, blocks, 3)
    fake.part_pause.clear()
    into = np.zeros_like(blocks)
    result = space.load(chain, into, deadline_seconds=0.1)
    assert result.blocks == 3
    assert "deadline" in result.reason.lower(), "whoever noticed it first"
    assert (into[:3] == blocks[:3]).all()


@pytest.mark.parametrize("verb", ["Match", "Load"])
def test_when_the_daemon_refuses_the_host_prefix_is_still_served(
    make_fake: Make, make_client: Make, verb: str
) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 4), coloured(4)
    fill(fake, space, chain, blocks, 2)
    fake.fail_with[verb] = Overloaded("too many calls")
    into = np.zeros_like(blocks)
    result = space.load(chain, into)
    assert (result.blocks, result.reason) == (2, "Overloaded: too many calls")
    assert (into[:2] == blocks[:2]).all()


def test_a_promoted_slot_that_is_lost_before_the_last_check_is_a_miss(
    make_fake: Make, make_client: Make
) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 2), coloured(2)
    fill(fake, space, chain, blocks, 1)
    lease = space.lease(chain)
    assert [ready.first for ready in lease.load()] == [0, 1, 1]
    assert lease.valid()
    fake.evict(chain[1])
    assert not lease.valid()


# ---------------------------------------------------------------- without an ordered directory


def test_other_processors_read_under_leases_only(
    make_fake: Make, make_client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "STORE_ORDER_TRUSTED", False)
    monkeypatch.setattr("kvstore.client.core.STORE_ORDER_TRUSTED", False)
    fake, client = make_fake(), make_client()
    assert "leases" in client.directory_reads.reason
    assert not client.directory_reads.enabled
    space = open_space(client)
    chain, blocks = chain_of(space, 3), coloured(3)
    fill(fake, space, chain, blocks, 2)
    assert space.match(chain) == 2
    into = np.zeros_like(blocks)
    assert space.load(chain, into).blocks == 3
    assert (into == blocks).all()
    assert {"Exists", "Match", "Load"} <= calls_of(fake)


# ---------------------------------------------------------------- leases


def test_lease_views(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client, TWO_RANKS)
    chain, blocks = chain_of(space, 3), coloured(3, TWO_RANKS)
    fill(fake, space, chain, blocks, 2)
    with space.lease(chain) as lease:
        assert lease.blocks == 3
        assert (lease.view(1) == blocks[1]).all()
        assert (lease.rank_view(1, 1) == blocks[1][4096:]).all()
        assert not lease.view(0).flags.writeable
        with pytest.raises(InvalidRequest, match="not readable yet"):
            lease.view(2)
        with pytest.raises(InvalidRequest, match="not leased"):
            lease.view(3)
        parts = [(ready.first, ready.parts) for ready in lease.load(layer_order=True)]
        assert parts == [(0, (0, 1)), (2, (0,)), (2, (1,))]
        assert (lease.view(2)[4096:] == blocks[2][4096:]).all()
        assert (lease.view(2)[:4000] == blocks[2][:4000]).all()
        assert lease.valid()
    with pytest.raises(LeaseUnknown):
        lease.view(0)
    eventually(lambda: not fake.leases)
    lease.release()
    assert len(fake.called("Release")) == 1


def test_lease_runs_out_and_is_renewed(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(read_seconds=0.1), make_client()
    space = open_space(client)
    chain = chain_of(space, 1)
    fill(fake, space, chain, coloured(1), 1)
    lease = space.lease(chain)
    assert lease.renew() == pytest.approx(0.1)
    eventually(lambda: not lease.seconds_left)
    with pytest.raises(LeaseExpired, match="renew"):
        lease.view(0)
    with pytest.raises(LeaseExpired):
        lease.renew()
    assert lease.valid(), "its slots did not change, whatever the clock says"


def test_a_lease_the_daemon_does_not_know_is_a_typed_error(
    make_fake: Make, make_client: Make
) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain = chain_of(space, 2)
    fill(fake, space, chain, coloured(2), 1)
    lease = space.lease(chain)
    fake.leases.clear()
    with pytest.raises(LeaseUnknown):
        lease.renew()
    with pytest.raises(LeaseUnknown):
        list(lease.load())


def test_a_miss_and_an_absent_daemon_give_empty_leases(make_fake: Make, make_client: Make) -> None:
    client = make_client(wait=False)
    space = open_space(client)
    lease = space.lease(chain_of(space, 2))
    assert (lease.blocks, lease.reason, lease.valid()) == (0, "away", False)
    make_fake()
    assert client.wait_connected(SECONDS)
    with space.lease(chain_of(space, 2)) as lease:
        assert lease.blocks == 0
        assert list(lease.groups[0].tiers) == []
    with pytest.raises(LeaseUnknown):
        next(lease.load())


def test_one_lease_over_several_groups(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    full = open_space(client)
    window = client.namespace(NamespaceId(b"w" * 32), LAYOUT, window_tokens=32)
    names = [chain_of(full, 3), chain_of(window, 3)]
    blocks = coloured(6)
    fill(fake, full, names[0], blocks[:3], 3)
    fill(fake, window, names[1], blocks[3:], 2)
    with client.match_groups(names, prompt_tokens=48) as lease:
        assert lease.boundary_tokens == 48
        assert [(r.group, r.first, r.count) for r in lease.load()] == [
            (0, 0, 3),
            (1, 0, 2),
            (1, 2, 1),
            (1, 2, 1),
        ]
        for group in range(2):
            for block in range(3):
                assert (lease.view(block, group) == blocks[3 * group + block]).all()
        assert lease.valid()
    (request,) = fake.called("Match")
    assert request.prompt_tokens == 48
    stranger = BlockLayout(16, 1, 4096)
    other = make_client().namespace(NamespaceId(b"q" * 32), stranger)
    with pytest.raises(InvalidRequest, match="no handle"):
        client.match_groups([chain_of(other, 1)])


def test_views_outlive_the_client_and_new_ones_are_refused(
    make_fake: Make, make_client: Make
) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 1), coloured(1)
    fill(fake, space, chain, blocks, 1)
    lease = space.lease(chain)
    view = lease.view(0)
    client.close()
    assert (view == blocks[0]).all()
    with pytest.raises(InvalidRequest, match="closed"):
        lease.view(0)


def test_a_lease_of_a_dead_daemon(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 1), coloured(1)
    fill(fake, space, chain, blocks, 1)
    lease = space.lease(chain)
    fake.kill()
    eventually(lambda: not client.connected)
    with pytest.raises(PeerGone):
        lease.view(0)
    make_fake()
    assert client.wait_connected(SECONDS)
    assert not lease.valid(), "the next life voided it"
