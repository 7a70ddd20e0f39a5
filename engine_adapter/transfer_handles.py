"""One transfer: what it still enqueues, what it waits for, what it holds until its last copy.

Primitives: `DeviceLoad`, `DeviceSave`, and `Nothing`, the handle of an empty plan.

A transfer is *closed* when it will enqueue nothing more: then its end is recorded on its stream. It
has *ended* when the device has passed that record; only then do blocks, slots, tables and events
serve others. A device that fails leaves it closed and never ended: nobody knows what still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

from engine_adapter.lanes import Lanes, fill, spill
from engine_adapter.loader import CHANGED, DEADLINE, GRACE_SECONDS, LoadFailed
from engine_adapter.transfer import LoadPlan, SavePlan
from engine_adapter.transfer_moves import Route
from engine_adapter.transfer_plan import Pieces, Program, placed, portions
from kvstore.errors import DeviceError, KVStoreError
from kvstore.types import BoolArray, ByteArray, IntArray, UIntArray

CANCELLED = "cancelled"
UNFINISHED = "transfer thread ended early"


class Transfer:
    """What loads and saves have in common."""

    def __init__(self, lanes: Lanes, stream: int, deadline_seconds: float) -> None:
        self._lanes = lanes
        self._stream = stream
        self._until = lanes.now() + deadline_seconds
        self._held: list[ByteArray] = []
        """Tables that enqueued work reads."""
        self._is_ended = False
        self._is_end_known = True
        self._slots: UIntArray = np.empty(0, np.uint64)
        """Host address of each block, 0 while it is not known."""
        self.failure = ""
        self.on_ended: Callable[[], object] = lambda: None
        """Called once, when the last copy is known to have ended."""
        self.is_closed = False
        self.end_event = lanes.events.take()

    @property
    def is_ended(self) -> bool:
        with self._lanes.lock:
            if not self._is_ended and self.is_closed and self._end_has_passed():
                self._is_ended = True
                self._let_go()
                self.on_ended()
            return self._is_ended

    @property
    def is_lost(self) -> bool:
        return self.is_closed and not self._is_end_known

    def _end_has_passed(self) -> bool:
        """An event that could not be recorded looks like a passed one: it says nothing."""
        try:
            return self._is_end_known and self._lanes.device.is_done(self.end_event)
        except DeviceError as error:
            self._lose(error)
            return False

    def _lose(self, error: DeviceError) -> None:
        self.failure = self.failure or str(error)
        self._is_end_known = False

    def touches(self, start: int, stop: int) -> bool:
        """Whether a slot of it lies in these host addresses."""
        return bool(((self._slots >= start) & (self._slots < stop)).any())

    def wait_ended(self, timeout_seconds: float) -> bool:
        until = self._lanes.now() + timeout_seconds
        while not self.is_ended:
            if self.is_lost or self._lanes.now() >= until:
                return False
            self._lanes.pause()
        return True

    def cancel(self) -> None:
        self.fail(CANCELLED)

    def fail(self, reason: str) -> None:
        """Enqueue nothing more, because of `reason`."""
        with self._lanes.lock:
            if not self._is_ended:
                self.failure = self.failure or reason
            self._close()

    def _close(self) -> None:
        """Enqueue nothing from now on."""
        with self._lanes.lock:
            if self.is_closed:
                return
            self.is_closed = True
            try:
                self._lanes.device.record(self.end_event, self._stream)
            except DeviceError as error:
                self._lose(error)

    def _let_go(self) -> None:
        self._lanes.tables.give_back(self._held)
        self._lanes.events.give_back(self.end_event)


class DeviceLoad(Transfer):
    """Made by `DeviceTransfers.start_load`; see `LoadHandle`."""

    def __init__(self, lanes: Lanes, plan: LoadPlan, route: Route, compute_stream: int) -> None:
        super().__init__(lanes, lanes.load_stream, plan.deadline_seconds + GRACE_SECONDS)
        self._plan = plan
        self._route = route
        self._only = route.only
        self._programs = programs = route.programs
        self._compute_stream = compute_stream
        blocks = len(plan.blocks)
        self._slots = np.zeros(blocks, np.uint64)
        self._has_slot: BoolArray = np.zeros(blocks, np.bool_)
        self._is_pinned: BoolArray = np.zeros(blocks, np.bool_)
        self._is_sent: BoolArray = np.zeros((len(programs), blocks), np.bool_)
        self._gates: list[int | None] = [None] * len(programs)
        """A program's event, once all its copies are enqueued."""
        self._program_of = [
            number for number, program in enumerate(programs) for _ in range(program.layers)
        ]

    # ------------------------------------------------------------------ the engine's thread

    def wait_layer(self, layer: int) -> None:
        number = self._program_of[layer]
        lanes = self._lanes
        while self._gates[number] is None and not self.is_closed:
            if lanes.now() >= self._until:
                self.fail(DEADLINE)
            else:
                lanes.pause()
        with lanes.lock:
            gate = self._gates[number]
            if self.failure or gate is None:
                self._fence()
                raise LoadFailed(self.failure or UNFINISHED)
            if not self._is_ended:  # afterwards the event is somebody else's
                lanes.device.wait(self._compute_stream, gate)

    def confirm(self) -> str:
        lanes = self._lanes
        while not self.is_ended and not self.failure:
            if lanes.now() >= self._until:
                self.fail(DEADLINE)
            else:
                lanes.pause()
        if self.failure:
            with lanes.lock, suppress(DeviceError):
                self._fence()
            return self.failure
        return "" if self._plan.source.valid() else CHANGED

    def _fence(self) -> None:
        """What is computed instead of this load comes after its last copy."""
        self._close()
        if not self._is_ended:
            self._lanes.device.wait(self._compute_stream, self.end_event)

    @property
    def whole(self) -> int:
        return max(0, min(self._plan.source.whole - self._plan.first, len(self._plan.blocks)))

    # ------------------------------------------------------------------ enqueueing

    def advance(self, *, may_wait: bool) -> bool:
        """Enqueue what became readable; whether everything is. Raises KVStoreError.

        Without `may_wait` what is not pinned is left for later."""
        plan = self._plan
        mask = plan.source.readable[plan.first : plan.first + len(plan.blocks)]
        self._find_slots(mask)
        if self._is_pinned.all() and not self._is_sent.any() and self._is_whole(mask):
            self._send_all()
            return self.is_closed
        for number, program in enumerate(self._programs):
            fresh = (mask >> program.part & 1).astype(np.bool_) & ~self._is_sent[number]
            if not may_wait:
                fresh &= self._is_pinned
            if fresh.any():
                self._send(number, program, np.flatnonzero(fresh))
            if self.is_closed:
                break
        return self.is_closed

    def _find_slots(self, mask: ByteArray) -> None:
        fresh = np.flatnonzero((mask != 0) & ~self._has_slot)
        if not len(fresh):
            return
        plan, layout = self._plan, self._plan.target.layout
        slots = plan.source.addresses(plan.first + fresh)
        self._slots[fresh] = slots
        self._has_slot[fresh] = True
        ours = slots + np.uint64(layout.rank_offset(plan.target.rank))
        lengths = np.full(len(ours), layout.rank_payload_bytes, np.uint64)
        self._is_pinned[fresh] = self._lanes.pins.is_pinned(ours, lengths)

    def _send(self, number: int, program: Program, which: IntArray) -> None:
        pinned = self._is_pinned[which]
        direct = which if pinned.all() else which[pinned]
        if len(direct) < len(which):
            self._bounce(self._pieces(program, which[~pinned]))
        with self._lanes.lock:
            if self.is_closed:
                return
            if len(direct):
                pieces = self._pieces(program, direct)
                self._lanes.enqueue(pieces, True, self._stream, self._held, self._only)
            self._is_sent[number, which] = True
            if self._is_sent[number].all():
                self._open_gate(number)
            if None not in self._gates:
                self._close()

    def _is_whole(self, mask: ByteArray) -> bool:
        needed = np.bitwise_or.reduce([1 << program.part for program in self._programs])
        return bool((mask & needed == needed).all())

    def _send_all(self) -> None:
        """The common case: every block lies in pinned memory."""
        lanes = self._lanes
        placed_all = self._route.placed(self._slots, self._plan.blocks, lanes.pins.fences)
        with lanes.lock:
            if self.is_closed:
                return
            for number, pieces in placed_all:
                lanes.enqueue(pieces, True, self._stream, self._held, self._only)
                self._open_gate(number)
            self._is_sent[:] = True
            self._close()

    def _open_gate(self, number: int) -> None:
        gate = self._lanes.events.take()
        self._lanes.device.record(gate, self._stream)
        self._gates[number] = gate

    def _pieces(self, program: Program, which: IntArray) -> Pieces:
        fences = self._lanes.pins.fences
        return placed(program, self._slots[which], self._plan.blocks[which], fences)

    def _bounce(self, pieces: Pieces) -> None:
        lanes = self._lanes
        for lot in portions(pieces, lanes.ring.buffer_bytes):
            buffer = lanes.take_buffer(self._until)
            if buffer is None:
                self.fail(DEADLINE)
                return
            fill(lot, buffer)
            with lanes.lock:
                if self.is_closed:
                    lanes.ring.give_back(buffer)
                    return
                event = lanes.bounce(lot, buffer, True, self._stream, self._held, self._only)
                lanes.reclaim_after(event, buffer)

    def run(self) -> None:
        """For a background thread: until everything is enqueued, or will not be."""
        try:
            left = max(0.0, self._until - GRACE_SECONDS - self._lanes.now())
            for _ in self._plan.source.arrivals(left):
                if self.advance(may_wait=True):
                    return
            self.fail(self._plan.source.reason or DEADLINE)
        except KVStoreError as error:
            self.fail(f"{type(error).__name__}: {error}")
        finally:
            if not self.is_closed:
                self.fail(UNFINISHED)

    def _let_go(self) -> None:
        super()._let_go()
        for gate in self._gates:
            if gate is not None:
                self._lanes.events.give_back(gate)


