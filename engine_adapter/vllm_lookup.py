"""What of a prompt is stored, found out beside the scheduler.

Primitives:
  `Lookup`        one request's question; `is_done`, `tokens`, `end`
  `EngineRequest` vLLM's request, as far as it is read here
  `Lookups`       the threads that answer; `Suppressed` the names that nobody may ask for

A lookup names the prompt's blocks, probes the host directory, and asks the daemon what lies below.
What is found below is brought up to host memory before the answer is given, so that an answer never
promises anything but host blocks: the engine's memory is not held while a disk is read. The lease
stays until `end`. Never longer than its deadline; then what host memory has is the answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import lcm
from queue import SimpleQueue
from typing import Any, Protocol

from kvstore.client import KVClient, ReadLease
from kvstore.errors import KVStoreError
from kvstore.fingerprint import Chain
from kvstore.planner import Ability
from kvstore.types import FINGERPRINT_BYTES

LOOKUP_THREADS = 2
PROMOTION_THREADS = 4
PROMOTION_SECONDS_MIN = 0.02
GRACE_SECONDS = 0.3
"""The daemon's last word arrives a little after a deadline."""
PAUSE_SECONDS = 1.0
"""A daemon that was slow to answer is not asked again for so long; its directory still is."""

_log = logging.getLogger(__name__)


class EngineRequest(Protocol):
    """vLLM's request, as far as it is read here."""

    request_id: str
    num_computed_tokens: int
    """Before the step that is being scheduled."""
    prompt_token_ids: Sequence[int] | None
    all_token_ids: Sequence[int]
    block_hashes: Sequence[bytes]
    cache_salt: str | None
    lora_request: Any
    mm_features: Sequence[Any]
    prompt_embeds: Any

    @property
    def num_tokens(self) -> int: ...


def _worth_tokens(lease: ReadLease, chains: Sequence[Chain]) -> int:
    """How far the lease goes, or less: what the daemon's plan would load."""
    plan = lease.plan
    if plan is None:
        return lease.boundary_tokens
    return min(lease.boundary_tokens, plan.last * chains[0].block_tokens)


class Suppressed:
    """Names that failed to load, each for a while. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: dict[bytes, float] = {}
        self._lock = threading.Lock()

    def add(self, names: Iterable[bytes], now: float) -> None:
        with self._lock:
            self._until = {name: until for name, until in self._until.items() if until > now}
            self._until.update(dict.fromkeys(names, now + self._seconds))

    def lift(self, names: bytes) -> None:
        """These, joined, are stored anew."""
        if self._until:
            with self._lock:
                for at in range(0, len(names), FINGERPRINT_BYTES):
                    self._until.pop(names[at : at + FINGERPRINT_BYTES], None)

    def cap(self, chains: Sequence[Chain], tokens: int, now: float) -> int:
        """`tokens`, or less: no block below it is suppressed."""
        if not self._until:
            return tokens
        with self._lock:
            bad = {name for name, until in self._until.items() if until > now}
        for chain in chains:
            first = next((at for at in range(len(chain)) if chain[at] in bad), len(chain))
            if first < len(chain):
                tokens = min(tokens, first * chain.block_tokens)
        return tokens


class Lookup:
    """Made by the scheduler's thread, which has many of them to make at once. Its chains are the
    lookup's until it is done, then the scheduler's.

    `prompt`: all tokens; `chains`, if there are any yet, hold the first `known` of them.
    """

    __slots__ = (
        "_done",
        "_is_ended",
        "_known",
        "_lease",
        "_lock",
        "_prompt",
        "began",
        "chains",
        "from_below",
        "reason",
        "request",
        "tokens",
        "until",
    )

    def __init__(
        self,
        request: EngineRequest,
        prompt: Sequence[int],
        seconds: float,
        chains: Sequence[Chain] = (),
        known: int = 0,
    ) -> None:
        self.request = request
        self.chains = chains
        self.tokens = 0
        """Leading tokens whose blocks lie in host memory."""
        self.from_below = 0
        """How many of them were brought up."""
        self.reason = ""
        """Why there are not more, as far as it is not just absence."""
        self.began = time.monotonic()
        self.until = self.began + seconds
        self._prompt = prompt
        self._known = known
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._lease: ReadLease | None = None
        self._is_ended = False

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the chains hold."""
        return len(self._prompt)

    def wait(self, seconds: float) -> bool:
        """Whether it is done, within `seconds`."""
        return self._done.wait(seconds)

    def end(self) -> None:
        """Nobody needs the answer, or the blocks, any more. Idempotent."""
        with self._lock:
            self._is_ended = True
            lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    # ------------------------------------------------------------------ for the threads

    @property
    def is_ended(self) -> bool:
        return self._is_ended

    def name_blocks(self, make_chains: Callable[[EngineRequest], Sequence[Chain]]) -> int:
        """Hash what is not hashed yet; the largest boundary that may be promised."""
        chains = self.chains or make_chains(self.request)
        for chain in chains:
            chain.extend(self._prompt[self._known :])
        self.chains = chains
        step = lcm(*(chain.block_tokens for chain in chains))
        return max(len(self._prompt) - 1, 0) // step * step

    def hold(self, lease: ReadLease) -> None:
        """Keep it until `end`; replaces none."""
        with self._lock:
            if not self._is_ended:
                self._lease = lease
                return
        lease.release()

    def answer(self, tokens: int, from_below: int = 0) -> None:
        self.tokens, self.from_below = tokens, from_below
        self._done.set()

    def fail(self, reason: str) -> None:
        self.reason = reason
        self._done.set()


