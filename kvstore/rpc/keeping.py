"""Verbs that keep blocks and drop them, and the one that lists them.

Primitives: `KeepingVerbs`, mixed into the servicer of the control API.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.listing import list_page
from kvstore.pins import BLOCKS_PER_CALL_MAX
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc import wire
from kvstore.rpc.verbs import Verbs, change, unary

PIN_SECONDS_MAX = 7 * 86400.0


class KeepingVerbs(Verbs):
    """Flush, Delete, Clear, Pin, Unpin, List, Resize."""

    @unary
    async def Flush(self, request: pb.FlushRequest, context: Any) -> pb.FlushReply:
        namespace = self.service.store.namespaces.get(request.namespace)
        names = self._names(request.fingerprints, "fingerprints")
        deadline = self.service.deadline(request.deadline_ms)
        durable = await self.service.flush(namespace, names, deadline)
        pending = int(np.count_nonzero(~durable))
        return pb.FlushReply(durable=durable.astype(np.uint8).tobytes(), pending_blocks=pending)

    @change
    async def Delete(self, request: pb.DeleteRequest, context: Any) -> pb.DeleteReply:
        namespace = self.service.store.namespaces.get(request.namespace)
        name = wire.unpack_name(request.fingerprint, "fingerprint")
        return pb.DeleteReply(deleted_blocks=await self.service.delete(namespace, name))

    @change
    async def Clear(self, request: pb.ClearRequest, context: Any) -> pb.ClearReply:
        namespaces = self.service.store.namespaces
        if bool(request.namespace) == request.all:
            raise InvalidRequest("clear: name one namespace, or ask for all")
        chosen = list(namespaces) if request.all else [namespaces.get(request.namespace)]
        for namespace in chosen:
            await self.service.clear(namespace)
        return pb.ClearReply(namespaces=len(chosen))

    @unary
    async def Pin(self, request: pb.PinRequest, context: Any) -> pb.PinReply:
        tenant = request.tenant or self.service.sessions.get(request.client).engine
        if not 0.0 < request.seconds <= PIN_SECONDS_MAX:
            raise InvalidRequest(
                f"pin: seconds={request.seconds:g} must lie between 0 and {PIN_SECONDS_MAX:g}"
            )
        namespace = self.service.store.namespaces.get(request.namespace)
        names = self._names(request.fingerprints, "fingerprints", BLOCKS_PER_CALL_MAX)
        now = self.service.now()
        done = self.service.pins.pin(tenant, namespace, names, request.seconds, request.hard, now)
        return pb.PinReply(pinned=done.blocks, short_reason=done.short_reason)

    @unary
    async def Unpin(self, request: pb.UnpinRequest, context: Any) -> pb.UnpinReply:
        tenant = request.tenant or self.service.sessions.get(request.client).engine
        self.service.store.namespaces.get(request.namespace)
        names = self._names(request.fingerprints, "fingerprints", BLOCKS_PER_CALL_MAX)
        return pb.UnpinReply(unpinned=self.service.pins.unpin(tenant, names))

    @unary
    async def Resize(self, request: pb.ResizeRequest, context: Any) -> pb.ResizeReply:
        elastic, gpu = self.service.elastic, self.service.gpu
        if request.HasField("host_bytes"):
            elastic.resize(request.host_bytes)
        if request.HasField("gpu_bytes") and gpu is None:
            raise InvalidRequest("resize: there is no GPU tier; set gpu.bytes_max and restart")
        if request.HasField("gpu_bytes") and gpu is not None:
            gpu.copies.resize(request.gpu_bytes)
        return pb.ResizeReply(
            host_bytes=elastic.target_bytes,
            host_bytes_used=elastic.filled_bytes,
            gpu_bytes=gpu.tier.bytes_max if gpu is not None else 0,
            gpu_bytes_used=gpu.tier.allocated_bytes if gpu is not None else 0,
        )

    @unary
    async def List(self, request: pb.ListRequest, context: Any) -> pb.ListReply:
        namespace = self.service.store.namespaces.get(request.namespace)
        most = self._config.limits.blocks_per_call_max
        page = list_page(
            self.service.store, namespace, request.cursor, min(request.blocks_max or most, most)
        )
        return pb.ListReply(fingerprints=page.names, tiers=page.tiers.tobytes(), cursor=page.cursor)
