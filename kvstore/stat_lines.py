"""A statistics tree as text: what `kvstore stat` prints.

Primitive: `as_lines`. Knows the tree's shape in two places only: series of counters, histograms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def as_lines(tree: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """A statistics tree as aligned text: plain values of a level first, then its branches.

    Labelled series ("dropped_blocks:io") that never moved are left out.
    """
    indent = "  " * depth
    shown = {key: value for key, value in tree.items() if value != 0 or ":" not in key}
    branches = {key: value for key, value in shown.items() if _is_branch(value)}
    leaves = {key: value for key, value in shown.items() if key not in branches}
    width = max(map(len, leaves), default=0)
    for key, value in leaves.items():
        yield f"{indent}{key:<{width}}  {_as_text(key, value)}"
    for key, value in branches.items():
        yield f"{indent}{key}"
        if key == "latencies":
            yield from (f"{indent}  {line}" for line in _histograms(value))
        elif isinstance(value, dict):
            yield from as_lines(value, depth + 1)
        else:
            for item in value:
                facts = (f"{name} {_as_text(name, fact)}" for name, fact in item.items())
                yield f"{indent}  {', '.join(facts)}"


def _histograms(latencies: Mapping[str, Any]) -> Iterator[str]:
    """A line a verb that was called."""
    for verb, seen in latencies.items():
        (*bounds, _), (*below, calls) = seen["buckets"], seen["buckets"].values()
        if calls:
            mean = seen["seconds"] / calls * 1e3
            bound = next((b for b, n in zip(bounds, below, strict=True) if n >= 0.99 * calls), None)
            p99 = f"at most {float(bound) * 1e3:g} ms" if bound else f"above {bounds[-1]} s"
            yield f"{verb:<10}{calls:>9} calls, mean {mean:.2f} ms, P99 {p99}"


def _is_branch(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, dict) for item in value)
    return isinstance(value, dict) and bool(value)


def _as_text(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and "bytes" in key.split(":")[0].split("_"):
        for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value >= size:
                return f"{value / size:.1f} {unit}"
        return f"{value} B"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value in ("", None) else str(value)
