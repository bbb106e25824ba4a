"""Controller: the metadata of samples (keys, tags, consumption) and their locations in an rl-tq queue.

It serves the queue. Each client has a thread, so that a call that waits delays no other. Samples count as consumed when
they are given out, as in TransferQueue: if a consumer dies, call `reset_consumption`. rl-tq's own `get_meta` and `ack`
lose none.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch

from rl_tq import BatchMeta as Reference
from rl_tq import serve
from rl_tq.errors import SchemaError, StaleReferenceError
from rl_tq_transfer_queue.metadata import BatchMeta, Schema
from rl_tq_transfer_queue.sampler import BaseSampler, SequentialSampler
from rl_tq_transfer_queue.values import codec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Result = TypeVar("Result")

METADATA_TIMEOUT_S = 60.0
"""How long `get_meta` waits for samples where the controller does not poll; TQ_CONTROLLER_GET_METADATA_TIMEOUT."""

Row = tuple[int, int]
"""Row number and generation, of the queue that holds the values."""


class Location(NamedTuple):
    """Location of one field of one sample in the queue."""

    row: Row
    column: str


@dataclass(slots=True)
class Field:
    """One field of a partition."""

    dtype: torch.dtype | None
    is_non_tensor: bool
    is_nested: bool = False
    locations: dict[int, Location] = field(default_factory=dict[int, Location])
    """By sample."""
    shapes: dict[int, Any] = field(default_factory=dict[int, Any])
    """By sample; None if it is not a tensor."""

    def schema(self, indexes: Sequence[int]) -> dict[str, Any]:
        """See `metadata.Schema`."""
        shapes = [self.shapes.get(index) for index in indexes]
        is_nested = not self.is_non_tensor and (self.is_nested or len(set(shapes)) > 1)
        schema = {
            "dtype": self.dtype,
            "shape": None if is_nested or not shapes else shapes[0],
            "is_nested": is_nested,
            "is_non_tensor": self.is_non_tensor,
        }
        return {**schema, "per_sample_shapes": shapes} if is_nested else schema


@dataclass(slots=True)
class Partition:
    """Metadata of one partition. `field_name_mapping` and `production_status` are for readers of a snapshot."""

    partition_id: str
    global_indexes: set[int] = field(default_factory=set[int])
    pre_allocated_global_indexes: list[int] = field(default_factory=list[int])
    """Samples reserved for later: they count as neither produced nor consumed."""
    fields: dict[str, Field] = field(default_factory=dict[str, Field])
    consumed: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    custom_meta: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    keys_mapping: dict[str, int] = field(default_factory=dict[str, int])
    revert_keys_mapping: dict[int, str] = field(default_factory=dict[int, str])
    rows: Counter[Row] = field(default_factory=Counter[Row])
    """Reference counts: fields of samples in each row of the queue."""

    @property
    def field_name_mapping(self) -> dict[str, int]:
        """Field to column of `production_status`."""
        return {name: i for i, name in enumerate(self.fields)}

    @property
    def production_status(self) -> torch.Tensor:
        """int8 [highest index + 1, fields]: 1 where the value is there."""
        status = torch.zeros(max(self.global_indexes, default=-1) + 1, len(self.fields), dtype=torch.int8)
        for column, each in enumerate(self.fields.values()):
            status[list(each.locations), column] = 1
        return status

    @property
    def expected(self) -> list[int]:
        """All samples, the reserved ones among them."""
        return sorted({*self.global_indexes, *self.pre_allocated_global_indexes})

    def get_custom_meta(self, global_indices: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Tags of samples, by index."""
        return {index: dict(self.custom_meta.get(index, {})) for index in global_indices}

    def ready(self, names: Iterable[str], task: str) -> list[int]:
        """Samples that have all of these fields and were not consumed, in rising order."""
        found = self.global_indexes - self.consumed.get(task, set())
        for name in names:
            held = self.fields.get(name)
            found &= held.locations.keys() if held else set()
        return sorted(found)

    def common_fields(self, indexes: Sequence[int]) -> list[str]:
        """Fields that all of these samples have."""
        return [name for name, each in self.fields.items() if indexes and all(i in each.locations for i in indexes)]

    def put(self, name: str, index: int, where: Location) -> None:
        """Record the location of a field of a sample; an older one is removed."""
        self.remove(name, index)
        self.fields[name].locations[index] = where
        self.rows[where.row] += 1

    def remove(self, name: str, index: int) -> None:
        """Remove a field of a sample."""
        where = self.fields[name].locations.pop(index, None)
        if where is not None:
            self.rows[where.row] -= 1

    def forget(self, indexes: Iterable[int]) -> None:
        """Remove samples."""
        for index in indexes:
            for name in self.fields:
                self.remove(name, index)
                self.fields[name].shapes.pop(index, None)
            self.global_indexes.discard(index)
            self.custom_meta.pop(index, None)
            for done in self.consumed.values():
                done.discard(index)
            key = self.revert_keys_mapping.pop(index, None)
            if key is not None:
                del self.keys_mapping[key]

    def unused_rows(self) -> list[Row]:
        """Rows of the queue without a reference; each is returned once."""
        unused = [row for row, times in self.rows.items() if not times]
        for row in unused:
            del self.rows[row]
        return unused


