"""Several teachers, each for the rows of some data sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_tq.types import BatchMeta
    from rl_trainer.workers.engine import EngineWorker


class Teachers:
    """Has every row scored by the teacher of its `data_source`.

    Args:
        by_source: Teachers by `data_source`; that of "" has the rows of all others.
        num_ranks: Of each teacher's engine, which calls all of them alike: a call has a row for each of them.
    """

    def __init__(self, by_source: Mapping[str, EngineWorker], num_ranks: int) -> None:
        self._by_source, self._num_ranks = by_source, num_ranks

    def compute_teacher_log_prob(self, batch: BatchMeta) -> BatchMeta:
        """Write what the loss reads of the teachers."""
        rows: dict[str, list[int]] = {}
        for row, tags in enumerate(batch.tags):
            source = tags["data_source"]
            rows.setdefault(source if source in self._by_source else "", []).append(row)
        columns: tuple[str, ...] = ()
        for source, own in rows.items():
            num_idle = self._num_ranks - len(own)  # they call alike, on a row that another one writes
            asked, writes = [*own, *own[:1] * num_idle], [True] * len(own) + [False] * num_idle
            columns = self._by_source[source].compute_teacher_log_prob(batch.reorder(asked), writes).columns
        return type(batch)(partition=batch.partition, sample_ids=batch.sample_ids, columns=columns)

    def offload(self) -> None:
        """Move everything to the CPU's memory."""
        for teacher in self._by_source.values():
            teacher.offload()
