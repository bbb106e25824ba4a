"""Client of TransferQueue: put and get samples by global index."""

from __future__ import annotations

import asyncio
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from tensordict import TensorDict

from rl_tq import TransferQueue, connect
from rl_tq.errors import MissingDataError, StaleReferenceError
from rl_tq_transfer_queue.controller import METADATA_TIMEOUT_S, reference
from rl_tq_transfer_queue.metadata import BatchMeta, extract_field_schema
from rl_tq_transfer_queue.service.rpc import ControllerInfo, ControllerStub
from rl_tq_transfer_queue.values import codec, columns

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

P = ParamSpec("P")
T = TypeVar("T")

_VALUES_FILE = "values.records"
_MAX_MOVES = 8
"""How often values may be replaced by others while they are being fetched."""


class StorageKeyNotFoundError(KeyError):
    """A sample that was asked for is not there: it was cleared, or has no such field yet."""


def in_thread(method: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Asyncio twin of a call; it runs in a thread."""

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, *args, **kwargs)

    return call


class TransferQueueClient:
    """Puts and gets samples. Good for any number of threads; survives a fork. Each method has a twin `async_...`."""

    def __init__(
        self,
        client_id: str,
        controller_info: ControllerInfo,
        zmq_io_threads: int | None = None,
        zmq_max_sockets: int | None = None,
    ) -> None:
        if zmq_io_threads is not None or zmq_max_sockets is not None:
            raise ValueError("zmq_io_threads and zmq_max_sockets mean nothing here: there is no zmq. Leave them out")
        self.client_id = client_id
        self._controller = ControllerStub(controller_info)
        self._address: str = self._controller.call("queue_address")
        self._token = None if self._address.startswith("shm://") else controller_info.key
        self._pid = 0
        self._connected: TransferQueue | None = None

    def initialize_storage_manager(self, manager_type: str, config: Any) -> None:
        """Check that the storage is the one there is; the controller knows where it is."""
        del config
        if manager_type != "SimpleStorage":
            raise ValueError(f"there is no storage {manager_type!r} here: it is 'SimpleStorage', served by rl-tq")

    @property
    def _queue(self) -> TransferQueue:
        if self._connected is None or self._pid != os.getpid():
            self._pid, self._connected = os.getpid(), connect(self._address, token=self._token)
        return self._connected

    # Samples

    def get_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """Samples for a task (`fetch`), all samples (`force_fetch`), or new ones (`insert`).

        Raises:
            TimeoutError: too few were ready in time, and the controller does not poll.
        """
        return self._controller.call(
            "get_metadata", data_fields, partition_id, mode, task_name, batch_size, sampling_config,
            timeout_s=float(os.environ.get("TQ_CONTROLLER_GET_METADATA_TIMEOUT", METADATA_TIMEOUT_S)),
        )  # fmt: skip

    def put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: Callable[[Any], Any] | None = None,
    ) -> BatchMeta:
        """Store fields of samples, new ones without `metadata`. Existing values are replaced.

        `data_parser` is given the fields as a dict, ragged ones as lists, and changes them in place.

        Raises:
            SchemaError: other samples have another dtype in a field. Nothing is stored.
            StorageKeyNotFoundError: a sample was cleared.
        """
        if metadata is None:
            if partition_id is None:
                raise ValueError("partition_id must be provided if metadata is not given")
            self._controller.call("check_dtypes", partition_id, extract_field_schema(data))
            names = list(columns.plain_fields(data))
            metadata = self.get_meta(names, data.batch_size[0], partition_id, "insert")
        if not metadata:
            raise ValueError("metadata cannot be none or empty")
        if data.batch_size[0] != len(metadata):
            raise ValueError(f"data has {data.batch_size[0]} samples, and metadata {len(metadata)}")
        fields = columns.plain_fields(data)
        if data_parser is not None:
            fields = _parsed(fields, data_parser)
            data = TensorDict(fields, batch_size=data.batch_size)
        for part, positions in _by_partition(metadata):
            self._put(part, fields if len(part) == len(metadata) else _at(fields, positions))
        return metadata.add_fields(data)

    def _put(self, meta: BatchMeta, fields: dict[str, Any]) -> None:
        partition = meta.partition_ids[0]
        schema = extract_field_schema(TensorDict(fields, batch_size=[len(meta)]))
        self._controller.call("check_dtypes", partition, schema)
        pieces: list[Any] = []
        for piece in columns.encode(fields, len(meta)):
            stored = self._queue.put(piece.columns, partition=partition)
            rows = [(row, stored.generation) for row in stored.rows]
            pieces.append((list(piece.positions), piece.names, rows))
        self._publish("publish", partition, meta.global_indexes, schema, pieces, meta.custom_meta)

    def _publish(self, method: str, *arguments: Any) -> None:
        try:
            self._controller.call(method, *arguments)
        except KeyError as error:
            raise StorageKeyNotFoundError(*error.args) from error

    def get_data(self, metadata: BatchMeta) -> TensorDict:
        """The fields of samples: tensors with dimensions nested, scalars dense, others as `NonTensorStack`.

        Raises:
            StorageKeyNotFoundError: a sample was cleared, or has not got a field. Never a shorter batch.
        """
        names = metadata.field_names
        if not metadata or not names:
            return TensorDict({}, batch_size=[0])
        parts: dict[str, list[tuple[Sequence[int], Any]]] = {name: [] for name in names}
        for meta, positions in _by_partition(metadata):
            for name, found in self._get(meta, names).items():
                parts[name] += [([positions[i] for i in where], values) for where, values in found]
        fields = {name: columns.join(found, len(metadata)) for name, found in parts.items()}
        return TensorDict(fields, batch_size=[len(metadata)])

    def _get(self, meta: BatchMeta, names: Sequence[str]) -> dict[str, list[tuple[Sequence[int], Any]]]:
        partition = meta.partition_ids[0]
        for _ in range(_MAX_MOVES):
            try:
                locations = self._controller.call("locate", partition, meta.global_indexes, names)
                return self._fetch(partition, locations)
            except KeyError as error:
                raise StorageKeyNotFoundError(*error.args) from error
            except (StaleReferenceError, MissingDataError):
                continue  # replaced or cleared meanwhile: the controller knows
        raise StorageKeyNotFoundError(f"samples of partition {partition!r} were replaced {_MAX_MOVES} times meanwhile")

    def _fetch(
        self, partition: str, locations: dict[str, list[tuple[tuple[int, int], str]]]
    ) -> dict[str, list[tuple[Sequence[int], Any]]]:
        """Values by field; adjacent fields are fetched at once."""
        wanted: dict[tuple[Any, ...], list[tuple[str, str, list[int]]]] = {}
        for name, where in locations.items():
            located: dict[tuple[int, str], list[int]] = {}
            for i, ((_, generation), column) in enumerate(where):
                located.setdefault((generation, column), []).append(i)
            for (generation, column), positions in located.items():
                rows = tuple(where[i][0][0] for i in positions)
                wanted.setdefault((generation, rows), []).append((name, column, positions))
        found: dict[str, list[tuple[Sequence[int], Any]]] = {name: [] for name in locations}
        for (generation, rows), fields in wanted.items():
            batch = self._queue.get(reference(partition, rows, generation, [column for _, column, _ in fields]))
            for name, column, positions in fields:
                found[name].append((positions, columns.decode(column, batch.get(column))))
        return found

    def set_custom_meta(self, metadata: BatchMeta) -> None:
        """Store the tags of samples."""
        for meta in metadata.chunk_by_partition():
            self._publish("set_custom_meta", meta.partition_ids[0], meta.global_indexes, meta.custom_meta)

    def clear_partition(self, partition_id: str) -> None:
        """Remove a partition."""
        self._controller.call("clear_partition", partition_id)

    def clear_samples(self, metadata: BatchMeta) -> None:
        """Remove samples."""
        for meta in metadata.chunk_by_partition():
            self._controller.call("clear_samples", meta.partition_ids[0], meta.global_indexes)

    # Status

    def get_consumption_status(
        self, task_name: str, partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Indexes int64 [n] and int8 [n], 1 where the task consumed the sample; (None, None) without the partition."""
        return self._controller.call("get_consumption_status", partition_id, task_name)

    def get_production_status(
        self, data_fields: list[str], partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Indexes int64 [n] and int8 [n, fields], 1 where the value is there; (None, None) without such fields."""
        return self._controller.call("get_production_status", partition_id, data_fields)

    def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Whether there are samples, and the task consumed all of them."""
        return _all_set(self.get_consumption_status(task_name, partition_id)[1])

    def check_production_status(self, data_fields: list[str], partition_id: str) -> bool:
        """Whether there are samples, and all of them have all these fields."""
        return _all_set(self.get_production_status(data_fields, partition_id)[1])

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Give the samples to a task (None: to all) again. False without the partition."""
        return self._controller.call("reset_consumption", partition_id, task_name)

    def get_partition_list(self) -> list[str]:
        """Names of the partitions."""
        return self._controller.call("list_partitions")

    # Keys

    def kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """The samples of keys, with the fields that all of them have; unknown keys are made, or left out."""
        names = [keys] if isinstance(keys, str) else list(keys)
        return self._controller.call("kv_retrieve_meta", names, partition_id, create)

    def kv_retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> list[str | None]:
        """The keys of samples; None for one that has none."""
        indexes = [global_indexes] if isinstance(global_indexes, int) else list(global_indexes)
        return self._controller.call("kv_retrieve_keys", indexes, partition_id)

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        """Partition to key to tags."""
        return self._controller.call("kv_list", partition_id)

    # Checkpoints

    def save_controller_checkpoint(self, path: str) -> None:
        """Write what the controller knows, but for the values."""
        with Path(path).open("wb") as file:
            codec.write_records(file, [self._controller.call("snapshot")])

    def load_controller_checkpoint(self, path: str) -> None:
        """Replace what the controller knows by what `save_controller_checkpoint` wrote. Nothing in the file runs."""
        with Path(path).open("rb") as file:
            [state] = codec.read_records(file)
        self._controller.call("restore", state)

    def save_storage_checkpoint(self, checkpoint_dir: str) -> None:
        """Write all values."""
        with (Path(checkpoint_dir) / _VALUES_FILE).open("wb") as file:
            codec.write_records(file, self._all_values())

    def _all_values(self) -> Iterator[tuple[str, list[int], dict[str, Any]]]:
        for partition in self.get_partition_list():
            snapshot = self._controller.call("get_partition_snapshot", partition)
            for name, field in snapshot.fields.items() if snapshot else ():
                indexes = sorted(field.locations)
                if indexes:
                    where = [tuple(field.locations[index]) for index in indexes]
                    values = columns.join(self._fetch(partition, {name: where})[name], len(indexes))
                    is_tensor = isinstance(values, torch.Tensor)
                    rows = list(values.unbind()) if is_tensor and values.is_nested else values
                    yield partition, indexes, {name: rows if is_tensor else values.tolist()}

    def load_storage_checkpoint(self, checkpoint_dir: str) -> None:
        """Put all values again, for samples that the controller knows. Nothing in the file runs."""
        with (Path(checkpoint_dir) / _VALUES_FILE).open("rb") as file:
            for partition, indexes, fields in codec.read_records(file):
                meta = BatchMeta(indexes, [partition] * len(indexes))
                self._put(meta, {name: _nested(values) for name, values in fields.items()})

    def close(self) -> None:
        """Close the connections."""
        self._controller.close()
        if self._connected is not None and self._pid == os.getpid():
            self._connected.close()
        self._connected = None

    async_get_meta = in_thread(get_meta)
    async_put = in_thread(put)
    async_get_data = in_thread(get_data)
    async_set_custom_meta = in_thread(set_custom_meta)
    async_clear_partition = in_thread(clear_partition)
    async_clear_samples = in_thread(clear_samples)
    async_get_consumption_status = in_thread(get_consumption_status)
    async_get_production_status = in_thread(get_production_status)
    async_check_consumption_status = in_thread(check_consumption_status)
    async_check_production_status = in_thread(check_production_status)
    async_reset_consumption = in_thread(reset_consumption)
    async_get_partition_list = in_thread(get_partition_list)
    async_kv_retrieve_meta = in_thread(kv_retrieve_meta)
    async_kv_retrieve_keys = in_thread(kv_retrieve_keys)
    async_kv_list = in_thread(kv_list)
    async_save_controller_checkpoint = in_thread(save_controller_checkpoint)
    async_load_controller_checkpoint = in_thread(load_controller_checkpoint)
    async_save_storage_checkpoint = in_thread(save_storage_checkpoint)
    async_load_storage_checkpoint = in_thread(load_storage_checkpoint)


def _by_partition(metadata: BatchMeta) -> list[tuple[BatchMeta, list[int]]]:
    """One part per partition, and where its samples stand in the whole."""
    positions: dict[str, list[int]] = {}
    for i, partition in enumerate(metadata.partition_ids):
        positions.setdefault(partition, []).append(i)
    return [(metadata.select_samples(where), where) for where in positions.values()]


def _at(fields: dict[str, Any], positions: Sequence[int]) -> dict[str, Any]:
    taken: dict[str, Any] = {}
    for name, value in fields.items():
        is_nested = isinstance(value, torch.Tensor) and value.is_nested
        if isinstance(value, torch.Tensor) and not is_nested:
            taken[name] = value[list(positions)]
        else:
            items = value.unbind() if is_nested else columns.items_of(value)
            taken[name] = _nested([items[i] for i in positions])
    return taken


def _nested(values: Any) -> Any:
    """A list of tensors as one, a list of anything else as `NonTensorStack`; a tensor as it is."""
    if isinstance(values, torch.Tensor):
        return values
    return columns.join([(range(len(values)), values)], len(values))


def _parsed(fields: dict[str, Any], data_parser: Callable[[Any], Any]) -> dict[str, Any]:
    opened = {
        name: value if isinstance(value, torch.Tensor) and not value.is_nested
        else list(value.unbind()) if isinstance(value, torch.Tensor) else columns.items_of(value)
        for name, value in fields.items()
    }  # fmt: skip
    counts = {name: len(value) for name, value in opened.items()}
    result = data_parser(opened)
    parsed = opened if result is None else result
    if {name: len(value) for name, value in parsed.items()} != counts:
        raise ValueError(f"data_parser must keep the fields and their numbers of samples, {counts}")
    return {name: _nested(value) for name, value in parsed.items()}


def _all_set(status: torch.Tensor | None) -> bool:
    return status is not None and status.numel() > 0 and bool((status == 1).all())
