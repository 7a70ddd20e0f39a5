"""Blocks between arena slots and an engine's paged KV tensors: what a connector calls.

Primitives:
  `Plane`, `PagedTarget`, `planes_of`   where an engine's KV lies
  `LoadPlan`, `SavePlan`                which blocks go where
  `TransferEngine`                      starts transfers; a plan never waits for another
  `LoadHandle`, `SaveHandle`            one transfer, until `is_ended`

Rules that every engine keeps:
  * a load begins after all work that was enqueued on the compute stream before `start_load`;
    a save reads after all work that was enqueued on it before `start_save`; with a `mark`, before
    the mark was taken;
  * until `is_ended` the blocks and slots of a transfer belong to it, also after `cancel`, a
    deadline, or the daemon's death: re-use neither before;
  * two transfers that touch the same engine block run in the order of their calls, or the second
    raises Overloaded;
  * what was loaded is provisional until `confirm` answered "".
May not know an engine, a tensor library or a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from engine_adapter.quantised import QuantisedTarget
from kvstore.client import WriteReservation
from kvstore.client.inplace import InPlace
from kvstore.errors import InvalidRequest
from kvstore.layout import BlockLayout
from kvstore.types import IntArray

BLOCK_AXIS = "block"


@dataclass(frozen=True)
class Plane:
    """Equal rows of one layer; row r of block b lies at
    `address + b * block_stride_bytes + r * row_stride_bytes` in the device's memory."""

    address: int
    block_stride_bytes: int
    row_bytes: int
    rows: int = 1
    row_stride_bytes: int = 0

    @property
    def block_bytes(self) -> int:
        """Payload of one block."""
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class PagedTarget:
    """One rank's paged KV. A slot holds a layer as its planes one after the other, rows packed.

    Raises InvalidRequest when the planes do not add up to the layout's layers and bytes.
    """

    layout: BlockLayout
    planes: tuple[tuple[Plane, ...], ...]
    """A layer."""
    blocks: int
    """Engine blocks: ids are [0, blocks)."""
    rank: int = 0
    owner: object = None
    """Kept as long as the target: the tensors that the addresses point into."""

    def __post_init__(self) -> None:
        self.layout.rank_offset(self.rank)
        if len(self.planes) != self.layout.layers:
            raise InvalidRequest(
                f"target: {len(self.planes)} layers of planes, the layout has {self.layout.layers}"
            )
        for layer, planes in enumerate(self.planes):
            found = sum(plane.block_bytes for plane in planes)
            if found != self.layout.layer_bytes:
                raise InvalidRequest(
                    f"target: layer {layer} has {found} bytes a block, "
                    f"the layout {self.layout.layer_bytes}"
                )


Target: TypeAlias = PagedTarget | QuantisedTarget
"""Bytes as the engine has them, or packed into 8-bit numbers on their way."""


def planes_of(
    address: int, shape: Sequence[int], strides_bytes: Sequence[int], axes: str, item_bytes: int
) -> tuple[Plane, ...]:
    """The planes of one layer's tensor.

    `axes` declares what the dimensions are, outermost first and comma-separated, for example
    "kv,block,token,head,dim"; exactly one is "block". A slot then holds the others in this order,
    whatever the strides: name them by falling stride, or rows become short. Raises InvalidRequest
    when axes and shape do not fit.
    """
    names = axes.split(",")
    if len(names) != len(shape) or len(shape) != len(strides_bytes):
        raise InvalidRequest(f"tensor: axes {axes!r} do not fit shape {list(shape)}")
    if names.count(BLOCK_AXIS) != 1:
        raise InvalidRequest(f"tensor: axes {axes!r} must name '{BLOCK_AXIS}' once")
    block = names.index(BLOCK_AXIS)
    rest = [
        (size, stride)
        for axis, (size, stride) in enumerate(zip(shape, strides_bytes, strict=True))
        if axis != block and size != 1
    ]
    row_bytes = item_bytes
    while rest and rest[-1][1] == row_bytes:
        row_bytes *= rest.pop()[0]
    rows, row_stride = rest.pop() if rest else (1, 0)
    while rest and rest[-1][1] == rows * row_stride:
        rows *= rest.pop()[0]
    starts = [address]
    for size, stride in rest:
        starts = [start + index * stride for start in starts for index in range(size)]
    return tuple(
        Plane(start, strides_bytes[block], row_bytes, rows, row_stride) for start in starts
    )


