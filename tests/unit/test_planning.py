"""Matches with a plan, late loads, announced blocks, hints and predictions, through the verbs."""

from __future__ import annotations

import numpy as np
import pytest
from store_kit import LAYOUT, counters, on_nvme_only, rows_of, tokens

from kvstore.errors import InvalidRequest
from kvstore.hints import HINT_CLASSES, SESSION, SYSTEM_PROMPT, Hint
from kvstore.policy import UNKNOWN_REQUEST
from kvstore.rpc import control_pb2 as pb
from kvstore.store import READY
from kvstore.testing.engine import Lease, LeasedBlocks
from kvstore.types import Tier

BLOCKS = 24
PROMPT = BLOCKS * LAYOUT.block_tokens + 2


@pytest.fixture
def below(make_harness):
    """A chain on NVMe only."""
    harness = make_harness()
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(BLOCKS))
    on_nvme_only(harness, space, chain, engine)
    return harness, space, engine, chain


def teach(harness, engine, space, seconds_per_token, *, count=5):
    """Prefill times, as an engine reports them."""
    times = [
        pb.PrefillTime(
            namespace=space.id,
            start_tokens=0,
            end_tokens=100 * (1 + at),
            seconds=100 * (1 + at) * seconds_per_token,
        )
        for at in range(count)
    ]
    request = pb.ReportRequest(client=engine.client, prefills=times)
    harness.wait(engine.call("Report", request))
    harness.sleep(0.5)


def match(harness, engine, space, chain, *, begin_load=False, **ability):
    request = pb.MatchRequest(
        client=engine.client,
        groups=[pb.Group(namespace=space.id, fingerprints=chain.joined)],
        want_lease=True,
        begin_load=begin_load,
        plan=pb.Ability(prompt_tokens=PROMPT, **ability),
    )
    return harness.wait(engine.call("Match", request))


def test_without_prefill_times_there_is_no_plan_and_all_is_offered(below):
    harness, space, engine, chain = below
    reply = match(harness, engine, space, chain)
    assert not reply.HasField("plan")
    assert reply.groups[0].blocks == BLOCKS


def test_a_cheap_load_is_made_whole(below):
    harness, space, engine, chain = below
    teach(harness, engine, space, 1.0)
    reply = match(harness, engine, space, chain)
    assert (reply.plan.first, reply.plan.last, reply.groups[0].blocks) == (0, BLOCKS, BLOCKS)
    assert reply.plan.ttft_seconds < reply.plan.recompute_seconds
    assert reply.plan.seconds_per_token == pytest.approx(1.0, rel=0.2)
    assert reply.lease
    assert not reply.short_reason


def test_a_load_that_loses_is_not_made_and_some_of_it_comes_up_later(below):
    harness, space, engine, chain = below
    teach(harness, engine, space, 1e-6)
    before = counters(harness, "missed_blocks:absent", "missed_blocks:planned")
    reply = match(harness, engine, space, chain)
    assert (reply.lease, reply.boundary_tokens, reply.short_reason) == (0, 0, "planned")
    assert reply.plan.ttft_seconds == reply.plan.recompute_seconds
    after = counters(harness, "missed_blocks:absent", "missed_blocks:planned")
    assert [new - old for new, old in zip(after, before, strict=True)] == [0, BLOCKS]
    harness.sleep(1.0)
    state = harness.store.catalog.host_state[rows_of(harness, chain)]
    assert (state[:8] == READY).all()
    assert not (state[8:] == READY).any()


def test_a_slow_link_makes_the_load_short_for_one_engine_and_meet_for_another(below):
    harness, space, engine, chain = below
    block_seconds = 0.1
    for _ in range(20):
        harness.store.costs.link_seen(Tier.NVME, LAYOUT.block_bytes, block_seconds)
        harness.store.costs.link_seen(Tier.NVME, 10 * LAYOUT.block_bytes, 10 * block_seconds)
    teach(harness, engine, space, block_seconds / LAYOUT.block_tokens)
    reply = match(harness, engine, space, chain, unit_blocks=2, begin_load=True)
    assert reply.plan.from_back
    assert 0 < reply.plan.first < BLOCKS * 0.6
    assert reply.plan.last == reply.groups[0].blocks == BLOCKS
    assert reply.plan.ttft_seconds < 0.7 * reply.plan.recompute_seconds
    harness.sleep(1.0)
    state = harness.store.catalog.host_state[rows_of(harness, chain)]
    assert not (state[: reply.plan.first] == READY).any()
    assert (state[reply.plan.first :] == READY).all()


