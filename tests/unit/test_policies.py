"""What each policy keeps, and what the value policy learns, by example."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvstore.catalog import ABSENT_ROW, Catalog
from kvstore.config import NvmeConfig
from kvstore.costs import Costs
from kvstore.errors import ConfigError
from kvstore.policies import NAMES, make_policy
from kvstore.policies.costs import BlockCosts
from kvstore.policies.ghosts import WAYS, Ghosts, Remembered
from kvstore.policies.hazard import Hazard, Intervals
from kvstore.policies.shadow import Shadow
from kvstore.policies.value import ValuePolicy
from kvstore.policies.wear import WearPrice, bytes_per_second
from kvstore.policy import RequestShape, VictimPicker
from kvstore.types import NamespaceId, ReplicaState, Tier

READY, ABSENT = ReplicaState.READY, ReplicaState.ABSENT
LENGTH = 1 << 20
PROMPT = RequestShape(blocks=4, blocks_found=0)


class Measured(Costs):
    """Nothing was guessed."""

    def is_calibrated(self, namespace_index: int) -> bool:
        return True


class Tiers:
    """A catalog with room in both tiers, a policy, and its picker."""

    def __init__(
        self, name: str, slots: int = 4096, budget: float = 0.0, known: Costs | None = None
    ) -> None:
        self.catalog = Catalog(host_slots=slots, nvme_slots=slots)
        costs = BlockCosts(self.catalog, known or Measured(), np.array([16, 64, 0]))
        self.policy = make_policy(name, self.catalog, costs, WearPrice(budget))
        self.picker = VictimPicker(
            self.catalog, self.policy, np.zeros(3, np.bool_), np.random.default_rng(1)
        )
        self.held = np.arange(slots)
        self.free = list(range(slots))[::-1]
        self.names = np.random.default_rng(5)

    def store(
        self,
        blocks: int,
        now: float,
        *,
        name: bytes = b"",
        namespace: int = 0,
        length: int = LENGTH,
    ):
        rows = self.catalog.add_chain(
            name or self.names.bytes(32 * blocks),
            parent=ABSENT_ROW,
            namespace=namespace,
            clear_count=0,
            depth=0,
            length=length,
        )
        slots = np.array([self.free.pop() for _ in range(blocks)])
        self.catalog.set_host(rows, READY, slots)
        self.policy.inserted(rows, now, PROMPT)
        return rows

    def write(self, rows) -> None:
        self.catalog.set_nvme(rows, READY, rows, np.ones(rows.size, np.uint64))

    def evict(self, rows, now: float) -> None:
        self.free += self.catalog.host_slot[rows].tolist()
        self.catalog.set_host(rows, ABSENT)
        self.policy.evicted(rows, Tier.HOST, now)
        self.catalog.remove_if_bare(rows)

    def choose(self, count: int, now: float, tier: Tier = Tier.HOST) -> list[int]:
        return self.picker.choose(self.held, tier, count, now).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_takes_leaves_first_and_what_is_asked(name):
    tiers = Tiers(name)
    first, second = tiers.store(6, 1.0), tiers.store(6, 2.0)
    chosen = tiers.choose(4, 10.0)
    assert len(chosen) == 4
    for chain in (first, second):
        gone = [row for row in chosen if row in chain]
        assert gone == chain[::-1][: len(gone)].tolist()
    tiers.evict(np.array(chosen), 10.0)
    assert len(tiers.choose(100, 11.0)) == 8


@pytest.mark.parametrize("name", NAMES)
def test_what_is_held_in_place_is_never_chosen(name):
    tiers = Tiers(name)
    rows = tiers.store(5, 1.0)
    tiers.catalog.leases[rows[2]] += 1
    assert tiers.choose(5, 9.0) == rows[[4, 3]].tolist()
    tiers.catalog.pins[rows[4]] += 1
    assert tiers.choose(5, 9.0) == []


def test_a_name_that_no_policy_has():
    with pytest.raises(ConfigError, match=r"policy\.name='best'.*value, lru"):
        Tiers("best")


def test_lfu_keeps_what_is_used_more_often():
    tiers = Tiers("lfu")
    often, once = tiers.store(1, 1.0), tiers.store(1, 5.0)
    tiers.policy.touched(often, 2.0)
    assert tiers.choose(1, 9.0) == once.tolist()


@pytest.mark.parametrize("name", ["arc", "s3fifo"])
def test_a_block_that_comes_back_is_held_above_new_ones(name):
    tiers = Tiers(name)
    name_of_one = tiers.names.bytes(32)
    back = tiers.store(1, 1.0, name=name_of_one)
    tiers.evict(back, 2.0)
    new = [tiers.store(1, 3.0 + number) for number in range(8)]
    back = tiers.store(1, 3.0, name=name_of_one)
    assert back[0] not in tiers.choose(4, 20.0)
    assert set(tiers.choose(4, 20.0)) <= {int(rows[0]) for rows in new}


# ---------------------------------------------------------------------- value


def learnt(tiers: Tiers, now: float, *, rounds: int = 60) -> float:
    """Chains used twice come back every 10 s, those used once never; the time after that."""
    regulars = [tiers.store(4, now) for _ in range(24)]
    for _ in range(rounds):
        now += 10.0
        for rows in regulars:
            tiers.policy.touched(rows, now, RequestShape(4, 4))
        tiers.evict(tiers.store(4, now)[::-1], now + 5.0)
    return now


def test_without_data_the_oldest_leaf_goes_first():
    tiers = Tiers("value")
    rows = [tiers.store(1, 1.0 + number) for number in range(5)]
    assert tiers.choose(2, 100.0) == [rows[0][0], rows[1][0]]


def test_a_block_that_classes_like_it_re_use_is_kept_over_a_newer_one():
    tiers = Tiers("value")
    now = learnt(tiers, 1.0)
    regular = tiers.store(1, now)
    tiers.policy.touched(regular, now + 1.0, RequestShape(1, 1))
    new = tiers.store(1, now + 5.0)
    assert np.diff(tiers.policy.scores(np.append(new, regular), Tier.HOST, now + 6.0))[0] > 0


def test_what_is_used_again_soon_has_a_higher_index_than_what_never_is():
    tiers = Tiers("value")
    now = learnt(tiers, 1.0)
    hazard = tiers.policy._learner.hazard
    often, once = np.array([4 * 9 + 3]), np.array([4 * 1])
    assert hazard.index(often, np.array([5.0])) > hazard.index(once, np.array([5.0]))
    assert hazard.chance(often, np.array([5.0]), 10.0) > hazard.chance(once, np.array([5.0]), 10.0)
    assert now > 0


def test_a_returning_block_is_remembered():
    tiers = Tiers("value")
    name = tiers.names.bytes(32)
    rows = tiers.store(1, 1.0, name=name)
    tiers.policy.touched(rows, 2.0)
    tiers.evict(rows, 3.0)
    back = tiers.store(1, 9.0, name=name)
    assert tiers.catalog.uses[back[0]] == 2


def test_coming_back_into_a_faster_tier_is_no_use():
    tiers = Tiers("value")
    rows = tiers.store(2, 1.0)
    tiers.policy.inserted(rows, 5.0)
    assert tiers.catalog.uses[rows].tolist() == [0, 0]
    assert tiers.catalog.last_use[rows].tolist() == [1.0, 1.0]


def test_one_request_is_one_use():
    tiers = Tiers("value")
    rows = tiers.store(2, 1.0)
    tiers.policy.touched(np.concatenate([rows, rows]), 2.0)
    assert tiers.catalog.uses[rows].tolist() == [1, 1]


def test_deep_blocks_and_those_without_a_copy_are_worth_more():
    tiers = Tiers("value")
    rows = tiers.store(2000, 1.0)
    scores = tiers.policy.scores(rows, Tier.HOST, 10.0)
    assert scores[-1] > scores[0]
    tiers.write(rows)
    copied = tiers.policy.scores(rows, Tier.HOST, 10.0)
    assert (copied <= scores).all()
    assert copied[-1] < scores[-1]


def test_on_nvme_only_what_loading_spares_counts():
    tiers = Tiers("value")
    rows = tiers.store(1, 1.0)
    assert tiers.policy.scores(rows, Tier.NVME, 2.0) < tiers.policy.scores(rows, Tier.HOST, 2.0)


def test_bytes_count_where_block_sizes_differ():
    tiers = Tiers("value")
    small, large = tiers.store(1, 1.0, namespace=0), tiers.store(1, 1.0, namespace=1)
    density = tiers.policy._learner.density
    # 64 tokens in as many bytes as 16.
    assert density[large[0]] == pytest.approx(4 * density[small[0]], rel=0.01)
    assert tiers.policy.scores(large, Tier.HOST, 5.0) > tiers.policy.scores(small, Tier.HOST, 5.0)


def test_beliefs_that_change_are_taken_over_with_the_next_fit():
    costs = Costs()
    costs.declare(0, NamespaceId(b"n" * 32))
    tiers = Tiers("value", known=costs)
    rows = tiers.store(4, 1.0)
    before = tiers.policy._learner.density[rows]
    for _ in range(3):
        costs.prefill_seen(0, 0, 1024, 60.0)
    while costs.refresh():
        pass
    learnt(tiers, 1.0)
    assert (tiers.policy._learner.density[rows] > 10 * before).all()


def test_a_hint_is_a_class_of_its_own():
    tiers = Tiers("value")
    for round_ in range(200):
        now = 1.0 + 10.0 * round_
        rows = tiers.store(4, now)
        tiers.policy.touched(rows, now + 1.0, RequestShape(4, 4, hint=2))
        tiers.policy.touched(rows, now + 4.0, RequestShape(4, 4, hint=2))
        tiers.evict(rows[::-1], now + 9.0)
    plain, hinted = tiers.store(1, 5000.0), tiers.store(1, 5000.0)
    tiers.policy.touched(plain, 5001.0, RequestShape(1, 1))
    tiers.policy.touched(hinted, 5001.0, RequestShape(1, 1, hint=2))
    rows = np.concatenate([plain, hinted])
    assert np.diff(tiers.policy.scores(rows, Tier.HOST, 5003.0))[0] > 0


def test_an_empty_nvme_tier_admits_everything_and_a_budget_less():
    assert Tiers("value").policy.admit(np.array([], np.int64), Tier.NVME, 1.0).size == 0
    free, poor = Tiers("value"), Tiers("value", budget=1.0)
    for tiers in (free, poor):
        for number in range(8):
            rows = tiers.store(4, 1.0 + number)
            admitted = tiers.policy.admit(rows, Tier.NVME, 1.0 + number)
        assert admitted.all() == (tiers is free)
    assert free.policy.wear_refusals == 0
    assert not admitted.any()
    assert poor.policy.wear_refusals > 0


def test_what_nobody_has_measured_is_worth_a_load():
    """A guess would say: 16 tokens in 4 MiB are computed sooner than they are loaded."""
    for costs, admitted in ((Measured(), False), (Costs(), True)):
        tiers = Tiers("value", known=costs)
        rows = tiers.store(4, 1.0, length=4 << 20)
        assert tiers.policy.admit(rows, Tier.NVME, 1.0).tolist() == [admitted] * 4


def test_what_nvme_admits_is_a_prefix_of_each_chain():
    tiers = Tiers("value", budget=2e6)
    for number in range(50):
        rows = tiers.store(40, 1.0 + number)
        admitted = tiers.policy.admit(rows, Tier.NVME, 1.0 + number)
        assert (np.diff(admitted.astype(int)) <= 0).all()


# ---------------------------------------------------------------------- its parts


def groups_of(classes: int) -> np.ndarray:
    return np.arange(classes)


def test_before_data_the_index_falls_with_age():
    hazard = Hazard(groups_of(1))
    ages = np.array([1.0, 4.0, 16.0, 64.0])
    index = hazard.index(np.zeros(4, np.int64), ages)
    assert (np.diff(index) < 0).all()
    assert index == pytest.approx(1 / ages, rel=0.6)


def test_open_intervals_lower_the_chance():
    sure, rare = Hazard(groups_of(1)), Hazard(groups_of(1))
    for hazard in (sure, rare):
        hazard.closed(np.zeros(2000, np.int64), np.full(2000, 30.0))
    sure.fit(Intervals(1))
    waiting = Intervals(1)
    waiting.add(np.zeros(20000, np.int64), np.full(20000, 100.0))
    rare.fit(waiting)
    at, now = np.zeros(1, np.int64), np.zeros(1)
    assert sure.chance(at, now, 60.0) > 0.8
    assert rare.chance(at, now, 60.0) == pytest.approx(2000 / 22000, rel=0.3)


def test_ghosts_are_found_once_and_the_oldest_make_way():
    ghosts = Ghosts()
    keys = np.arange(1, ghosts.slots * 2 + 1, dtype=np.uint32)
    for key in keys:
        ghosts.put(np.array([key]), Remembered(np.array([float(key)]), np.array([3], np.uint16)))
    found, known = ghosts.take(keys)
    assert found.size == ghosts.slots
    assert known.last_use.min() > ghosts.slots
    assert ghosts.take(keys)[0].size == 0


def test_several_ghosts_of_one_set_are_put_at_once():
    ghosts = Ghosts()
    sets = ghosts.slots // WAYS
    keys = np.arange(12, dtype=np.uint32) * np.uint32(sets) + np.uint32(5)
    lost = ghosts.put(keys, Remembered(np.arange(12.0), np.arange(12, dtype=np.uint16)))
    assert lost.marks.tolist() == [0, 1, 2, 3]
    found, known = ghosts.take(keys)
    assert dict(zip(found.tolist(), known.marks.tolist(), strict=True)) == {
        at: at for at in range(4, 12)
    }


def test_ghosts_survive_growth():
    ghosts = Ghosts()
    keys = np.random.default_rng(1).integers(1, 1 << 31, 200).astype(np.uint32)
    ghosts.put(keys, Remembered(np.arange(200.0), np.full(200, 7, np.uint16)))
    ghosts.grow(4000)
    assert ghosts.slots >= 4000
    assert ghosts.take(keys)[0].size == 200


def lru_saves(shadow: Shadow, last_use: float, now: float) -> bool:
    """Whether the shadow thinks that LRU would still hold a block used last then."""
    before = shadow._saved
    shadow.used([(1, last_use, 1.0)], now, held=False)
    return shadow._saved > before


def test_the_shadow_holds_the_blocks_used_last():
    shadow = Shadow()
    shadow.room = 100
    for now in range(1, 1001):
        shadow.used([(1, -np.inf, 0.0)], float(now), held=False)
    held = [lru_saves(shadow, float(at), 1000.0) for at in (1, 500, 880, 920, 950, 1000)]
    assert held == [False, False, False, True, True, True]


def test_a_window_is_all_that_a_bad_order_can_lose():
    """LRU saves 10 s a window; the value order loses some of it again and again."""
    shadow = Shadow()
    shadow.room, now, lost = 2048, 1.0, 0.0
    led = []

    def window(won: float) -> None:
        nonlocal now, lost
        for _ in range(64):
            now += 1.0
            shadow.used([(62, -np.inf, 0.0)], now, held=False)
            shadow.used([(1, now - 1, 10 / 64)], now, held=True)
            if won and not shadow.is_leading:
                at, held = (-1.0, True) if won > 0 else (now - 1, False)
                shadow.used([(1, at, abs(won) / 64)], now, held=held)
                lost -= won / 64
        led.append(shadow.is_leading)

    for _ in range(3):
        window(0.0)
    assert not any(led)
    while not shadow.is_leading:
        window(-4.0)
    assert 8.0 < lost < 16.0
    led.clear()
    for _ in range(200):
        window(-4.0)
    assert led.count(True) > 150
    # What is won again ends that, and makes up for a loss later on.
    for _ in range(80):
        window(5.0)
    assert not shadow.is_leading
    lost = 0.0
    while not shadow.is_leading:
        window(-4.0)
    assert 16.0 < lost < 32.0


def test_the_wear_price_lets_as_much_through_as_the_budget():
    wear = WearPrice(1e6)
    rng = np.random.default_rng(2)
    written = 0.0
    for now in range(1, 2001):
        values, sizes = rng.random(4) * 1e-9, np.full(4, 1e6)
        wear.offer(values, sizes, float(now))
        chosen = sizes[values > wear.price].sum()
        wear.spend(chosen)
        written += chosen
    assert written == pytest.approx(2000 * 1e6, rel=0.15)


def test_the_smaller_budget_counts():
    assert bytes_per_second(NvmeConfig()) == 0.0
    twice = NvmeConfig(bytes_max=86400, drive_writes_per_day=2.0)
    assert bytes_per_second(twice) == 2.0
    assert bytes_per_second(msgspec.structs.replace(twice, write_bytes_per_day=86400)) == 1.0


def test_memory_beside_the_catalog_stays_small():
    tiers = Tiers("value", slots=1 << 15)
    for number in range(1 << 7):
        tiers.store(256, 1.0 + number)
    for number in range(1 << 7):
        rows = np.array(tiers.choose(256, 4000.0 + number))
        tiers.evict(rows, 4000.0 + number)
        tiers.store(rows.size, 4000.0 + number)
    assert isinstance(tiers.policy, ValuePolicy)
    assert tiers.policy.nbytes <= 64 * (1 << 15)
