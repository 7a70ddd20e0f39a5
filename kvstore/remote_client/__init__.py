"""Client of the gateway: blocks put and got from another container, machine or user.

`RemoteClient` blocks, `AsyncRemoteClient` is for asyncio; both have the same verbs. Needs no shared
memory and no daemon on this machine. An engine beside the daemon uses `kvstore.client`.

  `verbs`             what each verb asks, in which order, and what its answers mean: no I/O
  `client` `aio`      the two that do I/O
  `target`            where a gateway is, and how to be let in
"""

from kvstore.client import RawNames
from kvstore.remote_client.aio import AsyncRemoteClient, AsyncRemoteNamespace
from kvstore.remote_client.client import RemoteClient, RemoteNamespace
from kvstore.remote_client.target import Tls
from kvstore.remote_client.verbs import Declared, GetResult, Limits, Pinned, PutResult, Score

__all__ = [
    "AsyncRemoteClient",
    "AsyncRemoteNamespace",
    "Declared",
    "GetResult",
    "Limits",
    "Pinned",
    "PutResult",
    "RawNames",
    "RemoteClient",
    "RemoteNamespace",
    "Score",
    "Tls",
]
