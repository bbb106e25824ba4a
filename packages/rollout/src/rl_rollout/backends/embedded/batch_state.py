"""Batch state: tokens, log-probs, lengths, sampling parameters and block tables of running sequences, a row each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rl_csrc.inference.sampling import streams_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RowValues:
    """Values of a sequence's row when it enters the batch."""

    token_ids: Sequence[int]
    """Prompt token ids."""
    limit: int
    """Length of prompt and completion at which it ends, tokens."""
    temperature: float
    """Temperature; 0 is greedy."""
    top_p: float
    top_k: int
    seed: int
    stop_token_ids: tuple[int, ...]
    adapter: int
    shift: int
    """Position of a completion token minus its index; 0 without images."""


_ROW_DTYPES = {
    "lengths": torch.int64,
    "temperature": torch.float32,
    "is_greedy": torch.bool,
    "top_p": torch.float32,
    "top_k": torch.int64,
    "streams": torch.int64,
    "adapters": torch.int64,
    "shifts": torch.int64,
}
_HOST_COLUMNS = ("lengths_host", "limits", "computed", "num_blocks")
_TOKEN_DTYPES = {"tokens": torch.int64, "logprobs": torch.float32, "versions": torch.int64}


class BatchState:
    """State of the running sequences, which are rows 0..n-1.

    Shapes: R rows, L positions, M blocks, S stop ids (padded with -1).
    """

    lengths: Tensor
    """[R] tokens of prompt and completion; the last of them is fed next."""
    temperature: Tensor
    """[R] divisor of the logits, 1 where greedy."""
    is_greedy: Tensor
    top_p: Tensor
    top_k: Tensor
    streams: Tensor
    """[R] random streams: `streams_of` the seeds."""
    adapters: Tensor
    """[R] 0 for none, else 1 + index of the LoRA adapter."""
    shifts: Tensor
    tokens: Tensor
    """[R, L] prompt and completion."""
    logprobs: Tensor
    """[R, L] of completion tokens."""
    versions: Tensor
    """[R, L] weight version of completion tokens."""
    block_tables: Tensor
    """[R, M] blocks of the cache, in the order of positions."""
    lengths_host: np.ndarray
    """[R] copy of `lengths` on the CPU; both are counted up, so that no transfer is needed."""
    limits: np.ndarray
    """[R] length at which the sequence ends."""
    stop_ids: np.ndarray
    """[R, S]"""
    computed: np.ndarray
    """[R] number of tokens whose keys and values are in the cache."""
    num_blocks: np.ndarray
    """[R] number of valid entries of the block table."""

    def __init__(self, device: torch.device, states: Mapping[int, Sequence[Tensor]] | None = None) -> None:
        """Make an empty batch; `states` has one row's of each layer that carries some."""
        self.device = device
        for name, dtype in _ROW_DTYPES.items():
            setattr(self, name, torch.zeros(0, dtype=dtype, device=device))
        for name, dtype in _TOKEN_DTYPES.items():
            setattr(self, name, torch.zeros(0, 0, dtype=dtype, device=device))
        self.stop_ids = np.full((0, 1), -1, dtype=np.int64)
        self.block_tables = torch.zeros(0, 1, dtype=torch.int64, device=device)
        for name in _HOST_COLUMNS:
            setattr(self, name, np.zeros(0, dtype=np.int64))
        self._new_blocks: dict[tuple[int, int], int] = {}
        self.states = {layer: [each.new_zeros(0, *each.shape) for each in its] for layer, its in (states or {}).items()}
        """[R, ...] convolution and recurrent state of each gated delta net, by layer."""

    def reserve(self, num_rows: int, length: int, num_stops: int, num_columns: int = 1) -> None:
        """Grow to so many rows, tokens, stop ids and blocks per row, keeping the content.

        Room for tokens at least doubles, so that the tensors are seldom reallocated.
        """
        rows = max(num_rows, self.lengths.shape[0])
        if rows > self.lengths.shape[0]:
            for name in _ROW_DTYPES:
                setattr(self, name, _grown(getattr(self, name), (rows,)))
            for name in _HOST_COLUMNS:
                old = getattr(self, name)
                setattr(self, name, np.pad(old, (0, rows - len(old))))
            for its in self.states.values():
                its[:] = [_grown(each, (rows, *each.shape[1:])) for each in its]
        there = self.tokens.shape[1]
        room = there if length <= there else max(length, 2 * there)
        if (rows, room) != tuple(self.tokens.shape):
            for name in _TOKEN_DTYPES:
                setattr(self, name, _grown(getattr(self, name), (rows, room)))
        stops = max(num_stops, self.stop_ids.shape[1])
        if (rows, stops) != self.stop_ids.shape:
            added = (rows - self.stop_ids.shape[0], stops - self.stop_ids.shape[1])
            self.stop_ids = np.pad(self.stop_ids, ((0, added[0]), (0, added[1])), constant_values=-1)
        columns = max(num_columns, self.block_tables.shape[1])
        if (rows, columns) != tuple(self.block_tables.shape):
            self.block_tables = _grown(self.block_tables, (rows, columns))

    def add(self, first_row: int, values: Sequence[RowValues]) -> None:
        """Fill rows `first_row`, `first_row + 1`, ... `reserve` must have made room."""
        rows = slice(first_row, first_row + len(values))
        columns = {
            "lengths": [len(each.token_ids) for each in values],
            "temperature": [each.temperature or 1.0 for each in values],
            "is_greedy": [each.temperature == 0 for each in values],
            "top_p": [each.top_p for each in values],
            "top_k": [each.top_k for each in values],
            "streams": [each.seed for each in values],
            "adapters": [each.adapter for each in values],
            "shifts": [each.shift for each in values],
        }
        for name, column in columns.items():
            getattr(self, name)[rows] = torch.tensor(column, dtype=_ROW_DTYPES[name], device=self.device)
        self.streams[rows] = streams_of(self.streams[rows])
        self.lengths_host[rows] = columns["lengths"]
        self.limits[rows] = [each.limit for each in values]
        self.computed[rows] = self.num_blocks[rows] = 0
        width = max(len(each.token_ids) for each in values)
        padded = [[*each.token_ids, *[0] * (width - len(each.token_ids))] for each in values]
        self.tokens[rows, :width] = torch.tensor(padded, device=self.device)
        self.stop_ids[rows] = -1
        for row, each in enumerate(values, start=first_row):
            self.stop_ids[row, : len(each.stop_token_ids)] = each.stop_token_ids

    def length_of(self, row: int) -> int:
        """Tokens of a row."""
        return int(self.lengths_host[row])

    def tokens_of(self, row: int) -> list[int]:
        """Token ids of a row."""
        return self.tokens[row, : self.length_of(row)].tolist()

    def write_draft(self, row: int, token_ids: Sequence[int]) -> None:
        """Write tokens behind the newest one of a row. They are its only once they have been sampled too."""
        length = self.length_of(row)
        self.reserve(0, length + len(token_ids) + 1, 1)
        self.tokens[row, length : length + len(token_ids)] = torch.tensor(token_ids, device=self.device)

    def append_blocks(self, row: int, blocks: Sequence[int]) -> None:
        """Append blocks to a row's block table, on the host; `flush_blocks` copies them to the device."""
        first = int(self.num_blocks[row])
        self._new_blocks.update({(row, first + i): block for i, block in enumerate(blocks)})
        self.num_blocks[row] += len(blocks)

    def flush_blocks(self) -> None:
        """Copy the appended blocks to the device, in one transfer."""
        if not self._new_blocks:
            return
        longest = max(column for _, column in self._new_blocks) + 1
        if longest > self.block_tables.shape[1]:
            room = max(longest, 2 * self.block_tables.shape[1])
            self.block_tables = _grown(self.block_tables, (self.block_tables.shape[0], room))
        entries = torch.tensor([(*place, block) for place, block in self._new_blocks.items()], device=self.device)
        self.block_tables[entries[:, 0], entries[:, 1]] = entries[:, 2]
        self._new_blocks.clear()

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole rows, from `sources` to `targets`."""
        source, target = (torch.tensor(rows, device=self.device) for rows in (sources, targets))
        for name in (*_ROW_DTYPES, *_TOKEN_DTYPES, "block_tables"):
            column = getattr(self, name)
            column.index_copy_(0, target, column.index_select(0, source))
        for name in (*_HOST_COLUMNS, "stop_ids"):
            column = getattr(self, name)
            column[list(targets)] = column[list(sources)]
        self.copy_states(list(zip(sources, targets, strict=True)))

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the state of gated delta nets between rows, given as (source, target) pairs."""
        if not pairs or not self.states:
            return
        source, target = torch.tensor(pairs, device=self.device).unbind(1)
        for column in (each for its in self.states.values() for each in its):
            column.index_copy_(0, target, column.index_select(0, source))


def _grown(old: Tensor, shape: tuple[int, ...]) -> Tensor:
    new = torch.zeros(shape, dtype=old.dtype, device=old.device)
    new[tuple(slice(0, size) for size in old.shape)] = old
    return new
