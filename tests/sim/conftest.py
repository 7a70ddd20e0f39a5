"""Seeds of the simulation: `--sim-seed 17` or KVSTORE_SIM_SEED=17 plays one again."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sim-seed", type=int, default=None, help="play this seed only")
