"""The examples that need no engine, as a new user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.gateway_kit import address, serving
from tests.e2e.kit import SECONDS_MAX, running

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def output_of(example: str, argument: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / example, argument],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def daemon():
    with running() as daemon:
        yield daemon


def test_second_prompt_of_an_engine_finds_the_prefix_of_the_first(daemon):
    assert output_of("engine_client.py", str(daemon.socket)).splitlines() == [
        "0 of 44 blocks loaded, bytes equal",
        "40 of 44 blocks loaded, bytes equal",
    ]


def test_a_service_puts_and_gets_blocks(daemon):
    with serving(daemon) as gateway:
        said = output_of("block_api.py", address(gateway))
    assert said.splitlines() == [
        "put:  stored stored stored",
        "got:  True True True False",
        "same: True",
    ]
