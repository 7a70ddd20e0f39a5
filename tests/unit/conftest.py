"""Fixtures of the unit tests: a fake daemon and its clients, and whole stores in one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def make_fake(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Factory of fake daemons on one directory: a second one is the next life of the first."""
    from fake_daemon import FakeDaemon

    made: list[Any] = []

    def make(**options: Any) -> Any:
        made.append(FakeDaemon(tmp_path, **options))
        return made[-1]

    yield make
    for fake in reversed(made):
        fake.stop()


@pytest.fixture
def make_client(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Factory of clients of that directory's daemon, attached unless told otherwise."""
    from kvstore.client import KVClient

    made: list[KVClient] = []

    def make(*, wait: bool = True, **options: Any) -> KVClient:
        client = KVClient(str(tmp_path / "s.sock"), **options)
        made.append(client)
        if wait:
            assert client.wait_connected(20), client.away_reason
        return client

    yield make
    for client in made:
        client.close()


@pytest.fixture
def make_harness() -> Iterator[Callable[..., Any]]:
    """Factory of started stores; each is checked whole at the end, and nothing of it stays."""
    from store_kit import harnesses

    with harnesses() as make:
        yield make


@pytest.fixture
def harness(make_harness: Callable[..., Any]) -> Any:
    """One small store with its tasks running."""
    return make_harness()
