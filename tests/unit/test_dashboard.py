"""Dashboard and alert rules speak of metrics that exist, with labels that they have, and compare
series that have the same ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvstore.metrics import METRICS

DOCKER = Path(__file__).resolve().parents[2] / "docker"
RULES = DOCKER / "prometheus/rules.yml"
DASHBOARD = DOCKER / "grafana/dashboards/kvstore.json"
SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_count", "_sum"]}
TARGET = {"instance", "job"}
KNOWN = {metric.name + suffix: metric for metric in METRICS for suffix in SUFFIXES[metric.kind]}
RULE = re.compile(r"(?:alert|record): (\S+)\s+expr: (?:>-\s+)?(.+?)\n +(?:for:|annot|-)", re.S)
TOKEN = re.compile(r"[a-z_:][a-z0-9_:]*(?:{[^}]*})?|[\d.]+|[=<>!]=|[-+*/<>(),]")


def expressions() -> dict[str, str]:
    """Every expression, by where it is."""
    found = dict(RULE.findall(RULES.read_text()))
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        found |= {f"{panel['title']} {each['refId']}": each["expr"] for each in panel["targets"]}
    return found


class Labels:
    """The labels of an expression's series, as far as ours go; None for a plain number.

    Both sides of an operator must have the same ones, or nothing ever matches: ValueError.
    """

    def __init__(self, text: str) -> None:
        self._left = TOKEN.findall(re.sub(r"\[\w+\]", "", text))[::-1]

    def of_all(self) -> set[str] | None:
        """Operands up to the end, or to what closes them."""
        found = self._operand()
        while self._left and self._left[-1] not in "),":
            self._left.pop()
            other = self._operand()
            if found is not None and other is not None and found != other:
                raise ValueError(f"{sorted(found)} never match {sorted(other)}")
            found = other if found is None else found
        return found

    def _operand(self) -> set[str] | None:
        token = self._left.pop()
        if token == "(":
            return self._to_the_end()
        if token[0].isdigit():
            return None
        if token == "sum":
            how = self._left.pop()
            listed = self._listed() if how != "(" else set()
            found = self._to_the_end() or set()
            return found - listed if how == "without" else found & listed
        if self._left and self._left[-1] == "(":
            self._left.pop()
            return self._to_the_end()
        name = token.partition("{")[0]
        own = {KNOWN[name].label} - {""} if name != "up" else set()
        return TARGET | own | ({"le"} if name.endswith("_bucket") else set())

    def _listed(self) -> set[str]:
        listed: set[str] = set()
        while (token := self._left.pop()) != ")":
            listed.add(token)
        self._left.pop()
        return listed

    def _to_the_end(self) -> set[str] | None:
        """Of the last argument."""
        found = self.of_all()
        while self._left.pop() == ",":
            found = self.of_all()
        return found


def test_every_metric_named_exists() -> None:
    for path in (DASHBOARD, RULES):
        text = path.read_text()
        used = set(re.findall(r"(?<!vllm:)\bkvstore_[a-z0-9_]+", text))
        assert used, path
        assert used <= KNOWN.keys(), f"{path}: {used - KNOWN.keys()}"
        for name, selector in re.findall(r"\b(kvstore_[a-z0-9_]+)\{([^}]*)\}", text):
            labels = set(re.findall(r"(\w+)=", selector)) - TARGET
            assert labels <= {KNOWN[name].label}, f"{path}: {name} has no {labels}"


@pytest.mark.parametrize("where", expressions())
def test_what_is_compared_can_match(where: str) -> None:
    Labels(expressions()[where]).of_all()


def test_what_cannot_match_is_found() -> None:
    refused = 'rate(kvstore_stored_blocks_total{outcome="no_room"}[10m])'
    every = "sum without (outcome) (rate(kvstore_stored_blocks_total[10m]))"
    assert Labels(f"sum without (outcome) ({refused}) > 0.5 * {every}").of_all() == TARGET
    with pytest.raises(ValueError, match="never match"):
        Labels(f"{refused} > 0.5 * {every}").of_all()
    assert len(RULE.findall(RULES.read_text())) == RULES.read_text().count("expr:")
