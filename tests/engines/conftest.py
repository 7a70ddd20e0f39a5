"""One daemon a module for tests with a real engine; models attached to it are detached again."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import DaemonProcess
from tests.e2e.kit import running

if importlib.util.find_spec("torch") is not None:
    import torch

    # Threads that wait for each other on a busy machine make tiny models a hundred times slower.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "engines" in item.path.parts:
            item.add_marker(pytest.mark.engines)
            # The engine's own deprecations are not ours to fail on.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="module")
def store() -> Iterator[DaemonProcess]:
    with running() as daemon:
        yield daemon


@pytest.fixture
def attach(store: DaemonProcess) -> Iterator[Callable[..., Any]]:
    """attach(model, socket=..., **options) with blocks of 16 tokens, connected to the daemon."""
    import engine_adapter.transformers as kv

    made: list[Any] = []

    def attach(model: Any, socket: Any = None, wait: bool = True, **options: Any) -> Any:
        options = {"block_tokens": 16, "deadline_seconds": 20.0, **options}
        # Tiny models compute faster than they load; only tests of plans ask for one.
        options = {"plan": False, **options}
        attached = kv.attach(model, str(socket or store.socket), **options)
        made.append(attached)
        if wait:
            assert attached.client.wait_connected(20), attached.client.away_reason
        return attached

    yield attach
    for attached in made:
        attached.detach()
