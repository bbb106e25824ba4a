"""What a planned step feeds the model: packed tokens, where they belong, and which of their logits are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from rl_rollout.backends.embedded.attention import PagedBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from rl_rollout.backends.embedded.batch_state import BatchTable
    from rl_rollout.backends.embedded.kv_cache import KVCache
    from rl_rollout.backends.embedded.model_runner import ServedModel
    from rl_rollout.backends.embedded.scheduler import Plan
    from rl_rollout.backends.embedded.sequence import InFlight


class Packer:
    """Makes tensors of plans."""

    def __init__(self, table: BatchTable, cache: KVCache) -> None:
        self._table = table
        self._cache = cache
        self._first_rows = torch.arange(64, device=table.device)

    def rows(self, ascending: np.ndarray) -> Tensor:
        """Row numbers on the device. Nearly always they are 0..n-1, which are there already."""
        count = len(ascending)
        if not count or ascending[-1] != count - 1:
            return torch.from_numpy(ascending).to(self._table.device)
        if count > len(self._first_rows):
            self._first_rows = torch.arange(2 * count, device=self._table.device)
        return self._first_rows[:count]

    def batch(self, plan: Plan, rows: Tensor) -> tuple[PagedBatch, Tensor]:
        """The planned tokens, those of `rows` first, and their ids [T]."""
        table = self._table
        positions = table.lengths[rows] - 1
        num_single = len(plan.rows)
        spans = [(chunk.sequence.row, chunk.start, chunk.count) for chunk in plan.chunks]
        if spans:
            # On the host: torch would wake threads for a few numbers, and they keep a core for themselves a while.
            chunk_rows = np.repeat([row for row, _, _ in spans], [count for _, _, count in spans])
            chunk_positions = np.concatenate([np.arange(start, start + count) for _, start, count in spans])
            rows = torch.cat([rows, torch.from_numpy(chunk_rows).to(table.device)])
            positions = torch.cat([positions, torch.from_numpy(chunk_positions).to(table.device)])
        batch = PagedBatch(
            self._cache,
            table.block_tables,
            rows,
            positions,
            num_single=num_single,
            num_blocks=int(table.num_blocks[plan.rows].max()) if num_single else 0,
            chunks=spans,
        )
        return batch, table.tokens[rows, positions]

    def choose_adapters(self, model: ServedModel, rows: Tensor, sequences: Iterable[InFlight]) -> None:
        """Tell the linear layers which of the packed tokens, given by their rows, have an adapter.

        `sequences` are those of the batch that have one.
        """
        wanted = {sequence.request.adapter for sequence in sequences}
        chosen = self._table.adapters[rows] if wanted else rows
        model.active_adapters.tokens = {
            name: (chosen == index).nonzero()[:, 0]
            for index, name in enumerate(model.adapters.names, start=1)
            if name in wanted
        }


def kept(plan: Plan, asked: Sequence[bool]) -> list[int] | None:
    """Of the planned tokens, those whose logits are wanted: the drawn ones first, then prompts. None: all, in order."""
    if not plan.chunks:
        return None
    ends: list[int] = []
    spans: list[int] = []
    at = len(plan.rows)
    for chunk, is_asked in zip(plan.chunks, asked, strict=True):
        if is_asked:
            spans.extend(range(at, at + chunk.count))
        at += chunk.count
        ends.append(at - 1)
    last = [end for end, chunk in zip(ends, plan.chunks, strict=True) if chunk.is_last]
    return [*range(len(plan.rows)), *last, *(ends[split.chunk] for split in plan.splits), *spans]
