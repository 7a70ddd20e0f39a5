"""From blocks and slots to the copies that move them: arithmetic on whole arrays.

Primitives:
  `Program`, `compiled`   a target's layers as offsets, worked out once
  `placed`                a program times n blocks: the copies, neighbours joined
  `Pieces`                copies between host and device, without a direction

A program is one layer, or several that lie side by side in slot and target: a block's bytes then go
in one copy. No loop here runs over blocks. Touches no memory but its own arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine_adapter.quantised import QuantisedTarget, piece_bytes
from engine_adapter.transfer import PagedTarget, Target
from kvstore.types import BoolArray, IntArray, UIntArray

PROGRAM_BYTES = 256 << 10
"""Layers that lie side by side are joined until a block's copy is so long: copy engines are at
their best there, and shorter programs hide more of a load."""


class Pieces(NamedTuple):
    """uint64 [n] each: host addresses, device addresses, lengths in bytes."""

    host: UIntArray
    device: UIntArray
    lengths: UIntArray
    total_bytes: int

    def only(self, which: BoolArray) -> Pieces:
        """Those of them."""
        lengths = self.lengths[which]
        return Pieces(self.host[which], self.device[which], lengths, int(lengths.sum()))


class _Piece(NamedTuple):
    """One copy of every block: from slot + `at` to `base` + block * `stride`."""

    at: int
    base: int
    stride: int
    length: int


@dataclass(frozen=True)
class Program:
    """Consecutive layers that travel together, all in one part of the slot."""

    first_layer: int
    layers: int
    part: int
    at: UIntArray
    """uint64 [pieces], with the next three: a block's copies."""
    base: UIntArray
    stride: UIntArray
    length: UIntArray
    block_bytes: int
    is_joinable: bool
    """Whether a block is one run, so that blocks that follow each other can be, too."""


def compiled(target: Target) -> tuple[Program, ...]:
    """The target's layers in order. Packed pieces are never joined: a kernel takes each."""
    parts = target.layout.parts
    programs: list[tuple[int, int, int, list[_Piece]]] = []
    for layer in range(target.layout.layers):
        offset = target.layout.layer_offset(target.rank, layer)
        part = next(p.index for p in parts if p.offset <= offset < p.offset + p.length)
        if isinstance(target, QuantisedTarget):
            programs.append((layer, 1, part, list(_packed(target, layer))))
            continue
        pieces = list(_joined(_pieces(target, layer)))
        if programs and len(pieces) == 1:
            first, count, before, earlier = programs[-1]
            both = list(_joined([*earlier, *pieces])) if len(earlier) == 1 else []
            if before == part and len(both) == 1 and both[0].length <= PROGRAM_BYTES:
                programs[-1] = (first, count + 1, part, both)
                continue
        programs.append((layer, 1, part, pieces))
    is_copied = isinstance(target, PagedTarget)
    return tuple(_program(*program, is_copied) for program in programs)


def _program(
    first: int, count: int, part: int, pieces: Sequence[_Piece], is_copied: bool
) -> Program:
    at, base, stride, length = np.array(pieces, np.uint64).T.copy()
    is_joinable = is_copied and len(length) == 1 and length[0] == stride[0]
    return Program(first, count, part, at, base, stride, length, int(length.sum()), is_joinable)


def _packed(target: QuantisedTarget, layer: int) -> Iterator[_Piece]:
    at = target.layout.layer_offset(target.rank, layer)
    length = piece_bytes(target.tokens, target.dim)
    for start in target.starts[layer]:
        yield _Piece(at, start, target.block_stride_bytes, length)
        at += length


def _pieces(target: PagedTarget, layer: int) -> Iterator[_Piece]:
    at = target.layout.layer_offset(target.rank, layer)
    for plane in target.planes[layer]:
        for row in range(plane.rows):
            base = plane.address + row * plane.row_stride_bytes
            yield _Piece(at, base, plane.block_stride_bytes, plane.row_bytes)
            at += plane.row_bytes


def _joined(pieces: Sequence[_Piece] | Iterator[_Piece]) -> Iterator[_Piece]:
    """Neighbours in slot and block as one piece."""
    last: _Piece | None = None
    for piece in pieces:
        if (
            last is not None
            and last.at + last.length == piece.at
            and last.base + last.length == piece.base
            and last.stride == piece.stride
        ):
            last = last._replace(length=last.length + piece.length)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def placed(
    program: Program, slots: UIntArray, blocks: IntArray, fences: UIntArray | None = None
) -> Pieces:
    """The copies for block `blocks[i]` and the slot at host address `slots[i]`.

    Joined copies do not run across `fences`, ascending host addresses.
    """
    ids = blocks.astype(np.uint64)
    host = (slots + program.at[:, None]).ravel()
    device = (ids * program.stride[:, None] + program.base[:, None]).ravel()
    lengths = np.repeat(program.length, len(slots))
    total = len(slots) * program.block_bytes
    if not program.is_joinable or len(slots) < 2:
        return Pieces(host, device, lengths, total)
    length = program.length[0]
    is_new = np.ones(len(host), np.bool_)
    is_new[1:] = (host[1:] != host[:-1] + length) | (device[1:] != device[:-1] + length)
    if fences is not None:
        sides = np.searchsorted(fences, host, "right")
        is_new[1:] |= sides[1:] != sides[:-1]
    starts = np.flatnonzero(is_new)
    runs = np.diff(starts, append=len(host)).astype(np.uint64)
    return Pieces(host[starts], device[starts], runs * length, total)


def portions(pieces: Pieces, most_bytes: int) -> Iterator[Pieces]:
    """The same bytes in lots of at most `most_bytes`, longer pieces cut."""
    most = np.uint64(most_bytes)
    cuts = -(-pieces.lengths.astype(np.int64) // most_bytes)
    which = np.repeat(np.arange(len(cuts)), cuts)
    turn = np.arange(len(which)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    start = turn.astype(np.uint64) * most
    lengths = np.minimum(most, pieces.lengths[which] - start)
    host, device = pieces.host[which] + start, pieces.device[which] + start
    ends = np.cumsum(lengths)
    first, before = 0, np.uint64(0)
    while first < len(ends):
        stop = int(np.searchsorted(ends, before + most, "right"))
        lot = slice(first, stop)
        yield Pieces(host[lot], device[lot], lengths[lot], int(ends[stop - 1] - before))
        first, before = stop, ends[stop - 1]
