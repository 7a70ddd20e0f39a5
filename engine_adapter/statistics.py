"""What an adapter counts, and the report of one request. Counters only grow.

Primitives: `RequestReport`, `AdapterStatistics`, `Tally` (the thread-safe place where they grow).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from threading import Lock


@dataclass
class RequestReport:
    """One generate call. Tokens are summed over the rows of a batch, padding not counted."""

    prompt_tokens: int = 0
    host_tokens: int = 0
    """Prompt tokens whose KV came from host memory."""
    nvme_tokens: int = 0
    """Prompt tokens whose KV was below host memory when the request came."""
    plain_reason: str = ""
    """Why this call did not use the store at all; "" if it did."""
    miss_reason: str = ""
    """Why not more of the prompt was restored; "" if all that can be was."""
    reruns: int = 0
    """Prefills thrown away because what they were computed from was not confirmed."""
    met_at_tokens: int = 0
    """Leading tokens that were computed while what follows was loaded from the back."""
    lookup_seconds: float = 0.0
    """Naming, matching and starting the load, before the prefill."""
    first_token_seconds: float = 0.0
    """From the call to the end of its prefill; 0 if there was none."""

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.host_tokens + self.nvme_tokens


@dataclass
class AdapterStatistics:
    """A snapshot."""

    requests: int = 0
    plain: int = 0
    """Requests that could not use the store; `plain_reasons` says why."""
    hits: int = 0
    prompt_tokens: int = 0
    host_tokens: int = 0
    nvme_tokens: int = 0
    reruns: int = 0
    load_seconds: float = 0.0
    """Wall time of load threads, waiting for the daemon included."""
    load_cpu_seconds: float = 0.0
    """Processor time of load threads."""
    saved_blocks: int = 0
    present_blocks: int = 0
    """Blocks that were stored already when the saver came to them."""
    refused_blocks: int = 0
    """No room, no parent, daemon away, or too many saves waiting; `save_reasons` says which."""
    save_cpu_seconds: float = 0.0
    """Processor time of the saver thread."""
    hook_cpu_seconds: float = 0.0
    """Processor time that the adapter took on callers' threads."""
    plain_reasons: Counter[str] = field(default_factory=Counter)
    miss_reasons: Counter[str] = field(default_factory=Counter)
    save_reasons: Counter[str] = field(default_factory=Counter)

    @property
    def hit_tokens(self) -> int:
        return self.host_tokens + self.nvme_tokens


class Tally:
    """One lock around one AdapterStatistics."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._values = AdapterStatistics()

    def add(self, **amounts: float) -> None:
        """Grow counters by name; a wrong name is our bug (AttributeError)."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._values, name, getattr(self._values, name) + amount)

    def reason(self, counter: str, reason: str, amount: int = 1) -> None:
        """Count `reason` ("" is none) in `plain_reasons`, `miss_reasons` or `save_reasons`.

        What follows a colon is detail, so that there are only a few reasons."""
        if reason:
            with self._lock:
                getattr(self._values, counter)[reason.partition(":")[0]] += amount

    def request(self, report: RequestReport) -> None:
        """A generate call ended, or its prefill did."""
        self.add(
            requests=1,
            plain=int(bool(report.plain_reason)),
            hits=int(report.hit_tokens > 0),
            prompt_tokens=report.prompt_tokens,
            host_tokens=report.host_tokens,
            nvme_tokens=report.nvme_tokens,
            reruns=report.reruns,
        )
        self.reason("plain_reasons", report.plain_reason)
        self.reason("miss_reasons", report.miss_reason)

    def snapshot(self) -> AdapterStatistics:
        with self._lock:
            return replace(
                self._values,
                plain_reasons=self._values.plain_reasons.copy(),
                miss_reasons=self._values.miss_reasons.copy(),
                save_reasons=self._values.save_reasons.copy(),
            )
