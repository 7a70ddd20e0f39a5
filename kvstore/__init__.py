"""kvstore keeps the prefix KV blocks of LLM servers across host memory and NVMe.

What engines use, importable from here: `KVClient`, `AsyncKVClient`, `KVIdentity`, `BlockLayout`,
`Chain`, `Content`, `BlockStatus`, `Tier`, `KVStoreError`. Everything else is found in its module.
Names are loaded on first use, so that importing a part does not import the client and gRPC with it.
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
    from kvstore.version import VERSION as __version__

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

_PLACES = {
    "AsyncKVClient": ("kvstore.async_client", "AsyncKVClient"),
    "BlockLayout": ("kvstore.layout", "BlockLayout"),
    "BlockStatus": ("kvstore.types", "BlockStatus"),
    "Chain": ("kvstore.fingerprint", "Chain"),
    "Content": ("kvstore.fingerprint", "Content"),
    "KVClient": ("kvstore.client", "KVClient"),
    "KVIdentity": ("kvstore.fingerprint", "KVIdentity"),
    "KVStoreError": ("kvstore.errors", "KVStoreError"),
    "NamespaceKind": ("kvstore.types", "NamespaceKind"),
    "Tier": ("kvstore.types", "Tier"),
    "__version__": ("kvstore.version", "VERSION"),
}


def __getattr__(name: str) -> object:
    """Load an exported name's module when it is first asked for."""
    try:
        module, attribute = _PLACES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(import_module(module), attribute)
