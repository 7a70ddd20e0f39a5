"""The store's counters: every series exists at 0 from the start, and only ever grows.

One flat mapping `name[:label]` → int; `snapshot()` is what statistics and metrics read. Rates are
for the reader.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.boundary import counted_group
from kvstore.matching import MatchResult

HIT_TIERS = ("host", "nvme")
MISS_REASONS = ("absent", "planned")
DROP_REASONS = (
    "evicted",
    "dropped_before_write",
    "checksum",
    "io",
    "cleared",
    "deleted",
    "parent_lost",
    "over_cap",
    "staged",
)
PREFETCH_OUTCOMES = ("accepted", "refused", "begun", "dropped")
STORE_OUTCOMES = ("stored", "present", "no_room", "no_parent", "dropped", "refused")
WRITE_SKIPS = ("queue_full", "write_budget", "no_room", "no_parent", "policy", "wear", "io", "gone")


class Counters:
    """Monotonic counters of one daemon life."""

    def __init__(self) -> None:
        self._values: dict[str, int] = dict.fromkeys(
            (
                "queries",
                "queried_blocks",
                "reported_blocks",
                "reported_missed_blocks",
                "leases_granted",
                "bytes_promoted",
                "bytes_written_behind",
                "blocks_written_behind",
                "gpu_blocks:came",
                "gpu_blocks:left",
                "late_commits",
                "expired_reservations",
                "suppressed_errors",
                "saved_prefill_us",
                *(f"hit_blocks:{tier}" for tier in HIT_TIERS),
                *(f"hit_tokens:{tier}" for tier in HIT_TIERS),
                *(f"missed_blocks:{reason}" for reason in MISS_REASONS),
                *(f"missed_tokens:{reason}" for reason in MISS_REASONS),
                *(f"dropped_blocks:{reason}" for reason in DROP_REASONS),
                *(f"prefetch_blocks:{outcome}" for outcome in PREFETCH_OUTCOMES),
                *(f"store_blocks:{outcome}" for outcome in STORE_OUTCOMES),
                *(f"write_skipped_blocks:{reason}" for reason in WRITE_SKIPS),
            ),
            0,
        )

    def add(self, name: str, amount: int = 1) -> None:
        """Grow one counter; an unknown name is our bug (KeyError)."""
        self._values[name] += int(amount)

    def matched(self, result: MatchResult, in_host: Sequence[int]) -> None:
        """One look-up; `in_host`: blocks of each group that were in the host tier.

        Blocks before a group's window are needed by nobody: neither found nor missed. The groups'
        tokens are the same ones: they count once.
        """
        self.add("queries")
        counted = counted_group([group.namespace.window_tokens for group in result.groups])
        missed = result.short_reason or "absent"
        for at, (group, asked) in enumerate(zip(result.groups, result.asked_blocks, strict=True)):
            tokens = group.namespace.layout.block_tokens if at == counted else 0
            self._blocks("hit", "host", in_host[at], tokens)
            self._blocks("hit", "nvme", len(group.rows) - in_host[at], tokens)
            self._blocks("missed", missed, asked - group.blocks, tokens)

    def reported(self, blocks: int, block_tokens: int) -> None:
        """Blocks that a client found in the host tier without a call."""
        self.add("queries")
        self.add("reported_blocks", blocks)
        self._blocks("hit", "host", blocks, block_tokens)

    def _blocks(self, what: str, label: str, blocks: int, block_tokens: int) -> None:
        self.add("queried_blocks", blocks)
        self.add(f"{what}_blocks:{label}", blocks)
        self.add(f"{what}_tokens:{label}", blocks * block_tokens)

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def snapshot(self) -> dict[str, int]:
        return dict(self._values)
