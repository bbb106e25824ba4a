"""Workers around the sample queue: its host, and the writer of samples to disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import rl_agent.registry
import rl_tq.registry
from rl_tq.types.staleness import ADMITTED
from rl_trainer.runtime.base import Dispatch, WorkerContext, register
from rl_trainer.runtime.network import address_of
from rl_trainer.samples import file_of, write_samples
from rl_trainer.workers.columns import EXPERTS, IMAGES

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_agent.types import Tokenizer
    from rl_tq.base import TransferQueue
    from rl_tq.types import BatchMeta


def write_step(queue: TransferQueue, tokenizer: Tokenizer, folder: Path, batch: BatchMeta, step: int) -> int:
    """Write a batch's columns, its texts and its finish reasons; returns the bytes on disk.

    Images, routed experts and other columns with several axes are left out: they are larger than all else.
    """
    names = [name for name in batch.columns if name not in (*EXPERTS, *IMAGES)]
    data = queue.get(batch, names)
    columns: dict[str, Any] = {name: data[name] for name in names if data[name].dim() <= 2}
    for owner in ("prompt", "completion"):
        if f"{owner}_token_ids" not in columns:  # something else than tokens was generated
            continue
        rows = columns[f"{owner}_token_ids"].unbind()
        columns[owner] = [tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in rows]
    logged = [tags.get("extra", {}) for tags in batch.tags]  # by `log_extra` of a reward function
    for name in {name: None for each in logged for name in each if name not in columns}:
        columns[name] = [each.get(name) for each in logged]
    for tag in ("reward", "finish_reason"):
        columns[tag] = [tags[tag] for tags in batch.tags]
    return write_samples(file_of(folder, step), columns)


class SampleWorker:
    """Writes the samples of a step to a parquet file, reading the queue itself: the controller holds no tensor."""

    def __init__(
        self, context: WorkerContext, *, folder: str, model_path: str, queue_address: str, timeout_s: float
    ) -> None:
        del context
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer = rl_agent.registry.create_tokenizer(model_path)
        self._queue = rl_tq.registry.connect(queue_address, timeout_s=timeout_s)

    @register(Dispatch.RANK_ZERO)
    def write(self, batch: BatchMeta, step: int) -> int:
        """See `write_step`."""
        return write_step(self._queue, self._tokenizer, self._folder, batch, step)

    def close(self) -> None:
        """Close the connection to the queue."""
        self._queue.close()


class QueueWorker:
    """Host of the sample queue, in its own process: the controller holds no tensor."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        storage: str,
        name: str,
        snapshot: str | None = None,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        if prepare is not None:  # makes a custom staleness policy known to this process
            prepare()
        self._queue = rl_tq.registry.serve(address_of(storage, name, (context.host, 0)), snapshot=snapshot)

    @register(Dispatch.RANK_ZERO)
    def address(self) -> str:
        """URL that clients connect to."""
        return self._queue.address

    @register(Dispatch.RANK_ZERO)
    def copy(self, rows: BatchMeta, partition: str) -> BatchMeta:
        """Copy rows into `partition`, with columns and tags; the copies are never claimed as admitted groups."""
        tags = [{name: value for name, value in tag.items() if name != ADMITTED} for tag in rows.tags]
        return self._queue.put(self._queue.get(rows), partition=partition, tags=tags)

    def close(self) -> None:
        """Free every row."""
        self._queue.close()
