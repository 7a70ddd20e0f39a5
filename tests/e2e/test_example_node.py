"""The example client in Node, generated from the protos, against a live gateway."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.gateway_kit import address, serving
from tests.e2e.kit import running

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "node"
INSTALL_SECONDS_MAX = 240
RUN_SECONDS_MAX = 60


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_SECONDS_MAX + 2 * RUN_SECONDS_MAX)
def test_node_puts_and_gets_blocks(tmp_path):
    """Skipped where node or its packages cannot be had."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed here")
    # Outside the tree: what npm brings is nobody's source.
    project = tmp_path / "examples" / "node"
    shutil.copytree(EXAMPLE, project, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(EXAMPLE.parents[1] / "proto", tmp_path / "proto")
    install = [npm, "install", "--no-audit", "--no-fund", "--silent", "--no-package-lock"]
    done = subprocess.run(
        install,
        cwd=project,
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS_MAX,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"npm cannot install the example's packages: {done.stderr.strip()[-300:]}")
    with running() as daemon, serving(daemon) as gateway:
        said = subprocess.run(
            [node, "blocks.js", address(gateway)],
            cwd=project,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS_MAX,
            check=False,
        )
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) == {
        "allStored": True,
        "sameBytes": True,
        "absentIsMissing": True,
        "prefixBlocks": 3,
    }
