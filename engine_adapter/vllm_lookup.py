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
from math import inf, lcm
from queue import SimpleQueue
from typing import Any, Protocol

from engine_adapter.vllm_settings import Settings
from kvstore.client import KVClient, ReadLease
from kvstore.errors import KVStoreError
from kvstore.fingerprint import Chain
from kvstore.planner import Ability
from kvstore.types import FINGERPRINT_BYTES

LOOKUP_THREADS = 2
PROMOTION_THREADS = 4
SLICE_TOKENS = 4096
"""Hashed in one go."""
PROMOTION_SECONDS_MIN = 0.02
GRACE_SECONDS = 0.3
"""The daemon's last word arrives a little after a deadline."""
NAP_SECONDS, NAPS = 0.0003, 30
"""Requests come in crowds: for a while a thread looks for the next one from time to time, as waking
it would cost the engine's thread several microseconds a request."""
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
    resumable: bool
    """More of the prompt may come."""

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
    """One request's question. The scheduler's thread makes many of them at once: so they are plain,
    without locks, and most values are the class's until they change. The chains are the lookup's
    until it is done, then the scheduler's."""

    chains: Sequence[Chain] = ()
    named_tokens = 0
    """How many of the request's tokens the chains hold."""
    until = 0.0
    """How long the request waits at most, from when it was asked for first; 0 before."""
    answered = inf
    """When."""
    is_done = False
    is_ended = False
    tokens = 0
    """Leading tokens whose blocks lie in host memory."""
    from_below = 0
    """How many of them were brought up."""
    lease: ReadLease | None = None

    def __init__(self, request: EngineRequest) -> None:
        self.request = request

    def end(self) -> None:
        """Nobody needs the answer, or the blocks, any more. Idempotent."""
        self.is_ended = True
        self._release()

    # ------------------------------------------------------------------ for the threads

    def name_blocks(self, make_chains: Callable[[EngineRequest], Sequence[Chain]]) -> int:
        """Hash what is not hashed yet; the largest boundary that may be promised."""
        chains = self.chains or make_chains(self.request)
        if not chains:
            return 0
        count = self.request.num_tokens
        for first in range(self.named_tokens, count, SLICE_TOKENS):
            tokens = self.request.all_token_ids[first : min(first + SLICE_TOKENS, count)]
            for chain in chains:
                chain.extend(tokens)
            time.sleep(0)  # the engine gets the interpreter now, not after the switch interval
        self.chains, self.named_tokens = chains, count
        step = lcm(*(chain.block_tokens for chain in chains))
        return max(count - 1, 0) // step * step

    def hold(self, lease: ReadLease) -> None:
        """Keep it until `end`."""
        self.lease = lease
        if self.is_ended:
            self._release()

    def _release(self) -> None:
        if self.lease is not None:
            self.lease.release()

    def answer(self, tokens: int, from_below: int = 0) -> None:
        self.tokens, self.from_below = tokens, from_below
        self.answered = time.monotonic()
        self.is_done = True


