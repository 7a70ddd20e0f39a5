"""Verbs that decide what to load: the match with its plan, what it learns from, what comes early.

Primitives: `PlanningVerbs`, mixed into the servicer of the control API; `model_size`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from kvstore.costs import ModelSize
from kvstore.errors import InvalidRequest
from kvstore.hints import TokenHint
from kvstore.namespaces import Namespace
from kvstore.planner import Ability, Plan
from kvstore.promotion import BACK, BLOCKS, LAYERS, LoadOrder
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc.replies import pack_group, pack_plan
from kvstore.rpc.verbs import Verbs, unary
from kvstore.types import Tier

GROUPS_MAX = 64
"""KV groups in one call; a model has a handful."""
HINTS_MAX = 64
TIMES_MAX = 256
"""Measurements in one report."""
TOKENS_MAX = 1 << 32
SECONDS_MAX = 3600.0


class PlanningVerbs(Verbs):
    """Match, Report, Prefetch, Score."""

    def _groups(self, groups: Any) -> list[tuple[Namespace, bytes]]:
        if len(groups) > GROUPS_MAX:
            raise InvalidRequest(f"groups: {len(groups)} in one call, the limit is {GROUPS_MAX}")
        get = self.service.store.namespaces.get
        return [
            (get(group.namespace), self._names(group.fingerprints, f"groups[{index}].fingerprints"))
            for index, group in enumerate(groups)
        ]

    @unary
    async def Match(self, request: pb.MatchRequest, context: Any) -> pb.MatchReply:
        session = self.service.sessions.get(request.client)
        store = self.service.store
        result, made = self.service.advisor.match(
            session.client,
            self._groups(request.groups),
            request.prompt_tokens,
            request.want_lease,
            self.service.now(),
            _ability(request.plan) if request.HasField("plan") else None,
            _hints(request.groups[0].hints) if request.groups else (),
        )
        if request.begin_load and result.lease:
            self.service.load_soon(result.groups, _order(made), made.first if made else 0)
        self.service.touch_soon()
        return pb.MatchReply(
            boundary_tokens=result.boundary_tokens,
            lease=result.lease or 0,
            lease_seconds=self._config.lease.read_seconds if result.lease else 0.0,
            groups=[pack_group(store, group) for group in result.groups],
            short_reason=result.short_reason,
            boot_id=self.service.boot_id,
            plan=None if made is None else pack_plan(made),
        )

    @unary
    async def Report(self, request: pb.ReportRequest, context: Any) -> pb.ReportReply:
        self.service.sessions.get(request.client)
        store = self.service.store
        used = self._groups(request.used)
        if len(request.prefills) + len(request.copies) > TIMES_MAX:
            raise InvalidRequest(f"report: more than {TIMES_MAX} measurements in one call")
        told = {time.namespace: store.namespaces.get(time.namespace) for time in request.prefills}
        for (namespace, names), group in zip(used, request.used, strict=True):
            store.report(namespace, names, _hints(group.hints))
        store.report_missed(request.missed_blocks, request.missed_tokens)
        for time in request.prefills:
            if time.end_tokens < TOKENS_MAX and _is_duration(time.seconds):
                index = told[time.namespace].index
                store.costs.prefill_seen(index, time.start_tokens, time.end_tokens, time.seconds)
        for copy in request.copies:
            if _is_duration(copy.seconds):
                store.costs.link_seen(Tier.HOST, copy.bytes, copy.seconds)
        self.service.touch_soon()
        return pb.ReportReply()

    @unary
    async def Prefetch(self, request: pb.PrefetchRequest, context: Any) -> pb.PrefetchReply:
        """Blocks that are in the host tier, or will be when no load needs the bandwidth."""
        self.service.sessions.get(request.client)
        announce = self.service.prefetcher.announce
        return pb.PrefetchReply(
            accepted=sum(announce(space, names) for space, names in self._groups(request.groups))
        )

    @unary
    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreReply:
        """Tokens available by tier, and what a request would take; counts no use."""
        store = self.service.store
        namespace = store.namespaces.get(request.namespace)
        names = self._names(request.fingerprints, "fingerprints")
        prefix, mask = store.exists(namespace, names)
        tokens = {
            int(tier): int(np.count_nonzero(mask[:prefix] & (1 << tier)))
            * namespace.layout.block_tokens
            for tier in (Tier.HOST, Tier.NVME)
        }
        made = self.service.advisor.score(namespace, names, request.prompt_tokens)
        return pb.ScoreReply(
            tokens_by_tier=tokens,
            predicted_ttft_seconds=made.ttft_seconds if made else 0.0,
            recompute_seconds=made.recompute_seconds if made else 0.0,
        )


def model_size(request: pb.DeclareRequest) -> ModelSize | None:
    """Of a model that was described in full."""
    model = request.model
    if not (model.parameters > 0 and math.isfinite(model.parameters)):
        return None
    return ModelSize(model.parameters, max(model.layers, 1), max(model.hidden, 1))


def _ability(asked: pb.Ability) -> Ability:
    return Ability(
        min(asked.prompt_tokens, TOKENS_MAX),
        asked.held_blocks,
        max(asked.stages, 1),
        asked.unit_blocks,
    )


def _order(made: Plan | None) -> LoadOrder:
    if made is not None and made.from_back:
        return BACK
    return LAYERS if made is not None and made.in_layers else BLOCKS


def _hints(hints: Collection[pb.Hint]) -> list[TokenHint]:
    if len(hints) > HINTS_MAX:
        raise InvalidRequest(f"hints: {len(hints)} in one group, the limit is {HINTS_MAX}")
    return [TokenHint(each.hint_class, each.start_tokens, each.end_tokens) for each in hints]


def _is_duration(seconds: float) -> bool:
    return 0.0 < seconds < SECONDS_MAX
