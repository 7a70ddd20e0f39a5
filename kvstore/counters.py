"""The store's counters: every series exists at 0 from the start, and only ever grows.

One flat mapping `name[:label]` → int; `snapshot()` is what statistics and metrics read. Rates are
for the reader.
"""

from __future__ import annotations

from kvstore.types import Tier

TIERS = tuple(tier.name.lower() for tier in Tier)

MISS_REASONS = ("absent", "cleared", "capacity", "deadline", "failed", "planned")
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
                *(f"hit_blocks:{tier}" for tier in TIERS),
                *(f"hit_tokens:{tier}" for tier in TIERS),
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

    def looked_up(
        self, block_tokens: int, asked: int, in_host: int, below: int, missed_reason: str
    ) -> None:
        """One look-up of `asked` blocks, of which so many were found."""
        self.add("queries")
        self.add("queried_blocks", asked)
        for name, blocks in (
            (f"hit_{{}}:{TIERS[Tier.HOST]}", in_host),
            (f"hit_{{}}:{TIERS[Tier.NVME]}", below),
            (f"missed_{{}}:{missed_reason}", asked - in_host - below),
        ):
            self.add(name.format("blocks"), blocks)
            self.add(name.format("tokens"), blocks * block_tokens)

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def snapshot(self) -> dict[str, int]:
        return dict(self._values)
