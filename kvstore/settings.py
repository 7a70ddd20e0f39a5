"""The declared settings as data: what exists, what it means, which values it takes.

Primitives: `settings()`, `Setting`, `shown`, and `as_toml`, which writes them as a file that
`config_load` reads back. Reads the declarations in `config`; adds none.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from kvstore.config import Config
from kvstore.config_fields import SIZE_BYTES_MAX
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
        is_open = meta.le == SIZE_BYTES_MAX and self.unit == "bytes"
        return f"{kind} {least}" + ("" if is_open else f" up to {write(meta.le)}")


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
    """A value as a configuration file has it: "64 MiB" and "10s" in quotes, true, 4."""
    if setting.unit == "bytes":
        return json.dumps(format_bytes(value)) if value else "0"
    if setting.unit == "seconds":
        return json.dumps(format_seconds(value))
    return json.dumps(value, ensure_ascii=False)


def section_help(section: str) -> str:
    """What a section is about, in one line."""
    return (get_type_hints(Config)[section].__doc__ or "").strip()


def as_toml(config: Config | None = None, sources: Mapping[str, str] | None = None) -> str:
    """A commented TOML file with the values of `config`, or the declared defaults without one.

    `sources` tells where a value came from if not from the defaults.
    """
    return "\n".join(_toml_lines(config, sources or {})) + "\n"


def _toml_lines(config: Config | None, sources: Mapping[str, str]) -> Iterator[str]:
    section = ""
    for setting in settings().values():
        if setting.section != section:
            if section:
                yield ""
            section = setting.section
            yield f"# {section_help(section)}"
            yield f"[{section}]"
        value = setting.default
        if config is not None:
            value = getattr(getattr(config, section), setting.name)
        yield from textwrap.wrap(
            setting.description,
            96,
            initial_indent="# ",
            subsequent_indent="# ",
            break_on_hyphens=False,
        )
        source = f"  # from {sources[setting.key]}" if setting.key in sources else ""
        yield f"{setting.name} = {shown(setting, value)}{source}"
