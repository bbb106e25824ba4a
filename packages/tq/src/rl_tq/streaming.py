"""`StreamingDataset`: an iterable dataset over claims, for torch's `DataLoader`. Imports torch.utils.data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from rl_tq.errors import WaitTimeoutError
from rl_tq.registry import connect

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tensordict import TensorDict

    from rl_tq.base import Sampler, TransferQueue
    from rl_tq.types import BatchMeta, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedBatch:
    """Batch of a stream."""

    meta: BatchMeta
    """The claimed rows: acknowledge them once they are trained on."""
    data: TensorDict
    """Their columns."""


class StreamingDataset(IterableDataset[StreamedBatch]):
    """Batches as rows become ready, until none comes in time. For a `DataLoader` with `batch_size=None`, or alone.

    Nothing is claimed ahead of its use except what the loader's workers prefetch, so a slow trainer leaves rows in the
    queue, where `max_rows` and `admit` hold producers up. Batches that were fetched and never acknowledged (a loader
    that is dropped, a worker that dies) go back to the queue with the connection that claimed them. Each worker, and
    each `iter`, connects by itself; workers share the rows of the task.
    """

    def __init__(
        self,
        address: str,
        *,
        partition: str,
        columns: Sequence[str],
        batch_size: int,
        task: str,
        sampler: Sampler | Policy | None = None,
        lease_s: float | None = None,
        idle_s: float = 60.0,
        clear: bool = False,
    ) -> None:
        """Describe the stream.

        Args:
            address: Address of the queue.
            partition: Partition to claim from.
            columns: Columns to fetch.
            batch_size: Rows per batch.
            task: Name of the consumer.
            sampler: See `TransferQueue.get_meta`.
            lease_s: See `TransferQueue.get_meta`.
            idle_s: The stream ends when no batch became ready for so long.
            clear: Acknowledge and clear each batch once the next is asked for, at steps 0, 1, ...: for consumers that
                need no restore. Otherwise `ack` is the caller's, by any client.
        """
        super().__init__()
        self._address = address
        self._claim: dict[str, Any] = {
            "partition": partition, "columns": list(columns), "batch_size": batch_size, "task": task,
            "sampler": sampler, "lease_s": lease_s, "timeout_s": idle_s,
        }  # fmt: skip
        self._is_clearing = clear

    def __iter__(self) -> Iterator[StreamedBatch]:
        with connect(self._address) as queue:
            step = 0
            while True:
                try:
                    meta = queue.get_meta(**self._claim)
                except WaitTimeoutError:
                    queue.stats()  # raises if the server did not answer, in which case the stream is not at its end
                    return
                yield StreamedBatch(meta=meta, data=queue.get(meta))
                if self._is_clearing:
                    self._consume(queue, meta, step)
                step += 1

    def _consume(self, queue: TransferQueue, meta: BatchMeta, step: int) -> None:
        queue.ack(meta, step=step)
        queue.clear(meta)
