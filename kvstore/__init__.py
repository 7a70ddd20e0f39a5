"""kvstore keeps the prefix KV blocks of LLM servers across host memory and NVMe.

What engines use, importable from here: `KVClient`, `AsyncKVClient`, `KVIdentity`, `BlockLayout`, `Chain`, `Content`,
`BlockStatus`, `Tier`, `KVStoreError`. Everything else is found in its module. Names are loaded on first use, so that
importing a part does not import the client and gRPC with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.async_client import AsyncKVClient
    from kvstore.client import KVClient
    from kvstore.errors import KVStoreError
    from kvstore.fingerprint import Chain, Content, KVIdentity
    from kvstore.layout import BlockLayout
    from kvstore.types import BlockStatus, NamespaceKind, Tier

__version__ = "0.1.0"

__all__ = [
    "AsyncKVClient",
    "BlockLayout",
    "BlockStatus",
    "Chain",
    "Content",
    "KVClient",
    "KVIdentity",
    "KVStoreError",
    "NamespaceKind",
    "Tier",
    "__version__",
]

_MODULES = {
    "AsyncKVClient": "kvstore.async_client",
    "BlockLayout": "kvstore.layout",
    "BlockStatus": "kvstore.types",
    "Chain": "kvstore.fingerprint",
    "Content": "kvstore.fingerprint",
    "KVClient": "kvstore.client",
    "KVIdentity": "kvstore.fingerprint",
    "KVStoreError": "kvstore.errors",
    "NamespaceKind": "kvstore.types",
    "Tier": "kvstore.types",
}


def __getattr__(name: str) -> object:
    """Load an exported name's module when it is first asked for."""
    try:
        module = _MODULES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(import_module(module), name)
