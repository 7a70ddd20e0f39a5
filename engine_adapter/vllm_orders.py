"""What the scheduler's half of the connector tells the workers' half, and what comes back.

Primitives:
  `Lane`          one KV group of one rank: what a namespace of the store holds
  `Stretch`       names of consecutive blocks of a lane
  `BlockOrder`    engine blocks of a lane and their names
  `LoadOrder`, `SaveOrders`, `StepOrders`   the work of one step
  `WorkerReport`  what a worker found out, merged over ranks

Plain values: they are pickled between processes at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.fingerprint import Chain
from kvstore.layout import BlockLayout
from kvstore.types import FINGERPRINT_BYTES, NamespaceId


@dataclass(frozen=True)
class Lane:
    """One KV group's blocks on one rank; every rank keeps its own part of a model's blocks.

    Ranks that hold equal bytes (MLA) share one lane: `rank` is the one that saves.
    """

    group: int
    rank: int
    namespace: NamespaceId
    layout: BlockLayout
    window_tokens: int
    """0: full attention."""
    layer_names: tuple[str, ...]
    is_shared: bool = False
    """Every rank loads it, `rank` saves it."""

    @property
    def block_tokens(self) -> int:
        return self.layout.block_tokens

    def is_loaded_by(self, rank: int) -> bool:
        return self.is_shared or self.rank == rank


@dataclass(frozen=True)
class Stretch:
    """Names of consecutive blocks; what the client's verbs take."""

    namespace: NamespaceId
    parent: bytes
    """Name of the block before the first; the namespace itself at the root."""
    joined: bytes
    """32 bytes a block."""

    @classmethod
    def of(cls, chain: Chain, first: int, stop: int) -> Stretch:
        names = b"".join(chain[block] for block in range(first, stop))
        return cls(chain.namespace, chain.parent_of(first), names)

    def __len__(self) -> int:
        return len(self.joined) // FINGERPRINT_BYTES

    def parent_of(self, depth: int) -> bytes:
        end = depth * FINGERPRINT_BYTES
        return self.joined[end - FINGERPRINT_BYTES : end] if depth else self.parent

    def part(self, first: int, stop: int) -> Stretch:
        """Blocks [first, stop) of these."""
        joined = self.joined[first * FINGERPRINT_BYTES : stop * FINGERPRINT_BYTES]
        return Stretch(self.namespace, self.parent_of(first), joined)


@dataclass(frozen=True)
class BlockOrder:
    """Engine block `block_ids[i]` of `lane` holds, or shall hold, block `names[i]`."""

    lane: int
    """Index among the engine's lanes."""
    names: Stretch
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class LoadOrder:
    """One request's blocks. Ended by exactly one answer a rank, whatever happens."""

    request: str
    is_layerwise: bool
    """Inside this step's forward pass; else beside it, while the request waits."""
    blocks: tuple[BlockOrder, ...]


@dataclass(frozen=True)
class SaveOrder:
    """Blocks that this step completes. `number` comes back once they are stored."""

    number: int
    blocks: BlockOrder


@dataclass(frozen=True)
class StepOrders:
    """Nothing but `fence` in most steps."""

    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    fence: int = 0
    """Counts resets: what was saved under an earlier one may not be stored any more."""


@dataclass
class WorkerReport:
    """What the scheduler's half must know; empty in most steps."""

    fence: int = 0
    """Lowest of all ranks: nothing saved before it is under way any more."""
    stored: dict[int, int] = field(default_factory=dict)
    """Number of a save order -> leading blocks of it that are stored."""
    failed: set[bytes] = field(default_factory=set)
    """Names of blocks that could not be loaded."""
    failed_requests: set[str] = field(default_factory=set)
    saves_lost: bool = False
    """This step's saves were thrown away: the forward pass read blocks that did not come."""
    copy_bytes_per_second: float = 0.0
    """Of loads lately; 0: none were measured."""

    def merge(self, other: WorkerReport) -> WorkerReport:
        """Of two ranks in the same step."""
        rates = [r for r in (self.copy_bytes_per_second, other.copy_bytes_per_second) if r]
        return WorkerReport(
            fence=min(self.fence, other.fence),
            stored={**self.stored, **other.stored},
            failed=self.failed | other.failed,
            failed_requests=self.failed_requests | other.failed_requests,
            saves_lost=self.saves_lost or other.saves_lost,
            copy_bytes_per_second=min(rates, default=0.0),
        )
