"""Both halves of the vLLM connector on a real daemon, with an engine that paints its blocks.

Field cases VLLM-1, 2, 4, 7, 8, 10, 11, 15, 16. What the real engine does is told in tests/engines.
"""

from __future__ import annotations

import contextlib
import signal
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine_adapter.refusal import Refused
from engine_adapter.vllm_orders import WorkerReport
from engine_adapter.vllm_saves import ANSWER_TOKENS, ANSWERS_MAX
from engine_adapter.vllm_settings import Settings
from tests.conftest import DaemonProcess
from tests.e2e.kit import SECONDS_MAX, eventually, running
from tests.e2e.vllm_kit import BLOCK, DeviceEngine, FakeEngine, FakeRequest, lane


@pytest.fixture(scope="module")
def store() -> Iterator[DaemonProcess]:
    with running() as daemon:
        yield daemon


DEADLINE = 2.0
"""As in an engine: for those who wait for it."""
WHERE = {"host": FakeEngine, "device": DeviceEngine}
"""The engine's blocks lie in memory, or on the stand-in for a GPU."""


@pytest.fixture(params=WHERE)
def engine(store: DaemonProcess, request: pytest.FixtureRequest) -> Iterator[FakeEngine]:
    """One lane of its own: nothing that other tests stored is found."""
    with WHERE[request.param](store.socket, lane(name=request.node.name)) as made:
        yield made


@pytest.fixture(params=WHERE)
def layerwise(store: DaemonProcess, request: pytest.FixtureRequest) -> Iterator[FakeEngine]:
    """As `engine`; loads lie inside the forward pass."""
    settings = Settings(
        socket=str(store.socket), layerwise="always", plan=False, lookup_seconds=20.0
    )
    one = lane(name=request.node.name)
    with WHERE[request.param](store.socket, one, settings=settings) as made:
        yield made


def tokens_of(number: int, count: int) -> list[int]:
    return [number * 10_000 + at for at in range(count)]


def ready_blocks(store: DaemonProcess) -> int:
    tree: Any = store.stat()
    return sum(size["ready"] for size in tree["host"]["slabs"]["classes"])


