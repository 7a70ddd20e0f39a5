"""The control API: one gRPC method a verb, translated to the store and back.

Primitives: `ControlServicer`, one coroutine a verb: here those that attach, read and write; what to
load is planning.py, what to keep keeping.py. Each checks lengths and limits, finds the caller's
session, calls the store, packs the answer. Owns no state.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from kvstore.errors import InvalidRequest, VersionMismatch
from kvstore.layout import BlockLayout
from kvstore.matching import groups_of
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc import control_pb2_grpc, wire
from kvstore.rpc.keeping import KeepingVerbs
from kvstore.rpc.planning import PlanningVerbs, model_size
from kvstore.rpc.replies import announce, namespace_reply, offsets_of, pack_group
from kvstore.rpc.sessions import Session
from kvstore.rpc.verbs import change, streaming, unary
from kvstore.statistics import statistics_of
from kvstore.types import FINGERPRINT_BYTES, LeaseId, ReservationId
from kvstore.version import VERSION

HELLO_SECONDS_MAX = 10.0
ANNOUNCE_SECONDS = 0.002


class ControlServicer(KeepingVerbs, PlanningVerbs, control_pb2_grpc.ControlServicer):
    """All verbs of the control API over one `Service`."""

    # ------------------------------------------------------------------ attach

    @streaming
    async def Attach(self, requests: Any, context: Any) -> AsyncIterator[pb.AttachReply]:
        first = await self._first_of(requests)
        if first is None or first.WhichOneof("kind") != "hello":
            raise InvalidRequest("attach: the first message must be a hello")
        hello = first.hello
        if hello.protocol_major != wire.PROTOCOL_MAJOR:
            raise VersionMismatch(
                f"client speaks protocol {hello.protocol_major}.{hello.protocol_minor}, this "
                f"daemon ({VERSION}) speaks {wire.PROTOCOL_MAJOR}.{wire.PROTOCOL_MINOR}: "
                "install the same major"
            )
        self.service.check_lock_file(hello.lock_file)
        session = self.service.sessions.open(hello)
        reader = asyncio.create_task(self._read_attached(requests, session))
        try:
            self.service.attached(session)
            yield pb.AttachReply(welcome=self._welcome(session))
            while (reply := await session.outbox.get()) is not None:
                yield reply
        finally:
            reader.cancel()
            self.service.detached(session)

    @staticmethod
    async def _first_of(requests: Any) -> Any:
        """The first message of a stream, None at its end. A caller that says nothing is not waited
        for.
        """
        try:
            async with asyncio.timeout(HELLO_SECONDS_MAX):
                return await anext(aiter(requests), None)
        except TimeoutError:
            raise InvalidRequest(f"attach: no hello came within {HELLO_SECONDS_MAX} s") from None
        except DecodeError as error:
            raise InvalidRequest(f"attach: {error}") from error

    async def _read_attached(self, requests: Any, session: Session) -> None:
        """The client's side of the stream; its end, or bytes that are none, ends the session."""
        with contextlib.suppress(DecodeError):
            async for word in requests:
                session.pins_arena |= word.HasField("device")
                if self.service.gpu is not None:
                    self.service.gpu.heard(session, word)
        if not session.outbox.full():
            session.outbox.put_nowait(None)

    def _welcome(self, session: Session) -> pb.Welcome:
        config, gpu = self._config, self.service.store.gpu
        return pb.Welcome(
            protocol_major=wire.PROTOCOL_MAJOR,
            protocol_minor=wire.PROTOCOL_MINOR,
            client=session.client,
            boot_id=self.service.boot_id,
            arena_dir=str(config.arena_directory),
            region_bytes=config.host.region_bytes,
            regions=config.host.regions,
            read_lease_seconds=config.lease.read_seconds,
            write_lease_seconds=config.lease.write_seconds,
            lease_blocks_max=config.lease.blocks_max,
            version=VERSION,
            gpu_directory_at=gpu.directory_at if gpu is not None else 0,
            gpu_slab_bytes=config.gpu.slab_bytes,
        )

    # ------------------------------------------------------------------ namespaces

    @change
    async def Declare(self, request: pb.DeclareRequest, context: Any) -> pb.NamespaceReply:
        self.service.sessions.get(request.client)
        sizes = request.layout
        layout = BlockLayout(sizes.block_tokens, sizes.layers, sizes.layer_bytes, sizes.ranks or 1)
        namespace = await self.service.declare(
            request.namespace,
            request.kind,
            layout,
            request.window_tokens,
            request.label,
            model_size(request),
        )
        return namespace_reply(namespace)

    @unary
    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.NamespaceReply:
        return namespace_reply(self.service.store.namespaces.get(request.namespace))

    # ------------------------------------------------------------------ reads

    @streaming
    async def Load(self, request: pb.LoadRequest, context: Any) -> AsyncIterator[pb.LoadReply]:
        session = self.service.sessions.get(request.client)
        deadline = self.service.deadline(request.deadline_ms)
        store = self.service.store
        rows = store.leases.rows_of(session.client, LeaseId(request.lease), self.service.now())
        groups = groups_of(rows, store.catalog.namespace[rows].astype(np.int64), store.namespaces)
        self.service.staging.opened(
            LeaseId(request.lease), groups, self.service.now(), whole=request.staging
        )
        stream = await self.service.mover.open_load(
            groups, order=request.order, first=request.first_block, deadline=deadline
        )
        yield pb.LoadReply(
            grants=[pack_group(store, group) for group in stream.groups],
            short_reason=stream.short_reason,
        )
        watch = self.service.advisor.watch(LeaseId(request.lease), stream)
        while not stream.is_done:
            until = deadline if watch is None else min(deadline, watch.until)
            try:
                await asyncio.wait_for(stream.changed.wait(), max(until - self.service.now(), 0.0))
            except TimeoutError:
                stream.short_reason = "deadline" if until == deadline else "late"
                break
            if stream.blocks_unread:
                # What follows at once goes with the same message: one costs as much as many.
                await asyncio.sleep(ANNOUNCE_SECONDS)
            if not stream.is_done:
                if watch is not None:
                    watch.seen(stream.parts_ready, self.service.now())
                yield announce(stream)
        last = announce(stream)
        last.done, last.short_reason = True, stream.short_reason
        yield last

    @unary
    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseReply:
        session = self.service.sessions.get(request.client)
        released = sum(
            self.service.release(session.client, lease)
            for lease in request.leases[: self._config.lease.leases_per_client_max]
        )
        return pb.ReleaseReply(released=released)

    @unary
    async def Renew(self, request: pb.RenewRequest, context: Any) -> pb.RenewReply:
        session = self.service.sessions.get(request.client)
        seconds = self.service.renew(session, request.lease, request.reservation)
        return pb.RenewReply(lease_seconds=seconds)

    @unary
    async def Exists(self, request: pb.ExistsRequest, context: Any) -> pb.ExistsReply:
        store = self.service.store
        namespace = store.namespaces.get(request.namespace)
        prefix, mask = store.exists(namespace, self._names(request.fingerprints, "fingerprints"))
        return pb.ExistsReply(prefix_blocks=prefix, tiers=mask.tobytes())

    # ------------------------------------------------------------------ writes

    @unary
    async def Reserve(self, request: pb.ReserveRequest, context: Any) -> pb.ReserveReply:
        session = self.service.sessions.get(request.client)
        namespace = self.service.store.namespaces.get(request.namespace)
        writes = self.service.writes
        if request.fingerprints and request.count:
            raise InvalidRequest("reserve: give fingerprints or count, not both")
        if request.fingerprints:
            names = self._names(request.fingerprints, "fingerprints")
            grant = writes.reserve(
                session.client,
                session.engine,
                namespace,
                request.parent,
                names,
                request.reservation,
            )
        else:
            count = min(request.count, self._config.limits.blocks_per_call_max)
            grant = writes.reserve_anonymous(
                session.client, session.engine, namespace, count, request.reservation
            )
        return pb.ReserveReply(
            reservation=grant.reservation or 0,
            lease_seconds=self._config.lease.write_seconds,
            statuses=grant.statuses.tobytes(),
            offsets=offsets_of(self.service.store, grant.slots).tobytes(),
        )

    @change
    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitReply:
        session = self.service.sessions.get(request.client)
        names = self._names(request.fingerprints, "fingerprints")
        count = len(names) // FINGERPRINT_BYTES
        offsets = wire.unpack_u64(request.offsets, "offsets", count)
        if request.hint_classes:
            classes = wire.unpack_u8(request.hint_classes, "hint_classes", count)
            self.service.store.uses.will_store(names, classes)
        statuses = await self.service.commit(
            session,
            ReservationId(request.reservation),
            request.parent,
            names,
            offsets,
            None if request.all_ranks else request.rank,
            request.end,
        )
        return pb.CommitReply(statuses=statuses.tobytes())

    @unary
    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortReply:
        session = self.service.sessions.get(request.client)
        freed = self.service.ends.abort(
            session.client, session.engine, ReservationId(request.reservation)
        )
        return pb.AbortReply(freed=freed)

    # ------------------------------------------------------------------ looking

    @unary
    async def Stat(self, request: pb.StatRequest, context: Any) -> pb.StatReply:
        return pb.StatReply(json=json.dumps(statistics_of(self.service)))

    @streaming
    async def Verify(
        self, request: pb.VerifyRequest, context: Any
    ) -> AsyncIterator[pb.VerifyReply]:
        verify = self.service.scrubber.verify
        async for progress in verify(payloads=request.payloads, fix=request.fix):
            yield pb.VerifyReply(
                checked_blocks=progress.checked_blocks,
                total_blocks=progress.total_blocks,
                findings=progress.findings,
                done=progress.is_done,
            )
