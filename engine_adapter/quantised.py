"""KV kept as 8-bit numbers: one scale a block, layer, head and kind. Lossy, and opted into.

Primitives:
  `QuantisedTarget`, `quantised_target`   a paged KV whose slots hold packed pieces
  `packed`, `restored`                    the reference, bit for bit what the kernels give
  `error_of`                              what a layer loses

Only for bfloat16 tensors whose elements can be addressed one by one; others are refused by name.
The scheme belongs into the identity (`KVIdentity.quantization` and `kv_dtype`): packed blocks are
another namespace with smaller slots, and the store sees nothing else of it. Values that are not
finite: NaN becomes 0, infinity the largest that there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest
from kvstore.layout import BlockLayout
from kvstore.types import ByteArray

Scheme: TypeAlias = Literal["int8", "fp8_e4m3"]
SCHEMES: dict[Scheme, float] = {"int8": 127.0, "fp8_e4m3": 448.0}
"""Scheme -> largest number."""
HEAD_BYTES = 16
AXES = frozenset(("kv", "block", "token", "head", "dim"))
ELEMENT_BYTES = 2

Numbers: TypeAlias = NDArray[np.float32]


def piece_bytes(tokens: int, dim: int) -> int:
    """Keys or values of one head of one block: a head with the scale, and the numbers."""
    return HEAD_BYTES + tokens * dim


@dataclass(frozen=True)
class QuantisedTarget:
    """One rank's paged KV; a slot holds a layer's pieces, kind by kind and head by head."""

    layout: BlockLayout
    starts: tuple[tuple[int, ...], ...]
    """A layer: device address of the first number of each piece of block 0."""
    block_stride_bytes: int
    token_stride_bytes: int
    tokens: int
    dim: int
    scheme: Scheme
    blocks: int
    rank: int = 0
    owner: object = None

    def __post_init__(self) -> None:
        wanted = len(self.starts[0]) * piece_bytes(self.tokens, self.dim)
        if len(self.starts) != self.layout.layers or self.layout.layer_bytes != wanted:
            raise InvalidRequest(
                f"quantised target: {len(self.starts)} layers of {wanted} bytes, the layout has "
                f"{self.layout.layers} of {self.layout.layer_bytes}"
            )


def quantised_target(
    addresses: Sequence[int],
    shape: Sequence[int],
    strides_bytes: Sequence[int],
    axes: str,
    dtype: str,
    scheme: Scheme,
    *,
    ranks: int = 1,
    rank: int = 0,
    owner: object = None,
) -> QuantisedTarget:
    """For one tensor a layer, all of one shape. `axes` names kv, block, token, head and dim.

    Raises InvalidRequest for what cannot be packed number by number, naming it."""
    names = axes.split(",")
    if set(names) != AXES or len(names) != len(AXES) or len(shape) != len(names):
        raise InvalidRequest(f"layout {axes!r} is not plain: only kv, block, token, head, dim are")
    size = dict(zip(names, shape, strict=True))
    stride = dict(zip(names, strides_bytes, strict=True))
    tokens, dim = size["token"], size["dim"]
    check_packable(dtype, scheme, tokens, dim)
    if stride["dim"] != ELEMENT_BYTES:
        raise InvalidRequest(f"layout {axes!r}: numbers of a row are not side by side")
    pieces = [
        kind * stride["kv"] + head * stride["head"]
        for kind in range(size["kv"])
        for head in range(size["head"])
    ]
    return QuantisedTarget(
        BlockLayout(tokens, len(addresses), len(pieces) * piece_bytes(tokens, dim), ranks),
        tuple(tuple(address + piece for piece in pieces) for address in addresses),
        stride["block"],
        stride["token"],
        tokens,
        dim,
        scheme,
        size["block"],
        rank,
        owner,
    )


def check_packable(dtype: str, scheme: str, tokens: int, dim: int) -> None:
    """Raises InvalidRequest unless blocks of so many tokens and numbers a head can be packed."""
    if dtype != "bfloat16" or scheme not in SCHEMES:
        raise InvalidRequest(f"{dtype} cannot be kept as {scheme}: bfloat16 as {list(SCHEMES)} can")
    if tokens * dim % HEAD_BYTES:
        raise InvalidRequest(f"{tokens} tokens of {dim} numbers are no multiple of {HEAD_BYTES}")


# ---------------------------------------------------------------------- the reference


def _e4m3_values() -> Numbers:
    """The 127 finite numbers from 0 up, float32."""
    codes = np.arange(127)
    exponent, fraction = codes >> 3, codes & 7
    normal = (1 + fraction / 8) * 2.0 ** (exponent - 7.0)
    values: Numbers = np.where(exponent > 0, normal, fraction / 512).astype(np.float32)
    return values


_E4M3 = _e4m3_values()


def _to_e4m3(numbers: Numbers) -> ByteArray:
    """To the nearest, ties to even codes, beyond the largest the largest."""
    sizes = np.minimum(np.abs(numbers), _E4M3[-1])
    above = np.searchsorted(_E4M3, sizes, "left")
    below = np.maximum(above - 1, 0)
    to_above = _E4M3[above].astype(np.float64) - sizes
    to_below = sizes.astype(np.float64) - _E4M3[below]
    is_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    codes = np.where(is_above, above, below) | np.where(np.signbit(numbers), 0x80, 0)
    found: ByteArray = codes.astype(np.uint8)
    return found


def packed(numbers: Numbers, scheme: Scheme) -> ByteArray:
    """uint8 [pieces, HEAD_BYTES + n] of float32 [pieces, n]."""
    sizes = np.where(np.isfinite(numbers), np.abs(numbers), np.float32(0))
    scales = sizes.max(axis=1) / np.float32(SCHEMES[scheme])
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = numbers / scales[:, None]
    scaled[np.isnan(numbers) | (scales[:, None] == 0)] = 0
    found = np.zeros((len(numbers), HEAD_BYTES + numbers.shape[1]), np.uint8)
    found[:, :4] = scales.view(np.uint8).reshape(-1, 4)
    if scheme == "int8":
        found[:, HEAD_BYTES:] = np.clip(np.rint(scaled), -127, 127).astype(np.int8).view(np.uint8)
    else:
        found[:, HEAD_BYTES:] = _to_e4m3(scaled)
    return found


def restored(pieces: ByteArray, scheme: Scheme) -> Numbers:
    """float32 [pieces, n], each a bfloat16, of what `packed` gave."""
    scales = np.ascontiguousarray(pieces[:, :4]).view(np.float32)
    codes = pieces[:, HEAD_BYTES:]
    if scheme == "int8":
        numbers = codes.view(np.int8).astype(np.float32)
    else:
        numbers = np.where(codes & 0x80, -1, 1).astype(np.float32) * _E4M3[codes & 0x7F]
    return from_bfloat16(to_bfloat16(numbers * scales))


def to_bfloat16(numbers: Numbers) -> NDArray[np.uint16]:
    """Bits, rounded to the nearest even."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return rounded.astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> Numbers:
    """Exactly."""
    wide: Numbers = (bits.astype(np.uint32) << 16).view(np.float32)
    return wide


def error_of(numbers: Numbers, scheme: Scheme) -> float:
    """Root mean square of what is lost, relative to that of the numbers; float32 [pieces, n]."""
    lost = restored(packed(numbers, scheme), scheme) - numbers
    return float(np.sqrt(np.mean(lost**2) / np.mean(numbers**2)))