class DeviceSave(Transfer):
    """Made by `DeviceTransfers.start_save`; see `SaveHandle`."""

    def __init__(self, lanes: Lanes, plan: SavePlan, route: Route, slots: UIntArray) -> None:
        super().__init__(lanes, lanes.save_stream, plan.deadline_seconds)
        self._plan = plan
        self._route = route
        self._only = route.only
        self._slots = slots
        layout = plan.target.layout
        ours = slots + np.uint64(layout.rank_offset(plan.target.rank))
        lengths = np.full(len(ours), layout.rank_payload_bytes, np.uint64)
        self._is_pinned = lanes.pins.is_pinned(ours, lengths)

    def send_pinned(self) -> bool:
        """Enqueue what needs no buffer; whether that was all. Raises DeviceError."""
        which = np.flatnonzero(self._is_pinned)
        with self._lanes.lock:
            if len(which) and not self.is_closed:
                for _, pieces in self._placed(which):
                    self._lanes.enqueue(pieces, False, self._stream, self._held, self._only)
            if len(which) == len(self._slots):
                self._close()
        return self.is_closed

    def _placed(self, which: IntArray) -> Iterator[tuple[int, Pieces]]:
        fences = self._lanes.pins.fences
        return self._route.placed(self._slots[which], self._plan.blocks[which], fences)

    def run(self) -> None:
        """For a background thread: the rest, lot by lot through buffers."""
        which = np.flatnonzero(~self._is_pinned)
        try:
            for _, pieces in self._placed(which):
                for lot in portions(pieces, self._lanes.ring.buffer_bytes):
                    self._bounce(lot)
                    if self.is_closed:
                        return
            self._close()
        except KVStoreError as error:
            self.fail(f"{type(error).__name__}: {error}")
        finally:
            if not self.is_closed:
                self.fail(UNFINISHED)

    def _bounce(self, lot: Pieces) -> None:
        """Into a buffer, and from there to the slots once it has come: the save is not closed
        before, so that the slots stay ours while this thread writes them."""
        lanes = self._lanes
        buffer = lanes.take_buffer(self._until)
        if buffer is None:
            self.fail(DEADLINE)
            return
        with lanes.lock:
            if self.failure:
                lanes.ring.give_back(buffer)
                self._close()
                return
            event = lanes.bounce(lot, buffer, False, self._stream, self._held, self._only)
        while not lanes.device.is_done(event):
            lanes.pause()
        spill(lot, buffer)
        with lanes.lock:
            lanes.events.give_back(event)
            lanes.ring.give_back(buffer)

    def cancel(self) -> None:
        """The thread that copies through buffers closes it after its present lot."""
        with self._lanes.lock:
            if not self._is_ended:
                self.failure = self.failure or CANCELLED
            if self._is_pinned.all():
                self._close()


class Nothing:
    """A transfer of no blocks: ended from the start."""

    failure = ""
    whole = 0
    is_ended = True
    is_lost = False

    def wait_layer(self, layer: int) -> None:
        """There is nothing to wait for."""

    def confirm(self) -> str:
        return ""

    def cancel(self) -> None:
        """There is nothing to cancel."""

    def wait_ended(self, timeout_seconds: float) -> bool:
        return True
