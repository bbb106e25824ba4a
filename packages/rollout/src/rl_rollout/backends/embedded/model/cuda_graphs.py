"""CUDA graphs of decode steps: one launch for the forward pass, the sampling and the update of the batch state.

A graph is captured for a number of rows and a number of block-table columns, both rounded up, when a step first needs
it. It reads and writes the batch state directly, through row numbers in a static buffer; padding rows point at a spare
row, whose keys and values go to a block that no sequence holds. A graph holds addresses: once weights, cache or batch
state move, all graphs are captured anew. Models with experts run without graphs: which kernels they launch depends on
the routing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rl_csrc import paged, sampling
from rl_rollout.backends.embedded.model.paged_attention import PagedBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_rollout.backends.embedded.batch_state import BatchState
    from rl_rollout.backends.embedded.kv_cache import KVCache
    from rl_rollout.backends.embedded.model.model_runner import ServedModel

    Work = Callable[[], Tensor]

KERNEL_COLUMNS = 16
"""Fewest block-table columns of a graph whose attention is a kernel: it reads no more blocks than a row has, so a
generous size costs nothing, and few sizes mean few captures."""


MOST_REPLAYS = 8
"""Most replays that the host launches before it waits for their tokens: while it prepares the next ones the GPU idles,
for a quarter of a step's time on an H200. A row that stops meanwhile draws tokens that are not read."""


def round_up(count: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(count - 1, 0).bit_length()


def round_up_columns(count: int, *, has_kernel: bool) -> int:
    """Columns of the graph for `count` blocks: the next power of two.

    Without a kernel, attention reads all columns, and sizes lie closer: 1, 2, 4, 8, 10, 12, 14, 16, 20, ...
    """
    if has_kernel:
        return max(round_up(count), KERNEL_COLUMNS)
    step = max(round_up(count) // 8, 1)
    return round_up(count) if count <= 8 else -(-count // step) * step


class GpuCapture:
    """Captures CUDA graphs on one device, all in one memory pool: a result is read before another graph is replayed.

    Only this thread is in capture mode, as another may be allocating memory for new weights at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Capture `work`; returns a function that replays it and returns the tensor that `work` returned."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # warm-up: libraries allocate their workspaces now, not in the capture
                work()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                out = work()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class DecodeGraphs:
    """Decode steps by CUDA graphs: one token for each of some rows of the batch.

    Args:
        model: The served model.
        cache: Its size must not change while graphs exist.
        table: Batch state with at least `spare_row` + 1 rows.
        spare_row: A row of the batch state that no sequence ever has.
        spare_block: A block of the cache that no sequence ever holds.
        new_capture: `GpuCapture`, or a stand-in in tests. Called once for every set of graphs, as a memory pool is
            freed with its last graph.
    """

    def __init__(
        self,
        model: ServedModel,
        cache: KVCache,
        table: BatchState,
        spare_row: int,
        spare_block: int,
        new_capture: Callable[[torch.device], Callable[[Work], Work]] = GpuCapture,
    ) -> None:
        self._model = model
        self._cache = cache
        self._table = table
        self._spare_row = spare_row
        self._spare_block = spare_block
        self._new_capture = new_capture
        self._capture = new_capture(model.device)
        self._replays: dict[tuple[int, int, bool], Work] = {}
        self._places: tuple[int, ...] = ()
        self._rows = torch.full((round_up(spare_row),), spare_row, dtype=torch.int64, device=model.device)
        self._rows_now = np.zeros(0, dtype=np.int64)
        self._version = torch.zeros((), dtype=torch.int64, device=model.device)
        self._version_now = 0
        self._logits: Tensor | None = None

    def clear(self) -> None:
        """Drop all graphs, because weights or the cache have moved."""
        self._replays.clear()
        self._capture = self._new_capture(self._model.device)

    def draw(self, rows: np.ndarray, num_columns: int, version: int, steps: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Sample the next tokens of each row, and write everything but `lengths_host` into the batch state.

        Args:
            rows: Distinct row numbers, int64 [B], which hold the blocks of all steps.
            num_columns: Columns of the block table that any of them uses, at most.
            version: Weight version to note for the new tokens.
            steps: Tokens of each row. What follows a stop token is not held back.

        Returns:
            Token ids, int64 [steps, B], and log-probs, float32 [steps, B].
        """
        if version != self._version_now:
            self._version.fill_(version)
            self._version_now = version
        outputs = [self._replay(rows, num_columns, draws=True)[:, : len(rows)].clone() for _ in range(steps)]
        drawn = torch.stack(outputs).cpu().numpy()  # here the host waits
        return drawn[:, 0].astype(np.int64), drawn[:, 1].astype(np.float32)

    def logits(self, rows: np.ndarray, num_columns: int) -> Tensor:
        """Logits [B, V] float32 of the next token of each row; the batch state is not changed."""
        return self._replay(rows, num_columns, draws=False)[: len(rows)]

    def _replay(self, rows: np.ndarray, num_columns: int, *, draws: bool) -> Tensor:
        table = self._table
        # Tensors of the batch state are replaced when they grow.
        places = tuple(t.data_ptr() for t in (table.tokens, table.lengths, table.block_tables))
        if places != self._places:
            self.clear()
            self._places = places
        if not np.array_equal(rows, self._rows_now):
            self._rows.fill_(self._spare_row)
            self._rows[: len(rows)] = torch.from_numpy(rows).to(self._rows.device)
            self._rows_now = rows.copy()
        columns = round_up_columns(num_columns, has_kernel=paged.has_kernel(self._cache.keys[0]))
        size = round_up(len(rows)), min(columns, table.block_tables.shape[1]), draws
        if size not in self._replays:
            self._replays[size] = self._make(*size)
        return self._replays[size]()

    def _make(self, num_rows: int, num_columns: int, draws: bool) -> Work:
        table, rows, spare = self._table, self._rows[:num_rows], self._spare_row

        def logits() -> Tensor:
            table.lengths.select(0, spare).fill_(1)
            table.block_tables.select(0, spare).fill_(self._spare_block)
            positions = table.lengths[rows] - 1
            tables = table.block_tables[:, :num_columns]
            where = (self._cache, tables, rows, positions)
            batch = PagedBatch(*where, num_single=num_rows, num_blocks=num_columns)
            shifted = positions + table.shifts[rows]
            return self._model.raw_logits(table.tokens[rows, positions], shifted, batch)

        def keep() -> Tensor:
            return self._kept(num_rows).copy_(logits())

        def draw() -> Tensor:
            lengths = table.lengths[rows]
            ids, logprobs = sampling.draw(
                logits(),
                temperature=table.temperature[rows],
                streams=table.streams[rows],
                positions=lengths,
                is_greedy=table.is_greedy[rows],
            )
            table.tokens[rows, lengths] = ids
            table.logprobs[rows, lengths] = logprobs
            table.versions[rows, lengths] = self._version
            table.lengths[rows] = lengths + 1
            return torch.stack((ids.double(), logprobs.double()))

        # Warm-up and capture must not change any sequence: all rows point at the spare one meanwhile.
        wanted = self._rows.clone()
        self._rows.fill_(spare)
        replay = self._capture(draw if draws else keep)
        self._rows.copy_(wanted)
        return replay

    def _kept(self, num_rows: int) -> Tensor:
        """Output buffer for the logits of so many rows, shared by all graphs."""
        if self._logits is None:
            shape = (len(self._rows), len(self._model.module.get_output_embeddings().weight))
            self._logits = torch.empty(shape, dtype=torch.float32, device=self._model.device)
        return self._logits[:num_rows]
