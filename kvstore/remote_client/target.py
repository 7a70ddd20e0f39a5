"""Where a gateway is, and how to be let in.

Primitives: `Tls`, `Target` (address, TLS files, token, as a channel needs them).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kvstore.errors import ClientForked, ConfigError
from kvstore.rpc.channels import BULK_OPTIONS

OPTIONS = (
    *BULK_OPTIONS,
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True)
class Tls:
    """PEM files. `authority`: whose certificate the gateway has; None: a public one's.

    `certificate` and `key` are this client's own, where the gateway asks for one.
    """

    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""
    """Name in the gateway's certificate, where it is not the one in the address."""


@dataclass(frozen=True)
class Target:
    """`address`: host:port, or unix:PATH."""

    address: str
    token: str | None = None
    tls: Tls | None = None
    process: int = field(default_factory=os.getpid)
    """Where it was made: a channel does not survive a fork."""

    def check_process(self) -> None:
        """Raises ClientForked in a forked child, at once."""
        if os.getpid() != self.process:
            raise ClientForked(
                f"this client belongs to process {self.process}; "
                f"open a new one in process {os.getpid()}"
            )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def open(self, library: Any) -> Any:
        """A channel of `library`: grpc or grpc.aio. Raises ConfigError for unreadable files."""
        options: list[tuple[str, Any]] = list(OPTIONS)
        if self.tls is None:
            return library.insecure_channel(self.address, options=options)
        if self.tls.server_name:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        credentials = grpc.ssl_channel_credentials(
            _read(self.tls.authority), _read(self.tls.key), _read(self.tls.certificate)
        )
        return library.secure_channel(self.address, credentials, options=options)


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise ConfigError(f"TLS file {path} cannot be read: {error.strerror}") from error