def test_a_planned_load_that_is_late_is_cut_at_what_came(make_harness):
    seconds = [1e-4]
    harness = make_harness(job_seconds=lambda random: seconds[0])
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(BLOCKS))
    on_nvme_only(harness, space, chain, engine)
    teach(harness, engine, space, 2e-4)
    reply = match(harness, engine, space, chain)
    assert reply.plan.last == BLOCKS
    seconds[0] = 0.5
    lease = Lease(
        reply.lease,
        reply.boundary_tokens,
        [LeasedBlocks.of(space, chain.joined, reply.groups[0])],
    )
    began = harness.clock.monotonic()
    reason = harness.wait(engine.bring_up(lease, deadline_seconds=2.0))
    waited = harness.clock.monotonic() - began
    assert reason == "late"
    assert waited <= 0.25 * reply.plan.recompute_seconds + 0.01
    harness.wait(engine.release(lease))


def test_announced_blocks_come_up_while_nothing_else_runs(below):
    harness, space, engine, chain = below
    longer = harness.chain(space, tokens(BLOCKS + 5))
    request = pb.PrefetchRequest(
        client=engine.client,
        groups=[pb.Group(namespace=space.id, fingerprints=longer.joined)],
    )
    assert harness.wait(engine.call("Prefetch", request)).accepted == BLOCKS
    assert harness.wait(engine.read_directory(space, chain)) == 0
    harness.sleep(1.0)
    assert harness.wait(engine.read_directory(space, chain)) == BLOCKS
    assert counters(harness, "prefetch_blocks:accepted", "prefetch_blocks:begun") == [BLOCKS] * 2
    # Asked again, all are there.
    assert harness.wait(engine.call("Prefetch", request)).accepted == BLOCKS
    assert counters(harness, "prefetch_blocks:accepted") == [BLOCKS]


