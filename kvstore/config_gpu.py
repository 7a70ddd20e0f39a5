"""The GPU tier's settings.

Primitives: `GpuConfig`, `gpu_conflicts`. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from kvstore.config_fields import Section, count, size
from kvstore.types import HUGE_PAGE_BYTES, PAGE_BYTES
from kvstore.units import KIB, MIB, format_bytes


class GpuConfig(Section, frozen=True):
    """The GPU tier: second copies, in device memory, of the host blocks that are worth most."""

    bytes_max: Annotated[
        int,
        size(
            "Most device memory for blocks; taken slab by slab, given back when engines need it "
            "(docs/gpu.md). 0: no GPU tier, and cupy is not imported."
        ),
    ] = 0
    device: Annotated[int, count("Number of the CUDA device.", 0, 255)] = 0
    slab_bytes: Annotated[
        int, size("One allocation, opened by engines as a whole.", HUGE_PAGE_BYTES)
    ] = 256 * MIB
    slot_bytes_min: Annotated[
        int, size("Smallest slot; smaller blocks still take one.", PAGE_BYTES)
    ] = 256 * KIB


def gpu_conflicts(gpu: GpuConfig) -> Iterator[tuple[str, str, str]]:
    """(key, problem, way out) for settings of the GPU tier that cannot work together."""
    if gpu.slab_bytes % HUGE_PAGE_BYTES:
        yield "gpu.slab_bytes", "is not a whole number of 2 MiB pages", "use a multiple of 2 MiB"
    if 0 < gpu.bytes_max < gpu.slab_bytes:
        yield (
            "gpu.bytes_max",
            f"holds not even one slab of {format_bytes(gpu.slab_bytes)}",
            "raise it, or lower gpu.slab_bytes",
        )
    if gpu.slot_bytes_min % PAGE_BYTES or gpu.slot_bytes_min > gpu.slab_bytes:
        yield (
            "gpu.slot_bytes_min",
            f"is not a multiple of 4 KiB up to gpu.slab_bytes ({format_bytes(gpu.slab_bytes)})",
            "256 KiB suits most models",
        )
