"""The client library: what runs inside an engine.

`KVClient` and the objects its verbs return. Imports no engine, no torch; blocking calls on its own
threads only, so that an engine's event loops are left alone. See `core` for the client, `namespace`
for the verbs.
"""

from kvstore.client.committer import StoreTicket
from kvstore.client.control import Existence, ListedPage
from kvstore.client.core import DirectoryReads, KVClient
from kvstore.client.groups import LeasedGroup, Ready
from kvstore.client.lease import ReadLease
from kvstore.client.loading import LoadResult
from kvstore.client.names import FlatNames, Names, RawNames
from kvstore.client.namespace import NamespaceHandle
from kvstore.client.reservation import SharedReservation, WriteReservation
from kvstore.client.statistics import ClientStatistics

__all__ = [
    "ClientStatistics",
    "DirectoryReads",
    "Existence",
    "FlatNames",
    "KVClient",
    "LeasedGroup",
    "ListedPage",
    "LoadResult",
    "Names",
    "NamespaceHandle",
    "RawNames",
    "ReadLease",
    "Ready",
    "SharedReservation",
    "StoreTicket",
    "WriteReservation",
]
