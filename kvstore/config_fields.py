"""How a setting is declared: the kinds of values there are, with limits and a description.

Primitives: `size`, `time`, `count`, `number`, `text`, `Section`; `is_address` for host:port.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Meta

SIZE_BYTES_MAX = 1 << 50
ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:\s]+):(\d{1,5})")
"""host:port; the host of an IPv6 address in brackets."""
OFF = "off"


def is_address(address: str) -> bool:
    """Whether it is host:port with a port that exists, or off."""
    found = ADDRESS.fullmatch(address)
    return address == OFF or (found is not None and int(found[2]) <= 65535)


def size(description: str, least: int = 0) -> Meta:
    """Bytes."""
    return Meta(description=description, ge=least, le=SIZE_BYTES_MAX, extra={"unit": "bytes"})


def time(description: str, most: float = 86400.0) -> Meta:
    """Seconds."""
    return Meta(description=description, gt=0.0, le=most, extra={"unit": "seconds"})


def count(description: str, least: int = 1, most: int = 1 << 31) -> Meta:
    """A whole number."""
    return Meta(description=description, ge=least, le=most)


def number(description: str, most: float) -> Meta:
    """Any number from 0."""
    return Meta(description=description, ge=0.0, le=most)


def text(description: str, pattern: str | None = None) -> Meta:
    """Any text, or what `pattern` allows."""
    return Meta(description=description, pattern=pattern)


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Common ground of all sections."""