@dataclass(frozen=True)
class LoadPlan:
    """Store blocks [first, first + n) of `source` go to engine blocks `blocks`, int64 [n]."""

    target: Target
    source: InPlace
    blocks: IntArray
    first: int = 0
    deadline_seconds: float = 2.0


@dataclass(frozen=True)
class SavePlan:
    """Engine blocks `blocks`, int64 [n], go to the slots granted for blocks `at`, int64 [n], of
    `reservation`, counted as `WriteReservation` counts them."""

    target: Target
    reservation: WriteReservation
    blocks: IntArray
    at: IntArray
    deadline_seconds: float = 30.0


class LoadHandle(Protocol):
    """`wait_layer` and `confirm` on the engine's thread; the rest from any."""

    def wait_layer(self, layer: int) -> None:
        """Make the compute stream wait until `layer` of all blocks has arrived.

        Waits on the host only while bytes that are still below the host tier have not come, and
        never past the plan's deadline. Raises LoadFailed: compute without this load; what the
        compute stream is given from then on runs after the load's last copy.
        """

    def confirm(self) -> str:
        """After the forward pass was enqueued: waits for the last copy, then compares
        generations. "" if every byte was the stored one, else why not: discard what was computed;
        the compute stream is ordered as after LoadFailed.
        """

    def cancel(self) -> None:
        """Enqueue nothing more; what was enqueued runs on until `is_ended`. Idempotent."""

    @property
    def is_ended(self) -> bool:
        """No copy of this load runs or will run: its engine blocks may be re-used. Never waits."""

    def wait_ended(self, timeout_seconds: float) -> bool:
        """`is_ended`, waiting for it up to `timeout_seconds`."""

    @property
    def is_lost(self) -> bool:
        """The device failed: nobody will ever know whether it ended."""

    @property
    def whole(self) -> int:
        """Leading blocks of the plan whose bytes could be read by now."""


class SaveHandle(Protocol):
    """The caller commits its reservation once `is_ended` with no `failure`, and aborts it once
    `is_ended` otherwise; never before."""

    @property
    def is_ended(self) -> bool:
        """No copy runs or will run: engine blocks and slots are free to use. Never waits."""

    def wait_ended(self, timeout_seconds: float) -> bool:
        """`is_ended`, waiting for it up to `timeout_seconds`."""

    @property
    def is_lost(self) -> bool:
        """The device failed: nobody will ever know whether it ended."""

    @property
    def failure(self) -> str:
        """Why the slots do not hold the blocks; "" if, once ended, they do."""

    def cancel(self) -> None:
        """Enqueue nothing more; what was enqueued runs on until `is_ended`. Idempotent."""


class TransferEngine(Protocol):
    """Thread-safe. `compute_stream` is the handle of the stream that the caller computes on
    (torch: `stream.cuda_stream`; 0 where there are no streams).

    An empty plan gives a handle that has ended and touches no device. A device that failed makes
    every verb raise DeviceError.
    """

    def start_load(
        self, plan: LoadPlan, compute_stream: int, mark: int | None = None
    ) -> LoadHandle:
        """Returns at once; raises InvalidRequest for ids that are not the target's, Overloaded.

        With `mark` the hand-over is where that was taken, not now."""

    def start_save(
        self, plan: SavePlan, compute_stream: int, mark: int | None = None
    ) -> SaveHandle:
        """Returns at once; raises like `start_load`, and what `WriteReservation.view` raises."""

    def mark(self, compute_stream: int) -> int:
        """All work that is enqueued on the compute stream by now, for transfers that start later.
        From here on their blocks belong to them. End it with one `forget`, once they started."""

    def forget(self, mark: int) -> None:
        """Nothing more starts from it."""

    def describe(self) -> dict[str, object]:
        """Numbers for people: mechanisms, bytes by way, what is pinned and what is not and why."""

    def close(self) -> None:
        """Wait for running transfers within their deadlines, then let go of the device."""
