"""The GPU tier towards its clients: what they are told of its slabs, and what they answer.

Primitives of `GpuDesk`: `heard` (a client's word), `turn` (a step of the whole tier), `left`,
`gone`.
"""

from __future__ import annotations

from kvstore.errors import DeviceError
from kvstore.gpu_copies import GpuCopies
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc.sessions import Session
from kvstore.tier.gpu import GpuTier
from kvstore.types import ClientId


class GpuDesk:
    """On the loop. A client that left keeps its slabs open until its process is proved gone."""

    def __init__(self, tier: GpuTier, copies: GpuCopies) -> None:
        self.tier = tier
        self.copies = copies
        self._open: dict[ClientId, Session] = {}
        self._asked: set[tuple[ClientId, int]] = set()

    def heard(self, session: Session, word: pb.AttachRequest) -> None:
        """What a client says after its hello."""
        match word.WhichOneof("kind"):
            case "device" if word.device.maps_slabs:
                self._open[session.client] = session
            case "unmapped":
                self._asked.discard((session.client, word.unmapped.slab))
                self.tier.acknowledge(session.client, word.unmapped.slab)
            case "pressure":
                self.copies.press(session.client, word.pressure.device_bytes)

    def turn(self, now: float) -> None:
        """Copies go on; new slabs are told, closed ones asked for, and what nobody has open is
        freed."""
        self.copies.turn(now)
        if self.copies.failure:
            return
        try:
            for client, session in self._open.items():
                if not session.outbox.full() and (fresh := self.tier.handles_for(client)):
                    slabs = [pb.Slab(slab=slab, handle=handle) for slab, handle in fresh]
                    session.tell(pb.AttachReply(slabs=pb.Slabs(slabs=slabs)))
            for client, slab in self.tier.tend():
                asked = self._open.get(client)
                if asked is not None and (client, slab) not in self._asked:
                    told = asked.tell(pb.AttachReply(unmap=pb.UnmapSlab(slab=slab)))
                    self._asked |= {(client, slab)} if told else set()
        except DeviceError as error:
            self.copies.give_up(str(error))

    def left(self, client: ClientId) -> None:
        """Its stream ended: it is told nothing more, and what it asked for is over."""
        self._open.pop(client, None)
        self.copies.press(client, 0)

    def gone(self, client: ClientId) -> None:
        """Its process is proved gone, and its mappings with it."""
        self._asked = {pair for pair in self._asked if pair[0] != client}
        self.tier.forget(client)
