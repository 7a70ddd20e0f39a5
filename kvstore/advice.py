"""What to load of what was found: the planner between a look-up and its lease.

Primitives of `Advisor`: `match`, `watch`, `predict`, `score`.

Until prefill times of a namespace were seen, there is no plan and all that was found is offered.
What a plan declines to load is no part of the match, nor of the lease. Runs on the daemon's loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvstore.hints import TokenHint
from kvstore.matching import MatchResult
from kvstore.mover import Mover
from kvstore.namespaces import Namespace
from kvstore.planner import Ability, Pipeline, Plan, Prompt, Watch, plan
from kvstore.prefetch import Prefetcher
from kvstore.promotion import LoadStream
from kvstore.store import READY, Store
from kvstore.types import ClientId, LeaseId, NamespaceKind, Tier

PLANNED = "planned"
PLANS_KEPT_MAX = 4096


class Advisor:
    """Judges with the store's costs and the mover's queue."""

    def __init__(self, store: Store, mover: Mover, prefetcher: Prefetcher) -> None:
        self._store = store
        self._mover = mover
        self._prefetcher = prefetcher
        self._plans: OrderedDict[LeaseId, tuple[Plan, float]] = OrderedDict()
        """Of leases that were not loaded yet, with the time they were given."""

    def match(
        self,
        client: ClientId,
        groups: Sequence[tuple[Namespace, bytes]],
        prompt_tokens: int,
        want_lease: bool,
        now: float,
        ability: Ability | None = None,
        hints: Sequence[TokenHint] = (),
    ) -> tuple[MatchResult, Plan | None]:
        """`Store.find`, cut to what the plan loads, then `Store.hold`. Raises InvalidRequest,
        LeaseTooLarge.
        """
        result = self._store.find(groups, prompt_tokens)
        made = None if ability is None else self.predict(result, ability)
        if made is not None:
            block_tokens = result.groups[0].namespace.layout.block_tokens
            kept = made.last * block_tokens if made.blocks else 0
            if kept < result.boundary_tokens:
                first = result.groups[0]
                self._prefetcher.probe(first.namespace, first.rows[kept // block_tokens :])
                result.cut(kept, PLANNED)
        self._store.hold(client, result, want_lease, now, hints)
        if made is not None and result.lease:
            self._plans[result.lease] = (made, now)
            if len(self._plans) > PLANS_KEPT_MAX:
                self._plans.popitem(last=False)
        return result, made

    def watch(self, lease: LeaseId, stream: LoadStream) -> Watch | None:
        """Of a load that begins now under a planned lease; None when there is nothing to watch."""
        made, began = self._plans.pop(lease, (None, 0.0))
        if made is None or stream.is_done:
            return None
        parts = len(stream.groups[0].namespace.layout.parts)
        return Watch(made, stream.blocks_missing * parts, began)

    def predict(self, result: MatchResult, ability: Ability) -> Plan | None:
        """The plan for what was found; None while uncalibrated, and for opaque keys."""
        first, namespace = result.groups[0], result.groups[0].namespace
        costs = self._store.costs
        if namespace.kind is NamespaceKind.FLAT or not costs.is_calibrated(namespace.index):
            return None
        found = sum(len(group.rows) * group.namespace.layout.block_bytes for group in result.groups)
        prompt = Prompt(
            max(ability.prompt_tokens, result.boundary_tokens),
            namespace.layout.block_tokens,
            found // max(len(first.rows), 1),
            self._store.catalog.host_state[first.rows] != READY,
            min(ability.held_blocks, ability.prompt_tokens // namespace.layout.block_tokens),
            ability.unit_blocks,
            # Sliding groups hold a window only: there is no shorter prefix to load.
            is_whole=len(result.groups) > 1 or namespace.window_tokens > 0,
        )
        return plan(prompt, self._pipeline(namespace, ability.stages))

    def _pipeline(self, namespace: Namespace, stages: int) -> Pipeline:
        costs = self._store.costs
        return Pipeline(
            costs.prefill(namespace.index),
            costs.link(Tier.HOST),
            costs.link(Tier.NVME),
            costs.call_seconds(namespace.index),
            float(self._mover.bytes_inflight),
            max(1, min(stages, len(namespace.layout.parts))),
        )

    def score(self, namespace: Namespace, names: bytes, prompt_tokens: int) -> Plan | None:
        """What a request for this chain would meet; counts no use. None while uncalibrated."""
        result = self._store.find([(namespace, names)], 0)
        return self.predict(result, Ability(prompt_tokens))
