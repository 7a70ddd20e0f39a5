"""The transformers adapter on a CUDA device: its cache is filled and saved by the transfer engine.

Primitives:
  `Accelerator`       a device, its transfer engine, and what torch must be asked there
  `DevicePrefixLoad`  the load of one batch: the calls of `loader.PrefixLoad`
  `DeviceSaveJob`     a `saver.SaveJob` whose bytes leave by the device

The compute stream waits for a layer, the host does not, so that layers arrive behind the prefill.
Buffers belong to their transfers until those have ended, however the request did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from engine_adapter.device_transfer import DeviceTransfers
from engine_adapter.loader import Row
from engine_adapter.quantised import QuantisedTarget
from engine_adapter.saver import SaveJob
from engine_adapter.tensors import KVTensors
from engine_adapter.transfer import LoadHandle, LoadPlan, PagedTarget, Plane, SavePlan, Target
from kvstore.client import NamespaceHandle, WriteReservation
from kvstore.client.inplace import let_in
from kvstore.errors import DeviceError, KVStoreError

STUCK_SECONDS = 60.0
"""A save that has not ended by then is given up with its slots."""

Layers: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer: [batch, heads, columns, size]."""


class Accelerator:
    """Of one CUDA device. Closing the transfer engine is its opener's."""

    def __init__(self, transfers: DeviceTransfers, device: torch.device) -> None:
        self.transfers = transfers
        self.device = device

    @classmethod
    def open(cls, device: torch.device) -> Accelerator:
        """Raises ConfigError without cupy or a driver that it can use."""
        return cls(DeviceTransfers.open(device.index or 0), device)

    def introduce(self, handle: NamespaceHandle) -> None:
        """The daemon of `handle` learns of this device, in every life of it."""
        let_in(handle, self.transfers)

    def attend(self, handle: NamespaceHandle) -> None:
        """A new daemon life brings a new arena to pin."""
        self.transfers.attend(handle)

    # ------------------------------------------------------------------ what torch does there

    def stream(self) -> int:
        """The stream that the calling thread computes on."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def empty(self, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """A buffer for a cache."""
        return like.new_empty(tuple(shape))

    def arrived(self) -> None:
        """The compute stream was told to wait: nothing is left to do."""

    def computed(self) -> None:
        """Wait for what the calling thread enqueued, and for nothing else of the device."""
        torch.cuda.current_stream(self.device).synchronize()


def target_of(layers: Layers, row: int, column: int, tensors: KVTensors) -> Target:
    """One row of a cache: block b is what lies from column `column + b * block_tokens` on."""

    def plane(tensor: torch.Tensor) -> Plane:
        item, (by_row, by_head, by_token, _) = tensor.element_size(), tensor.stride()
        start = tensor.data_ptr() + item * (row * by_row + column * by_token)
        block_bytes = item * by_token * tensors.block_tokens
        return Plane(start, block_bytes, block_bytes, tensors.heads, item * by_head)

    keys = layers[0][0]
    blocks = (keys.shape[2] - column) // tensors.block_tokens
    planes = tuple((plane(keys), plane(values)) for keys, values in layers)
    layout = tensors.block_layout
    if tensors.scheme is None:
        return PagedTarget(layout, planes, blocks, owner=layers)
    starts = tuple(
        tuple(p.address + head * p.row_stride_bytes for p in pair for head in range(p.rows))
        for pair in planes
    )
    return QuantisedTarget(
        layout,
        starts,
        block_stride_bytes=planes[0][0].block_stride_bytes,
        token_stride_bytes=keys.element_size() * keys.stride(2),
        tokens=tensors.block_tokens,
        dim=keys.shape[3],
        scheme=tensors.scheme,
        blocks=blocks,
        owner=layers,
    )


class DevicePrefixLoad:
    """Starts at once; raises what `start_load` raises. On the engine's thread."""

    def __init__(
        self,
        accelerator: Accelerator,
        tensors: KVTensors,
        rows: Sequence[Row],
        layers: Layers,
        deadline_seconds: float,
    ) -> None:
        self._accelerator = accelerator
        self._layers = layers
        self._rows = [row for row in rows if row.tokens > 0]
        self._loads: list[LoadHandle] = []
        stream = accelerator.stream()
        try:
            for row in self._rows:
                assert row.prefix.source is not None  # rows without tokens were left out
                blocks = np.arange(-(-row.tokens // tensors.block_tokens))
                target = target_of(layers, row.rows[0], row.column, tensors)
                plan = LoadPlan(target, row.prefix.source, blocks, 0, deadline_seconds)
                self._loads.append(accelerator.transfers.start_load(plan, stream))
        except KVStoreError:
            self.cancel()
            raise

    def wait(self, layer: int) -> None:
        """What is enqueued from now on finds `layer` in its buffers. Raises LoadFailed."""
        for load in self._loads:
            load.wait_layer(layer)
        self._accelerator.arrived()
        for row in self._rows:
            first, *others = row.rows
            for tensor in self._layers[layer] if others else ():
                stretch = tensor[:, :, row.column : row.column + row.tokens]
                stretch[others] = stretch[first]

    def confirm(self) -> str:
        """After the forward pass: "" if every byte it read was the stored one, else the reason."""
        reasons = [load.confirm() for load in self._loads]
        return next(filter(None, reasons), "")

    def whole(self) -> list[int]:
        """For each row leading blocks that could be read by now."""
        return [load.whole for load in self._loads]

    def cancel(self) -> None:
        """Nobody waits for it any more; what was enqueued runs on into buffers that nobody uses."""
        for load in self._loads:
            load.cancel()


@dataclass(frozen=True)
class DeviceSaveJob(SaveJob):
    """`stream`: what computed the blocks, all of it enqueued by now."""

    accelerator: Accelerator
    target: Target
    stream: int

    def fill(self, reservation: WriteReservation, start: int) -> bool:
        at = np.array(reservation.granted, np.int64)
        plan = SavePlan(self.target, reservation, start + at, at, STUCK_SECONDS)
        save = self.accelerator.transfers.start_save(plan, self.stream)
        if not save.wait_ended(STUCK_SECONDS):
            save.cancel()
            return False
        if save.failure:
            raise DeviceError(save.failure)
        return True
