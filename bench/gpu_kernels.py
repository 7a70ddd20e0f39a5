"""The CUDA sources without a GPU: compiled for real targets, and run on the CPU.

Primitives:
  `compiled(source, target)`   what a compiler made of it: code, registers, spills, PTX
  `Shim`                       the same source as a shared library: kernels run serially
  `copy_mismatches`            the copy kernel against numpy, odd sizes and alignments included

The compiler is NVRTC (the extra `gpu-check`) or the machine's nvcc. A shim that crashes takes its
process along: run it in one of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from engine_adapter import quantised
from engine_adapter.transfer_moves import source_of

TARGETS = ("sm_80", "sm_90", "sm_100")
SHIM = Path(__file__).parent / "kernels" / "cuda_shim.h"
ARGUMENTS = {"copy_pieces": 4, "scale_pieces": 7, "quantise_pieces": 7, "restore_pieces": 7}
"""Kernels and how many numbers they take."""
LENGTHS = (0, 1, 2, 15, 16, 17, 31, 63, 64, 255, 256, 1000, 4096, 4099, 16384)
SKEWS = (0, 1, 4, 8, 15)
SIZES = ((16, 64), (1, 16), (3, 80), (16, 128), (4, 24))
SHAPES = ((1, 1), (3, 32), (2, 192))


class CompilerMissing(Exception):
    """Neither NVRTC nor nvcc is here."""


@dataclass(frozen=True)
class Compiled:
    """What a compiler said."""

    code_bytes: int
    registers: int
    spilled_bytes: int
    ptx: str


def names() -> list[str]:
    """Every CUDA source of the package."""
    folder = files("engine_adapter") / "kernels"
    return sorted(one.name[:-3] for one in folder.iterdir() if one.name.endswith(".cu"))


def compiled(source: str, target: str) -> Compiled:
    """Raises CompilerMissing; ValueError with the compiler's words when it does not compile."""
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        return _by_nvcc(source, target)
    return _by_nvrtc(nvrtc, source, target)


