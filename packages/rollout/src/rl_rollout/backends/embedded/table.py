"""What the engine knows of each sequence in the batch, as tensors with one row per sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RowValues:
    """How a sequence enters the table."""

    token_ids: Sequence[int]
    """Its P prompt tokens."""
    limit: int
    """Length at which it ends, tokens."""
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop_token_ids: tuple[int, ...]
    shift: int
    """Position of a later token minus its index; 0 without images."""


_ROW_DTYPES = {
    "lengths": torch.int64,
    "limits": torch.int64,
    "temperature": torch.float32,
    "top_p": torch.float32,
    "top_k": torch.int64,
    "seeds": torch.int64,
    "shifts": torch.int64,
}
_TOKEN_DTYPES = {"tokens": torch.int64, "logprobs": torch.float32, "versions": torch.int64}


class BatchTable:
    """Rows 0..n-1 are in use. R rows, L positions, S stop ids (padded with -1)."""

    lengths: Tensor
    """[R] tokens that are known; the last of them is fed next."""
    limits: Tensor
    """[R] length at which the row ends."""
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    seeds: Tensor
    shifts: Tensor
    stop_ids: Tensor
    """[R, S]"""
    tokens: Tensor
    """[R, L] prompt and completion."""
    logprobs: Tensor
    """[R, L] of completion tokens."""
    versions: Tensor
    """[R, L] weight version of completion tokens."""
    host_lengths: Tensor
    """[R] `lengths` again, on the CPU: every row grows by one per step, so both can be kept without a transfer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        for name, dtype in _ROW_DTYPES.items():
            setattr(self, name, torch.zeros(0, dtype=dtype, device=device))
        for name, dtype in _TOKEN_DTYPES.items():
            setattr(self, name, torch.zeros(0, 0, dtype=dtype, device=device))
        self.stop_ids = torch.zeros(0, 1, dtype=torch.int64, device=device)
        self.host_lengths = torch.zeros(0, dtype=torch.int64)

    def reserve(self, num_rows: int, length: int, num_stops: int) -> None:
        """Make room, keeping what is there."""
        rows = max(num_rows, self.lengths.shape[0])
        if rows > self.lengths.shape[0]:
            for name in _ROW_DTYPES:
                setattr(self, name, _grown(getattr(self, name), (rows,)))
            self.host_lengths = _grown(self.host_lengths, (rows,))
        room = max(length, self.tokens.shape[1])
        if (rows, room) != tuple(self.tokens.shape):
            for name in _TOKEN_DTYPES:
                setattr(self, name, _grown(getattr(self, name), (rows, room)))
        stops = max(num_stops, self.stop_ids.shape[1])
        if (rows, stops) != tuple(self.stop_ids.shape):
            self.stop_ids = _grown(self.stop_ids, (rows, stops), fill=-1)

    def add(self, first_row: int, values: Sequence[RowValues]) -> None:
        """Fill rows `first_row`, `first_row + 1`, ... There must be room."""
        rows = slice(first_row, first_row + len(values))
        columns = {
            "lengths": [len(each.token_ids) for each in values],
            "limits": [each.limit for each in values],
            "temperature": [each.temperature for each in values],
            "top_p": [each.top_p for each in values],
            "top_k": [each.top_k for each in values],
            "seeds": [each.seed for each in values],
            "shifts": [each.shift for each in values],
        }
        for name, column in columns.items():
            getattr(self, name)[rows] = torch.tensor(column, dtype=_ROW_DTYPES[name], device=self.device)
        self.host_lengths[rows] = torch.tensor(columns["lengths"])
        self._fill(self.tokens, rows, [each.token_ids for each in values], fill=0)
        self._fill(self.stop_ids, rows, [each.stop_token_ids for each in values], fill=-1)

    def _fill(self, target: Tensor, rows: slice, ragged: Sequence[Sequence[int]], fill: int) -> None:
        width = max(len(row) for row in ragged)
        padded = [[*row, *[fill] * (width - len(row))] for row in ragged]
        target[rows] = fill
        if width:
            target[rows, :width] = torch.tensor(padded, dtype=target.dtype, device=self.device)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy whole rows, [n] int64 each."""
        for name in (*_ROW_DTYPES, *_TOKEN_DTYPES, "stop_ids"):
            column = getattr(self, name)
            column[target] = column[source]
        self.host_lengths[target.cpu()] = self.host_lengths[source.cpu()]


def _grown(old: Tensor, shape: tuple[int, ...], fill: int = 0) -> Tensor:
    new = torch.full(shape, fill, dtype=old.dtype, device=old.device)
    new[tuple(slice(0, size) for size in old.shape)] = old
    return new
