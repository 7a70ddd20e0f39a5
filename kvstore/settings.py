"""The declared settings as data: what exists, what it means, which values it takes.

Primitives: `settings()`, `Setting`, `shown`. Reads the declarations in `config`; adds none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from kvstore.config import Config
from kvstore.units import format_bytes, format_seconds

ENVIRONMENT_PREFIX = "KVSTORE_"


@dataclass(frozen=True)
class Setting:
    """One declared setting, as the documentation and the loader see it."""

    section: str
    name: str
    type: Any
    default: Any
    description: str
    unit: Literal["", "bytes", "seconds"]

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"{ENVIRONMENT_PREFIX}{self.section}__{self.name}".upper()

    @property
    def allowed(self) -> str:
        """The values it takes, in words."""
        base, meta = get_args(self.type)
        if get_args(base):
            return "one of " + ", ".join(f'"{choice}"' for choice in get_args(base))
        if base is bool:
            return "true or false"
        if base is str:
            return f"text like {meta.pattern}" if meta.pattern else "text"
        writers: dict[str, Callable[[Any], str]] = {
            "bytes": format_bytes,
            "seconds": format_seconds,
        }
        write = writers.get(self.unit, str)
        kind = {"bytes": "a size", "seconds": "a time"}.get(self.unit, "a number")
        least = f"from {write(meta.ge)}" if meta.ge is not None else "above 0"
        return f"{kind} {least} up to {write(meta.le)}"


@cache
def settings() -> Mapping[str, Setting]:
    """Every setting by its key "section.name", in declaration order; autos show as declared (0)."""
    found: dict[str, Setting] = {}
    for section, cls in get_type_hints(Config).items():
        hints = get_type_hints(cls, include_extras=True)
        for field in msgspec.structs.fields(cls):
            meta: Meta = hints[field.name].__metadata__[0]
            setting = Setting(
                section,
                field.name,
                hints[field.name],
                field.default,
                meta.description or "",
                (meta.extra or {}).get("unit", ""),
            )
            found[setting.key] = setting
    return found


def shown(setting: Setting, value: Any) -> str:
    """A setting's value as people write it."""
    is_size = setting.unit == "bytes" and isinstance(value, int)
    return format_bytes(value) if is_size else str(value)
