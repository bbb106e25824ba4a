"""The controller: which samples there are, who consumed them, and where in an rl-tq queue their values lie.

It serves the queue, and answers every client from a thread of its own, so that one that waits holds up nobody. Samples
are consumed when they are given, as code written for TransferQueue expects: a consumer that dies has lost them, unless
somebody calls `reset_consumption`. The queue's own `get_meta` and `ack` are the way to lose none.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from rl_tq import BatchMeta as Reference
from rl_tq import serve
from rl_tq.errors import SchemaError, StaleReferenceError
from rl_tq_transfer_queue._partition import Field, Partition, Place, Row
from rl_tq_transfer_queue.metadata import BatchMeta, Schema
from rl_tq_transfer_queue.sampler import BaseSampler, SequentialSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Result = TypeVar("Result")

METADATA_TIMEOUT_S = 60.0
"""How long `get_meta` waits for samples where the controller does not poll; TQ_CONTROLLER_GET_METADATA_TIMEOUT."""


class TransferQueueController:
    """All bookkeeping. Its public methods may be called from any thread."""

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
        """Of the queue that holds the values."""
        return self._queue.address

    def register_sampler(self, sampler: BaseSampler | type[BaseSampler]) -> None:
        """Have another sampler choose from now on."""
        made = sampler() if isinstance(sampler, type) else sampler
        if not isinstance(made, BaseSampler):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"sampler {sampler!r} must be an instance or subclass of BaseSampler")
        self.sampler = made

    def close(self) -> None:
        """End the queue."""
        self._queue.close()

    # Producing

    def insert(self, partition_id: str, size: int, data_fields: Sequence[str]) -> BatchMeta:
        """New samples without values."""
        with self._changed:
            home = self._open(partition_id)
            indexes = self._allocate(home, size)
            meta = self._meta(home, indexes, data_fields)
            for name in data_fields:
                unknown = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False}
                meta.field_schema.setdefault(name, unknown)
            return meta

    def check_dtypes(self, partition_id: str, schema: Schema) -> None:
        """Raise SchemaError for a field that other samples of the partition hold with another dtype."""
        with self._changed:
            home = self.partitions.get(partition_id)
            for name, brought in schema.items():
                held = home.fields.get(name) if home else None
                if held is None or not held.places:
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
                home = self._home(partition_id, indexes)
            except (KeyError, SchemaError):
                self._free(partition_id, rows)
                raise
            for name, each in schema.items():
                held = home.fields.get(name)
                if held is None or not held.places:
                    held = home.fields[name] = Field(each["dtype"], each["is_non_tensor"])
                held.is_nested |= each["is_nested"]
                shapes = each.get("per_sample_shapes") or [each["shape"]] * len(indexes)
                held.shapes.update(zip(indexes, shapes, strict=True))
            for positions, columns, held_rows in pieces:
                for position, row in zip(positions, held_rows, strict=True):
                    for name, column in columns.items():
                        home.place(name, indexes[position], Place(row, column))
            self._tag(home, indexes, custom_meta)
            self._free(partition_id, home.unused_rows())
            self._changed.notify_all()

    def set_custom_meta(self, partition_id: str, indexes: Sequence[int], custom_meta: Sequence[dict[str, Any]]) -> None:
        """Merge tags into samples'."""
        with self._changed:
            self._tag(self._home(partition_id, indexes), indexes, custom_meta)
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
                home = self.partitions.get(partition_id)
                return self._meta(home, sorted(home.global_indexes), data_fields) if home else BatchMeta.empty()
        if task_name is None:
            raise ValueError("must provide task_name in mode 'fetch'")
        return self._fetch(partition_id, data_fields, task_name, batch_size or 0, sampling_config or {})

    def _fetch(
        self, partition_id: str, data_fields: Sequence[str], task: str, batch_size: int, config: dict[str, Any]
    ) -> BatchMeta:
        def attempt() -> BatchMeta | None:
            home = self.partitions.get(partition_id)
            if home is None:
                return None
            ready = home.ready(data_fields, task)
            if len(ready) < batch_size and not self.sampler.has_cached_result(partition_id, task, config):
                return None
            named = {"task_name": task, "partition_id": partition_id, **config}
            chosen, consumed = self.sampler(ready, batch_size, partition=home, **named)
            if not chosen:
                return None
            self._home(partition_id, chosen)  # none of a cached choice was cleared
            home.consumed.setdefault(task, set()).update(consumed)
            return self._meta(home, chosen, data_fields)

        limit = 0.0 if self.polling_mode else _metadata_timeout_s()
        meta = self._wait(attempt, limit)
        if meta is None and not self.polling_mode:
            home = self.partitions.get(partition_id)
            raise TimeoutError(
                f"Timeout after {limit} s while waiting for sufficient data for task {task!r} in partition "
                f"{partition_id!r}. Required: {batch_size} samples with {list(data_fields)} that the sampler "
                f"{type(self.sampler).__name__} accepts, Available: {len(home.ready(data_fields, task)) if home else 0}"
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
            home = self._home(partition_id, indexes)
            found: dict[str, list[tuple[Row, str]]] = {}
            for name in data_fields:
                places = home.fields[name].places if name in home.fields else {}
                if missing := [index for index in indexes if index not in places]:
                    raise KeyError(f"samples {missing[:5]} of partition {partition_id!r} have no field {name!r} yet")
                found[name] = [(places[index].row, places[index].column) for index in indexes]
            return found

    def get_consumption_status(self, partition_id: str, task_name: str) -> tuple[Any, Any]:
        """Indexes int64 [n] and int8 [n], 1 where the task consumed the sample; (None, None) without the partition."""
        with self._changed:
            home = self.partitions.get(partition_id)
            if home is None:
                return None, None
            done = home.consumed.get(task_name, set())
            return _numbers(home.expected), torch.tensor([index in done for index in home.expected], dtype=torch.int8)

    def get_production_status(self, partition_id: str, data_fields: Sequence[str]) -> tuple[Any, Any]:
        """Indexes int64 [n] and int8 [n, fields], 1 where the value is there; (None, None) without such fields."""
        with self._changed:
            home = self.partitions.get(partition_id)
            if home is None or not data_fields or any(name not in home.fields for name in data_fields):
                return None, None
            rows = [[index in home.fields[name].places for name in data_fields] for index in home.expected]
            return _numbers(home.expected), torch.tensor(rows, dtype=torch.int8).view(-1, len(data_fields))

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Give the samples to a task (None: to all) again. False without the partition."""
        with self._changed:
            home = self.partitions.get(partition_id)
            if home is None:
                return False
            for task in list(home.consumed) if task_name is None else [task_name]:
                home.consumed.pop(task, None)
            self.sampler.clear_cache(partition_id)
            self._changed.notify_all()
            return True

    # Clearing

    def clear_partition(self, partition_id: str) -> None:
        """Forget a partition; nothing happens when it is not there."""
        with self._changed:
            if self.partitions.pop(partition_id, None) is not None:
                self.sampler.clear_cache(partition_id)
                self._queue.clear(partition_id)

    def clear_samples(self, partition_id: str, indexes: Sequence[int]) -> None:
        """Forget samples, those among them that are still there."""
        with self._changed:
            home = self.partitions.get(partition_id)
            if home is not None:
                home.forget([index for index in indexes if index in home.global_indexes])
                self._free(partition_id, home.unused_rows())

    # Keys

    def kv_retrieve_meta(self, keys: Sequence[str], partition_id: str, create: bool = False) -> BatchMeta:
        """The samples of keys, with the fields that all of them have; unknown keys are made, or left out."""
        with self._changed:
            home = self._open(partition_id) if create else self.partitions.get(partition_id)
            if home is None:
                return BatchMeta.empty()
            new = [key for key in dict.fromkeys(keys) if key not in home.keys_mapping] if create else []
            for key, index in zip(new, self._allocate(home, len(new)), strict=True):
                home.keys_mapping[key], home.revert_keys_mapping[index] = index, key
            indexes = [home.keys_mapping[key] for key in keys if key in home.keys_mapping]
            return self._meta(home, indexes, home.common_fields(indexes))

    def kv_retrieve_keys(self, global_indexes: Sequence[int], partition_id: str) -> list[str | None]:
        """The keys of samples; None for one that has none."""
        with self._changed:
            home = self.partitions.get(partition_id)
            return [home.revert_keys_mapping.get(index) for index in global_indexes] if home else []

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """Partition to key to tags."""
        with self._changed:
            names = list(self.partitions) if partition_id is None else [partition_id]
            return {
                name: {key: dict(home.custom_meta.get(index, {})) for key, index in home.keys_mapping.items()}
                for name in names
                if (home := self.partitions.get(name))
            }

    # Looking

    def list_partitions(self) -> list[str]:
        """Their names."""
        return list(self.partitions)

    def get_partition_snapshot(self, partition_id: str) -> Partition | None:
        """A copy of what is known of a partition."""
        with self._changed:
            return copy.deepcopy(self.partitions.get(partition_id))

    def stats(self) -> dict[str, Any]:
        """Of the queue that holds the values."""
        return self._queue.stats()

    # Checkpoints

    def snapshot(self) -> dict[str, Any]:
        """Partitions without places, the sampler's state, and the next index."""
        with self._changed:
            following = next(self._numbers)
            self._numbers = count(following)
            bare = copy.deepcopy(self.partitions)
            for home in bare.values():
                home.rows.clear()
                for each in home.fields.values():
                    each.places.clear()
            return {"partitions": bare, "sampler": self.sampler.save_checkpoint(), "next_index": following}

    def restore(self, state: dict[str, Any]) -> None:
        """Replace everything by a snapshot; the values are published again by whoever has them."""
        with self._changed:
            for name in list(self.partitions):
                self.clear_partition(name)
            self.partitions = state["partitions"]
            self.sampler.load_checkpoint(state["sampler"])
            self._numbers = count(max(state["next_index"], next(self._numbers)))

    # Parts; the lock is held

    def _open(self, partition_id: str) -> Partition:
        if partition_id not in self.partitions:
            home = self.partitions[partition_id] = Partition(partition_id)
            expected = int(os.environ.get("TQ_PRE_ALLOC_SAMPLE_NUM", "0"))
            home.pre_allocated_global_indexes = [next(self._numbers) for _ in range(expected)]
        return self.partitions[partition_id]

    def _allocate(self, home: Partition, size: int) -> list[int]:
        held = sum(len(each.global_indexes) for each in self.partitions.values())
        if self._max_samples is not None and held + size > self._max_samples:
            raise RuntimeError(
                f"{size} samples more than the {held} there are would be over total_storage_size="
                f"{self._max_samples}: clear some, or configure more"
            )
        expected = home.pre_allocated_global_indexes
        indexes, home.pre_allocated_global_indexes = expected[:size], expected[size:]
        indexes += [next(self._numbers) for _ in range(size - len(indexes))]
        home.global_indexes.update(indexes)
        return indexes

    def _home(self, partition_id: str, indexes: Sequence[int]) -> Partition:
        home = self.partitions.get(partition_id)
        gone = [index for index in indexes if home is None or index not in home.global_indexes]
        if home is None or gone:
            raise KeyError(f"samples {gone[:5]} of partition {partition_id!r} are not there: they were cleared")
        return home

    def _meta(self, home: Partition, indexes: Sequence[int], names: Sequence[str]) -> BatchMeta:
        held = [home.fields[name] for name in names if name in home.fields]
        is_ready = [bool(names) and len(held) == len(names) and all(i in each.places for each in held) for i in indexes]
        return BatchMeta(
            list(indexes),
            [home.partition_id] * len(indexes),
            {name: home.fields[name].schema(indexes) for name in names if name in home.fields},
            np.array(is_ready, dtype=np.int8),
            custom_meta=[dict(home.custom_meta.get(index, {})) for index in indexes],
        )

    def _tag(self, home: Partition, indexes: Sequence[int], custom_meta: Sequence[dict[str, Any]]) -> None:
        for index, tags in zip(indexes, custom_meta, strict=True):
            if tags:
                home.custom_meta.setdefault(index, {}).update(tags)

    def _free(self, partition_id: str, rows: Sequence[Row]) -> None:
        by_generation: dict[int, list[int]] = {}
        for number, generation in rows:
            by_generation.setdefault(generation, []).append(number)
        for generation, numbers in by_generation.items():
            # Already gone with their partition, where that was cleared between their put and now.
            with contextlib.suppress(StaleReferenceError):
                self._queue.clear(reference(partition_id, numbers, generation))


def reference(partition: str, numbers: Sequence[int], generation: int, columns: Sequence[str] = ()) -> Reference:
    """Rows of the queue, by number."""
    return Reference(
        partition=partition, sample_ids=tuple(map(str, numbers)), columns=tuple(columns), rows=tuple(numbers),
        generation=generation,
    )  # fmt: skip


def _numbers(indexes: Sequence[int]) -> torch.Tensor:
    return torch.tensor(indexes, dtype=torch.int64)


def _metadata_timeout_s() -> float:
    return float(os.environ.get("TQ_CONTROLLER_GET_METADATA_TIMEOUT", METADATA_TIMEOUT_S))
