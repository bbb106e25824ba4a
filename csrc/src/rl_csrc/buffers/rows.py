"""Rows of ragged columns on the CPU: offsets, concatenation in one call, and balanced partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from rl_csrc.native import cpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch

    Buffer: TypeAlias = torch.Tensor | np.ndarray | bytes | bytearray | memoryview


def row_offsets(rows: list[torch.Tensor]) -> torch.Tensor | None:
    """Offsets of rows once concatenated, int64 [rows + 1].

    None unless all rows are plain contiguous CPU tensors (no subclasses) of one real dtype, with shapes that differ in
    the first dimension only.
    """
    return cpu.row_offsets(rows)


def ends(offsets: torch.Tensor) -> tuple[int, int]:
    """First and last offset of a ragged column, whose `offsets` are int64 [rows + 1], contiguous and on the CPU.

    Raises:
        ArgumentError: `offsets` is not such a tensor.
    """
    return cpu.ends(offsets)


def cut(offsets: torch.Tensor, first: int, count: int, known: list[torch.Tensor]) -> tuple[int, int, int, torch.Tensor]:
    """Slice of a ragged column: `count` rows from `first` on, as a separate column.

    Args:
        offsets: int64 [rows + 1], contiguous and on the CPU.
        first: Index of the first row.
        count: Rows.
        known: Offsets made earlier: one with equal values is returned instead of a new tensor.

    Returns:
        Index of the first value, index after the last value, length of the longest row, and the offsets of the slice:
        int64 [count + 1], from 0, in memory of their own.

    Raises:
        ArgumentError: the column has no such rows, or their offsets decrease.
    """
    return cpu.cut(offsets, first, count, known)


def join(pieces: list[torch.Tensor], out: Buffer) -> bool:
    """Concatenate the bytes of tensors at the start of `out`; releases the GIL for large copies.

    Returns False, and copies nothing, if a piece is not a plain contiguous CPU tensor of a real dtype. Pieces must not
    overlap `out`.

    Raises:
        ArgumentError: the pieces have more bytes than `out`.
    """
    return cpu.join(pieces, out)


class Joining(Protocol):
    """Copies in progress (of `begin_joins`): complete once `finish` returns, or when this object is destroyed."""

    def finish(self) -> None:
        """Help the background thread copy the remaining pieces, and wait until all are copied."""
        ...


def begin_joins(joins: Sequence[tuple[Sequence[torch.Tensor], Buffer]]) -> Joining | None:
    """Start several `join(pieces, out)` in a background thread that needs no GIL, while the caller continues.

    There is one such thread per process, started on first use. If it has no core, or is busy with other copies,
    `finish` does the copying. Until `finish` returns, neither write to the pieces nor read `out`.

    Returns None, and copies nothing, if a piece is not a plain contiguous CPU tensor of a real dtype.

    Raises:
        ArgumentError: pieces have more bytes than their `out`.
    """
    return cpu.begin_joins([*joins])


def join_slices(sources: list[Buffer], slices: list[tuple[int, int, int]], out: Buffer, *, width: int) -> int:
    """Concatenate slices (source, start, stop), in units of `width` bytes, at the start of `out`.

    Gathers rows of ragged columns in any order from several buffers; returns the bytes copied. No source may overlap
    `out`.

    Raises:
        ArgumentError: a slice is outside its source, or `out` is too small for all of them.
    """
    return cpu.join_slices(sources, slices, width, out)


def balanced_order(lengths: list[int], num_parts: int) -> list[int]:
    """Balanced partition: positions reordered so that `num_parts` contiguous runs have equal counts and similar sums.

    LPT (Graham 1969) with equal counts: rows are taken longest first, each goes to the part with the smallest sum of
    `lengths` that is not full (the first one of equals). Inside a part, rows keep their original order.

    Raises:
        ArgumentError: `len(lengths)` is not a multiple of `num_parts`, or the sum may exceed 64 bits.
    """
    return cpu.balanced_order(lengths, num_parts)