def _by_nvrtc(nvrtc: Any, source: str, target: str) -> Compiled:
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    options = [f"--gpu-architecture={target}".encode(), b"-std=c++17", b"--ptxas-options=-v"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ValueError(log)
    _, code_bytes = nvrtc.nvrtcGetCUBINSize(program)
    ptx = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    nvrtc.nvrtcDestroyProgram(program)
    return Compiled(code_bytes, *_resources(log), ptx)


def _text(size_of: Any, read: Any, program: Any) -> str:
    _, size = size_of(program)
    into = b" " * size
    read(program, into)
    return into.decode(errors="replace").rstrip("\0")


def _by_nvcc(source: str, target: str) -> Compiled:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise CompilerMissing("install the extra gpu-check, or CUDA's nvcc")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cu"
        path.write_text(source, encoding="utf-8")
        base = [nvcc, f"-arch={target}", "-std=c++17", str(path), "-o"]
        code = subprocess.run(
            [*base, f"{folder}/k.cubin", "-cubin", "-Xptxas", "-v"], capture_output=True, text=True
        )
        if code.returncode:
            raise ValueError(code.stderr)
        subprocess.run([*base, f"{folder}/k.ptx", "-ptx"], check=True, capture_output=True)
        size = (Path(folder) / "k.cubin").stat().st_size
        ptx = (Path(folder) / "k.ptx").read_text(encoding="utf-8")
    return Compiled(size, *_resources(code.stderr), ptx)


def _resources(log: str) -> tuple[int, int]:
    registers = max(map(int, re.findall(r"Used (\d+) registers", log)), default=0)
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    return registers, spills


# ---------------------------------------------------------------------- on the CPU


class Shim:
    """A source's kernels as functions of this process. Raises CompilerMissing without g++."""

    def __init__(self, source: str, folder: Path) -> None:
        compiler = _gxx()
        kernels = re.findall(r"__global__ void __launch_bounds__\([^)]*\) (\w+)", source)
        text = f'#include "{SHIM}"\n{source}\n' + "".join(map(_entry, kernels))
        path = folder / f"kernel-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.so"
        if not path.exists():
            cpp = path.with_suffix(".cpp")
            cpp.write_text(text, encoding="utf-8")
            command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off"]
            # x86 takes what is misaligned; a GPU faults.
            command += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
            subprocess.run([*command, str(cpp), "-o", str(path)], check=True)
        self._library = ctypes.CDLL(str(path))

    def launch(self, name: str, blocks: int, threads: int, arguments: tuple[int, ...]) -> None:
        """Every thread of every block, one after the other."""
        values = [ctypes.c_uint64(argument) for argument in arguments]
        getattr(self._library, f"run_{name}")(blocks, threads, *values)


def _gxx() -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        raise CompilerMissing("install g++")
    return compiler


def _entry(kernel: str) -> str:
    count = ARGUMENTS[kernel]
    takes = ", ".join(f"unsigned long long a{number}" for number in range(count))
    gives = ", ".join(f"a{number}" for number in range(count))
    return (
        f'extern "C" void run_{kernel}(unsigned blocks, unsigned threads, {takes}) '
        f"{{ run_serially({kernel}, blocks, threads, {gives}); }}\n"
    )


def copy_mismatches(folder: Path) -> Iterator[str]:
    """Cases in which the copy kernel and numpy differ, gaps between pieces included."""
    shim = Shim(source_of("copy_pieces"), folder)
    rng = np.random.default_rng(1)
    for (blocks, threads), to_skew, from_skew in product(SHAPES, SKEWS, SKEWS):
        sizes = np.array(LENGTHS, np.uint64)
        room = int(sizes.sum()) + 64 * len(sizes)
        source, found = rng.integers(0, 256, (2, room), np.uint8)
        wanted = found.copy()
        at = np.cumsum(sizes + np.uint64(48)) - sizes - np.uint64(48)
        at = at // np.uint64(16) * np.uint64(16)
        to, fro = at + np.uint64(to_skew), at + np.uint64(from_skew)
        order = rng.permutation(len(sizes))
        for start, begin, size in zip(to.tolist(), fro.tolist(), LENGTHS, strict=True):
            wanted[start : start + size] = source[begin : begin + size]
        tables = np.stack(
            [to + np.uint64(found.ctypes.data), fro + np.uint64(source.ctypes.data), sizes]
        )[:, order].copy()
        places = [tables[row].ctypes.data for row in range(3)]
        shim.launch("copy_pieces", blocks, threads, (*places, len(sizes)))
        if not np.array_equal(found, wanted):
            yield f"copy_pieces {blocks}x{threads}, skews {to_skew} and {from_skew}"


def quantise_mismatches(folder: Path) -> Iterator[str]:
    """Cases in which the packing kernels and the reference differ in a bit."""
    shim = Shim(source_of("quantise_pieces"), folder)
    rng = np.random.default_rng(2)
    for scheme, (tokens, dim), threads in product(quantised.SCHEMES, SIZES, (1, 32, 192)):
        stride, pieces = 2 * dim + (16 if threads == 32 else 6), 9
        bits = rng.integers(0, 1 << 16, (pieces, tokens, stride // 2), np.uint16)
        bits[0, :, :dim] = 0
        bits[1:5, :, :dim] = quantised.to_bfloat16(rng.normal(0, 3, (4, tokens, dim)))
        numbers = quantised.from_bfloat16(bits[:, :, :dim]).reshape(pieces, -1)
        wanted = quantised.packed(numbers, scheme)
        found = np.full_like(wanted, 0x55)
        back = np.full_like(bits, 0x55)
        for names, rows in (
            (("scale_pieces", "quantise_pieces"), bits),
            (("restore_pieces",), back),
        ):
            tables = [
                one.ctypes.data + np.arange(pieces, dtype=np.uint64) * np.uint64(one.strides[0])
                for one in (found, rows)
            ]
            places = [table.ctypes.data for table in tables]
            shape = (pieces, tokens, dim, stride, int(scheme == "fp8_e4m3"))
            for name in names:
                shim.launch(name, 2, threads, (*places, *shape))
        wanted_back = np.full_like(bits, 0x55)
        restored = quantised.restored(wanted, scheme)
        wanted_back[:, :, :dim] = quantised.to_bfloat16(restored).reshape(pieces, tokens, dim)
        if not np.array_equal(found, wanted) or not np.array_equal(back, wanted_back):
            yield f"{scheme} {tokens}x{dim}, {threads} threads"


def main() -> None:
    """Print every mismatch: the part that may crash, for a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        for mismatches in (copy_mismatches, quantise_mismatches):
            for case in mismatches(Path(folder)):
                print(case)


def mismatches_in_child() -> list[str]:
    """`main` in a child; a crash counts as a mismatch. Raises CompilerMissing."""
    _gxx()
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu_kernels"], capture_output=True, text=True, timeout=300
    )
    lines = done.stdout.splitlines()
    return (
        lines
        if not done.returncode
        else [*lines, f"ended with {done.returncode}: {done.stderr[-300:]}"]
    )


if __name__ == "__main__":
    main()
