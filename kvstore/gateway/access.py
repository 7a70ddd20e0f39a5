"""Who calls, and which namespaces that caller may use.

Primitives: `Tenant`; `Access.tenant_of(context)`. A caller is, in this order: the owner of the Unix
socket; the common name of its client certificate; the tenant of its bearer token; nobody in
particular, where neither is asked for. The tokens file is read again when it changes:

    [tenant.search]
    sha256 = ["9f86d081884c7d65…"]     # of the token, in hex; several while one is replaced
    namespaces = ["89ab…"]             # 64 hex digits each; left out: all

A file that became unusable leaves the last good one in force, and is told in the log.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import AccessDenied, ConfigError, Unauthenticated
from kvstore.logs import get_logger

LOOK_AGAIN_SECONDS = 1.0
_SHA256 = re.compile(r"[0-9a-f]{64}")
_log = get_logger("gateway")


@dataclass(frozen=True)
class Tenant:
    """A caller. `namespaces` None: all of them. `name` is whose budget its pins use."""

    name: str
    namespaces: frozenset[bytes] | None = None

    def check(self, namespace: bytes) -> None:
        """Raises AccessDenied."""
        if not self.may_use(namespace):
            raise AccessDenied(
                f"tenant {self.name} may not use namespace {namespace.hex()[:16]}…; "
                "the gateway's tokens file lists what it may"
            )

    def may_use(self, namespace: bytes) -> bool:
        return self.namespaces is None or namespace in self.namespaces


OWNER = Tenant("local")
ANYBODY = Tenant("anybody")


class Access:
    """`tokens`: the tokens file, None without one. Thread-safe."""

    def __init__(self, tokens: Path | None) -> None:
        """Raises ConfigError when the file cannot be used."""
        self._path = tokens
        self._lock = threading.Lock()
        self._look_at = 0.0
        self._seen: tuple[int, int, int] | None = None
        self._tenants: Mapping[str, Tenant] = {}
        self._by_token: Mapping[str, Tenant] = {}
        if tokens is not None:
            self._seen = self._fingerprint(tokens)
            self._tenants, self._by_token = _read(tokens)

    def tenant_of(self, context: Any) -> Tenant:
        """Of a gRPC call. Raises Unauthenticated, AccessDenied."""
        if context.peer().startswith("unix:"):
            return OWNER
        self._read_again()
        names = context.auth_context().get("x509_common_name")
        if names:
            return self._of_certificate(names[0].decode(errors="replace"))
        if self._path is None:
            return ANYBODY
        for key, value in context.invocation_metadata():
            if key == "authorization":
                return self._of_token(value)
        raise Unauthenticated("no token: send metadata `authorization: Bearer TOKEN`")

    def _of_certificate(self, name: str) -> Tenant:
        if self._path is None:
            return Tenant(name)
        tenant = self._tenants.get(name)
        if tenant is None:
            raise AccessDenied(f"the certificate's common name {name!r} is no tenant here")
        return tenant

    def _of_token(self, value: str) -> Tenant:
        kind, _, token = value.partition(" ")
        tenant = self._by_token.get(hashlib.sha256(token.strip().encode()).hexdigest())
        if kind.lower() != "bearer" or tenant is None:
            raise Unauthenticated("this token is not known (any more); ask for a new one")
        return tenant

    def _read_again(self) -> None:
        now = time.monotonic()
        with self._lock:
            if self._path is None or now < self._look_at:
                return
            self._look_at = now + LOOK_AGAIN_SECONDS
            try:
                seen = self._fingerprint(self._path)
                if seen == self._seen:
                    return
                self._seen = seen
                self._tenants, self._by_token = _read(self._path)
                _log.info("tokens read again", file=str(self._path), tenants=len(self._tenants))
            except ConfigError as error:
                _log.error("tokens not read again; the last good ones count", reason=str(error))

    @staticmethod
    def _fingerprint(path: Path) -> tuple[int, int, int]:
        try:
            found = path.stat()
        except OSError as error:
            raise ConfigError(f"gateway.tokens={path}: {error.strerror}") from error
        return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[dict[str, Tenant], dict[str, Tenant]]:
    """Tenants by name and by the token's digest. Raises ConfigError."""

    def refuse(problem: object) -> ConfigError:
        return ConfigError(f"gateway.tokens={path}: {problem}; see docs/block-api.md for its form")

    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refuse(error) from error
    tenants: dict[str, Tenant] = {}
    by_token: dict[str, Tenant] = {}
    entries = tree.get("tenant")
    if not isinstance(entries, dict) or set(tree) != {"tenant"}:
        raise refuse("must hold tables [tenant.NAME] and nothing else")
    for name, entry in entries.items():
        if not isinstance(entry, dict) or set(entry) - {"sha256", "namespaces"}:
            raise refuse(f"tenant {name} has sha256 and namespaces, nothing else")
        digests, spaces = entry.get("sha256", []), entry.get("namespaces")
        for digest in [*_texts(digests), *_texts(spaces or [])]:
            if not _SHA256.fullmatch(digest):
                raise refuse(f"tenant {name}: {digest!r} is not 64 lower-case hex digits")
        allowed = None if spaces is None else frozenset(map(bytes.fromhex, spaces))
        tenants[name] = Tenant(name, allowed)
        for digest in digests:
            if digest in by_token:
                raise refuse(f"tenants {by_token[digest].name} and {name} have one token")
            by_token[digest] = tenants[name]
    return tenants, by_token


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]
