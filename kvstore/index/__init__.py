"""The durable index: fingerprint → record of its NVMe replica, in LMDB. Nothing else imports lmdb.

Primitives:
  `RECORD`            one block's fixed-size record
  `NamespaceRecord`   what must outlive the daemon about a namespace
  `Index`             open / submit / get / scan / close; namespaces and meta values beside them
  `IndexDamaged`      it cannot be opened or read: set it aside and rebuild
"""

from kvstore.index.index import Index, IndexStatistics
from kvstore.index.records import ENGINE, RECORD, Delete, IndexDamaged, NamespaceRecord, Put

__all__ = [
    "ENGINE",
    "RECORD",
    "Delete",
    "Index",
    "IndexDamaged",
    "IndexStatistics",
    "NamespaceRecord",
    "Put",
]
