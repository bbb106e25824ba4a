"""Streaming data loader: batches for a rank as samples become ready."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, IterableDataset

from rl_tq_transfer_queue.client import TransferQueueClient
from rl_tq_transfer_queue.metadata import BatchMeta, names_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_IDLE_S = 0.1

Batch = tuple[TensorDict, BatchMeta]


class StreamingDataset(IterableDataset[Batch]):
    """Stream of micro-batches for one rank. Batches are cached: `reset` replays them."""

    def __init__(
        self,
        config: Any,
        batch_size: int,
        micro_batch_size: int,
        data_fields: list[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: Callable[..., Any] | None = None,
        process_batch_fn: Callable[..., Any] | None = None,
    ) -> None:
        """Describe the stream.

        Args:
            config: What `init` returned.
            batch_size: Samples fetched at once.
            micro_batch_size: Samples handed out at once; at most `batch_size`.
            data_fields: What to fetch.
            partition_id: Where.
            task_name: Who consumes.
            dp_rank: Ranks of one number get the same samples (with a sampler that knows of ranks).
            should_check_consumption_status: End once the partition is consumed; else never.
            fetch_batch_fn: Instead of `default_fetch_batch_fn`.
            process_batch_fn: Instead of `chunk_batch_fn`.
        """
        super().__init__()
        for name, value in (("batch_size", batch_size), ("micro_batch_size", micro_batch_size)):
            if value < 1:
                raise ValueError(f"{name} must be greater than 0, got {value}")
        if micro_batch_size > batch_size:
            raise ValueError(f"micro_batch_size is {micro_batch_size}, and a batch has {batch_size} samples")
        if not data_fields:
            raise ValueError("data_fields must not be empty")
        if dp_rank < 0:
            raise ValueError(f"dp_rank {dp_rank} must be greater than or equal to 0")
        self.config = config
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.data_fields = list(data_fields)
        self.partition_id = partition_id
        self.task_name = task_name
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn or default_fetch_batch_fn
        self.process_batch_fn = process_batch_fn or chunk_batch_fn
        self.sampling_config = {"dp_rank": dp_rank, "task_name": task_name}
        self.buffer: list[Batch] = []
        self.batch_index = 0
        self._client: TransferQueueClient | None = None

    def __iter__(self) -> Iterator[Batch]:
        if self._client is None:
            self._client = TransferQueueClient("StreamingDataset", self.config.controller.zmq_info)
        while True:
            if self.batch_index < len(self.buffer):
                batch = self.buffer[self.batch_index]
                self.batch_index += 1
                yield from self.process_batch_fn(*batch, micro_batch_size=self.micro_batch_size)
                continue
            if self.should_check_consumption_status and self._client.check_consumption_status(
                self.task_name, self.partition_id
            ):
                return
            data, meta = self.fetch_batch_fn(
                tq_client=self._client,
                data_fields=self.data_fields,
                batch_size=self.batch_size,
                partition_id=self.partition_id,
                task_name=self.task_name,
                sampling_config=self.sampling_config,
                batch_index=self.batch_index,
            )
            if data is None:
                time.sleep(_IDLE_S)
            else:
                self.buffer.append((data, meta))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    def reset(self) -> None:
        """Replay the fetched batches from the first one."""
        self.batch_index = 0

    def step(self, partition_id: str) -> None:
        """Switch to another partition."""
        self.buffer = []
        self.batch_index = 0
        self.partition_id = partition_id


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: dict[str, Any],
    batch_index: int,
) -> tuple[TensorDict | None, BatchMeta]:
    """Ask for a batch; None, and no samples, where too few are ready."""
    meta = tq_client.get_meta(
        data_fields=data_fields,
        batch_size=batch_size,
        partition_id=partition_id,
        task_name=task_name,
        sampling_config={**sampling_config, "batch_index": batch_index, "partition_id": partition_id},
    )
    return (tq_client.get_data(meta) if meta else None), meta


def chunk_batch_fn(td: TensorDict, batch_meta: BatchMeta, micro_batch_size: int = 1) -> list[Batch]:
    """Cut a batch into micro-batches; the last may be smaller.

    Raises:
        ValueError: a micro-batch has no samples, or more than the batch.
    """
    if not isinstance(td, TensorDict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"Expected TensorDict, got {type(td).__name__}")
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size must be a positive integer, got {micro_batch_size}")
    if not td.batch_size:
        raise ValueError("Input TensorDict must have non-empty batch_size")
    size = td.batch_size[0]
    if micro_batch_size > size:
        raise ValueError(f"micro_batch_size ({micro_batch_size}) exceeds total batch size ({size})")
    parts: list[Batch] = []
    for start in range(0, size, micro_batch_size):
        stop = min(start + micro_batch_size, size)
        part: dict[str, Any] = {}
        for name in names_of(td):
            value: Any = td.get(name)
            is_nested = isinstance(value, torch.Tensor) and value.is_nested
            rows = value.unbind()[start:stop] if is_nested else value[start:stop]
            part[name] = torch.nested.as_nested_tensor(list(rows), layout=value.layout) if is_nested else rows
        parts.append((TensorDict(part, batch_size=[stop - start]), batch_meta[start:stop]))
    return parts


def _as_it_is(data: Any) -> Any:
    return data


class StreamingDataLoader(DataLoader[Batch]):
    """A `DataLoader` of micro-batches: (TensorDict, BatchMeta) each."""

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[..., Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        super().__init__(
            dataset=dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn or _as_it_is,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )

    @property
    def _stream(self) -> StreamingDataset:
        assert isinstance(self.dataset, StreamingDataset)
        return self.dataset

    def reset(self) -> None:
        """See `StreamingDataset.reset`."""
        self._stream.reset()

    def step(self, partition_id: str) -> None:
        """See `StreamingDataset.step`."""
        self._stream.step(partition_id)

    def get_buffer(self) -> list[Batch]:
        """Fetched batches."""
        return self._stream.buffer
