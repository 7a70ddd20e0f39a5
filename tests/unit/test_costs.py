"""What is learnt about prefill and links: outliers, changes, restarts, damage."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.costs import (
    LINKS_GUESSED,
    Costs,
    LinkCost,
    ModelSize,
    PrefillCost,
)
from kvstore.types import NamespaceId, Tier

NAMESPACE = NamespaceId(b"n" * 32)
TRUE = PrefillCost(1e-4, 3e-9)
CALL_SECONDS = 0.01


def learnt(costs: Costs) -> Costs:
    while costs.refresh():
        pass
    return costs


def taught(samples: int, *, noise: float = 0.05, outliers: int = 0, seed: int = 1) -> Costs:
    costs, random = Costs(), np.random.default_rng(seed)
    costs.declare(0, NAMESPACE, ModelSize(8e9, 32, 4096))
    for number in range(samples):
        start = int(random.integers(0, 20_000))
        end = start + int(random.integers(16, 4000))
        seconds = CALL_SECONDS + TRUE.seconds(float(start), float(end))
        seconds *= random.normal(1.0, noise)
        costs.prefill_seen(0, start, end, seconds * (20 if number % 5 < outliers else 1))
    return learnt(costs)


def test_shape_gives_the_published_cost_of_a_block() -> None:
    cost = Costs.prefill_of_shape(8.03e9, 32, 4096, 4e14)
    assert cost.seconds(0.0, 512.0) == pytest.approx(0.0207, rel=0.01)
    assert cost.seconds(30_000.0, 30_512.0) == pytest.approx(2 * 0.0207, rel=0.05)


@pytest.mark.parametrize("outliers", [0, 1, 2])
def test_prefill_is_learnt_from_noisy_samples_of_which_two_in_five_are_far_off(outliers) -> None:
    costs = taught(40, outliers=outliers)
    found = costs.prefill(0)
    for start, end in ((0, 1000), (0, 20_000), (16_000, 20_000)):
        truth = TRUE.seconds(float(start), float(end))
        assert found.seconds(float(start), float(end)) == pytest.approx(truth, rel=0.1)
    assert costs.call_seconds(0) == pytest.approx(CALL_SECONDS, rel=0.7)


def test_few_samples_scale_the_guess_and_three_are_a_calibration() -> None:
    costs = Costs()
    costs.declare(0, NAMESPACE, ModelSize(8e9, 32, 4096))
    guess = costs.prefill(0)
    for number in range(3):
        assert not costs.is_calibrated(0)
        costs.prefill_seen(0, 0, 1000 + number, 10 * guess.seconds(0.0, 1064.0))
        learnt(costs)
    assert costs.is_calibrated(0)
    ratio = costs.prefill(0).seconds(0.0, 8000.0) / guess.seconds(0.0, 8000.0)
    assert ratio == pytest.approx(10, rel=0.1)


def test_a_link_that_slows_down_and_recovers_is_believed_within_twenty_loads() -> None:
    costs, random = Costs(), np.random.default_rng(2)

    def loads(rate: float, count: int) -> float:
        for _ in range(count):
            size = int(random.integers(1 << 20, 64 << 20))
            costs.link_seen(Tier.NVME, size, 1e-3 + size / rate)
        return learnt(costs).link(Tier.NVME).seconds_per_byte * rate

    assert loads(1e9, 40) == pytest.approx(1, rel=0.05)
    assert loads(1e6, 20) == pytest.approx(1, rel=0.2)
    assert loads(1e9, 20) == pytest.approx(1, rel=0.2)


def test_one_hiccup_changes_nothing() -> None:
    costs = Costs()
    for _ in range(20):
        costs.link_seen(Tier.NVME, 8 << 20, 0.01)
    before = learnt(costs).link(Tier.NVME).seconds(float(8 << 20))
    costs.link_seen(Tier.NVME, 8 << 20, 5.0)
    assert learnt(costs).link(Tier.NVME).seconds(float(8 << 20)) == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_duration_is_ignored(seconds: float) -> None:
    costs = taught(10)
    before = costs.prefill(0)
    costs.prefill_seen(0, 0, 100, seconds)
    costs.prefill_seen(0, 100, 100, 1.0)
    costs.prefill_seen(7, 0, 100, 1.0)
    costs.link_seen(Tier.NVME, 0, 1.0)
    assert learnt(costs).prefill(0) == before
    assert costs.link(Tier.NVME) == LINKS_GUESSED[Tier.NVME]


def test_beliefs_outlive_a_restart_under_another_number() -> None:
    first = taught(40)
    first.link_seen(Tier.NVME, 1 << 20, 0.5)
    learnt(first)
    second = Costs()
    second.restore(first.snapshot())
    second.declare(5, NAMESPACE)
    learnt(second)
    assert second.is_calibrated(5)
    assert second.prefill(5).seconds(0.0, 8000.0) == pytest.approx(
        first.prefill(0).seconds(0.0, 8000.0), rel=0.05
    )
    assert second.link(Tier.NVME) == first.link(Tier.NVME)
    assert second.snapshot()["prefill"].keys() == first.snapshot()["prefill"].keys()


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"prefill": [], "links": {}},
        {"prefill": {"00": [[1.0]]}, "links": {}},
        {"prefill": {}, "links": {"ATTIC": []}},
        {"prefill": {}, "links": {"NVME": [["x", 1, 2]]}},
        [],
    ],
)
def test_a_damaged_snapshot_is_refused_and_nothing_is_taken(damaged) -> None:
    costs = Costs()
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        costs.restore(damaged)
    assert costs.link(Tier.NVME) == LINKS_GUESSED[Tier.NVME]
    assert costs.snapshot()["prefill"] == {}


def test_statistics_say_how_far_off_the_fit_is() -> None:
    [belief] = taught(40, noise=0.05).statistics()["prefill"].values()
    assert belief["samples"] == 40
    assert 0.01 < belief["relative_error"] < 0.1


def test_decoding_is_part_of_a_links_cost() -> None:
    assert LinkCost(1.0, 2.0, 3.0).seconds(10.0) == 51.0
