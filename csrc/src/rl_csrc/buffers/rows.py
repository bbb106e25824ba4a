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
    """Return where rows begin and end once they are laid one after the other, int64 [rows + 1].

    None if they are not alike: plain contiguous CPU tensors (no subclasses) of one real dtype and of shapes that differ
    in their first dimension at most.
    """
    return cpu.row_offsets(rows)


def ends(offsets: torch.Tensor) -> tuple[int, int]:
    """Return the first and the last of a ragged column's offsets, int64 [rows + 1], contiguous and on the CPU.

    Raises:
        ArgumentError: they are no such tensor.
    """
    return cpu.ends(offsets)


def cut(offsets: torch.Tensor, first: int, count: int, known: list[torch.Tensor]) -> tuple[int, int, int, torch.Tensor]:
    """Slice a ragged column: `count` rows from `first` on, as a column of their own.

    Args:
        offsets: int64 [rows + 1], contiguous and on the CPU.
        first: Index of the first row.
        count: Rows.
        known: Offsets that were made before: one of them that is the same is returned instead of a copy.

    Returns:
        Index of their first value, one past that of the last, values in the longest row, and where each row begins and
        ends once the others are gone: int64 [count + 1], from 0, in memory of its own.

    Raises:
        ArgumentError: the column has no such rows, or the offsets of these do not rise.
    """
    return cpu.cut(offsets, first, count, known)


def join(pieces: list[torch.Tensor], out: Buffer) -> bool:
    """Copy the bytes of tensors, one after the other, to the start of `out`; without the GIL where that pays.

    Returns False, and copies nothing, if one of them is not plain, contiguous, on the CPU and real. They must not
    overlap `out`.

    Raises:
        ArgumentError: they have more bytes than `out`.
    """
    return cpu.join(pieces, out)


class Joining(Protocol):
    """Copies that were begun: they are done once `finish` returns, or when nothing refers to this any more."""

    def finish(self) -> None:
        """Copy the remaining pieces, together with the thread that began."""
        ...


def begin_joins(joins: Sequence[tuple[Sequence[torch.Tensor], Buffer]]) -> Joining | None:
    """Begin several `join(pieces, out)` in a thread of this library, which needs no GIL, while the caller goes on.

    There is one such thread, made on first use, and anew in a forked child. Where it gets no core or copies for
    somebody else, `finish` copies. Until then, neither write to the pieces nor look at what is copied.

    Returns None, and copies nothing, if one of the pieces is not plain, contiguous, on the CPU and real.

    Raises:
        ArgumentError: pieces have more bytes than their `out`.
    """
    return cpu.begin_joins([*joins])


def join_slices(sources: list[Buffer], slices: list[tuple[int, int, int]], out: Buffer, *, width: int) -> int:
    """Copy slices (source, start, stop), in units of `width` bytes, one after the other to the start of `out`.

    Rows of ragged columns in any order, out of several memories. Returns the bytes copied. No source may overlap `out`.

    Raises:
        ArgumentError: a slice does not lie in its source, or all of them not in `out`.
    """
    return cpu.join_slices(sources, slices, width, out)


def balanced_order(lengths: list[int], num_parts: int) -> list[int]:
    """Positions in an order whose `num_parts` contiguous parts have equal counts and nearly equal sums of `lengths`.

    LPT (Graham 1969) with as many rows in each part: longest first, each to the part with the smallest sum that has
    room, the first of equal ones. Inside a part, rows stand in their first order.

    Raises:
        ArgumentError: the count does not divide, or the sum may exceed 64 bits.
    """
    return cpu.balanced_order(lengths, num_parts)
