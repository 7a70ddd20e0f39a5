"""The gateway's settings: where it listens, whom it lets in, how much it takes on.

Primitives: `GatewayConfig`, `gateway_conflicts`. No I/O.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from kvstore.config_fields import ADDRESS, OFF, Section, count, is_address, text, time


class GatewayConfig(Section, frozen=True):
    """`kvstore gateway`: the block API for other containers, machines and languages."""

    socket: Annotated[
        str, text("Unix socket. Empty: the daemon's, with .gateway added. off: none.")
    ] = ""
    address: Annotated[
        str,
        text(
            "TCP address as host:port; port 0 takes a free one. Other than loopback needs TLS, "
            "and client certificates or tokens. off: none."
        ),
    ] = "127.0.0.1:7420"
    tls_certificate: Annotated[str, text("Certificate chain (PEM) of the TCP address.")] = ""
    tls_key: Annotated[str, text("Its private key (PEM).")] = ""
    tls_client_ca: Annotated[
        str,
        text(
            "Mutual TLS: clients need a certificate of this authority (PEM); its common name is "
            "the tenant."
        ),
    ] = ""
    tokens: Annotated[
        str, text("File of bearer tokens and their tenants; read again when it changes.")
    ] = ""
    insecure: Annotated[
        bool,
        Meta(
            description="Listen on any address without TLS or without knowing the callers: "
            "whoever reaches it may read, replace and drop every block."
        ),
    ] = False
    streams_max: Annotated[int, count("Get and Put streams at once.", 1, 1024)] = 64
    idle_seconds_max: Annotated[
        float, time("A stream on which nothing moves for so long is cancelled.", 3600.0)
    ] = 60.0
    drain_seconds: Annotated[
        float, time("On shutdown: longest wait for calls under way.", 3600.0)
    ] = 10.0

    def socket_path(self, daemon_socket: Path) -> Path | None:
        """Where to listen beside the daemon at `daemon_socket`; None: nowhere."""
        if self.socket == OFF:
            return None
        own = daemon_socket.with_name(daemon_socket.name + ".gateway")
        return Path(self.socket) if self.socket else own

    @property
    def is_loopback(self) -> bool:
        """Whether `address` can be reached from this machine only."""
        found = ADDRESS.fullmatch(self.address)
        host = found[1].strip("[]") if found else ""
        try:
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


def gateway_conflicts(gateway: GatewayConfig) -> Iterator[tuple[str, str, str]]:
    """(key, problem, way out) for settings of the gateway that cannot work together."""
    if not is_address(gateway.address):
        yield "gateway.address", "is not host:port", "write 127.0.0.1:7420, [::1]:7420, or off"
    if gateway.address == OFF and gateway.socket == OFF:
        yield "gateway.address", "is off, and so is gateway.socket", "set one of them"
    if bool(gateway.tls_certificate) != bool(gateway.tls_key):
        yield "gateway.tls_certificate", "and gateway.tls_key come together", "set both, or none"
    if gateway.tls_client_ca and not gateway.tls_certificate:
        yield "gateway.tls_client_ca", "needs a certificate", "set gateway.tls_certificate too"
    if gateway.address == OFF or gateway.is_loopback or gateway.insecure:
        return
    if not gateway.tls_certificate:
        yield (
            "gateway.address",
            "is not loopback, and there is no TLS",
            "set gateway.tls_certificate and gateway.tls_key, or gateway.insecure = true",
        )
    if not gateway.tls_client_ca and not gateway.tokens:
        yield (
            "gateway.address",
            "is not loopback, and nobody checks who calls",
            "set gateway.tls_client_ca or gateway.tokens, or gateway.insecure = true",
        )
