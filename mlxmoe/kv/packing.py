"""Rows of keys or values as they are stored: plain, or quantised in groups. Knows nothing of tokens and windows.

Legend: B sequences, H heads, L rows, D width. Packed rows are a list of arrays `[B, H, L, ...]` that are cut, joined
and written alike along L.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

LEAST_GROUP = 32  # MLX's smallest group of numbers with one scale
BEST_GROUP = 64

Packed = list[mx.array]


@dataclass(frozen=True, slots=True)
class Packing:
    """How rows of `width` numbers are stored, in `bits` or, for None, as they are.

    A width that 32 does not divide is filled up with zeros to one that it does. Quantised rows of a width that is a
    power of two are stored behind a Hadamard rotation: keys have a few numbers that are always large, which would
    take the levels from the others of their group (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456).
    """

    width: int
    bits: int | None

    @property
    def padded(self) -> int:
        return -(-self.width // LEAST_GROUP) * LEAST_GROUP

    @property
    def group(self) -> int:
        return BEST_GROUP if self.bits == 8 and self.padded % BEST_GROUP == 0 else LEAST_GROUP

    @property
    def rotated(self) -> bool:
        """Only where the rotation is its own inverse."""
        return self.padded & (self.padded - 1) == 0

    @property
    def quantised(self) -> bool:
        return self.bits is not None and self.width > 0

    def pack(self, rows: mx.array) -> Packed:
        """`[B, H, L, D]` as it is stored."""
        if not self.quantised:
            return [rows]
        if self.padded != self.width:
            rows = mx.pad(rows, [(0, 0), (0, 0), (0, 0), (0, self.padded - self.width)])
        if self.rotated:
            rows = mx.hadamard_transform(rows)
        return list(mx.quantize(rows, group_size=self.group, bits=self.bits))

    def unpack(self, packed: Packed) -> mx.array:
        """Stored rows as `[B, H, L, D]`."""
        if not self.quantised:
            return packed[0]
        weights, scales, biases = packed
        rows = mx.dequantize(weights, scales, biases, group_size=self.group, bits=self.bits)
        if self.rotated:
            rows = mx.hadamard_transform(rows)
        return rows if self.padded == self.width else rows[..., : self.width]


def empty_like(packed: Packed, rows: int) -> Packed:
    """Room for `rows` rows of the same kind, zeroed."""
    return [mx.zeros((*part.shape[:2], rows, part.shape[3]), dtype=part.dtype) for part in packed]


def cut(packed: Packed, start: int, stop: int) -> Packed:
    """Rows `start` to `stop`, a view."""
    return [part[..., start:stop, :] for part in packed]


def join(*pieces: Packed) -> Packed:
    """The pieces' rows one after the other; pieces without rows are left out."""
    some = [piece for piece in pieces if piece[0].shape[2]]
    if len(some) <= 1:
        return some[0] if some else pieces[0]
    return [mx.concatenate(list(parts), axis=2) for parts in zip(*some, strict=True)]


def write(packed: Packed, start: int, rows: Packed) -> None:
    """Put `rows` into `packed` from row `start` on, in place where nothing unevaluated reads it."""
    for part, new in zip(packed, rows, strict=True):
        part[..., start : start + new.shape[2], :] = new


def nbytes(packed: Packed) -> int:
    return sum(part.nbytes for part in packed)
