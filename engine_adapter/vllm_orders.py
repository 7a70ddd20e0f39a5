"""What the scheduler's half of the connector tells the workers' half, and what comes back.

Primitives:
  `Lane`          one KV group of one rank: what a namespace of the store holds
  `BlockOrder`    engine blocks of a lane and their names
  `LoadOrder`, `StepOrders`   the work of one step
  `WorkerReport`  what a worker found out, merged over ranks

Plain values, pickled between processes at every step and changed by nobody: frozen classes would
cost the scheduler a microsecond each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.costs import ModelSize
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
    label: str = ""
    """For people."""
    model: ModelSize | None = None
    """What the daemon guesses a prefill's cost from, until it was told some."""

    @property
    def block_tokens(self) -> int:
        return self.layout.block_tokens

    def is_loaded_by(self, rank: int) -> bool:
        return self.is_shared or self.rank == rank


@dataclass(slots=True)
class BlockOrder:
    """Consecutive blocks: engine block `block_ids[i]` of `lane` holds, or shall hold, the i-th one.

    What the client's verbs take as names."""

    lane: int
    """Index among the engine's lanes."""
    namespace: NamespaceId
    parent: bytes
    """Name of the block before the first; the namespace itself at the root."""
    joined: bytes
    """Names, 32 bytes a block."""
    block_ids: Sequence[int]
    number: int = 0
    """Of a save: comes back once the blocks are stored."""

    @classmethod
    def of(cls, lane: int, chain: Chain, ids: Sequence[int], first: int, stop: int) -> BlockOrder:
        """Blocks [first, stop) of `chain`; `ids` is the request's whole table."""
        parent, joined = chain.parent_of(first), chain.part(first, stop)
        return cls(lane, chain.namespace, parent, joined, ids[first:stop])

    def __len__(self) -> int:
        return len(self.block_ids)

    def parent_of(self, depth: int) -> bytes:
        end = depth * FINGERPRINT_BYTES
        return self.joined[end - FINGERPRINT_BYTES : end] if depth else self.parent


@dataclass(slots=True)
class LoadOrder:
    """One request's blocks. Ended by exactly one answer a rank, whatever happens."""

    request: str
    is_layerwise: bool
    """Inside this step's forward pass; else beside it, while the request waits."""
    blocks: tuple[BlockOrder, ...]


@dataclass(slots=True)
class StepOrders:
    """Nothing but `fence` in most steps."""

    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[BlockOrder, ...] = ()
    """Blocks that this step completes."""
    fence: int = 0
    """Counts resets: what was saved under an earlier one may not be stored any more."""
    step: int = 0
    """Comes back with the step's report, where steps overlap."""


@dataclass
class WorkerReport:
    """What the scheduler's half must know; empty in most steps."""

    fence: int = 0
    """Lowest of all ranks: nothing saved before it is under way any more."""
    stored: dict[int, int] = field(default_factory=dict)
    """Number of a save order -> leading blocks of it that are stored."""
    copied: list[int] = field(default_factory=list)
    """Numbers of save orders that no longer read the engine's blocks; from devices only."""
    failed: set[bytes] = field(default_factory=set)
    """Names of blocks that could not be loaded."""
    failed_requests: set[str] = field(default_factory=set)
    saves_lost: bool = False
    """This step's saves were thrown away: the forward pass read blocks that did not come."""
    copy: tuple[int, float] | None = None
    """Bytes and seconds of the newest load; None: none was measured."""
    step: int = 0
    """Of the orders."""

    def merge(self, other: WorkerReport) -> WorkerReport:
        """Of two ranks in the same step."""
        copies = [copy for copy in (self.copy, other.copy) if copy is not None]
        return WorkerReport(
            fence=min(self.fence, other.fence),
            stored={**self.stored, **other.stored},
            copied=self.copied + other.copied,
            failed=self.failed | other.failed,
            failed_requests=self.failed_requests | other.failed_requests,
            saves_lost=self.saves_lost or other.saves_lost,
            copy=min(copies, key=lambda copy: copy[0] / copy[1], default=None),
            step=max(self.step, other.step),
        )
