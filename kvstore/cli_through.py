"""Whose blocks a command moves, and through whom: a gateway, or the daemon on this machine.

Primitives: `Through`, `DEFAULT_THROUGH`, `blocks_of` (one namespace), `all_namespaces`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from kvstore import logs
from kvstore.cli_options import Where, unreachable
from kvstore.errors import NamespaceUnknown, Unavailable
from kvstore.types import FINGERPRINT_BYTES, NamespaceId, NamespaceKind

if TYPE_CHECKING:
    from kvstore.block_access import Access
    from kvstore.remote_client import Declared

CONNECT_SECONDS_MAX = 10.0
HEX_DIGITS = 2 * FINGERPRINT_BYTES


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Through:
    """Options of commands that move blocks: through which gateway, if any."""

    gateway: Annotated[str | None, Parameter(env_var="KVSTORE_GATEWAY")] = None
    "Gateway as host:port or unix:PATH; without it, the daemon on this machine."

    token_file: Path | None = None
    "File with this caller's bearer token."

    tls_ca: Path | None = None
    "Certificate of the gateway's authority (PEM); turns TLS on."

    tls_certificate: Path | None = None
    "This caller's certificate (PEM), where the gateway asks for one."

    tls_key: Path | None = None
    "Its private key (PEM)."


DEFAULT_THROUGH = Through()


def _remote(through: Through) -> Any:
    from kvstore.remote_client import RemoteClient, Tls

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    token = through.token_file.read_text().strip() if through.token_file else None
    tls = None
    if through.tls_ca or through.tls_certificate:
        tls = Tls(through.tls_ca, through.tls_certificate, through.tls_key)
    assert through.gateway is not None
    return RemoteClient(through.gateway, token=token, tls=tls)


def _local(where: Where) -> Any:
    from kvstore.client import KVClient

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    config, _ = where.load({})
    socket = config.daemon.socket
    if (problem := unreachable(socket)) is not None:
        raise problem
    logs.configure("error", "auto")
    client = KVClient(socket, engine="kvstore-cli", deadline_seconds=30.0)
    if not client.wait_connected(CONNECT_SECONDS_MAX):
        reason = client.away_reason
        client.close()
        raise unreachable(socket) or Unavailable(
            f"the daemon at {socket} does not let this command in: {reason}"
        )
    return client


@contextmanager
def blocks_of(
    where: Where, through: Through, namespace: str, *, new_block_bytes: int = 0
) -> Iterator[Access]:
    """The namespace; with `new_block_bytes` a flat one that is unknown is declared."""
    from kvstore.block_access import LocalAccess, RemoteAccess

    space = _space_id(namespace)
    with _remote(through) if through.gateway else _local(where) as client:

        def opened(found: NamespaceId | Declared) -> Access:
            if through.gateway:
                return RemoteAccess(client, found)
            return LocalAccess(client, found, "kvstore-cli")

        try:
            access = opened(space)
        except NamespaceUnknown:
            if not new_block_bytes or space.hex() == namespace.lower():
                raise
            access = opened(_flat(space, namespace, new_block_bytes))
        yield access


def _flat(space: NamespaceId, name: str, block_bytes: int) -> Declared:
    from kvstore.layout import BlockLayout
    from kvstore.remote_client import Declared

    return Declared(space, BlockLayout(1, 1, block_bytes), NamespaceKind.FLAT, label=name)


def all_namespaces(where: Where, through: Through) -> list[Declared]:
    """All this caller may use."""
    from kvstore.block_access import LocalAccess

    if through.gateway:
        with _remote(through) as client:
            found: list[Declared] = client.describe()[0]
            return found
    with _local(where) as client:
        spaces = [NamespaceId(bytes.fromhex(item["id"])) for item in client.stat()["namespaces"]]
        return [LocalAccess(client, space, "kvstore-cli").declared for space in spaces]


def _space_id(text: str) -> NamespaceId:
    """64 hex digits as they are; anything else names a flat namespace of this command line."""
    if len(text) == HEX_DIGITS:
        try:
            return NamespaceId(bytes.fromhex(text))
        except ValueError:
            pass
    return NamespaceId(hashlib.blake2b(b"kvstore-flat\0" + text.encode(), digest_size=32).digest())
