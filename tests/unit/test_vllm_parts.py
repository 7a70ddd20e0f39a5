"""The vLLM connector's small parts: settings, names of files, the ring, speeds, reports.

Field cases VLLM-3, 11, 12.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.refusal import Refused
from engine_adapter.vllm_blocks import LanePages
from engine_adapter.vllm_host import HostSaver, Ring
from engine_adapter.vllm_identity import (
    Adapters,
    EngineFacts,
    GroupFacts,
    files_digest,
    lanes_of,
    weights_digest_of,
)
from engine_adapter.vllm_orders import BlockOrder, WorkerReport
from engine_adapter.vllm_settings import Settings, settings_from
from engine_adapter.vllm_speed import Prefill, Speeds
from engine_adapter.vllm_statistics import Counts, added
from kvstore.fingerprint import chain
from kvstore.layout import BlockLayout
from kvstore.types import NamespaceId

FACTS = EngineFacts(
    architecture="Llama",
    config={"hidden_size": 64, "rope_theta": 10000.0},
    weights_digest="w",
    model_length=4096,
    dtype="bfloat16",
    kv_dtype="auto",
    quantization="",
    layout="LBHNC",
    attention="cpu",
    versions=(("vllm", "0.32.0"),),
    ranks=2,
    groups=(GroupFacts(0, "FullAttentionSpec", ("a", "b"), 32, 4096, 2, 32, 0, False),),
)


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"sockett": "x"}, "sockett"),
        ({"lookup_seconds": "soon"}, "lookup_seconds"),
        ({"lookup_seconds": True}, "lookup_seconds"),
        ({"staging_bytes": 1.5}, "staging_bytes"),
        ({"stall_seconds": -1.0}, "stall_seconds"),
        ({"layerwise": "sometimes"}, "layerwise"),
        ({"plan": 1}, "plan"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused_by_name(extra: Any, word: str) -> None:
    with pytest.raises(Refused, match=word):
        settings_from(extra)


def test_settings_take_whole_numbers_for_seconds() -> None:
    assert settings_from({"load_seconds": 3}).load_seconds == 3.0
    assert not settings_from({"plan": False}).plan


def test_whatever_shapes_the_bytes_shapes_the_names() -> None:
    group = FACTS.groups[0]
    others = [
        {"weights_digest": "other"},
        {"config": {"hidden_size": 65, "rope_theta": 10000.0}},
        {"dtype": "float32"},
        {"kv_dtype": "fp8"},
        {"quantization": "awq"},
        {"layout": "LBNHC"},
        {"versions": (("vllm", "0.33.0"),)},
        {"ranks": 4},
        {"tenant_salt": "s"},
        {"variant": "v"},
        {"groups": (dataclasses.replace(group, block_tokens=64),)},
        {"groups": (dataclasses.replace(group, window_tokens=64),)},
        {"groups": (dataclasses.replace(group, layer_names=("a", "c")),)},
    ]
    seen = {lane.namespace for lane in lanes_of(FACTS)}
    assert len(seen) == 2, "a rank each"
    for change in others:
        names = {lane.namespace for lane in lanes_of(dataclasses.replace(FACTS, **change))}
        assert not names & seen, change
        seen |= names
    named = {"_name_or_path": "elsewhere", **FACTS.config}
    same = lanes_of(dataclasses.replace(FACTS, config=named))
    assert {lane.namespace for lane in same} <= seen


def test_the_length_counts_only_where_positions_depend_on_it() -> None:
    longer = dataclasses.replace(FACTS, model_length=8192)
    assert lanes_of(longer) == lanes_of(FACTS)
    scaled = {**FACTS.config, "rope_scaling": {"rope_type": "longrope"}}
    short = dataclasses.replace(FACTS, config=scaled)
    assert lanes_of(dataclasses.replace(short, model_length=8192)) != lanes_of(short)


def test_ranks_with_equal_bytes_share_one_lane() -> None:
    group = dataclasses.replace(FACTS.groups[0], is_shared=True)
    (lane,) = lanes_of(dataclasses.replace(FACTS, groups=(group,)))
    assert lane.is_loaded_by(0)
    assert lane.is_loaded_by(1)
    assert lanes_of(dataclasses.replace(FACTS, groups=(group,), ranks=4)) == (lane,)


def lora_of(folder: Path, number: int, load_inplace: bool = False) -> Any:
    """What is read of vLLM's LoRARequest."""
    return SimpleNamespace(
        lora_name="x", lora_int_id=number, lora_path=str(folder), load_inplace=load_inplace
    )


