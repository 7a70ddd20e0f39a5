"""The benchmark harness: bars, pairs, JSON, closing line; coloured blocks. No time is asserted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench import plain
from bench.harness import Bar, Context, Figure, Pairs, Part, Reading, Suite, pairs, workspace
from bench.workload import Painter, identity_of, prompt
from kvstore.fingerprint import chain, namespace_of
from kvstore.layout import BlockLayout

FAST = Bar("fast", "x", at_most=1.5)
MANY = Bar("many", "blocks", at_least=1)
BROKEN = Bar("broken", "ms", at_most=3)


def good(context: Context) -> Iterator[Reading]:
    if context.wants("fast"):
        yield Reading("fast", 1.2345678, "p25..p75 1.2..1.3")
    if context.wants("many"):
        yield Reading("many", 0, "none seen")


def bad(context: Context) -> Iterator[Reading]:
    (context.work / "left").write_text("x")
    raise RuntimeError("the disk is away")


def suite() -> Suite:
    return Suite("sample", [Part("good", (FAST, MANY), good), Part("bad", (BROKEN,), bad)])


class TestBar:
    def test_at_most_and_at_least_include_the_bound(self) -> None:
        assert FAST.holds(1.5)
        assert not FAST.holds(1.5001)
        assert MANY.holds(1)
        assert not MANY.holds(0.999)

    def test_what_was_not_measured_never_holds(self) -> None:
        assert not FAST.holds(math.nan)
        assert not MANY.holds(math.nan)

    def test_needs_exactly_one_bound(self) -> None:
        with pytest.raises(ValueError, match="either"):
            Bar("none", "x")
        with pytest.raises(ValueError, match="either"):
            Bar("both", "x", at_most=1, at_least=0)

    def test_a_value_holds_before_it_is_rounded(self) -> None:
        figure = Figure(FAST, 1.500001, "")
        assert figure.as_json()["value"] == 1.5
        assert figure.as_json()["holds"] is False


class TestPairs:
    def test_alternates_the_order_and_drops_the_warm_up(self) -> None:
        order: list[tuple[str, int]] = []

        def work(name: str, seconds: float, turn: int) -> float:
            order.append((name, turn))
            return seconds * (turn + 1)

        seen = pairs(3, lambda t: work("plain", 1.0, t), lambda t: work("ours", 2.0, t), warm_up=1)
        assert [name for name, _ in order] == [
            *("plain", "ours", "ours", "plain"),
            *("plain", "ours", "ours", "plain"),
        ]
        assert seen.plain == [2.0, 3.0, 4.0]
        assert seen.measured == [4.0, 6.0, 8.0]

    def test_ratio_is_the_median_of_the_pairs_own_ratios(self) -> None:
        seen = Pairs(plain=[1.0, 10.0, 2.0], measured=[1.1, 13.0, 2.8])
        assert seen.ratio == pytest.approx(1.3)
        assert "of 3 pairs" in seen.note("np.copyto")
        assert "p25..p75 1.2..1.35" in seen.note("np.copyto")


class TestSuite:
    def test_writes_every_figure_and_counts_in_the_last_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code = suite().main(["--out", str(tmp_path)])
        printed = capsys.readouterr()
        assert code == 1
        assert printed.out.splitlines()[-1] == "figures: 3, hold: 1"
        assert "the disk is away" in printed.err
        body = json.loads((tmp_path / "sample.json").read_text())
        assert body["suite"] == "sample"
        assert body["machine"]["cores"] >= 1
        assert body["figures"] == [
            {
                "name": "fast",
                "value": 1.235,
                "unit": "x",
                "at_most": 1.5,
                "holds": True,
                "note": "p25..p75 1.2..1.3",
            },
            {
                "name": "many",
                "value": 0.0,
                "unit": "blocks",
                "at_least": 1,
                "holds": False,
                "note": "none seen",
            },
            {
                "name": "broken",
                "value": None,
                "unit": "ms",
                "at_most": 3,
                "holds": False,
                "note": "failed: RuntimeError: the disk is away",
            },
        ]

    def test_only_measures_what_was_asked_for(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert suite().main(["--out", str(tmp_path), "--only", "many"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "figures: 1, hold: 0"

    def test_leaves_no_scratch_files(self, tmp_path: Path) -> None:
        suite().main(["--out", str(tmp_path)])
        assert list((tmp_path / "work").iterdir()) == []

    def test_removes_what_a_dead_run_left(self, tmp_path: Path) -> None:
        (tmp_path / "4194305").mkdir()  # above the largest process id there can be
        with workspace(tmp_path) as work:
            assert [path.name for path in tmp_path.iterdir()] == [work.name]

    def test_a_name_cannot_occur_twice(self) -> None:
        with pytest.raises(ValueError, match="twice"):
            Suite("twins", [Part("a", (FAST,), good), Part("b", (FAST,), good)])


class TestPainter:
    NAMES = chain(
        namespace_of(identity_of(BlockLayout(4, 1, 4099))), prompt(1, 16), 4
    )  # four blocks

    @pytest.mark.parametrize("size", [1, 7, 8, 4096, 4099, 600_001])
    def test_tells_its_own_bytes_from_all_others(self, size: int) -> None:
        painter = Painter(size)
        block = painter.painted(self.NAMES[0])
        assert painter.is_painted(self.NAMES[0], block)
        assert painter.wrong_bytes(self.NAMES[0], block) == 0
        assert not painter.is_painted(self.NAMES[1], block)
        for place in {0, size // 2, size - 1}:
            block[place] ^= 1
            assert not painter.is_painted(self.NAMES[0], block)
            assert painter.wrong_bytes(self.NAMES[0], block) == 1
            block[place] ^= 1

    def test_bytes_moved_within_a_block_are_wrong(self) -> None:
        painter = Painter(64)
        assert not painter.is_painted(self.NAMES[2], np.roll(painter.painted(self.NAMES[2]), 8))

    def test_another_size_is_wrong(self) -> None:
        assert not Painter(64).is_painted(self.NAMES[0], Painter(72).painted(self.NAMES[0]))

    def test_prompts_are_reproducible_and_share_what_they_should(self) -> None:
        one, two = prompt(1, 64, shared=16), prompt(2, 64, shared=16)
        assert one.dtype == np.uint32
        assert (one == prompt(1, 64, shared=16)).all()
        assert (one[:16] == two[:16]).all()
        assert (one[16:] != two[16:]).any()


class TestPlain:
    def test_direct_file_reads_what_lies_there(self, tmp_path: Path) -> None:
        file = plain.DirectFile(tmp_path / "plain.bin", 8 * plain.MIB, inflight=2)
        try:
            buffer = plain.huge_buffer(4 * plain.MIB)
            file.read_into(buffer, 6 * plain.MIB)  # wraps
        finally:
            file.close()
        data = (tmp_path / "plain.bin").read_bytes()
        assert buffer.tobytes() == data[6 * plain.MIB :] + data[: 2 * plain.MIB]

    def test_ring_hands_out_every_buffer_in_turn(self) -> None:
        ring = plain.Ring(3, rows=2, row_bytes=4096)
        addresses = [ring.of(turn).ctypes.data for turn in range(6)]
        assert len(set(addresses)) == 3
        assert addresses[:3] == addresses[3:]
        assert ring.of(0).shape == (2, 4096)
