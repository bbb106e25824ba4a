"""Keys and values of the sequences in the batch.

One contiguous row per running sequence, in the order of the batch: rows 0..n-1 are in use, so that a decode step
reads plain slices and gathers nothing. Rows and positions are added when they are needed. The engine says which row
belongs to whom.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LENGTH_STEP = 64
"""Capacities in positions are multiples of this."""


def plan_capacity(count: int, length: int, *, rows: int, room: int, max_rows: int, budget: int) -> tuple[int, int]:
    """What to have room for, in rows and positions.

    There is room for `rows` x `room` now, and `count` rows of up to `length` positions are wanted. What is there is
    kept while it suffices. Rows grow by doubling, positions by half; both shrink to what is needed
    when the memory budget (in positions, over all rows) asks for it.
    """

    def rounded(positions: int) -> int:
        return -(-positions // LENGTH_STEP) * LENGTH_STEP

    if count > rows:
        rows = min(max(count, 2 * rows), max_rows)
    if length > room:
        room = rounded(max(length, room + room // 2))
    if rows * room > budget:
        room = rounded(length)
        rows = max(count, min(rows, budget // room))
    return rows, room


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one attention layer keeps per position."""

    num_heads: int
    """Key/value heads."""
    key_dim: int
    """Size of a key."""
    value_dim: int
    """Size of a value."""


class KVCache:
    """Per layer a key tensor [rows, heads, positions, key_dim] and a value tensor like it.

    Memory is zeroed when it is taken: positions beyond a sequence's end are masked, and a mask cannot hide a NaN.
    """

    def __init__(self, shapes: dict[int, LayerShape], *, dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = shapes
        self.dtype = dtype
        self.device = device
        self.num_rows = 0
        self.length = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def bytes_per_position(self) -> int:
        """Memory of one position of one row, all layers, bytes."""
        numbers = sum(s.num_heads * (s.key_dim + s.value_dim) for s in self.shapes.values())
        return numbers * self.dtype.itemsize

    def resize(self, num_rows: int, length: int, *, num_used: int) -> None:
        """Take exactly this room, if it is not what there is; the first `num_used` rows keep their content."""
        if (num_rows, length) == (self.num_rows, self.length):
            return
        for layer, shape in self.shapes.items():
            room = (num_rows, shape.num_heads, length)
            self.keys[layer] = self._moved(self.keys.get(layer), (*room, shape.key_dim), num_used)
            self.values[layer] = self._moved(self.values.get(layer), (*room, shape.value_dim), num_used)
        self.num_rows, self.length = num_rows, length

    def _moved(self, old: Tensor | None, shape: tuple[int, int, int, int], num_used: int) -> Tensor:
        new = torch.zeros(shape, dtype=self.dtype, device=self.device)
        if old is not None and num_used:
            length = min(old.shape[2], new.shape[2])
            new[:num_used, :, :length] = old[:num_used, :, :length]
        return new

    def copy_rows(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions of rows `source` to rows `target`, both [n] int64."""
        for part in (*self.keys.values(), *self.values.values()):
            part[target, :, :length] = part[source, :, :length]

    def clear(self, rows: Tensor | None = None) -> None:
        """Zero these rows, [n] int64; all when None."""
        for part in (*self.keys.values(), *self.values.values()):
            if rows is None:
                part.zero_()
            else:
                part[rows] = 0

    def release(self) -> None:
        """Give all memory back."""
        self.keys.clear()
        self.values.clear()
        self.num_rows = self.length = 0
