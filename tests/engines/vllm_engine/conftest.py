"""One daemon and one model a module; engines are made by the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DaemonProcess
from tests.e2e.kit import running


@pytest.fixture(scope="module")
def store() -> Iterator[DaemonProcess]:
    with running({"host.bytes": "128MiB", "nvme.bytes_max": "512MiB"}) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engines.vllm_engine.kit import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("llama"))
