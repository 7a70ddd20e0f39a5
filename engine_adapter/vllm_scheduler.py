"""The scheduler's half of the vLLM connector: what to load, what to save, when to say no.

Primitives of `SchedulerSide`, in the order in which a request meets them:
  `arrived`       its lookup starts on another thread
  `matched`       how many tokens can be loaded; None: ask again
  `allocated`     the engine's blocks are known: the load becomes an order
  `step_orders`   the work of a step, saves of what it computes among it
  `step_ended`    what the workers found out
  `finished`      forgets it
  `reset`         nothing stored so far may be found again

Never calls the daemon but in `reset`. A step waits once for lookups, at most `stall_seconds`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from sys import maxsize
from typing import Any, Final

from engine_adapter.vllm_lookup import EngineRequest, Lookup, Lookups, Suppressed
from engine_adapter.vllm_orders import (
    BlockOrder,
    Lane,
    LoadOrder,
    StepOrders,
    WorkerReport,
)
from engine_adapter.vllm_requests import LOADS_MAX, Tracked, contents_of
from engine_adapter.vllm_saves import BlockIdsOf, SavePlan, orders_of
from engine_adapter.vllm_settings import Settings
from engine_adapter.vllm_speed import Prefill, Speeds
from engine_adapter.vllm_statistics import Counts
from kvstore.client import KVClient, NamespaceHandle
from kvstore.client.inplace import timings_of
from kvstore.errors import KVStoreError
from kvstore.fingerprint import Chain

STALE_SECONDS = 2.0
"""An answer this old is asked for once more: others may have stored the prefix meanwhile, and the
lease over what was found runs out before long."""
NOTHING = StepOrders()
ASK_AGAIN: Final = (None, False)
NO_HIT: Final = (0, False)

_log = logging.getLogger(__name__)


class SchedulerSide:
    """One thread's: the scheduler's."""

    def __init__(
        self,
        client: KVClient,
        lanes: Sequence[Lane],
        settings: Settings,
        *,
        adapter_digest: Callable[[Any], str],
        step_tokens_max: int,
        may_load: bool = True,
        may_save: bool = True,
        may_layerwise: bool = True,
        has_overlap: bool = False,
        wants_events: bool = False,
    ) -> None:
        """`has_overlap`: a step may begin before the one before it has ended."""
        self._client = client
        self._lanes = tuple(lanes)
        self._handles = [open_lane(client, lane) for lane in lanes]
        self._settings = settings
        self._adapter_digest = adapter_digest
        self._step_tokens_max = step_tokens_max
        self._hit_tokens_min = max(settings.hit_tokens_min, 1) if may_load else maxsize
        self._may_layerwise = may_layerwise and settings.layerwise != "never"
        self._arrived: dict[str, Lookup] = {}
        """Requests that were not asked for yet: as little as possible is made for them."""
        self._requests: dict[str, Tracked] = {}
        self._loading: dict[str, Tracked] = {}
        """Beside the forward pass, until the workers report them; also of aborted requests."""
        self._layerwise: list[Tracked] = []
        """Those whose load lies in the step that was ordered last."""
        self._loads: list[LoadOrder] = []
        self._has_stalled, self._step_now = False, 0.0
        self._has_overlap = has_overlap
        self._step = 0
        self._fence = self._acknowledged = 0
        self._reset: Future[None] | None = None
        self._is_resetting = False
        self._control = ThreadPoolExecutor(1, "kvstore-reset")
        self.counts = Counts()
        self.speeds = Speeds()
        self._timings = timings_of(self._handles[0])
        self._sharing = sum(not lane.window_tokens for lane in lanes) or len(lanes)
        self._suppressed = Suppressed(settings.suppress_seconds)
        self._saves = SavePlan(lanes, self._requests, self._suppressed, may_save, wants_events)
        self._lookups = Lookups(client, self._chains, settings, self._budget, self._suppressed)

    # ------------------------------------------------------------------ a request's way

    def arrived(self, request: EngineRequest) -> None:
        """Begin to look for its prefix."""
        self._arrived[request.request_id] = lookup = Lookup(request)
        self._lookups.start(lookup)

    def _track(self, request_id: str) -> Tracked | None:
        """From now on. None: it never arrived."""
        lookup = self._arrived.pop(request_id, None)
        if lookup is None:
            return None
        self._requests[request_id] = tracked = Tracked(lookup)
        return tracked

    def _look_up_again(self, tracked: Tracked) -> Lookup:
        tracked.forget_lookup()
        tracked.lookup = lookup = Lookup(tracked.request)
        lookup.chains, lookup.named_tokens = tracked.chains, tracked.hashed_tokens
        self._lookups.start(lookup)
        return lookup

    def _chains(self, request: EngineRequest) -> Sequence[Chain]:
        """On a lookup's thread: an adapter's files may have to be read. None for prompts given as
        embeddings and those that go on arriving, with pictures that were not there: they pass by
        the store."""
        if request.prompt_embeds is not None or request.prompt_token_ids is None:
            return ()
        if request.resumable:
            return ()
        contents = contents_of(request, self._adapter_digest)
        return [Chain(lane.namespace, lane.block_tokens, contents) for lane in self._lanes]

    def matched(self, request: EngineRequest, computed: int) -> tuple[int | None, bool]:
        """(tokens beyond `computed` that can be loaded, whether beside the forward pass)."""
        request_id = request.request_id
        now = self._step_now = self._step_now or time.monotonic()
        lookup = self._arrived.get(request_id)
        if lookup and self._has_stalled and not lookup.is_done and self._may_wait(lookup, now):
            return ASK_AGAIN  # many arrived at once: nothing is made for them yet
        tracked = self._requests.get(request_id) or self._track(request_id)
        if tracked is None or self._is_resetting:
            return NO_HIT
        tracked.computed_tokens = computed
        lookup = tracked.lookup
        if lookup is None or tracked.has_failed:
            lookup = self._look_up_again(tracked)
        elif now > lookup.answered + STALE_SECONDS and self._may_refresh(tracked):
            lookup = self._look_up_again(tracked)
            tracked.is_refreshed = True
        if not lookup.is_done and not self._wait(lookup, now):
            if self._may_wait(lookup, now):
                return ASK_AGAIN
            self.counts.add(lookups_late=1)
            return NO_HIT
        tokens = lookup.tokens - computed
        if tokens < self._hit_tokens_min:
            return NO_HIT
        if tracked.loads >= LOADS_MAX:
            self.counts.add(loads_given_up=1)
            return NO_HIT
        if not self._is_worth(tracked, tokens):
            return NO_HIT
        tracked.take_lookup()
        tracked.from_below = lookup.from_below
        tracked.is_layerwise = self._is_hidden(tokens, request.num_tokens - lookup.tokens)
        return tokens, not tracked.is_layerwise

    def _is_worth(self, tracked: Tracked, tokens: int) -> bool:
        """Whether loading is predicted to be faster than computing, once a load was seen. Each time
        it is not, loads are thought a little faster, so that another one is tried by and by."""
        speeds, compute = self.speeds, self.speeds.prefill_seconds(tokens)
        if not self._settings.plan or not speeds.has_copied or not compute:
            return True
        if self._load_seconds(tokens) <= compute:
            return True
        if not tracked.is_slow:  # it may be asked for again
            tracked.is_slow = True
            speeds.doubt_copies()
            self.counts.add(loads_not_worth=1)
        return False

    def _load_seconds(self, tokens: int) -> float:
        """Ranks copy at the same time, each its own."""
        size = sum(
            lane.layout.block_bytes / lane.block_tokens * min(tokens, lane.window_tokens or tokens)
            for lane in self._lanes
            if lane.is_loaded_by(0)
        )
        return self.speeds.copy_seconds(size)

    def _may_refresh(self, tracked: Tracked) -> bool:
        """One request a step, and the step goes on without its answer."""
        if self._has_stalled or tracked.is_refreshed:
            return False
        self._has_stalled = True
        return True

    def _wait(self, lookup: Lookup, now: float) -> bool:
        """Whether it is done; the first one of a step that is not is worth waiting for."""
        if self._has_stalled or not self._may_wait(lookup, now):
            return False
        self._has_stalled = True
        self._lookups.settle(self._settings.stall_seconds)
        self.counts.add(stall_seconds=time.monotonic() - now)
        return lookup.is_done

    def _may_wait(self, lookup: Lookup, now: float) -> bool:
        if not lookup.until:  # a thread that sets it at this moment loses some of its time
            lookup.until = now + self._settings.lookup_seconds
        return now < lookup.until

    def _is_hidden(self, tokens: int, suffix: int) -> bool:
        """Whether a load inside the step costs the step no more than it may."""
        if not self._may_layerwise:
            return False
        if self._settings.layerwise == "always":
            return True
        load = self._load_seconds(tokens)
        compute = self.speeds.prefill_seconds(min(suffix, self._step_tokens_max))
        return load <= max(compute, self._settings.stall_seconds)

    def _budget(self, tokens: int) -> float:
        """Bringing blocks up may take as long as computing them would."""
        predicted = self.speeds.prefill_seconds(tokens)
        return min(predicted or self._settings.load_seconds, self._settings.load_seconds)

    def allocated(
        self, request: EngineRequest, block_ids: Sequence[Sequence[int]], tokens: int
    ) -> None:
        """The engine gave the request blocks and will load `tokens` tokens into them; with 0 the
        request goes on without a load, or after it."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        if not tokens:
            tracked.end_lookup()
            self._saves.look_in(1, tracked)
            return
        first, stop = tracked.computed_tokens, tracked.computed_tokens + tokens
        orders: list[BlockOrder] = []
        for index, lane in enumerate(self._lanes):
            begin, end = first // lane.block_tokens, -(-stop // lane.block_tokens)
            ids = block_ids[lane.group]
            orders += orders_of(index, lane, tracked.chains[index], ids, begin, end)
        order = LoadOrder(request.request_id, tracked.is_layerwise, tuple(orders))
        self._loads.append(order)
        tracked.loads += 1
        tracked.load_tokens = tokens
        below = min(tracked.from_below, tokens)
        self.counts.add(
            loads=1,
            loads_layerwise=int(tracked.is_layerwise),
            promised_host_tokens=tokens - below,
            promised_nvme_tokens=below,
        )
        if tracked.is_layerwise:
            self._layerwise.append(tracked)
            self._saves.look_in(1, tracked)
        else:
            tracked.is_loading = True
            self._loading[request.request_id] = tracked

    def sources(self, request_id: str, tokens: int) -> tuple[int, int]:
        """Of `tokens` about to be loaded: (found in host memory, brought up from below)."""
        tracked = self._requests.get(request_id)
        below = min(tracked.from_below, tokens) if tracked is not None else 0
        return tokens - below, below

    def finished(self, request_id: str) -> None:
        """Its blocks are freed now, or once a load that is under way was reported."""
        if self._loads:
            self._loads = [order for order in self._loads if self._keeps(order, request_id)]
        self._track(request_id)
        tracked = self._requests.pop(request_id, None)
        if tracked is not None and not tracked.is_loading:
            tracked.end_lookup()

    @staticmethod
    def _keeps(order: LoadOrder, request_id: str) -> bool:
        """One beside the forward pass stays: the scheduler waits for its report."""
        return order.request != request_id or not order.is_layerwise

    # ------------------------------------------------------------------ a step

    def step_orders(
        self,
        scheduled: Mapping[str, int],
        preempted: Iterable[str],
        block_ids_of: BlockIdsOf,
    ) -> StepOrders:
        """`scheduled`: tokens computed in this step, by request."""
        self._has_stalled, self._step_now = False, 0.0
        if self._is_resetting and self._acknowledged >= self._fence:
            self._clear_again()
        for request_id in preempted:
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.forget_lookup()
                tracked.loads = 0
        if not scheduled and not self._loads and not self._fence:
            return NOTHING  # the engine waits, and asks again and again
        tokens = sum(scheduled.values())
        self._step += 1
        self.speeds.step_begins(self._step, scheduled, tokens, self._requests)
        saves = self._saves.orders(scheduled, tokens, block_ids_of, self._is_resetting)
        step = self._step if self._has_overlap else 0
        if not saves and not self._loads and not self._fence and not step:
            return NOTHING
        orders = StepOrders(tuple(self._loads), tuple(saves), self._fence, step)
        self._loads = []
        return orders

    def step_ended(self, report: WorkerReport | None, received: Iterable[str]) -> None:
        """`received`: requests whose load ended, well or not."""
        step = self._step
        if self._has_overlap:
            step = 0 if report is None else report.step
        prefill = self.speeds.step_ends(step)
        if prefill is not None and not self._layerwise:  # else the pass waited for loads
            self._tell(prefill)
        failed = report.failed_requests if report is not None else frozenset()
        while self._layerwise:
            self._loaded(self._layerwise.pop(), failed)
        for request_id in received:
            loaded = self._loading.pop(request_id, None)
            if loaded is not None:
                loaded.is_loading = False
                self._loaded(loaded, failed)
        if report is None:
            return
        self._acknowledged = max(self._acknowledged, report.fence)
        if report.failed:
            self._suppressed.add(report.failed, time.monotonic())
            self.counts.add(loads_failed=len(report.failed_requests))
        for request_id in report.failed_requests:
            if request_id in self._requests:
                self._requests[request_id].load_failed()
        if report.saves_lost:
            self._saves.lost()
        if report.copy is not None:
            size_bytes, seconds = report.copy
            self.speeds.copied(size_bytes / seconds)
            self._timings.copy(size_bytes, seconds)
        self._saves.stored(report.stored)

    def _loaded(self, tracked: Tracked, failed: Container[str]) -> None:
        """A load of it ended."""
        tracked.end_lookup()
        if tracked.request.request_id not in failed:
            self.counts.add(saved_prefill_seconds=self.speeds.prefill_seconds(tracked.load_tokens))

    def rewind(self, request_id: str, blocks: int) -> None:
        """What it has computed counts up to so many blocks of its only lane, no further."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            request, tokens = tracked.request, blocks * self._lanes[0].block_tokens
            request.num_computed_tokens = min(request.num_computed_tokens, tokens)

    def _tell(self, prefill: Prefill) -> None:
        """The daemon learns what blocks are worth. Lanes share a prefill, as a hit is one of all of
        them; those of windows count nothing as saved."""
        seconds = prefill.seconds / self._sharing
        for handle in self._handles:
            self._timings.prefill(handle.id, prefill.start, prefill.stop, seconds)

    def take_stored(self) -> list[tuple[Any, ...]]:
        """(request, lane, first block, order, leading blocks stored) since the last call."""
        return self._saves.take_stored()

    # ------------------------------------------------------------------ reset, end

    def reset(self) -> bool:
        """Clear the namespaces. Until the workers have let go of older saves nothing is found or
        saved; then what those stored in between is cleared too. False: the daemon did not obey."""
        self._fence += 1
        self._is_resetting, self._reset = True, None
        for request_id in list(self._arrived):
            self._track(request_id)
        for tracked in self._requests.values():
            if not tracked.is_loading:
                tracked.forget_lookup()
        self._saves.forget()
        try:
            self._clear()
        except KVStoreError as error:
            _log.warning("reset: namespaces were not cleared: %s", error)
            return False
        return True

    def _clear(self) -> None:
        for handle in self._handles:
            handle.clear()

    def _clear_again(self) -> None:
        if self._reset is None:
            self._reset = self._control.submit(self._clear)
        elif self._reset.done():
            if self._reset.exception() is None:
                self._is_resetting = False
            self._reset = None

    def close(self) -> None:
        """Leave the daemon."""
        self._lookups.close()
        self._control.shutdown(wait=False, cancel_futures=True)
        self._client.close()


def open_lane(client: KVClient, lane: Lane) -> NamespaceHandle:
    """The lane's namespace, declared now or when a daemon comes."""
    return client.namespace(
        lane.namespace,
        lane.layout,
        window_tokens=lane.window_tokens,
        label=lane.label,
        model=lane.model,
    )