def test_an_announcement_fills_at_most_its_share_of_the_tier(make_harness):
    harness = make_harness()
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    slots = harness.config.host.bytes // LAYOUT.slot_bytes
    chain = harness.chain(space, tokens(slots // 2))
    on_nvme_only(harness, space, chain, engine)
    request = pb.PrefetchRequest(
        client=engine.client,
        groups=[pb.Group(namespace=space.id, fingerprints=chain.joined)],
    )
    assert harness.wait(engine.call("Prefetch", request)).accepted == slots // 4
    assert counters(harness, "prefetch_blocks:refused") == [slots // 2 - slots // 4]


def test_hints_reach_the_policy_by_token_range(below, monkeypatch):
    harness, space, engine, chain = below
    seen = []
    plain = harness.store.policy.touched

    def touched(rows, now, request):
        seen.append((len(rows), request.hint, request.blocks, request.blocks_found))
        plain(rows, now, request)

    monkeypatch.setattr(harness.store.policy, "touched", touched)
    half = BLOCKS // 2 * LAYOUT.block_tokens
    hints = [pb.Hint(hint_class=1, end_tokens=half), pb.Hint(hint_class=99, start_tokens=half)]
    group = pb.Group(namespace=space.id, fingerprints=chain.joined, hints=hints)
    request = pb.MatchRequest(client=engine.client, groups=[group])
    harness.wait(engine.call("Match", request))
    harness.sleep(0.1)
    assert seen == [
        (BLOCKS // 2, 1, BLOCKS, BLOCKS),
        (BLOCKS // 2, HINT_CLASSES - 1, BLOCKS, BLOCKS),
    ]


def test_too_many_hints_are_refused(below):
    harness, space, engine, chain = below
    hints = [pb.Hint(hint_class=1)] * 65
    group = pb.Group(namespace=space.id, fingerprints=chain.joined, hints=hints)
    with pytest.raises(InvalidRequest):
        harness.wait(engine.call("Match", pb.MatchRequest(client=engine.client, groups=[group])))


def test_hints_of_stored_blocks_reach_the_policy_once_they_are_ready(make_harness, monkeypatch):
    harness = make_harness()
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(4))
    seen = []
    plain = harness.store.policy.inserted

    def inserted(rows, now, request=UNKNOWN_REQUEST):
        seen.append((len(rows), request.hint))
        plain(rows, now, request)

    monkeypatch.setattr(harness.store.policy, "inserted", inserted)
    held = harness.wait(engine.reserve(space, chain))
    engine.fill(space, held)
    request = pb.CommitRequest(
        client=engine.client,
        reservation=held.reservation,
        all_ranks=True,
        fingerprints=chain.joined,
        offsets=np.array(held.offsets, np.uint64).tobytes(),
        hint_classes=bytes([0, 0, 3, 200]),
    )
    harness.wait(engine.call("Commit", request))
    assert sorted(seen) == [(1, 3), (1, HINT_CLASSES - 1), (2, 0)]


def test_every_hint_has_a_class_of_its_own_kind():
    assert Hint().hint_class == 0
    assert Hint(is_session=True).hint_class == SESSION
    assert Hint(is_system_prompt=True, priority=1).hint_class == SYSTEM_PROMPT
    found = {
        Hint(priority=priority, next_use_seconds=soon, ttl_seconds=ttl).hint_class
        for priority in (-1, 0, 1)
        for soon, ttl in ((1, None), (100, None), (9999, None), (100, 50))
    }
    assert len(found) == 12
    assert min(found) > SESSION
    assert max(found) < HINT_CLASSES


def test_scores_predict_and_count_no_use(below):
    harness, space, engine, chain = below
    request = pb.ScoreRequest(namespace=space.id, fingerprints=chain.joined, prompt_tokens=PROMPT)
    assert harness.wait(engine.call("Score", request)).predicted_ttft_seconds == 0.0
    teach(harness, engine, space, 0.01)
    uses = harness.store.catalog.uses[rows_of(harness, chain)].copy()
    score = harness.wait(engine.call("Score", request))
    assert score.tokens_by_tier[Tier.NVME] == BLOCKS * LAYOUT.block_tokens
    assert 0 < score.predicted_ttft_seconds < score.recompute_seconds
    assert score.recompute_seconds == pytest.approx(PROMPT * 0.01, rel=0.5)
    harness.sleep(0.1)
    assert (harness.store.catalog.uses[rows_of(harness, chain)] == uses).all()


def test_what_was_learnt_outlives_the_daemon(below):
    harness, space, engine, chain = below
    teach(harness, engine, space, 1e-6)
    harness.stop()
    harness.start()
    engine = harness.engine()
    assert harness.store.costs.is_calibrated(space.index)
    assert match(harness, engine, harness.declare("a", LAYOUT), chain).short_reason == "planned"


def test_a_report_with_too_many_or_senseless_times_teaches_nothing(below):
    harness, space, engine, _ = below
    one = pb.PrefillTime(namespace=space.id, end_tokens=10, seconds=1.0)
    with pytest.raises(InvalidRequest):
        harness.wait(
            engine.call("Report", pb.ReportRequest(client=engine.client, prefills=[one] * 300))
        )
    bad = [
        pb.PrefillTime(namespace=space.id, end_tokens=10, seconds=seconds)
        for seconds in (0.0, -1.0, float("nan"), float("inf"), 1e9)
    ]
    bad += [pb.PrefillTime(namespace=space.id, start_tokens=9, end_tokens=9, seconds=1.0)] * 3
    bad += [pb.PrefillTime(namespace=space.id, end_tokens=1 << 60, seconds=1.0)] * 3
    harness.wait(engine.call("Report", pb.ReportRequest(client=engine.client, prefills=bad)))
    assert not harness.store.costs.is_calibrated(space.index)
