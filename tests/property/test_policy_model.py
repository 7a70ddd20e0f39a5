"""Every policy, through catalog and picker, against naive models over random requests."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench import replay_models
from bench.replay_cache import MODEL_8B, Tiers, replay, times_of
from bench.replay_traces import Trace, make
from kvstore.policies import NAMES
from kvstore.types import ReplicaState, Tier

READY = int(ReplicaState.READY)


def requests(rng: random.Random, count: int, trees: int) -> Iterator[tuple[float, list[int]]]:
    """Chains through random trees: a node's number stands for its whole path."""
    children: dict[int, list[int]] = {}
    number = iter(range(1_000_000))
    roots = [next(number) for _ in range(trees)]
    now = 0.0
    for _ in range(count):
        now += rng.choice([0.0, 0.1, 3.0, 40.0])
        chain = [rng.choice(roots)]
        while rng.random() < 0.85 and len(chain) < 40:
            known = children.setdefault(chain[-1], [])
            if not known or rng.random() < 0.15:
                known.append(next(number))
            chain.append(rng.choice(known))
        yield now, chain


def trace_of(seed: int, count: int = 60, trees: int = 3) -> Trace:
    return make("random", requests(random.Random(seed), count, trees))


def check(tiers: Tiers) -> None:
    """Books and prefixes."""
    catalog = tiers.catalog
    for _ in catalog.check_integrity(lambda rows: np.ones(rows.size, np.bool_)):
        pass
    rows = np.arange(catalog.rows_end)
    host, nvme = catalog.host_state[rows] == READY, catalog.nvme_state[rows] == READY
    assert tiers.host.free + np.count_nonzero(host) == tiers.host.held.size
    assert tiers.nvme.free + np.count_nonzero(nvme) == tiers.nvme.held.size
    assert not catalog.pins[rows].any()
    parents = catalog.parent[rows]
    inner = parents >= 0
    assert (~host | ~inner | host[parents] | nvme[parents]).all(), "a way to every host block"
    assert (~nvme | ~inner | nvme[parents]).all(), "NVMe is prefix-closed by itself"


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(NAMES),
    host=st.integers(1, 60),
    nvme=st.sampled_from([0, 30, 200]),
    on_demotion=st.booleans(),
)
@example(seed=1105, name="lfu", host=37, nvme=30, on_demotion=True)
def test_books_and_prefixes_hold_after_every_request(seed, name, host, nvme, on_demotion):
    trace = trace_of(seed, 40)
    budget = float(seed % 3) * 1e8
    tiers = Tiers(
        name, host, nvme, write_on_demotion=on_demotion, write_bytes_per_second=budget, seed=seed
    )
    for number, now in enumerate(times_of(trace).tolist()):
        blocks = trace.blocks[trace.starts[number] : trace.starts[number + 1]]
        free, before = tiers.host.free, tiers.outcome.evicted_blocks
        stored = tiers.outcome.stored_blocks
        tiers.request(trace.names[blocks].tobytes(), now)
        gone = tiers.outcome.evicted_blocks - before
        came = tiers.outcome.stored_blocks - stored
        if not nvme:
            assert gone == max(0, came - free), "exactly what was missing leaves"
        check(tiers)


class OneByOne(Tiers):
    """Evicts as the naive model does: a block, then a look at who is next."""

    def _make_room(self, count: int, now: float) -> int:
        while self.host.free < count:
            victims = self.picker.pick(self.host.held, Tier.HOST, 1, now)
            if not victims.size:
                break
            self._drop_host(victims, now)
        return min(count, self.host.free)


def saved_by_lru(seed: int, share: float, kind: type[Tiers]) -> tuple[float, float]:
    """Ours and the naive one's, in a room that holds every request."""
    trace = trace_of(seed, 80)
    longest = int(np.diff(trace.starts).max())
    room = max(longest, int(trace.unique * share))
    ours = replay(trace, kind("lru", room)).saved_seconds
    return ours, replay_models.lru(trace, room, MODEL_8B)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), share=st.floats(0.05, 0.9))
def test_block_by_block_the_plain_policy_is_lru(seed, share):
    """Where all slots are ranked, the product's LRU is the naive one."""
    ours, naive = saved_by_lru(seed, share, OneByOne)
    assert ours == pytest.approx(naive)


def test_many_blocks_at_a_time_cost_the_plain_policy_little():
    """Victims chosen together are not always the naive model's: either may save a little more."""
    shares = np.random.default_rng(5).uniform(0.05, 0.9, 40)
    pairs = [saved_by_lru(seed, share, Tiers) for seed, share in enumerate(shares.tolist())]
    ours, naive = np.array(pairs).sum(axis=0)
    assert ours == pytest.approx(naive, rel=0.01)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(NAMES), share=st.floats(0.05, 0.9))
def test_nobody_saves_more_than_hindsight_and_its_bounds(seed, name, share):
    trace = trace_of(seed, 60)
    room = max(1, int(trace.unique * share))
    ours = replay(trace, Tiers(name, room))
    whole = replay_models.infinite(trace, MODEL_8B)
    best = replay_models.upper_bound(trace, room, MODEL_8B)
    tokens = sum(ours.hit_lengths)
    assert ours.saved_seconds <= whole * (1 + 1e-9)
    assert replay_models.hindsight(trace, room, MODEL_8B) <= min(best, whole) * (1 + 1e-9)
    assert tokens <= sum(replay(trace, Tiers("lru", trace.unique)).hit_lengths)


def test_an_infinite_tier_saves_what_an_infinite_cache_does():
    trace = trace_of(7, 200)
    ours = replay(trace, Tiers("value", trace.unique)).saved_seconds
    assert ours == pytest.approx(replay_models.infinite(trace, MODEL_8B))


def hot_hits(name: str, *, is_scanned: bool) -> float:
    """Share of a hot set, a fifth of the tier, that hits while a scan of ten tiers goes by."""
    room, chain = 200, 4
    hot = [list(range(at, at + chain)) for at in range(0, room // 5, chain)]
    rng = random.Random(1)
    found: list[float] = []
    tiers = Tiers(name, room)
    names = np.random.default_rng(3).integers(0, 256, (100_000, 32), np.uint8)
    new = room
    for step in range(500 + 10 * room // chain):
        # Ten hot requests for each two of the scan: every hot chain comes back after a while.
        blocks = rng.choice(hot)
        hits = tiers.request(names[blocks].tobytes(), 1.0 + step)
        if step >= 500:
            found.append(hits / chain)
            if is_scanned:
                tiers.request(names[new : new + chain].tobytes(), 1.5 + step)
                new += chain
    return float(np.mean(found))


def test_a_scan_leaves_the_hot_set_alone():
    assert hot_hits("value", is_scanned=True) >= hot_hits("value", is_scanned=False) - 0.05