def test_what_is_promised_is_whole_blocks_below_the_prompt(engine: FakeEngine) -> None:
    for number, count in enumerate([1, BLOCK, BLOCK + 1, 2 * BLOCK, 895]):
        engine.compute(FakeRequest(f"a{number}", tokens_of(number, count)))
        request = FakeRequest(f"b{number}", tokens_of(number, count))
        tokens, table, last = engine.load(request)
        assert tokens == (count - 1) // BLOCK * BLOCK
        assert not last.bad
        assert all(engine.holds(request, table, 0, at) for at in range(tokens // BLOCK))


def test_the_engines_own_hit_is_not_loaded_again(engine: FakeEngine) -> None:
    engine.compute(FakeRequest("a", tokens_of(1, 10 * BLOCK)))
    request = FakeRequest("b", tokens_of(1, 10 * BLOCK))
    engine.scheduler.arrived(request)  # type: ignore[arg-type]
    assert engine.ask(request, 4 * BLOCK) == (5 * BLOCK, True)
    assert engine.ask(request, 9 * BLOCK) == (0, False)


def test_every_block_that_did_not_come_is_told(engine: FakeEngine) -> None:
    engine.compute(FakeRequest("a", tokens_of(1, 9 * BLOCK)))
    request = FakeRequest("b", tokens_of(1, 9 * BLOCK))
    engine.scheduler.arrived(request)  # type: ignore[arg-type]
    tokens, _ = engine.ask(request)
    assert tokens == 8 * BLOCK
    table = engine.ids(request.num_tokens)
    handle = engine.scheduler._handles[0]
    handle.delete(engine.chain(0, request), 5)
    engine.scheduler.allocated(request, table, tokens)  # type: ignore[arg-type]
    while "b" not in (last := engine.step({})).received:
        pass
    right = {table[0][at] for at in range(8) if engine.holds(request, table, 0, at)}
    assert last.bad == set(table[0][:8]) - right
    assert last.bad >= set(table[0][5:8])
    # Asked again it is offered what is left, and never what failed.
    again, _ = engine.ask(request)
    assert again <= 5 * BLOCK


def test_a_window_is_all_that_is_promised_and_loaded(store: DaemonProcess) -> None:
    lanes = (lane(0, name="hybrid"), lane(1, 2 * BLOCK, name="hybrid"))
    with FakeEngine(store.socket, *lanes, may_layerwise=False) as engine:
        engine.compute(FakeRequest("a", tokens_of(1, 10 * BLOCK)))
        request = FakeRequest("b", tokens_of(1, 10 * BLOCK))
        tokens, table, last = engine.load(request)
        assert tokens == 9 * BLOCK
        assert not last.failed
        assert all(engine.holds(request, table, 0, at) for at in range(9))
        assert table[1][:7] == [0] * 7
        assert all(engine.holds(request, table, 1, at) for at in (7, 8))
        assert not engine.memory[1][0][0].any(), "block 0 is nobody's"


def test_ranks_act_on_what_all_of_them_have(store: DaemonProcess) -> None:
    lanes = (lane(0, rank=0, name="ranks"), lane(0, rank=1, name="ranks"))
    with FakeEngine(store.socket, *lanes, may_layerwise=False) as engine:
        request = FakeRequest("a", tokens_of(1, 9 * BLOCK))
        engine.compute(request)
        # Rank 1 is another process; here its lane was never saved.
        tokens, _, _ = engine.load(FakeRequest("b", tokens_of(1, 9 * BLOCK)))
        assert tokens == 0


def test_a_layerwise_load_is_there_when_the_layer_is_read(layerwise: FakeEngine) -> None:
    engine = layerwise
    engine.compute(FakeRequest("a", tokens_of(1, 5 * BLOCK)))
    request = FakeRequest("b", tokens_of(1, 5 * BLOCK))
    engine.scheduler.arrived(request)  # type: ignore[arg-type]
    tokens, is_async = engine.ask(request)
    assert (tokens, is_async) == (4 * BLOCK, False)
    table = engine.ids(request.num_tokens)
    engine.scheduler.allocated(request, table, tokens)  # type: ignore[arg-type]
    request.num_computed_tokens = tokens
    last = engine.step({"b": BLOCK}, {"b": table}, {"b": request})
    assert not last.bad
    assert all(engine.holds(request, table, 0, at) for at in range(5))


def test_a_pass_that_does_not_ask_for_its_layers_read_them_too_early(
    layerwise: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = layerwise
    engine.compute(FakeRequest("a", tokens_of(1, 5 * BLOCK)))
    request = FakeRequest("b", tokens_of(1, 5 * BLOCK))
    tokens, table = engine.admit(request)
    request.num_computed_tokens = tokens
    monkeypatch.setattr(engine.worker, "wait_for_layer", lambda name: None)
    last = engine.step({"b": BLOCK}, {"b": table}, {"b": request})
    assert last.bad == set(table[0][:4])


def test_nothing_computed_from_blocks_that_did_not_come_is_stored(
    layerwise: FakeEngine, store: DaemonProcess
) -> None:
    engine = layerwise
    before, known = ready_blocks(store), store.stat()["blocks"]
    engine.compute(FakeRequest("a", tokens_of(1, 5 * BLOCK)))
    request = FakeRequest("b", tokens_of(1, 7 * BLOCK))
    engine.scheduler.arrived(request)  # type: ignore[arg-type]
    tokens, _ = engine.ask(request)
    table = engine.ids(request.num_tokens)
    engine.scheduler._handles[0].delete(engine.chain(0, request), 0)
    engine.scheduler.allocated(request, table, tokens)  # type: ignore[arg-type]
    request.num_computed_tokens = tokens
    last = engine.step({"b": 2 * BLOCK}, {"b": table}, {"b": request})
    assert last.bad
    assert last.report.saves_lost
    assert engine.worker.wait_idle(SECONDS_MAX)
    assert engine.scheduler._handles[0].match(engine.chain(0, request)) == 0
    # Computed from the start it is stored whole, once what was deleted has gone.
    eventually(lambda: ready_blocks(store) == before, "the lease over the deleted blocks ended")
    eventually(lambda: store.stat()["blocks"] == known, "and they left NVMe")
    request.num_computed_tokens = 0
    engine.step({"b": 7 * BLOCK}, {"b": table}, {"b": request})
    assert engine.worker.wait_idle(SECONDS_MAX)
    assert engine.scheduler._handles[0].match(engine.chain(0, request)) == 7


@pytest.mark.parametrize("phase", ["asked", "allocated", "ordered", "loaded"])
def test_an_abort_leaves_nothing_behind(engine: FakeEngine, phase: str) -> None:
    engine.compute(FakeRequest("a", tokens_of(1, 9 * BLOCK)))
    request = FakeRequest("b", tokens_of(1, 9 * BLOCK))
    scheduler: Any = engine.scheduler
    scheduler.arrived(request)
    received: set[str] = set()
    tokens, _ = engine.ask(request) if phase != "asked" else (0, False)
    if phase != "asked":
        scheduler.allocated(request, engine.ids(request.num_tokens), tokens)
    if phase in ("ordered", "loaded"):
        received |= engine.step({}).received
    while phase == "loaded" and not received:
        received |= engine.step({}).received
    scheduler.finished("b")
    while phase != "asked" and not received:
        received |= engine.step({}).received
    for _ in range(3):
        received_again = engine.step({}).received
        assert not received_again, "told twice"
    assert not scheduler._requests
    assert not scheduler._loading


def test_a_finished_request_is_the_engines_to_free(engine: FakeEngine) -> None:
    request = FakeRequest("a", tokens_of(1, 3 * BLOCK))
    seen = weakref.ref(request)
    engine.compute(request)
    del request
    engine.compute(FakeRequest("b", tokens_of(2, BLOCK)))
    eventually(lambda: seen() is None, "freed")


def test_a_prompt_that_goes_on_arriving_passes_by_the_store(engine: FakeEngine) -> None:
    tokens = tokens_of(1, 4 * BLOCK)
    engine.compute(FakeRequest("a", tokens, resumable=True))
    assert engine.scheduler._handles[0].match(engine.chain(0, FakeRequest("b", tokens))) == 0


def test_nothing_is_kept_for_what_is_not_saved(store: DaemonProcess) -> None:
    with FakeEngine(store.socket, lane(name="consumer"), may_save=False) as engine:
        for at in range(3):
            request = FakeRequest(f"a{at}", tokens_of(at, 2 * BLOCK))
            engine.admit(request)
            engine.compute(request)
            assert engine.scheduler._handles[0].match(engine.chain(0, request)) == 0
        assert not engine.scheduler._saves._due


def test_a_pass_that_broke_off_is_the_last_one_saved(engine: FakeEngine) -> None:
    engine.worker.begin(engine.scheduler.step_orders({}, (), lambda request: None))
    engine.worker.end_forward(is_broken=True)
    request = FakeRequest("a", tokens_of(1, 2 * BLOCK))
    engine.compute(request)
    assert engine.scheduler._handles[0].match(engine.chain(0, request)) == 0


def test_a_pass_that_never_ended_is_the_last_one_saved(engine: FakeEngine) -> None:
    engine.worker.begin(engine.scheduler.step_orders({}, (), lambda request: None))
    request = FakeRequest("a", tokens_of(1, 2 * BLOCK))
    engine.compute(request)
    assert engine.scheduler._handles[0].match(engine.chain(0, request)) == 0


def test_steps_that_overlap_are_told_apart(store: DaemonProcess) -> None:
    with FakeEngine(store.socket, lane(name="overlap"), has_overlap=True) as engine:
        seen: list[int] = []
        step_ends = engine.scheduler.speeds.step_ends
        engine.scheduler.speeds.step_ends = (  # type: ignore[method-assign]
            lambda number: (seen.append(number), step_ends(number))[1]
        )
        engine.compute(FakeRequest("a", tokens_of(1, 2 * BLOCK)))
        assert 1 in seen
        assert not engine.scheduler.speeds._steps


def test_a_preempted_request_is_looked_up_anew(engine: FakeEngine) -> None:
    request = FakeRequest("a", tokens_of(1, 6 * BLOCK))
    engine.compute(FakeRequest("first", tokens_of(1, 4 * BLOCK)))
    engine.scheduler.arrived(request)  # type: ignore[arg-type]
    assert engine.ask(request)[0] == 4 * BLOCK
    engine.step({}, preempted=("a",))
    engine.compute(FakeRequest("second", tokens_of(1, 6 * BLOCK)))
    assert engine.ask(request)[0] == 5 * BLOCK


def test_what_a_prefill_takes_is_told_and_slow_loads_are_not_made(
    engine: FakeEngine, store: DaemonProcess
) -> None:
    space = engine.lanes[0].namespace
    scheduler: Any = engine.scheduler
    for at in range(4):
        scheduler.speeds._prefill_from = 0.0
        engine.compute(FakeRequest(f"a{at}", tokens_of(at, 64 * BLOCK)))

    def samples() -> list[int]:
        told = store.stat()["costs"]["prefill"].items()
        return [one["samples"] for name, one in told if space.hex().startswith(name)]

    eventually(lambda: samples() == [4], "the daemon knows")
    scheduler._settings = replace(engine.settings, plan=True)
    scheduler.speeds._prefill_tokens_per_second = 1e4
    for _ in range(20):
        scheduler.speeds.copied(1e6)
    scheduler.counts.take()
    slow = FakeRequest("slow", tokens_of(1, 64 * BLOCK))
    scheduler.arrived(slow)
    assert engine.ask(slow) == (0, False)
    assert scheduler.counts.take()["loads_not_worth"] == 1
    assert engine.ask(slow) == (0, False)
    assert not scheduler.counts.take(), "counted once"
    for _ in range(40):  # by and by one is tried again
        scheduler._is_worth(SimpleNamespace(is_slow=False), 63 * BLOCK)
    tokens, _, last = engine.load(FakeRequest("again", tokens_of(1, 64 * BLOCK)))
    assert (tokens, last.failed) == (63 * BLOCK, set())
    assert scheduler.counts.take()["saved_prefill_seconds"] == pytest.approx(63 * BLOCK / 1e4)


def test_what_a_load_takes_is_told(engine: FakeEngine, store: DaemonProcess) -> None:
    def samples() -> int:
        link: Any = store.stat()["costs"]["links"]["host"]
        return int(link["samples"])

    before = samples()
    engine.scheduler.step_ended(WorkerReport(copy=(2 << 20, 0.1)), ())
    assert engine.scheduler.speeds.copy_seconds(2 << 20) == pytest.approx(0.1)
    eventually(lambda: samples() == before + 1, "the daemon knows")


def test_an_old_answer_is_asked_for_again_once_and_no_step_waits_for_it(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [FakeRequest(f"a{at}", tokens_of(1, 4 * BLOCK)) for at in range(2)]
    scheduler: Any = engine.scheduler
    for request in requests:
        scheduler.arrived(request)
        assert engine.ask(request) == (0, False)
    engine.compute(FakeRequest("other", tokens_of(1, 4 * BLOCK)))
    monkeypatch.setattr("engine_adapter.vllm_scheduler.STALE_SECONDS", 0.0)
    engine.step({})
    assert [scheduler.matched(request, 0) for request in requests] == [(None, False), (0, False)]
    # Steps may be so long that every answer is old: it counts all the same.
    eventually(lambda: scheduler._requests["a0"].lookup.is_done, "asked again")
    engine.step({})
    assert scheduler.matched(requests[0], 0) == (3 * BLOCK, True)


def test_decoded_blocks_are_stored_when_their_tokens_are_known(engine: FakeEngine) -> None:
    request = FakeRequest("a", tokens_of(1, 2 * BLOCK - 1))
    engine.scheduler.arrived(request)  # type: ignore[arg-type]
    engine.ask(request)
    table = engine.ids(8 * BLOCK)
    count = request.num_tokens
    engine.step({"a": count}, {"a": table}, {"a": request})
    for token in range(ANSWER_TOKENS + 3):
        request.num_computed_tokens = request.num_tokens
        request.all_token_ids.append(90_000 + token)
        engine.step({"a": 1}, {"a": table}, {"a": request})
    assert engine.worker.wait_idle(SECONDS_MAX)
    assert (
        engine.scheduler._handles[0].match(engine.chain(0, request)) == 1 + ANSWER_TOKENS // BLOCK
    )


def test_salt_adapter_and_pictures_separate_prompts(engine: FakeEngine) -> None:
    class Feature:
        identifier = "picture"

        class mm_position:
            offset, length = BLOCK, 4

    tokens = tokens_of(1, 4 * BLOCK)
    variants: list[dict[str, Any]] = [
        {},
        {"cache_salt": "one"},
        {"cache_salt": "two"},
        {"lora_request": "one"},
        {"mm_features": [Feature()]},
    ]
    for at, variant in enumerate(variants):
        request = FakeRequest(f"a{at}", list(tokens), **variant)
        shared = BLOCK if "mm_features" in variant else 0
        engine.scheduler.arrived(request)  # type: ignore[arg-type]
        assert engine.ask(request)[0] == shared, variant
        engine.scheduler.finished(request.request_id)
        engine.compute(FakeRequest(f"b{at}", list(tokens), **variant))
        found, _, _ = engine.load(FakeRequest(f"c{at}", list(tokens), **variant))
        assert found == 3 * BLOCK


def test_an_adapter_that_cannot_be_named_passes_by_the_store(store: DaemonProcess) -> None:
    def refuse(adapter: Any) -> str:
        raise Refused(f"{adapter} was changed")

    with FakeEngine(store.socket, lane(name="unnamed"), adapter_digest=refuse) as engine:
        request = FakeRequest("a", tokens_of(1, 4 * BLOCK), lora_request="one")
        engine.scheduler.arrived(request)  # type: ignore[arg-type]
        for computed in (0, 2 * BLOCK):  # again after a preemption
            request.num_computed_tokens = 0
            assert engine.ask(request, computed) == (0, False)
            table = engine.ids(6 * BLOCK)
            engine.scheduler.allocated(request, (), 0)  # type: ignore[arg-type]
            engine.step({"a": request.num_tokens}, {"a": table}, {"a": request})
            for token in range(BLOCK):
                request.num_computed_tokens = request.num_tokens
                request.all_token_ids.append(token)
                engine.step({"a": 1}, {"a": table}, {"a": request})
            engine.step({}, preempted=("a",))
        engine.scheduler.finished("a")
        assert engine.worker.wait_idle(SECONDS_MAX)
        assert not any("blocks" in name for name in engine.worker.counts.take())
        assert engine.scheduler.counts.take().get("loads") is None


def test_after_a_reset_nothing_is_found_and_late_saves_are_not_kept(
    engine: FakeEngine, store: DaemonProcess
) -> None:
    known = store.stat()["blocks"]
    request = FakeRequest("a", tokens_of(1, 5 * BLOCK))
    engine.compute(request)
    other = engine.scheduler._handles[0]
    assert engine.scheduler.reset()
    assert other.match(engine.chain(0, request)) == 0
    again = FakeRequest("b", tokens_of(1, 5 * BLOCK))
    engine.scheduler.arrived(again)  # type: ignore[arg-type]
    assert engine.ask(again) == (0, False)
    while engine.scheduler._is_resetting:
        engine.step({})
    engine.scheduler.finished("b")
    eventually(lambda: store.stat()["blocks"] == known, "what was cleared has gone")
    engine.compute(FakeRequest("c", tokens_of(1, 5 * BLOCK)))
    assert engine.load(FakeRequest("d", tokens_of(1, 5 * BLOCK)))[0] == 4 * BLOCK


def test_without_a_daemon_everything_is_a_miss_at_once(tmp_path: Path) -> None:
    settings = Settings(socket=str(tmp_path / "nobody"), lookup_seconds=5.0)
    with FakeEngine(tmp_path / "nobody", settings=settings, attach=0.05) as engine:
        request = FakeRequest("a", tokens_of(1, 5 * BLOCK))
        engine.scheduler.arrived(request)  # type: ignore[arg-type]
        assert engine.ask(request) == (0, False)
        table = engine.ids(request.num_tokens)
        engine.step({"a": request.num_tokens}, {"a": table}, {"a": request})
        assert engine.worker.wait_idle(SECONDS_MAX)
        assert engine.worker.counts.take()["refused_blocks"] == 5


def test_of_what_finds_no_room_aside_the_beginning_is_stored(store: DaemonProcess) -> None:
    settings = Settings(socket=str(store.socket), lookup_seconds=20.0, staging_bytes=20_000)
    one = lane(name="staging")
    with FakeEngine(store.socket, one, settings=settings, wants_events=True) as engine:
        chain = engine.chain(0, FakeRequest("", tokens_of(1, 5 * BLOCK)))
        handle, saver = engine.scheduler._handles[0], cast(Any, engine.worker._mover.saver)
        # What was refused is saved by the next one that computes it; nothing is told before.
        for name, saved, present in (("a", 2, 2), ("b", 2, 4), ("c", 1, 5)):
            engine.compute(FakeRequest(name, tokens_of(1, 5 * BLOCK)))
            counts = engine.worker.counts.take()
            assert counts["saved_blocks"] == saved
            assert counts.get("refused_blocks", 0) == 5 - present
            assert handle.match(chain) == present
            assert [event[-1] for event in engine.scheduler.take_stored()] == [saved]
            eventually(lambda: not saver._ring._taken, "there is room again")
        # What follows in the same request lacks its parent, and finds room for nothing.
        request = FakeRequest("d", tokens_of(2, 5 * BLOCK))
        _, table = engine.admit(request)
        for request.num_computed_tokens, blocks in ((0, 3), (3 * BLOCK, 2)):
            engine.step({"d": blocks * BLOCK}, {"d": table}, {"d": request})
            assert engine.worker.wait_idle(SECONDS_MAX)
            eventually(lambda: not saver._ring._taken, "there is room again")
        assert engine.worker.counts.take() == {
            "saved_blocks": 2,
            "saved_bytes": 2 * one.layout.block_bytes,
            "refused_blocks": 3,
        }


def test_blocks_of_many_that_decode_are_stored_a_few_a_step(engine: FakeEngine) -> None:
    many = [FakeRequest(f"d{at}", tokens_of(700 + at, BLOCK)) for at in range(ANSWERS_MAX + 2)]
    tables = {one.request_id: engine.ids(8 * BLOCK) for one in many}
    by_id = {one.request_id: one for one in many}
    scheduler: Any = engine.scheduler
    for one in many:
        scheduler.arrived(one)
        assert engine.ask(one) == (0, False)
        scheduler.allocated(one, (), 0)
    engine.step({one.request_id: BLOCK for one in many}, tables, by_id)
    looks: list[int] = []
    resolve = {request_id: list(table) for request_id, table in tables.items()}
    for at in range(ANSWER_TOKENS + 3):
        for one in many:
            one.num_computed_tokens = BLOCK + at
            one.all_token_ids.append(at)
        orders = scheduler.step_orders(dict.fromkeys(by_id, 1), (), resolve.get)
        looks.append(len(orders.saves))
        assert all(len(order) == ANSWER_TOKENS // BLOCK for order in orders.saves)
    ends = ANSWER_TOKENS - 1  # the step that completes enough of each
    assert looks[:ends] == [0] * ends
    assert looks[ends : ends + 2] == [ANSWERS_MAX, 2]
    assert not any(looks[ends + 2 :])


# ---------------------------------------------------------------------- on a device only


def test_blocks_are_the_saves_until_its_last_copy_ended(store: DaemonProcess) -> None:
    with DeviceEngine(store.socket, lane(name="held")) as engine:
        stuck = engine.lanes_of_device.save_stream
        engine.fake.hold(stuck)
        request = FakeRequest("a", tokens_of(1, 3 * BLOCK))
        engine.scheduler.arrived(request)  # type: ignore[arg-type]
        engine.ask(request)
        engine.step({"a": 3 * BLOCK}, {"a": engine.ids(3 * BLOCK)}, {"a": request})
        engine.scheduler.finished("a")
        saver: Any = engine.worker._mover.saver
        eventually(lambda: saver._held[0].lots, "its copies are enqueued")
        engine.step({})
        assert engine.copied == []
        engine.fake.let_go(stuck)
        assert engine.worker.wait_idle(SECONDS_MAX)
        engine.step({})
        assert engine.copied == [1]
        assert engine.scheduler._handles[0].match(engine.chain(0, request)) == 3
        # Beyond what may be held nothing is saved, and the blocks are free at once.
        saver._held_blocks_max = 2
        engine.compute(FakeRequest("b", tokens_of(2, 3 * BLOCK)))
        assert engine.copied == [1, 2]
        assert engine.worker.counts.take()["refused_blocks"] == 3


@pytest.mark.parametrize("last", ["Reserve", "Commit"])
def test_a_daemon_that_hangs_is_asked_once_and_blocks_are_free(
    last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_adapter.vllm_device.PAUSE_SECONDS", 10 * SECONDS_MAX)
    with (
        running() as daemon,
        DeviceEngine(daemon.socket, lane(name="hung"), deadline=DEADLINE) as engine,
    ):
        saver: Any = engine.worker._mover.saver
        many = [FakeRequest(f"h{at}", tokens_of(at, BLOCK)) for at in range(1, 21)]
        tables = {one.request_id: engine.admit(one)[1] for one in many}
        by_id = {one.request_id: one for one in many}
        calls = recorded_calls(engine, monkeypatch)

        def compute(some: list[FakeRequest]) -> None:
            for one in some:
                engine.step({one.request_id: BLOCK}, tables, by_id)

        first = many[: last == "Commit"]
        engine.fake.hold(engine.lanes_of_device.save_stream)
        compute(first)
        eventually(lambda: len(calls) == len(first), "slots are reserved")
        eventually(lambda: all(save.lots for save in saver._held), "copies are enqueued")
        with stopped(daemon):
            compute(many[len(first) :])
            engine.fake.let_go(engine.lanes_of_device.save_stream)
            assert engine.worker.wait_idle(SECONDS_MAX)
            engine.step({})
            assert sorted(engine.copied) == list(range(1, 21))
            assert calls[len(first) :] == [last]
        assert engine.worker.counts.take()["refused_blocks"] == 20
        saver._ask_from = 0.0
        engine.compute(FakeRequest("later", tokens_of(99, 3 * BLOCK)))
        assert engine.worker.counts.take()["saved_blocks"] == 3


def recorded_calls(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the worker's half asks to store, by the names of the calls, as they begin."""
    session, calls = engine.worker.side.handles[0]._session, list[str]()
    call = session.call_until_closed

    def record(method: str, *arguments: Any) -> Any:
        if method in ("Reserve", "Commit"):
            calls.append(method)
        return call(method, *arguments)

    monkeypatch.setattr(session, "call_until_closed", record)
    return calls


@contextlib.contextmanager
def stopped(daemon: DaemonProcess) -> Iterator[None]:
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.process.send_signal(signal.SIGCONT)


def test_layers_that_come_too_late_are_computed_behind_them(store: DaemonProcess) -> None:
    settings = Settings(
        socket=str(store.socket),
        layerwise="always",
        plan=False,
        lookup_seconds=20.0,
        load_seconds=0.1,
    )
    with DeviceEngine(store.socket, lane(name="late"), settings=settings) as engine:
        engine.compute(FakeRequest("a", tokens_of(1, 5 * BLOCK)))
        request = FakeRequest("b", tokens_of(1, 5 * BLOCK))
        tokens, table = engine.admit(request)
        request.num_computed_tokens = tokens
        stuck = engine.lanes_of_device.load_stream
        engine.fake.hold(stuck)
        last = engine.step({"b": BLOCK}, {"b": table}, {"b": request})
        assert last.bad == set(table[0][:4])
        assert last.report.saves_lost
        other = FakeRequest("other", tokens_of(2, 5 * BLOCK))
        engine.step({"other": 4 * BLOCK}, {"other": [table[0][:4]]}, {"other": other})
        engine.fake.drain()
        engine.fake.let_go(stuck)
        assert all(engine.holds(other, [table[0][:4]], 0, at) for at in range(4))


def test_the_daemon_dies_in_the_middle_of_a_device_load() -> None:
    with running() as daemon, DeviceEngine(daemon.socket, lane(name="killed")) as engine:
        engine.compute(FakeRequest("a", tokens_of(1, 5 * BLOCK)))
        request = FakeRequest("b", tokens_of(1, 5 * BLOCK))
        _, table = engine.admit(request)
        stuck = engine.lanes_of_device.load_stream
        engine.fake.hold(stuck)
        assert not engine.step({}).received
        daemon.kill()
        engine.fake.let_go(stuck)
        while "b" not in (last := engine.step({})).received:
            pass
        right = {table[0][at] for at in range(4) if engine.holds(request, table, 0, at)}
        assert last.bad >= set(table[0][:4]) - right
        engine.compute(FakeRequest("c", tokens_of(2, 3 * BLOCK)))
        assert engine.load(FakeRequest("d", tokens_of(2, 3 * BLOCK)))[0] == 0


def test_a_device_that_fails_leaves_no_request_waiting(store: DaemonProcess) -> None:
    with DeviceEngine(store.socket, lane(name="failed")) as engine:
        engine.compute(FakeRequest("a", tokens_of(1, 5 * BLOCK)))
        request = FakeRequest("b", tokens_of(1, 5 * BLOCK))
        _, table = engine.admit(request)
        engine.fake.hold(engine.lanes_of_device.load_stream)
        assert not engine.step({}).received
        engine.fake._fault("it fell off the bus")
        last = engine.step({})
        assert (last.received, last.bad) == ({"b"}, set(table[0][:4]))
        engine.fake._streams.error = ""