def test_weights_and_adapters_are_named_by_content(tmp_path: Path) -> None:
    for folder, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_model.safetensors").write_bytes(content)
    named = Adapters().digest
    digests = [named(lora_of(tmp_path / name, number)) for number, name in enumerate("abc")]
    assert digests[0] == digests[1] != digests[2]
    assert weights_digest_of(str(tmp_path / "a"), "") == files_digest(
        tmp_path / "a", (".safetensors",)
    )
    assert weights_digest_of("nowhere", "given") == "given"
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refused, match="weights_digest"):
        weights_digest_of(str(tmp_path / "empty"), "")
    for folder in ("no", "empty"):
        with pytest.raises(Refused, match="adapter"):
            named(lora_of(tmp_path / folder, 9))


def test_an_adapter_that_changed_under_the_engine_is_not_named(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"old")
    named = Adapters().digest
    old = named(lora_of(tmp_path, 1))
    assert named(lora_of(tmp_path, 1)) == old
    weights.write_bytes(b"newer")
    for content in (b"newer", b"old"):  # nobody knows which of them the engine has by now
        weights.write_bytes(content)
        with pytest.raises(Refused, match="changed"):
            named(lora_of(tmp_path, 1))
    weights.write_bytes(b"newer")
    new = named(lora_of(tmp_path, 2))
    assert new != old
    assert named(lora_of(tmp_path, 1, load_inplace=True)) == new
    assert named(lora_of(tmp_path, 1)) == new


@given(st.lists(st.integers(1, 60), max_size=60), st.randoms(use_true_random=False))
def test_the_ring_never_hands_out_what_is_taken(sizes: list[int], draw: Any) -> None:
    ring, taken = Ring(100), deque[tuple[Any, int]]()
    for mark, size in enumerate(sizes):
        rows = ring.take(size, 1)
        is_short = len(rows) < size
        assert taken or not is_short, "an empty ring has room"
        if len(rows):
            rows[:] = mark % 251
            taken.append((rows, mark % 251))
        while taken and (is_short or draw.random() < 0.4):
            oldest, value = taken.popleft()
            assert (oldest == value).all()
            ring.give_back()
            is_short = False
    assert all((rows == value).all() for rows, value in taken)


def test_the_ring_gives_as_many_rows_as_find_room() -> None:
    ring = Ring(100)
    assert not len(ring.take(1, 101)), "nothing to give back"
    assert [len(ring.take(rows, 10)) for rows in (6, 3)] == [6, 3]
    ring.give_back()
    assert [len(ring.take(rows, 10)) for rows in (7, 1, 1)] == [6, 0, 0]
    ring.give_back()
    assert len(ring.take(9, 10)) == 4