def _slots(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in fields(value)}


codec.register(Location, Location._asdict)
codec.register(Field, _slots)
codec.register(Partition, _slots)


class TransferQueueController:
    """Controller of samples, partitions and the sampler. Its public methods may be called from any thread."""

    def __init__(
        self,
        sampler: BaseSampler | type[BaseSampler] = SequentialSampler,
        polling_mode: bool = False,
        address: str = "shm://",
        max_samples: int | None = None,
        token: str | None = None,
    ) -> None:
        """Serve a queue at `address`; with `polling_mode`, who finds too few samples gets none instead of waiting."""
        self.register_sampler(sampler)
        self.polling_mode = polling_mode
        self._max_samples = max_samples
        self._queue = serve(address, token=token)
        self._changed = threading.Condition()
        self._numbers = count()
        self.partitions: dict[str, Partition] = {}

    @property
    def queue_address(self) -> str:
        """Address of the queue that holds the values."""
        return self._queue.address

    def register_sampler(self, sampler: BaseSampler | type[BaseSampler]) -> None:
        """Replace the sampler."""
        made = sampler() if isinstance(sampler, type) else sampler
        if not isinstance(made, BaseSampler):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"sampler {sampler!r} must be an instance or subclass of BaseSampler")
        self.sampler = made

    def close(self) -> None:
        """Close the queue."""
        self._queue.close()

    # Producing

    def insert(self, partition_id: str, size: int, data_fields: Sequence[str]) -> BatchMeta:
        """Allocate samples without values."""
        with self._changed:
            partition = self._open(partition_id)
            indexes = self._allocate(partition, size)
            meta = self._meta(partition, indexes, data_fields)
            for name in data_fields:
                unknown = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False}
                meta.field_schema.setdefault(name, unknown)
            return meta

    def check_dtypes(self, partition_id: str, schema: Schema) -> None:
        """Raise SchemaError for a field that other samples of the partition hold with another dtype."""
        with self._changed:
            partition = self.partitions.get(partition_id)
            for name, brought in schema.items():
                held = partition.fields.get(name) if partition else None
                if held is None or not held.locations:
                    continue
                if (held.dtype, held.is_non_tensor) != (brought["dtype"], brought["is_non_tensor"]):
                    there, here = held.dtype or "no tensor", brought["dtype"] or "no tensor"
                    raise SchemaError(
                        f"field {name!r} of partition {partition_id!r} is {there}, and this put brings {here}: convert "
                        "it, use another field, or clear the partition"
                    )

    def publish(
        self,
        partition_id: str,
        indexes: Sequence[int],
        schema: Schema,
        pieces: Sequence[tuple[Sequence[int], dict[str, str], Sequence[Row]]],
        custom_meta: Sequence[dict[str, Any]],
    ) -> None:
        """Make values visible that were put: for each piece its positions, field to column, and rows of the queue.

        Raises:
            KeyError: a sample was cleared meanwhile; nothing becomes visible.
            SchemaError: as `check_dtypes`.
        """
        rows = [row for _, _, held in pieces for row in held]
        with self._changed:
            try:
                self.check_dtypes(partition_id, schema)
                partition = self._partition_with(partition_id, indexes)
            except (KeyError, SchemaError):
                self._free(partition_id, rows)
                raise
            for name, each in schema.items():
                held = partition.fields.get(name)
                if held is None or not held.locations:
                    held = partition.fields[name] = Field(each["dtype"], each["is_non_tensor"])
                held.is_nested |= each["is_nested"]
                shapes = each.get("per_sample_shapes") or [each["shape"]] * len(indexes)
                held.shapes.update(zip(indexes, shapes, strict=True))
            for positions, columns, held_rows in pieces:
                for position, row in zip(positions, held_rows, strict=True):
                    for name, column in columns.items():
                        partition.put(name, indexes[position], Location(row, column))
            self._tag(partition, indexes, custom_meta)
            self._free(partition_id, partition.unused_rows())
            self._changed.notify_all()

    def set_custom_meta(self, partition_id: str, indexes: Sequence[int], custom_meta: Sequence[dict[str, Any]]) -> None:
        """Merge tags into samples'."""
        with self._changed:
            self._tag(self._partition_with(partition_id, indexes), indexes, custom_meta)
            self._changed.notify_all()

    # Consuming

    def get_metadata(
        self,
        data_fields: Sequence[str],
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        batch_size: int | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """Samples for a task (`fetch`), all samples (`force_fetch`), or new ones (`insert`).

        Raises:
            TimeoutError: too few were ready in time.
        """
        if mode not in ("fetch", "insert", "force_fetch"):
            raise ValueError(f"Invalid mode: {mode!r}; it is 'fetch', 'insert' or 'force_fetch'")
        if mode != "force_fetch" and batch_size is None:
            raise ValueError(f"must provide batch_size in mode {mode!r}")
        if mode == "insert":
            return self.insert(partition_id, batch_size or 0, data_fields)
        if mode == "force_fetch":
            with self._changed:
                partition = self.partitions.get(partition_id)
                return (
                    self._meta(partition, sorted(partition.global_indexes), data_fields)
                    if partition
                    else BatchMeta.empty()
                )
        if task_name is None:
            raise ValueError("must provide task_name in mode 'fetch'")
        return self._fetch(partition_id, data_fields, task_name, batch_size or 0, sampling_config or {})

    def _fetch(
        self, partition_id: str, data_fields: Sequence[str], task: str, batch_size: int, config: dict[str, Any]
    ) -> BatchMeta:
        def attempt() -> BatchMeta | None:
            partition = self.partitions.get(partition_id)
            if partition is None:
                return None
            ready = partition.ready(data_fields, task)
            if len(ready) < batch_size and not self.sampler.has_cached_result(partition_id, task, config):
                return None
            named = {"task_name": task, "partition_id": partition_id, **config}
            chosen, consumed = self.sampler(ready, batch_size, partition=partition, **named)
            if not chosen:
                return None
            self._partition_with(partition_id, chosen)  # none of a cached choice was cleared
            partition.consumed.setdefault(task, set()).update(consumed)
            return self._meta(partition, chosen, data_fields)

        limit = 0.0 if self.polling_mode else _metadata_timeout_s()
        meta = self._wait(attempt, limit)
        if meta is None and not self.polling_mode:
            partition = self.partitions.get(partition_id)
            num_ready = len(partition.ready(data_fields, task)) if partition else 0
            raise TimeoutError(
                f"Timeout after {limit} s while waiting for sufficient data for task {task!r} in partition "
                f"{partition_id!r}. Required: {batch_size} samples with {list(data_fields)} that the sampler "
                f"{type(self.sampler).__name__} accepts, Available: {num_ready}"
            )
        return meta or BatchMeta.empty()

    def _wait(self, attempt: Callable[[], Result | None], limit_s: float) -> Result | None:
        deadline = time.monotonic() + limit_s
        with self._changed:
            while (answer := attempt()) is None and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return answer

    def locate(
        self, partition_id: str, indexes: Sequence[int], data_fields: Sequence[str]
    ) -> dict[str, list[tuple[Row, str]]]:
        """Row of the queue and column of each field, sample by sample.

        Raises:
            KeyError: a sample was cleared, or has no such field.
        """
        with self._changed:
            partition = self._partition_with(partition_id, indexes)
            found: dict[str, list[tuple[Row, str]]] = {}
            for name in data_fields:
                locations = partition.fields[name].locations if name in partition.fields else {}
                if missing := [index for index in indexes if index not in locations]:
                    raise KeyError(f"samples {missing[:5]} of partition {partition_id!r} have no field {name!r} yet")
                found[name] = [(locations[index].row, locations[index].column) for index in indexes]
            return found

    def get_consumption_status(self, partition_id: str, task_name: str) -> tuple[Any, Any]:
        """Indexes int64 [n] and int8 [n], 1 where the task consumed the sample; (None, None) without the partition."""
        with self._changed:
            partition = self.partitions.get(partition_id)
            if partition is None:
                return None, None
            done = partition.consumed.get(task_name, set())
            return _numbers(partition.expected), torch.tensor(
                [index in done for index in partition.expected], dtype=torch.int8
            )

    def get_production_status(self, partition_id: str, data_fields: Sequence[str]) -> tuple[Any, Any]:
        """Indexes int64 [n] and int8 [n, fields], 1 where the value is there; (None, None) without such fields."""
        with self._changed:
            partition = self.partitions.get(partition_id)
            if partition is None or not data_fields or any(name not in partition.fields for name in data_fields):
                return None, None
            rows = [[index in partition.fields[name].locations for name in data_fields] for index in partition.expected]
            return _numbers(partition.expected), torch.tensor(rows, dtype=torch.int8).view(-1, len(data_fields))

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Give the samples to a task (None: to all) again. False without the partition."""
        with self._changed:
            partition = self.partitions.get(partition_id)
            if partition is None:
                return False
            for task in list(partition.consumed) if task_name is None else [task_name]:
                partition.consumed.pop(task, None)
            self.sampler.clear_cache(partition_id)
            self._changed.notify_all()
            return True

    # Clearing

    def clear_partition(self, partition_id: str) -> None:
        """Remove a partition; an unknown one is ignored."""
        with self._changed:
            if self.partitions.pop(partition_id, None) is not None:
                self.sampler.clear_cache(partition_id)
                self._queue.clear(partition_id)

    def clear_samples(self, partition_id: str, indexes: Sequence[int]) -> None:
        """Remove samples; unknown ones are ignored."""
        with self._changed:
            partition = self.partitions.get(partition_id)
            if partition is not None:
                partition.forget([index for index in indexes if index in partition.global_indexes])
                self._free(partition_id, partition.unused_rows())

    # Keys

    def kv_retrieve_meta(self, keys: Sequence[str], partition_id: str, create: bool = False) -> BatchMeta:
        """The samples of keys, with the fields that all of them have; unknown keys are made, or left out."""
        with self._changed:
            partition = self._open(partition_id) if create else self.partitions.get(partition_id)
            if partition is None:
                return BatchMeta.empty()
            new = [key for key in dict.fromkeys(keys) if key not in partition.keys_mapping] if create else []
            for key, index in zip(new, self._allocate(partition, len(new)), strict=True):
                partition.keys_mapping[key], partition.revert_keys_mapping[index] = index, key
            indexes = [partition.keys_mapping[key] for key in keys if key in partition.keys_mapping]
            return self._meta(partition, indexes, partition.common_fields(indexes))

    def kv_retrieve_keys(self, global_indexes: Sequence[int], partition_id: str) -> list[str | None]:
        """The keys of samples; None for one that has none."""
        with self._changed:
            partition = self.partitions.get(partition_id)
            return [partition.revert_keys_mapping.get(index) for index in global_indexes] if partition else []

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """Partition to key to tags."""
        with self._changed:
            names = list(self.partitions) if partition_id is None else [partition_id]
            return {
                name: {key: dict(partition.custom_meta.get(index, {})) for key, index in partition.keys_mapping.items()}
                for name in names
                if (partition := self.partitions.get(name))
            }

    # Looking

    def list_partitions(self) -> list[str]:
        """Names of the partitions."""
        return list(self.partitions)

    def get_partition_snapshot(self, partition_id: str) -> Partition | None:
        """A copy of a partition's metadata."""
        with self._changed:
            return copy.deepcopy(self.partitions.get(partition_id))

    def stats(self) -> dict[str, Any]:
        """Statistics of the queue that holds the values."""
        return self._queue.stats()

    # Checkpoints

    def snapshot(self) -> dict[str, Any]:
        """Partitions without locations, the sampler's state, and the next index."""
        with self._changed:
            following = next(self._numbers)
            self._numbers = count(following)
            bare = copy.deepcopy(self.partitions)
            for partition in bare.values():
                partition.rows.clear()
                for each in partition.fields.values():
                    each.locations.clear()
            return {"partitions": bare, "sampler": self.sampler.save_checkpoint(), "next_index": following}

    def restore(self, state: dict[str, Any]) -> None:
        """Replace everything by a snapshot; the values are published again by their owners."""
        with self._changed:
            for name in list(self.partitions):
                self.clear_partition(name)
            self.partitions = state["partitions"]
            self.sampler.load_checkpoint(state["sampler"])
            self._numbers = count(max(state["next_index"], next(self._numbers)))

    # Helpers; the caller holds the lock

    def _open(self, partition_id: str) -> Partition:
        if partition_id not in self.partitions:
            partition = self.partitions[partition_id] = Partition(partition_id)
            expected = int(os.environ.get("TQ_PRE_ALLOC_SAMPLE_NUM", "0"))
            partition.pre_allocated_global_indexes = [next(self._numbers) for _ in range(expected)]
        return self.partitions[partition_id]

    def _allocate(self, partition: Partition, size: int) -> list[int]:
        held = sum(len(each.global_indexes) for each in self.partitions.values())
        if self._max_samples is not None and held + size > self._max_samples:
            raise RuntimeError(
                f"{size} samples more than the {held} there are would be over total_storage_size="
                f"{self._max_samples}: clear some, or configure more"
            )
        expected = partition.pre_allocated_global_indexes
        indexes, partition.pre_allocated_global_indexes = expected[:size], expected[size:]
        indexes += [next(self._numbers) for _ in range(size - len(indexes))]
        partition.global_indexes.update(indexes)
        return indexes

    def _partition_with(self, partition_id: str, indexes: Sequence[int]) -> Partition:
        partition = self.partitions.get(partition_id)
        gone = [index for index in indexes if partition is None or index not in partition.global_indexes]
        if partition is None or gone:
            raise KeyError(f"samples {gone[:5]} of partition {partition_id!r} are not there: they were cleared")
        return partition

    def _meta(self, partition: Partition, indexes: Sequence[int], names: Sequence[str]) -> BatchMeta:
        held = [partition.fields[name] for name in names if name in partition.fields]
        is_ready = [
            bool(names) and len(held) == len(names) and all(i in each.locations for each in held) for i in indexes
        ]
        return BatchMeta(
            list(indexes),
            [partition.partition_id] * len(indexes),
            {name: partition.fields[name].schema(indexes) for name in names if name in partition.fields},
            np.array(is_ready, dtype=np.int8),
            custom_meta=[dict(partition.custom_meta.get(index, {})) for index in indexes],
        )

    def _tag(self, partition: Partition, indexes: Sequence[int], custom_meta: Sequence[dict[str, Any]]) -> None:
        for index, tags in zip(indexes, custom_meta, strict=True):
            if tags:
                partition.custom_meta.setdefault(index, {}).update(tags)

    def _free(self, partition_id: str, rows: Sequence[Row]) -> None:
        by_generation: dict[int, list[int]] = {}
        for number, generation in rows:
            by_generation.setdefault(generation, []).append(number)
        for generation, numbers in by_generation.items():
            # The partition may have been cleared since the put.
            with contextlib.suppress(StaleReferenceError):
                self._queue.clear(reference(partition_id, numbers, generation))


def reference(partition: str, numbers: Sequence[int], generation: int, columns: Sequence[str] = ()) -> Reference:
    """Reference to rows of the queue, by row number."""
    return Reference(
        partition=partition, sample_ids=tuple(map(str, numbers)), columns=tuple(columns), rows=tuple(numbers),
        generation=generation,
    )  # fmt: skip


def _numbers(indexes: Sequence[int]) -> torch.Tensor:
    return torch.tensor(indexes, dtype=torch.int64)


def _metadata_timeout_s() -> float:
    return float(os.environ.get("TQ_CONTROLLER_GET_METADATA_TIMEOUT", METADATA_TIMEOUT_S))
