"""A small control server over a real arena and directory, for tests of the client alone.

It keeps blocks in dicts and does what a test tells it: `on_disk` blocks are promoted by Load,
`fail_with` makes a verb fail, `hold` makes it wait. `kill()` is a daemon that dies; a second
FakeDaemon on the same paths is its next life.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from kvstore.arena import Arena
from kvstore.directory import DirectoryWriter, header_bytes
from kvstore.errors import KVStoreError, LeaseUnknown, PeerGone, ReservationUnknown
from kvstore.layout import BlockLayout
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc import control_pb2_grpc, status, wire
from kvstore.types import BlockStatus, Tier

REGION_BYTES = 4 << 20


def ready(group: int, parts: int, block: int) -> bytes:
    """One record of what became readable, or (no parts) failed."""
    return np.array([(group, parts, block)], wire.READY).tobytes()


class FakeDaemon(control_pb2_grpc.ControlServicer):
    """Slots of one size; `slot_bytes` must fit the layouts that tests declare."""

    def __init__(
        self,
        directory: Path,
        *,
        slot_bytes: int = 8192,
        slots: int = 64,
        region_bytes: int = REGION_BYTES,
        read_seconds: float = 10.0,
        write_seconds: float = 30.0,
        counters: int = 0,
    ) -> None:
        self.socket = str(directory / "s.sock")
        self.slot_bytes, self.slots, self.region_bytes = slot_bytes, slots, region_bytes
        self.read_seconds, self.write_seconds = read_seconds, write_seconds
        self.boot_id = secrets.randbits(63) | 1
        self.arena = Arena.create(
            directory / "arena",
            bytes_total=region_bytes,
            region_bytes=region_bytes,
            header_bytes=header_bytes(slots, 16, counters),
        )
        self.arena_dir = str(directory / "arena")
        self.directory = DirectoryWriter(
            self.arena.header.array,
            slots=slots,
            namespaces_max=16,
            boot_id=self.boot_id,
            counters=counters,
        )
        self.free = list(range(slots))
        self.ready: dict[bytes, int] = {}
        """fingerprint -> slot"""
        self.on_disk: dict[bytes, bytes] = {}
        """fingerprint -> payload, promoted by Load"""
        self.namespaces: list[bytes] = []
        self.layouts: dict[bytes, BlockLayout] = {}
        self.hellos: list[pb.Hello] = []
        self.calls: list[tuple[str, Any]] = []
        self.fail_with: dict[str, KVStoreError] = {}
        self.hold: dict[str, threading.Event] = {}
        self.leases: dict[int, list[tuple[bytes, list[bytes]]]] = {}
        self.reservations: dict[int, dict[int, bytes]] = {}
        """id -> offset -> fingerprint, b"" while anonymous"""
        self.ranks: dict[tuple[int, bytes], set[int]] = {}
        self.news: list[pb.AttachReply] = []
        self.part_pause = threading.Event()
        self.part_pause.set()
        self._clients: set[int] = set()
        self._stopping = threading.Event()
        self._streams = 0
        self._lock = threading.RLock()
        self._server = grpc.server(ThreadPoolExecutor(16))
        control_pb2_grpc.add_ControlServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    # ------------------------------------------------------------------ for tests

    def kill(self) -> None:
        """Die: no goodbye, the arena's files stay."""
        self._end()
        self.arena.close(unlink=False)

    def stop(self) -> None:
        """Leave in order: the boot word first."""
        if not self._stopping.is_set():
            self.directory.close_boot()
            self._end()
            self.arena.close()
            del self.arena, self.directory

    def _end(self) -> None:
        self._stopping.set()
        stopped = self._server.stop(0)
        for event in self.hold.values():
            event.set()
        self.part_pause.set()
        stopped.wait()

    def called(self, verb: str) -> list[Any]:
        return [request for name, request in self.calls if name == verb]

    def put(self, namespace: bytes, name: bytes, payload: bytes) -> int:
        """A READY block, as if an engine had stored it; its slot."""
        with self._lock:
            slot = self.free.pop(0)
            self._bytes(slot)[: len(payload)] = np.frombuffer(payload, np.uint8)
            self._publish(namespace, name, slot, len(payload))
            return slot

    def evict(self, name: bytes) -> None:
        with self._lock:
            slot = self.ready.pop(name)
            self.directory.retract(np.array([slot]))
            self.free.append(slot)

    def _bytes(self, slot: int) -> Any:
        at = slot * self.slot_bytes
        return self.arena.regions[0].array[at : at + self.slot_bytes]

    def _publish(self, namespace: bytes, name: bytes, slot: int, length: int) -> None:
        self.directory.publish(
            np.array([slot]),
            np.frombuffer(name, np.uint8).reshape(1, 32),
            offsets=np.array([slot * self.slot_bytes], np.uint64),
            lengths=np.array([length], np.uint64),
            namespace=self.namespaces.index(namespace),
            clear_count=0,
        )
        self.ready[name] = slot

    # ------------------------------------------------------------------ plumbing

    def _enter(self, verb: str, request: Any, context: Any) -> None:
        self.calls.append((verb, request))
        if verb in self.hold:
            self.hold[verb].wait(5)
            if self._stopping.is_set():
                context.abort(grpc.StatusCode.UNAVAILABLE, "dead")
        error = self.fail_with.get(verb)
        client = getattr(request, "client", None)
        if error is None and client is not None and client not in self._clients:
            error = PeerGone("this client is not attached (any more)")
        if error is not None:
            self._abort(context, error)

    def _abort(self, context: Any, error: KVStoreError) -> None:
        context.set_trailing_metadata(status.trailing_metadata(error))
        context.abort(status.code_of(error), str(error))

    # ------------------------------------------------------------------ verbs

    def Attach(self, requests: Any, context: Any) -> Iterator[pb.AttachReply]:
        hello = next(requests).hello
        self._enter("Attach", hello, context)
        self.hellos.append(hello)
        client = secrets.randbits(63) | 1
        self._clients.add(client)
        ended = threading.Event()
        context.add_callback(ended.set)
        yield pb.AttachReply(
            welcome=pb.Welcome(
                protocol_major=wire.PROTOCOL_MAJOR,
                protocol_minor=wire.PROTOCOL_MINOR + 1,
                client=client,
                boot_id=self.boot_id,
                arena_dir=self.arena_dir,
                region_bytes=self.region_bytes,
                regions=1,
                read_lease_seconds=self.read_seconds,
                write_lease_seconds=self.write_seconds,
                lease_blocks_max=1024,
                version="fake",
            )
        )
        told, streams = 0, self._streams
        while not ended.wait(0.005) and not self._stopping.is_set():
            while told < len(self.news):
                yield self.news[told]
                told += 1
            if self._streams != streams:
                return
        self._clients.discard(client)

    def forget_clients(self) -> None:
        """As after a broken stream that only the daemon noticed: it stays open for the client."""
        self._clients.clear()

    def drop_streams(self) -> None:
        """End every attach stream."""
        self._streams += 1

    def Declare(self, request: Any, context: Any) -> pb.NamespaceReply:
        self._enter("Declare", request, context)
        if request.namespace not in self.namespaces:
            self.namespaces.append(request.namespace)
        sizes = request.layout
        self.layouts[request.namespace] = BlockLayout(
            sizes.block_tokens, sizes.layers, sizes.layer_bytes, sizes.ranks
        )
        return pb.NamespaceReply(
            namespace=request.namespace,
            index=self.namespaces.index(request.namespace),
            slot_bytes=self.slot_bytes,
        )

    def _group(self, namespace: bytes, names: list[bytes]) -> pb.GroupMatch:
        slots = np.array([self.ready.get(name, -1) for name in names], np.int64)
        here = slots >= 0
        offsets = np.where(here, slots * self.slot_bytes, -1)
        generations = np.zeros(len(names), np.uint64)
        generations[here] = self.directory.generations(slots[here])
        return pb.GroupMatch(
            blocks=len(names),
            offsets=wire.pack_u64(offsets),
            generations=wire.pack_u64(generations),
            tiers=np.where(here, Tier.HOST, Tier.NVME).astype(np.uint8).tobytes(),
        )

    def Match(self, request: Any, context: Any) -> pb.MatchReply:
        self._enter("Match", request, context)
        with self._lock:
            held: list[tuple[bytes, list[bytes]]] = []
            for group in request.groups:
                names = _split(group.fingerprints)
                known = [name in self.ready or name in self.on_disk for name in names]
                count = known.index(False) if False in known else len(known)
                held.append((group.namespace, names[:count]))
            blocks = min(len(names) for _, names in held)
            held = [(space, names[:blocks]) for space, names in held]
            lease = (secrets.randbits(63) | 1) if blocks else 0
            if lease:
                self.leases[lease] = held
            return pb.MatchReply(
                boundary_tokens=blocks * 16,
                lease=lease,
                lease_seconds=self.read_seconds,
                groups=[self._group(space, names) for space, names in held],
                boot_id=self.boot_id,
            )

    def Load(self, request: Any, context: Any) -> Iterator[pb.LoadReply]:
        self._enter("Load", request, context)
        if request.lease not in self.leases:
            self._abort(context, LeaseUnknown("load: no such lease"))
        until = time.monotonic() + request.deadline_ms / 1000
        with self._lock:
            groups = self.leases[request.lease]
            coming: list[tuple[int, int, bytes, bytes, int]] = []
            grants = []
            for number, (space, names) in enumerate(groups):
                grant = self._group(space, names)
                offsets = wire.unpack_u64(grant.offsets, "o").copy()
                generations = wire.unpack_u64(grant.generations, "g").copy()
                for block, name in enumerate(names):
                    if name not in self.ready:
                        slot = self.free.pop(0)
                        offsets[block] = slot * self.slot_bytes
                        generations[block] = self.directory.generations(np.array([slot]))[0]
                        coming.append((number, block, space, name, slot))
                grant.offsets, grant.generations = offsets.tobytes(), generations.tobytes()
                grants.append(grant)
        yield pb.LoadReply(grants=grants)
        for number, block, space, name, slot in coming:
            payload = self.on_disk[name]
            if payload == b"broken":
                yield pb.LoadReply(
                    failed=ready(number, 0, block),
                    short_reason="failed",
                )
                continue
            parts = self.layouts[space].parts
            for part in parts:
                if not self.part_pause.wait(max(0.0, until - time.monotonic())):
                    yield pb.LoadReply(done=True, short_reason="deadline")
                    return
                stop = part.offset + part.length
                self._bytes(slot)[part.offset : stop] = np.frombuffer(
                    payload[part.offset : stop], np.uint8
                )
                if part is parts[-1]:
                    with self._lock:
                        self._publish(space, name, slot, len(payload))
                yield pb.LoadReply(ready=ready(number, 1 << part.index, block))
        yield pb.LoadReply(done=True)

    def Release(self, request: Any, context: Any) -> pb.ReleaseReply:
        self._enter("Release", request, context)
        gone = [self.leases.pop(lease, None) for lease in request.leases]
        return pb.ReleaseReply(released=len([lease for lease in gone if lease is not None]))

    def Renew(self, request: Any, context: Any) -> pb.RenewReply:
        self._enter("Renew", request, context)
        if request.reservation and request.reservation not in self.reservations:
            self._abort(context, ReservationUnknown("renew: expired"))
        if request.lease and request.lease not in self.leases:
            self._abort(context, LeaseUnknown("renew: released or expired"))
        return pb.RenewReply(
            lease_seconds=self.read_seconds if request.lease else self.write_seconds
        )

    def Report(self, request: Any, context: Any) -> pb.ReportReply:
        self._enter("Report", request, context)
        return pb.ReportReply()

    def Exists(self, request: Any, context: Any) -> pb.ExistsReply:
        self._enter("Exists", request, context)
        names = _split(request.fingerprints)
        tiers = [(name in self.ready) << 1 | (name in self.on_disk) << 2 for name in names]
        prefix = tiers.index(0) if 0 in tiers else len(tiers)
        return pb.ExistsReply(prefix_blocks=prefix, tiers=bytes(tiers))

    def Reserve(self, request: Any, context: Any) -> pb.ReserveReply:
        self._enter("Reserve", request, context)
        with self._lock:
            names = _split(request.fingerprints) or [b""] * request.count
            taken: dict[int, bytes] = {}
            statuses, offsets = [], []
            held = {request.namespace, *self.ready, *self.on_disk}
            if request.fingerprints and request.parent not in held:
                return pb.ReserveReply(
                    statuses=bytes([BlockStatus.NO_PARENT] * len(names)),
                    offsets=wire.pack_u64([wire.NO_OFFSET] * len(names)),
                )
            for name in names:
                if name and name in self.ready:
                    statuses.append(BlockStatus.PRESENT)
                elif not self.free:
                    statuses.append(BlockStatus.NO_ROOM)
                else:
                    statuses.append(BlockStatus.GRANTED)
                    offset = self.free.pop(0) * self.slot_bytes
                    taken[offset] = name
                    offsets.append(offset)
                    continue
                offsets.append(wire.NO_OFFSET)
            reservation = request.reservation if taken else 0
            if taken:
                self.reservations[reservation] = taken
            return pb.ReserveReply(
                reservation=reservation,
                lease_seconds=self.write_seconds,
                statuses=bytes(statuses),
                offsets=wire.pack_u64(offsets),
            )

    def Commit(self, request: Any, context: Any) -> pb.CommitReply:
        self._enter("Commit", request, context)
        with self._lock:
            held = self.reservations.get(request.reservation)
            if held is None:
                self._abort(context, ReservationUnknown("commit: expired"))
            space = self.namespaces[0]
            names = _split(request.fingerprints)
            statuses = []
            for name, at in zip(
                names, wire.unpack_u64(request.offsets, "o", len(names)).tolist(), strict=True
            ):
                ranks = self.ranks.setdefault((request.reservation, name), set())
                layout = self.layouts[space]
                ranks |= set(range(layout.ranks)) if request.all_ranks else {request.rank}
                if len(ranks) < layout.ranks:
                    statuses.append(BlockStatus.GRANTED)
                    continue
                del held[at]
                if name in self.ready:
                    statuses.append(BlockStatus.PRESENT)
                    self.free.append(at // self.slot_bytes)
                else:
                    statuses.append(BlockStatus.STORED)
                    self._publish(space, name, at // self.slot_bytes, layout.block_bytes)
            if request.end or not held:
                self._free(request.reservation)
            return pb.CommitReply(statuses=bytes(statuses))

    def _free(self, reservation: int) -> int:
        held = self.reservations.pop(reservation, {})
        self.free += [offset // self.slot_bytes for offset in held]
        return len(held)

    def expire(self, reservation: int) -> None:
        """The daemon ends a reservation; its slots wait for the client's word."""
        self.reservations.pop(reservation)

    def Abort(self, request: Any, context: Any) -> pb.AbortReply:
        self._enter("Abort", request, context)
        with self._lock:
            if request.reservation not in self.reservations:
                self._abort(context, ReservationUnknown("abort: ended"))
            return pb.AbortReply(freed=self._free(request.reservation))

    def Flush(self, request: Any, context: Any) -> pb.FlushReply:
        self._enter("Flush", request, context)
        names = _split(request.fingerprints)
        return pb.FlushReply(durable=bytes(name in self.on_disk for name in names))

    def Delete(self, request: Any, context: Any) -> pb.DeleteReply:
        self._enter("Delete", request, context)
        self.evict(request.fingerprint)
        return pb.DeleteReply(deleted_blocks=1)

    def Clear(self, request: Any, context: Any) -> pb.ClearReply:
        self._enter("Clear", request, context)
        for name in list(self.ready):
            self.evict(name)
        return pb.ClearReply(namespaces=1)

    def Prefetch(self, request: Any, context: Any) -> pb.PrefetchReply:
        self._enter("Prefetch", request, context)
        return pb.PrefetchReply(accepted=len(request.groups[0].fingerprints) // 32)

    def Stat(self, request: Any, context: Any) -> pb.StatReply:
        self._enter("Stat", request, context)
        return pb.StatReply(json='{"blocks": 3}')


def _split(joined: bytes) -> list[bytes]:
    return [joined[at : at + 32] for at in range(0, len(joined), 32)]
