"""What users may set in `kv_connector_extra_config`, checked by name.

Primitives: `Settings`, `settings_from`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine_adapter.refusal import Refused


@dataclass(frozen=True)
class Settings:
    """Everything has a default; see docs/vllm.md for what each one does."""

    socket: str = ""
    """The daemon's socket; "": as `KVClient` finds it."""
    tenant_salt: str = ""
    """Engines with another salt share nothing with this one."""
    variant: str = ""
    """Names what the connector cannot see, for example weights edited in memory."""
    weights_digest: str = ""
    """Names the weights when their files cannot be read here; "": digest of the files."""
    layerwise: str = "auto"
    """"auto": load inside the forward pass when that hides; "never"; "always": whenever allowed."""
    lookup_seconds: float = 0.5
    """Longest time a request waits to learn what is stored."""
    load_seconds: float = 5.0
    """Longest time a request waits for blocks from below host memory. Shorter when recomputing is
    predicted to be."""
    stall_seconds: float = 0.002
    """What running requests may be held up by in one step."""
    hit_tokens_min: int = 1
    """Fewer tokens than these beyond the engine's own cache are not worth a load."""
    plan: bool = True
    """Load only what is predicted to be faster than computing it."""
    suppress_seconds: float = 10.0
    """A block that failed to load is not asked for again for so long."""
    staging_bytes: int = 0
    """Saved blocks that may wait for the daemon; what finds no room is not stored. 0: a step's."""


def settings_from(extra: Mapping[str, Any]) -> Settings:
    """Raises Refused for names that do not exist and values of the wrong kind."""
    known: dict[str, Any] = {spec.name: spec.default for spec in fields(Settings)}
    values: dict[str, Any] = {}
    for name, value in extra.items():
        if name not in known:
            raise Refused(
                f"kv_connector_extra_config: {name!r} is no setting of kvstore; "
                f"there are {', '.join(sorted(known))}"
            )
        default = known[name]
        kind = type(default)
        is_right = isinstance(value, (int, float) if kind is float else kind)
        if not is_right or isinstance(value, bool) != (kind is bool):
            raise Refused(
                f"kv_connector_extra_config: {name}={value!r} must be a {kind.__name__}, "
                f"for example {default!r}"
            )
        if kind is not str and value < 0:
            raise Refused(f"kv_connector_extra_config: {name}={value!r} may not be negative")
        values[name] = kind(value)
    settings = Settings(**values)
    if settings.layerwise not in ("auto", "never", "always"):
        raise Refused(
            f"kv_connector_extra_config: layerwise={settings.layerwise!r} must be "
            "'auto', 'never' or 'always'"
        )
    return settings
