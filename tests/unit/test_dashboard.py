"""Dashboard and alert rules speak of metrics that exist, with labels that they have."""

from __future__ import annotations

import re
from pathlib import Path

from kvstore.metrics import METRICS

DOCKER = Path(__file__).resolve().parents[2] / "docker"
SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_count", "_sum"]}


def test_every_metric_named_exists() -> None:
    known = {metric.name + suffix: metric for metric in METRICS for suffix in SUFFIXES[metric.kind]}
    for path in ("grafana/dashboards/kvstore.json", "prometheus/rules.yml"):
        text = (DOCKER / path).read_text()
        used = set(re.findall(r"\bkvstore_[a-z0-9_]+", text))
        assert used, path
        assert used <= known.keys(), f"{path}: {used - known.keys()}"
        for name, selector in re.findall(r"\b(kvstore_[a-z0-9_]+)\{([^}]*)\}", text):
            labels = set(re.findall(r"(\w+)=", selector)) - {"instance", "job"}
            assert labels <= {known[name].label}, f"{path}: {name} has no {labels}"
