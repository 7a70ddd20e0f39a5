"""Options that every command has: which configuration, and thereby which daemon.

Primitives: `Where`, `DEFAULT_WHERE`; `unreachable` says why that daemon does not answer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvstore.config import Config
from kvstore.config_load import load_with_sources
from kvstore.errors import ConfigError, KVStoreError, PeerGone
from kvstore.places import why_silent


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Where:
    """Options of every command: which configuration, and thereby which daemon."""

    config: Annotated[Path | None, Parameter(alias="-c", env_var="KVSTORE_CONFIG")] = None
    "TOML file with settings; `kvstore config --defaults` prints one."

    set: Annotated[tuple[str, ...], Parameter(alias="-s", negative="", show_default=False)] = ()
    "One setting as section.key=value, for example host.bytes=4GiB. May be repeated."

    socket: str | None = None
    "Unix socket of the daemon (daemon.socket)."

    def load(
        self, shorthands: Mapping[str, tuple[str, str | None]]
    ) -> tuple[Config, dict[str, str]]:
        """The effective configuration and its sources; `shorthands` maps key to (flag, value)."""
        overrides: dict[str, str] = {}
        for text in self.set:
            key, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(f"flag --set: {text!r} has no value; write section.key=value")
            overrides[key.strip()] = value.strip()
        flags: dict[str, str] = {}
        for key, (flag, short) in {
            **shorthands,
            "daemon.socket": ("--socket", self.socket),
        }.items():
            if short is not None:
                overrides[key], flags[key] = short, flag
        return load_with_sources(self.config, os.environ, overrides, flags)


DEFAULT_WHERE = Where()


def unreachable(socket: str) -> KVStoreError | None:
    """Why nobody can be reached there, with the way out; None when somebody listens."""
    match why_silent(Path(socket)):
        case None:
            return None
        case PermissionError():
            return ConfigError(
                f"{socket}: this user may not open the daemon's socket; run as the daemon's user, "
                "or in the group that its host.group names"
            )
        case error:
            return PeerGone(
                f"no daemon answers at {socket} ({error.strerror or error}); start one with "
                "`kvstore serve`, or name its socket with --socket or KVSTORE_DAEMON__SOCKET"
            )