def test_a_large_models_step_finds_room_aside() -> None:
    def blocks_max(block_bytes_a_layer: int, asked: int) -> int:
        layout = BlockLayout(32, 32, block_bytes_a_layer)
        pages = LanePages(dataclasses.replace(lanes_of(FACTS)[0], layout=layout), [])
        side: Any = SimpleNamespace(settings=Settings())
        return len(HostSaver(side, {0: pages})._ring.take(asked, layout.block_bytes))

    assert blocks_max(128 << 10, 4096 // 32) == 4096 // 32, "128 KiB a token"
    assert blocks_max(2, 1 << 20) == 1 << 20, "64 MiB at least"


def test_an_order_names_the_blocks_of_its_chain() -> None:
    whole = chain(NamespaceId(b"n" * 32), range(10 * 4), 4)
    order = BlockOrder.of(0, whole, [10 + at for at in range(10)], 3, 8)
    assert len(order) == 5
    assert order.block_ids == [13, 14, 15, 16, 17]
    assert [order.parent_of(at) for at in range(6)] == [whole[at] for at in range(2, 8)]
    assert BlockOrder.of(0, whole, range(10), 0, 2).parent_of(0) == whole.namespace


def test_reports_of_ranks_keep_the_worst_of_both() -> None:
    left = WorkerReport(2, {1: 3}, [7], {b"a"}, {"r"}, False, (5, 1.0))
    right = WorkerReport(1, {2: 4}, [8], {b"b"}, set(), True)
    both = WorkerReport(1, {1: 3, 2: 4}, [7, 8], {b"a", b"b"}, {"r"}, True, (5, 1.0))
    assert left.merge(right) == both
    right.copy = (9, 3.0)
    assert left.merge(right).copy == (9, 3.0), "the slower one"


def test_speeds_follow_what_was_seen() -> None:
    now = [0.0]
    speeds = Speeds(lambda: now[0])
    assert speeds.prefill_seconds(100) == 0.0
    for at in range(20):
        speeds.step_begins(at, {"a": 1000}, 1000, {})
        now[0] += 0.5
        speeds.step_ends(at)
    assert speeds.prefill_seconds(1000) == pytest.approx(0.5)
    speeds.step_begins(20, {"a": 1}, 1, {})
    now[0] += 9.0
    speeds.step_ends(20)
    assert speeds.prefill_seconds(1000) == pytest.approx(0.5), "a decode step tells nothing"


def test_a_step_takes_from_the_end_of_the_one_before() -> None:
    now = [0.0]
    speeds = Speeds(lambda: now[0])
    speeds.step_begins(0, {"a": 1000}, 1000, {})
    for at in range(30):  # the next one is always on its way before this one ends
        now[0] += 0.1
        speeds.step_begins(at + 1, {"a": 1000}, 1000, {})
        now[0] += 0.4
        speeds.step_ends(0)  # of one that computed nothing
        speeds.step_ends(at)
    assert speeds.prefill_seconds(1000) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(
    ("scheduled", "told"),
    [
        ({"a": 800}, (200, 1000)),
        ({"a": 800, "b": 1, "c": 1}, (200, 1000)),
        ({"a": 800, "b": 300}, None),
        ({"a": 40}, None),
        ({"unknown": 800}, None),
    ],
)
def test_a_pass_tells_the_prefill_of_the_one_request_that_it_was_for(
    scheduled: dict[str, int], told: tuple[int, int] | None
) -> None:
    now = [0.0]
    speeds = Speeds(lambda: now[0])
    request = SimpleNamespace(num_computed_tokens=200)
    requests: Any = dict.fromkeys("abc", SimpleNamespace(request=request))
    for at in range(2):  # and the second one at once is not asked for
        speeds.step_begins(at, scheduled, sum(scheduled.values()), requests)
        now[0] += 0.25
        expected = Prefill(*told, 0.25) if told and not at else None
        assert speeds.step_ends(at) == expected


def test_copies_that_seem_slow_are_thought_faster_by_and_by() -> None:
    speeds = Speeds()
    assert not speeds.has_copied
    speeds.copied(5e9)
    assert speeds.copy_seconds(5e9) == pytest.approx(1.0), "the first one replaces the guess"
    for _ in range(30):
        speeds.doubt_copies()
    assert speeds.copy_seconds(1e12) < 1.0


def test_counts_are_taken_once_and_names_are_known() -> None:
    counts = Counts()
    counts.add(loads=2, loads_failed=0)
    assert counts.take() == {"loads": 2}
    assert counts.take() == {}
    with pytest.raises(KeyError):
        counts.add(lods=1)
    assert added({"a": 1}, {"a": 2, "b": 3}) == {"a": 3, "b": 3}


def test_pages_move_only_the_layers_asked_for() -> None:
    lane = lanes_of(FACTS)[0]
    memory = [np.zeros((4, lane.layout.layer_bytes), np.uint8) for _ in range(2)]
    pages = LanePages(lane, memory)
    slots = np.arange(2 * lane.layout.block_bytes, dtype=np.uint64).astype(np.uint8)
    slots = slots.reshape(2, -1) | 1
    pages.scatter(slots, (3, 1), range(1, 2))
    assert not memory[0].any()
    pages.scatter(slots, (3, 1), range(1))
    rows = np.zeros_like(slots)
    pages.gather((3, 1), rows)
    assert (rows == slots).all()
    assert not memory[0][[0, 2]].any()
