"""Loads that a plan shapes: the front computed while the back is loaded, bit for bit."""

from __future__ import annotations

import pytest
import torch
from kit import BLOCK, eventually, gemma, llama, plain, prompt, run, settled

from engine_adapter.meeting import BackLoad
from engine_adapter.prefix import Prefix
from kvstore.planner import Plan

STORED = 8


@pytest.fixture
def back_first(monkeypatch):
    """Every hit is a load from the back; the engine stops at a block the test chooses."""
    stop = [3]

    def made(prefix: Prefix) -> Plan:
        return Plan(0, prefix.blocks, True, 1.0, 2.0, 0.001, 1.0, 1.0)

    monkeypatch.setattr(Prefix, "plan", property(made))
    monkeypatch.setattr(
        BackLoad, "is_worth_computing", lambda self, block, start, end: block < stop[0]
    )
    return stop


@pytest.fixture
def stored(attach):
    """A prompt of eight blocks and a few tokens, its blocks stored."""

    def make(model):
        attached = attach(model)
        ids = prompt(STORED * BLOCK + 5)
        run(model, ids)
        settled(attached)
        return attached, ids

    return make


@pytest.mark.parametrize("model", [llama, gemma])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("meeting", [0, 3, STORED])
def test_front_and_back_together_are_the_bits_of_one_prefill(
    stored, back_first, model, dtype, meeting
):
    attached, ids = stored(model(dtype))
    back_first[0] = meeting
    found = run(attached.model, ids)
    assert found.differs(plain(attached, ids)) == 0
    last = attached.last
    assert last.met_at_tokens == meeting * BLOCK
    assert last.host_tokens == (STORED - meeting) * BLOCK
    assert last.reruns == 0


def test_what_the_load_does_not_bring_is_computed(stored, back_first, monkeypatch):
    attached, ids = stored(gemma())

    def nothing(load: BackLoad) -> None:
        with load._news:
            load._is_over = True
            load._news.notify_all()

    monkeypatch.setattr(BackLoad, "run", nothing)
    found = run(attached.model, ids)
    assert found.differs(plain(attached, ids)) == 0
    assert attached.last.met_at_tokens == STORED * BLOCK
    assert attached.last.hit_tokens == 0
    assert attached.last.miss_reason == "deadline"


def test_a_back_that_is_not_the_stored_bytes_any_more_is_computed_again(
    stored, back_first, monkeypatch
):
    attached, ids = stored(llama())
    monkeypatch.setattr(BackLoad, "confirm", lambda self: "changed")
    found = run(attached.model, ids)
    assert found.differs(plain(attached, ids)) == 0
    assert attached.last.reruns == 1
    assert attached.last.hit_tokens == 0


def test_prefill_times_reach_the_daemon(attach):
    attached = attach(llama(), plan=True)
    handle = attached.namespace()
    for _ in range(4):
        run(attached.model, prompt(40))

    def learnt() -> bool:
        fit = attached.client.stat()["costs"]["prefill"].get(handle.id.hex()[:16])
        return fit is not None and fit["samples"] > 0

    eventually(learnt, "a sample of what prefill costs")
