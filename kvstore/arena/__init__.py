"""The shared memory that holds the host tier's blocks: named tmpfs files, mapped by everyone.

Primitives:
  `Mapping`     one 2 MiB-aligned mapping that its numpy views keep alive
  `Arena`       the daemon's side: owns the directory, reserves every byte, may put huge pages under
  `ArenaView`   a client's side: read-only views, and writable ones for reserved slots
  `ClientLock`  a client's proof of life, a kernel lock on its own small file

One directory an arena:
  LOCK           held by the daemon that owns everything below
  header         the directory of READY blocks; page 0 all zero = no daemon lives here
  region-NNNN    block bytes; equal sizes, the last may be shorter
  clients/*.lock held by the client that made it until its process ends

Files of these names are ours and are removed when dead; anything else is left alone. Nothing is
sparse: what cannot be reserved physically is refused at start, never found out by a bus error.
Knows nothing of slots, blocks or the header's content. `multiprocessing.shared_memory` is not used:
it removes the memory of others when the first process that attached ends.
"""

from kvstore.arena.locks import ClientLock
from kvstore.arena.mapping import Mapping
from kvstore.arena.owner import Arena, ArenaStatistics
from kvstore.arena.view import ArenaView

__all__ = ["Arena", "ArenaStatistics", "ArenaView", "ClientLock", "Mapping"]