class Lookups:
    """`make_chains(request)`: empty chains, one a lane; `budget_seconds(tokens)`: how long bringing
    so many tokens up may take."""

    def __init__(
        self,
        client: KVClient,
        make_chains: Callable[[EngineRequest], Sequence[Chain]],
        settings: Settings,
        budget_seconds: Callable[[int], float],
        suppressed: Suppressed,
    ) -> None:
        self._client = client
        self._make_chains = make_chains
        self._lookup_seconds = settings.lookup_seconds
        self._plan = settings.plan
        self._budget_seconds = budget_seconds
        self._suppressed = suppressed
        self._ask_from = 0.0
        self._started = self._settled = 0
        self._lock = threading.Lock()
        self._all_settled = threading.Lock()
        """Held but for a moment: waiting for a bare lock costs the engine's thread least."""
        self._all_settled.acquire()
        self._queue: SimpleQueue[Lookup | None] = SimpleQueue()
        self._promotions = ThreadPoolExecutor(PROMOTION_THREADS, "kvstore-promote")
        for _ in range(LOOKUP_THREADS):
            threading.Thread(target=self._run, name="kvstore-lookup", daemon=True).start()

    def start(self, lookup: Lookup) -> None:
        """Queue it; costs the caller a microsecond."""
        self._started += 1
        self._queue.put(lookup)

    def settle(self, seconds: float) -> None:
        """Wait until none is looked for any more, but for what is being brought up."""
        self._all_settled.acquire(blocking=False)
        if self._settled < self._started:
            self._all_settled.acquire(timeout=seconds)

    def close(self) -> None:
        """Running ones end within their deadlines; the others are answered by theirs."""
        for _ in range(LOOKUP_THREADS):
            self._queue.put(None)
        self._promotions.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ the threads

    def _run(self) -> None:
        while (lookup := self._next()) is not None:
            self._guarded(lookup, self._find)
            with self._lock:
                self._settled += 1
                if self._settled >= self._started and self._all_settled.locked():
                    self._all_settled.release()
            if lookup.is_done and lookup.tokens:
                self._guarded(lookup, self._hold)
            lookup = None  # its request is the engine's to free while this thread waits

    def _next(self) -> Lookup | None:
        for _ in range(NAPS):
            if not self._queue.empty():
                break
            time.sleep(NAP_SECONDS)
        return self._queue.get()

    @staticmethod
    def _guarded(lookup: Lookup, work: Callable[..., None], *arguments: object) -> None:
        """Whatever goes wrong costs one request its hit."""
        try:
            work(lookup, *arguments)
        except Exception as error:  # noqa: BLE001 - an adapter that cannot be read, or our bug
            _log.log(
                logging.DEBUG if isinstance(error, KVStoreError) else logging.ERROR,
                "nothing is looked up for a request: %s",
                error,
                exc_info=error,
            )
            if not lookup.is_done:
                lookup.answer(0)

    def _find(self, lookup: Lookup) -> None:
        boundary = lookup.name_blocks(self._make_chains)
        boundary = self._suppressed.cap(lookup.chains, boundary, time.monotonic())
        if boundary <= 0 or lookup.is_ended:
            lookup.answer(0)
            return
        here = self._client.boundary_in_host(lookup.chains, boundary)
        if here == boundary:
            lookup.answer(here)
            return
        lease = self._ask(lookup, boundary, here)
        boundary = here if lease is None else _worth_tokens(lease, lookup.chains)
        if lease is None or boundary <= here:
            lookup.answer(here)
            return
        budget = max(self._budget_seconds(boundary - here), PROMOTION_SECONDS_MIN)
        until = time.monotonic() + budget
        lookup.until = until + GRACE_SECONDS
        work = (lookup, self._promote, lease, here, boundary, until)
        try:
            self._promotions.submit(self._guarded, *work)
        except RuntimeError:  # after close
            lookup.answer(here)

    def _hold(self, lookup: Lookup) -> None:
        """What was answered already stays where it is, and counts as used."""
        if lookup.lease is None:
            self._ask(lookup, lookup.tokens, lookup.tokens)

    def _ask(self, lookup: Lookup, boundary: int, here: int) -> ReadLease | None:
        """A lease up to `boundary`, held from now on; host memory has `here`. With one KV group
        also the daemon's word on how much of the rest is worth a load."""
        began = time.monotonic()
        if began < self._ask_from or lookup.is_ended:
            return None
        ability = None
        if self._plan and len(lookup.chains) == 1 and here < boundary:
            ability = Ability(lookup.named_tokens, here // lookup.chains[0].block_tokens)
        seconds = self._lookup_seconds / 2
        try:
            lease = self._client.match_groups(
                lookup.chains, boundary, deadline_seconds=seconds, ability=ability
            )
        except KVStoreError as error:
            _log.debug("no lease: %s", error)
            return None
        finally:
            if time.monotonic() - began > seconds:
                self._ask_from = time.monotonic() + PAUSE_SECONDS
        lookup.hold(lease)
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
                _log.debug("not brought up: %s", error)
        now_here = self._client.boundary_in_host(lookup.chains, boundary)
        lookup.answer(now_here, max(now_here - here, 0))
