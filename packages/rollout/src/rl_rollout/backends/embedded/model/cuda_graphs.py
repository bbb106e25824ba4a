"""CUDA graphs of decode steps: one launch instead of one per kernel.

A graph is captured for a number of rows and a number of block-table columns, both rounded up, when a step first wants
it, and replayed over static buffers. Rows that are too many look at a block that belongs to nobody. A
graph holds addresses: new weights or another cache make all of them void. Models with experts, whose kernels depend on
where tokens go, are run without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_rollout.backends.embedded.model.attention import PagedBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_rollout.backends.embedded.kv_cache import KVCache
    from rl_rollout.backends.embedded.model.model_runner import ServedModel

    Work = Callable[[], Tensor]


def round_up(count: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(count - 1, 0).bit_length()


def round_up_columns(count: int) -> int:
    """The next of 1, 2, 4, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, ...: a step reads all columns, so few are idle."""
    step = max(round_up(count) // 8, 1)
    return round_up(count) if count <= 8 else -(-count // step) * step


class GpuCapture:
    """Captures graphs on one device, all in one pool of memory: one is replayed when the last one's logits were read.

    The capture looks at this thread alone, as another may be taking memory for new weights at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Replay function for `work` on the same memory; it returns the same tensor."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # libraries take their workspaces now, not during the capture
                work()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                out = work()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Static inputs of one graph, N rows and M columns."""

    ids: Tensor
    """[N] int64"""
    positions: Tensor
    """[N] int64, where the tokens lie in the cache."""
    shifts: Tensor
    """[N] int64, what the model adds to positions."""
    tables: Tensor
    """[N, M] int64"""
    replay: Work


class DecodeGraphs:
    """One token each of some rows.

    Args:
        model: Run under `capture`.
        cache: Its size must not change while graphs are there.
        spare_block: A block of the cache that no sequence ever holds.
        new_capture: `GpuCapture`, or in tests anything that runs what it is given. Called for every set of graphs: a
            pool of memory ends with its last graph.
    """

    def __init__(
        self,
        model: ServedModel,
        cache: KVCache,
        spare_block: int,
        new_capture: Callable[[torch.device], Callable[[Work], Work]] = GpuCapture,
    ) -> None:
        self._model = model
        self._cache = cache
        self._spare_block = spare_block
        self._new_capture = new_capture
        self._capture = new_capture(model.device)
        self._buckets: dict[tuple[int, int], Bucket] = {}

    def clear(self) -> None:
        """Weights or the cache have moved."""
        self._buckets.clear()
        self._capture = self._new_capture(self._model.device)

    def logits(self, ids: Tensor, positions: Tensor, shifts: Tensor, tables: Tensor) -> Tensor:
        """Logits [B, V] of tokens [B] of rows whose block tables [B, M] are given; valid until the next call."""
        rows, columns = tables.shape
        size = round_up(rows), round_up_columns(columns)
        if size not in self._buckets:
            self._buckets[size] = self._make(*size)
        bucket = self._buckets[size]
        bucket.ids[:rows], bucket.positions[:rows], bucket.shifts[:rows] = ids, positions, shifts
        bucket.positions[rows:] = 0
        bucket.tables.fill_(self._spare_block)
        bucket.tables[:rows, :columns] = tables
        return bucket.replay()[:rows]

    def _make(self, rows: int, columns: int) -> Bucket:
        device = self._model.device
        ids, positions, shifts, order = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(4))
        order += torch.arange(rows, device=device)
        tables = torch.full((rows, columns), self._spare_block, dtype=torch.int64, device=device)

        def work() -> Tensor:
            batch = PagedBatch(self._cache, tables, order, positions, num_single=rows, num_blocks=columns)
            return self._model.logits(ids, positions + shifts, batch)

        return Bucket(ids=ids, positions=positions, shifts=shifts, tables=tables, replay=self._capture(work))
