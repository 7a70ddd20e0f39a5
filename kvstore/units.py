"""Sizes and times as people write them.

Primitives: `parse_bytes`, `parse_seconds` (strict; ValueError says what to write instead),
`format_bytes`, `format_seconds` (exact: the parsers read back the same value).
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_BINARY = {"TiB": 1 << 40, "GiB": GIB, "MiB": MIB, "KiB": KIB}
_DECIMAL = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3}
_UNITS = {unit.lower(): factor for unit, factor in {**_BINARY, **_DECIMAL, "B": 1}.items()}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: object) -> int:
    """Bytes from an integer or text such as "64 MiB", "10GB". ValueError says how to write it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    factor = _UNITS.get(match[2].lower() or "b") if match else None
    if match is None or factor is None:
        raise ValueError('write a size with its unit, for example "64 MiB" (1024-based) or "10 GB"')
    exact = Decimal(match[1]) * factor
    if exact != int(exact):
        raise ValueError("is not a whole number of bytes")
    return int(exact)


def format_bytes(value: int) -> str:
    """Shortest exact text that `parse_bytes` reads back: 1536 MiB, 10 GB, 4097 B."""
    units = {**_BINARY, **_DECIMAL, "B": 1}.items()
    number, unit = min((value // factor, unit) for unit, factor in units if value % factor == 0)
    return f"{number} {unit}" if number else "0"


def parse_seconds(value: object) -> float:
    """Seconds from a number or text such as "250ms", "2min". ValueError says how to write it."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    factor = _SECONDS.get(match[2].lower() or "s") if match else None
    if match is None or factor is None:
        raise ValueError('write a time with its unit, for example "10s", "250ms" or "2min"')
    return float(match[1]) * factor


def format_seconds(value: float) -> str:
    """Text that `parse_seconds` reads back: "10s", "250ms"."""
    milliseconds = round(value * 1e3)
    if value < 1 and milliseconds * 1e-3 == value:
        return f"{milliseconds}ms"
    plain = f"{Decimal(repr(value)):f}"
    return f"{plain.removesuffix('.0')}s"
