"""CUDA sources without a GPU: they compile for real targets and do on a CPU what they should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu_kernels
from bench.gpu_kernels import TARGETS, CompilerMissing, compiled, mismatches_in_child, names
from engine_adapter.transfer_moves import source_of

REGISTERS_MAX = 64
BUGS = {
    "the tail is one byte short": (
        "length - done, lane);",
        "length - done - (length > done), lane);",
    ),
    "the head is not cut to the length": ("if (head > length) head = length;", ""),
    "one byte too many": ("i < length;", "i <= length;"),
    "misaligned pieces go in words": ("((u64)to ^ (u64)from) & 15", "((u64)to ^ (u64)from) & 7"),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", names())
def test_every_source_compiles_without_spills(name: str, target: str) -> None:
    try:
        found = compiled(source_of(name), target)
    except CompilerMissing as error:
        pytest.skip(str(error))
    assert found.code_bytes
    assert found.spilled_bytes == 0
    assert 0 < found.registers <= REGISTERS_MAX


def test_copies_go_in_words_of_16_bytes() -> None:
    try:
        ptx = compiled(source_of("copy_pieces"), "sm_90").ptx
    except CompilerMissing as error:
        pytest.skip(str(error))
    assert "ld.global.cs.v4" in ptx
    assert "st.global.cs.v4" in ptx


def test_kernels_on_the_cpu_equal_numpy() -> None:
    try:
        assert mismatches_in_child() == []
    except CompilerMissing as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_broken_copy_kernel_shows(bug: str, tmp_path: Path) -> None:
    right, wrong = BUGS[bug]
    assert right in source_of("copy_pieces")
    broken = tmp_path / "broken.py"
    broken.write_text(
        "from bench import gpu_kernels\n"
        "source_of = gpu_kernels.source_of\n"
        f"gpu_kernels.source_of = lambda name: source_of(name).replace({right!r}, {wrong!r})\n"
        "gpu_kernels.main()\n"
    )
    root = Path(gpu_kernels.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, str(broken)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=root,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode or done.stdout
    assert "Traceback" not in done.stderr