class Lookups:
    """`make_chains(request)`: empty chains, one a lane; `budget_seconds(tokens)`: how long bringing
    so many tokens up may take."""

    def __init__(
        self,
        client: KVClient,
        make_chains: Callable[[EngineRequest], Sequence[Chain]],
        lookup_seconds: float,
        budget_seconds: Callable[[int], float],
        suppressed: Suppressed,
    ) -> None:
        self._client = client
        self._make_chains = make_chains
        self._lookup_seconds = lookup_seconds
        self._budget_seconds = budget_seconds
        self._suppressed = suppressed
        self._ask_from = 0.0
        self._queue: SimpleQueue[Lookup | None] = SimpleQueue()
        self._promotions = ThreadPoolExecutor(PROMOTION_THREADS, "kvstore-promote")
        for _ in range(LOOKUP_THREADS):
            threading.Thread(target=self._run, name="kvstore-lookup", daemon=True).start()

    def start(self, lookup: Lookup) -> None:
        """Queue it; costs the caller a microsecond."""
        self._queue.put(lookup)

    def close(self) -> None:
        """Running ones end within their deadlines; the others are answered by theirs."""
        for _ in range(LOOKUP_THREADS):
            self._queue.put(None)
        self._promotions.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ the threads

    def _run(self) -> None:
        while (lookup := self._queue.get()) is not None:
            self._guarded(lookup, self._find)

    @staticmethod
    def _guarded(lookup: Lookup, work: Callable[..., None], *arguments: object) -> None:
        """Whatever goes wrong costs one request its hit."""
        try:
            work(lookup, *arguments)
        except KVStoreError as error:
            lookup.fail(f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - our bug: told to the log
            _log.exception("lookup failed")
            lookup.fail(f"{type(error).__name__}: {error}")

    def _find(self, lookup: Lookup) -> None:
        boundary = lookup.name_blocks(self._make_chains)
        boundary = self._suppressed.cap(lookup.chains, boundary, time.monotonic())
        if boundary <= 0 or lookup.is_ended:
            lookup.answer(0)
            return
        here = self._client.boundary_in_host(lookup.chains, boundary)
        if here == boundary:
            lookup.answer(here)
            self._hold(lookup, here)
            return
        lease = self._ask(lookup, boundary, here)
        if lease is None or _worth_tokens(lease, lookup.chains) <= here:
            if lease is not None:
                lookup.hold(lease)
            lookup.answer(here)
            return
        lookup.hold(lease)
        boundary = _worth_tokens(lease, lookup.chains)
        budget = max(self._budget_seconds(boundary - here), PROMOTION_SECONDS_MIN)
        until = time.monotonic() + budget
        lookup.until = until + GRACE_SECONDS
        work = (lookup, self._promote, lease, here, boundary, until)
        try:
            self._promotions.submit(self._guarded, *work)
        except RuntimeError:  # after close
            lookup.answer(here)

    def _hold(self, lookup: Lookup, tokens: int) -> None:
        """What was answered already stays where it is, and counts as used."""
        lease = self._ask(lookup, tokens, tokens)
        if lease is not None:
            lookup.hold(lease)

    def _ask(self, lookup: Lookup, boundary: int, here: int) -> ReadLease | None:
        """A lease up to `boundary`, of which host memory has `here`; with one KV group also the
        daemon's word on how much of the rest is worth a load."""
        began = time.monotonic()
        if began < self._ask_from or lookup.is_ended:
            return None
        ability = None
        if len(lookup.chains) == 1 and here < boundary:
            ability = Ability(lookup.prompt_tokens, here // lookup.chains[0].block_tokens)
        lease = self._client.match_groups(
            lookup.chains, boundary, deadline_seconds=self._lookup_seconds / 2, ability=ability
        )
        if time.monotonic() - began > self._lookup_seconds / 2:
            self._ask_from = time.monotonic() + PAUSE_SECONDS
        if not lease.boundary_tokens:
            lookup.reason = lease.reason
        return lease

    def _promote(
        self, lookup: Lookup, lease: ReadLease, here: int, boundary: int, until: float
    ) -> None:
        seconds = until - time.monotonic()
        if seconds > 0 and not lookup.is_ended:
            try:
                for _ in lease.load(deadline_seconds=seconds):
                    if lookup.is_ended:
                        break
            except KVStoreError as error:
                lookup.reason = f"{type(error).__name__}: {error}"
        now_here = self._client.boundary_in_host(lookup.chains, boundary)
        lookup.answer(now_here, max(now_here - here, 0))
