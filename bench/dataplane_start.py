"""What the daemon costs before it serves: imports, disk, start after a crash, memory a block.

Primitives: `restart`, `import_seconds`, `venv_size`, `memory_per_block`, one reading each; `PARTS`.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bench.daemons import DaemonProcess, PrivateMemory, child_environment
from bench.dataplane_common import space_on
from bench.harness import OUT, Bar, Context, Reading, single, spread, timed
from bench.nvme_directory import fill_directory

RESTART_BLOCKS = 100_000
MEMORY_BLOCKS = 500_000
PAYLOAD_BYTES = 4096
CHAIN_BLOCKS = 500
SETTLE_SECONDS = 2.0
PROJECT = Path(__file__).resolve().parent.parent


def restart(context: Context) -> Reading:
    """Records made by the tier, one chain stored by a client; then SIGKILL, start, and again."""
    settings = {"host.bytes": "256MiB", "nvme.bytes_max": "4GiB"}
    folder = context.folder("restart")
    _fill(folder, settings, RESTART_BLOCKS - CHAIN_BLOCKS)
    with DaemonProcess(folder, settings) as daemon:
        with space_on(daemon.socket, 16, PAYLOAD_BYTES) as space:
            chain = space.chain(0, CHAIN_BLOCKS)
            space.store(chain)
            space.flush(chain)
        seconds, cpu = [], []
        for _ in range(context.several(7, 3)):
            daemon.kill()
            seconds.append(daemon.start())
            cpu.append(daemon.cpu_seconds())
            if (blocks := daemon.stat()["blocks"]) != RESTART_BLOCKS:
                raise RuntimeError(f"{blocks} of {RESTART_BLOCKS} blocks after the restart")
        with space_on(daemon.socket, 16, PAYLOAD_BYTES) as space:
            loaded = np.empty((CHAIN_BLOCKS, PAYLOAD_BYTES), np.uint8)
            result = space.handle.load(chain, loaded)
            space.check(chain, loaded[: result.blocks])
            if result.from_nvme != CHAIN_BLOCKS:
                raise RuntimeError(f"after the restart {result}")
    return Reading(
        "restart_100k_blocks_seconds",
        float(np.median(seconds)),
        f"exec to gRPC health SERVING after SIGKILL; {min(seconds):.3g}..{max(seconds):.3g} of "
        f"{len(seconds)}; CPU until then {np.median(cpu):.2g} s; peer 7 to 12 s, its budget lost",
    )


def import_seconds(context: Context) -> Reading:
    """A fresh interpreter, from exec to its end."""
    command = [sys.executable, "-c", "import kvstore.daemon"]
    _run_seconds(command)
    seconds = [_run_seconds(command) for _ in range(context.several(7, 3))]
    bare = [_run_seconds([sys.executable, "-c", ""]) for _ in range(3)]
    return Reading(
        "daemon_import_seconds",
        float(np.median(seconds)),
        f"whole process of `import kvstore.daemon`, bytecode at hand; {spread(seconds)} of "
        f"{len(seconds)}; a bare "
        f"interpreter {np.median(bare):.3g} s; peer 2.3 s",
    )


def _run_seconds(command: list[str]) -> float:
    return timed(lambda: subprocess.run(command, check=True, cwd=PROJECT, env=child_environment()))


def venv_size(context: Context) -> Reading:
    """A virtual environment with the base dependencies, kept while they stay the same."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    key = hashlib.sha256(repr(project["dependencies"]).encode()).hexdigest()[:12]
    venv = OUT / f"venv-{key}"
    if not (venv / "whole").exists():
        context.step("installing the base dependencies into a virtual environment of their own")
        for old in OUT.glob("venv-*"):
            shutil.rmtree(old)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-qq", str(PROJECT)]
        subprocess.run([*pip, "--disable-pip-version-check"], check=True, stdout=sys.stderr)
        (venv / "whole").touch()
    shown = subprocess.run(["du", "-sm", venv], check=True, capture_output=True, text=True)
    packages = len(list(venv.glob("lib/python*/site-packages/*.dist-info")))
    return Reading(
        "daemon_venv_MiB",
        float(shown.stdout.split()[0]),
        f"du -sm of a venv with the base dependencies, {packages} packages, pip included; "
        "peer 1,849",
    )


def memory_per_block(context: Context) -> Reading:
    """The daemon on an NVMe directory of so many records, less the same daemon on an empty one."""
    count = MEMORY_BLOCKS if not context.is_quick else MEMORY_BLOCKS // 10
    settings = {"host.bytes": "64MiB", "nvme.bytes_max": "6GiB"}
    with DaemonProcess(context.folder("empty"), settings) as daemon:
        empty = _settled(daemon)
    folder = context.folder("many")
    context.step(f"writing an NVMe directory of {count} records")
    _fill(folder, settings, count)
    with DaemonProcess(folder, settings) as daemon:
        full = _settled(daemon)
        blocks = int(daemon.stat()["blocks"])
    if blocks != count:
        raise RuntimeError(f"the daemon holds {blocks} of {count} blocks")
    grown = full.private - empty.private
    mapped = (full.mapped_files - empty.mapped_files) / count
    return Reading(
        "record_bytes_per_block",
        grown / count,
        f"growth of private memory, {empty.private >> 20} to {full.private >> 20} MiB at {count} "
        f"blocks on NVMe; besides, {mapped:.0f} bytes a block of the index's file pages are mapped",
    )


def _fill(folder: Path, settings: Mapping[str, str], count: int) -> None:
    """An NVMe directory of `count` records, written by a process of its own."""
    process = multiprocessing.get_context("spawn").Process(
        target=fill_directory, args=(folder / "data", settings, count, PAYLOAD_BYTES)
    )
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError("the directory was not written, see above")


def _settled(daemon: DaemonProcess) -> PrivateMemory:
    time.sleep(SETTLE_SECONDS)
    return daemon.private()


PARTS = (
    single(restart, Bar("restart_100k_blocks_seconds", "s", at_most=1.0)),
    single(import_seconds, Bar("daemon_import_seconds", "s", at_most=0.6)),
    single(venv_size, Bar("daemon_venv_MiB", "MiB", at_most=250)),
    single(memory_per_block, Bar("record_bytes_per_block", "B", at_most=700)),
)
