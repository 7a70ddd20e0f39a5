"""Prometheus metrics of a real daemon, read over HTTP by a parser that is not ours."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.counters import Counters
from kvstore.metrics import METRICS, Counted
from tests.conftest import DaemonProcess
from tests.e2e.kit import Engine, eventually

MakeDaemon = Callable[..., DaemonProcess]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def address_of(daemon: DaemonProcess) -> str:
    """Where it says that it serves metrics."""
    eventually(lambda: re.search(r'"event": "metrics"', daemon.log()), "it says where")
    found = re.search(r'"address": "(127\.0\.0\.1:\d+)", "event": "metrics"', daemon.log())
    assert found, daemon.log()
    return found[1]


def scraped(address: str) -> Samples:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_what_happened_is_counted_and_all_series_are_there_before(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon({"metrics.address": "127.0.0.1:0"}).start()
    address = address_of(daemon)
    before = scraped(address)
    assert value(before, "kvstore_hit_tokens_total", tier="nvme") == 0
    assert value(before, "kvstore_call_seconds_count", verb="Match") == 0
    with Engine(daemon) as engine:
        chain = engine.durable(1, 8)
        engine.loads_whole(chain)
        missing = engine.chain(2, 5)
        assert engine.load(missing).blocks == 0
        missed = {"reason": "absent"}

        def is_told() -> Any:
            now = scraped(address)
            return (
                value(now, "kvstore_hit_tokens_total", tier="host") >= 8 * 16
                and value(now, "kvstore_missed_tokens_total", **missed) >= 5 * 16
            )

        eventually(is_told, "hits and misses are reported")
        after = scraped(address)
    assert after.keys() == before.keys()
    assert value(after, "kvstore_stored_blocks_total", outcome="stored") == 8
    assert value(after, "kvstore_host_to_nvme_bytes_total") == 8 * engine.handle.layout.block_bytes
    assert value(after, "kvstore_call_seconds_count", verb="Commit") >= 1
    assert value(after, "kvstore_host_used_bytes") >= 8 * engine.handle.layout.block_bytes
    assert value(after, "kvstore_healthy") == 1
    counters = {key for key in before if key[0].endswith("_total")}
    assert all(after[key] >= before[key] for key in counters), "a counter only grows"
    assert daemon.stop() == 0
    with pytest.raises(urllib.error.URLError):
        scraped(address)


def test_a_taken_port_is_refused_and_named(make_daemon: MakeDaemon) -> None:
    first = make_daemon({"metrics.address": "127.0.0.1:0"}).start()
    address = address_of(first)
    second = make_daemon({"metrics.address": address})
    with pytest.raises(AssertionError):
        second.start()
    assert "metrics.address" in second.log()
    assert "cannot listen" in second.log()


def test_every_counter_has_its_metric() -> None:
    known = {metric.key for metric in METRICS if isinstance(metric, Counted)}
    counted = {name.partition(":")[0] for name in Counters().snapshot()}
    assert counted == known
    assert len({metric.name for metric in METRICS}) == len(METRICS)
