"""Batch metadata of TransferQueue: mutable references to samples, by global index or by key."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_tq_transfer_queue.values import codec
from rl_tq_transfer_queue.values.field_schema import (
    Schema,
    even_parts,
    extract_field_schema,
    joined_info,
    joined_schema,
    names_of,
    schema_at,
)

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

__all__ = ["BatchMeta", "KVBatchMeta", "SampleView", "Schema", "extract_field_schema", "names_of"]

logger = logging.getLogger(__name__)


class BatchMeta:
    """References to samples by global index, with their fields' schema. Some methods mutate it, as in the original.

    Attributes:
        global_indexes: one number per sample.
        partition_ids: one partition per sample.
        field_schema: see `Schema`.
        production_status: int8 [B], 1 where all fields of the sample are there.
        extra_info: whatever the caller keeps here.
        custom_meta: one mapping per sample.
    """

    def __init__(
        self,
        global_indexes: list[int],
        partition_ids: list[str],
        field_schema: Schema | None = None,
        production_status: np.ndarray[Any, Any] | None = None,
        extra_info: dict[str, Any] | None = None,
        custom_meta: list[dict[str, Any]] | None = None,
        _custom_backend_meta: list[dict[str, Any]] | None = None,
    ) -> None:
        size = len(global_indexes)
        self.global_indexes = list(global_indexes)
        self.partition_ids = list(partition_ids)
        self.field_schema: Schema = {name: dict(schema) for name, schema in (field_schema or {}).items()}
        self.extra_info = dict(extra_info or {})
        status = np.zeros(size) if production_status is None else production_status
        self.production_status = np.array(status, dtype=np.int8)
        self.custom_meta = [dict(meta) for meta in custom_meta or [{} for _ in range(size)]]
        self._custom_backend_meta = [dict(meta) for meta in _custom_backend_meta or [{} for _ in range(size)]]
        per_sample: dict[str, int] = {
            "partition_ids": len(self.partition_ids),
            "production_status": len(self.production_status),
            "custom_meta": len(self.custom_meta),
            "_custom_backend_meta": len(self._custom_backend_meta),
        }
        for name, schema in self.field_schema.items():
            if schema.get("per_sample_shapes") is not None:
                per_sample[f"per_sample_shapes of {name!r}"] = len(schema["per_sample_shapes"])
        for name, length in per_sample.items():
            if length != size:
                raise ValueError(
                    f"Length mismatch: {name} length {length} != batch_size {size}, the number of global_indexes"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Ray gives arrays that lie in its store, read-only.
        self.production_status = np.array(self.production_status)

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.global_indexes)

    @property
    def field_names(self) -> list[str]:
        """Names of the fields, sorted."""
        return sorted(self.field_schema)

    @property
    def samples(self) -> Sequence[SampleView]:
        """The samples, one by one."""
        return _Samples(self)

    @property
    def is_ready(self) -> bool:
        """Whether there are samples, and all of them have all fields."""
        return self.size > 0 and bool((self.production_status == 1).all())

    def get_dtypes(self, field_name: str) -> list[torch.dtype | None]:
        """The dtype of a field, once per sample."""
        return [self._schema_of(field_name).get("dtype")] * self.size

    def get_shapes(self, field_name: str) -> list[Any]:
        """The shape of a field in each sample."""
        schema = self._schema_of(field_name)
        shapes = schema.get("per_sample_shapes")
        return [schema.get("shape")] * self.size if shapes is None else list(shapes)

    def _schema_of(self, field_name: str) -> dict[str, Any]:
        if field_name not in self.field_schema:
            raise KeyError(f"Field '{field_name}' not found in field_schema, which has {self.field_names}")
        return self.field_schema[field_name]

    # What the caller attaches

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        """One value of `extra_info`."""
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        """Set one value of `extra_info`."""
        self.extra_info[key] = value

    def get_all_extra_info(self) -> dict[str, Any]:
        """A deep copy of `extra_info`."""
        return copy.deepcopy(self.extra_info)

    def update_extra_info(self, info_dict: dict[str, Any]) -> None:
        """Set several values of `extra_info`."""
        self.extra_info.update(info_dict)

    def remove_extra_info(self, key: str) -> Any:
        """Remove one value of `extra_info` and return it, or None."""
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        """Empty `extra_info`."""
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        """Whether `extra_info` has a value."""
        return key in self.extra_info

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        """A deep copy of `custom_meta`."""
        return copy.deepcopy(self.custom_meta)

    def update_custom_meta(self, custom_meta: list[dict[str, Any]] | None) -> None:
        """Merge one mapping per sample into `custom_meta`."""
        if custom_meta is None:
            return
        if len(custom_meta) != self.size:
            raise ValueError(
                f"The length of custom_meta list {len(custom_meta)} must match the batch size: {self.size}"
            )
        for held, new in zip(self.custom_meta, custom_meta, strict=True):
            held.update(new)

    def clear_custom_meta(self) -> None:
        """Empty `custom_meta`."""
        self.custom_meta = [{} for _ in range(self.size)]

    # Arithmetic

    def add_fields(self, tensor_dict: TensorDict, set_all_ready: bool = True) -> BatchMeta:
        """Note the fields of a batch of the same samples, in place; returns itself."""
        size = tensor_dict.batch_size[0]
        if not size:
            logger.warning("add_fields was given a batch without samples: nothing is done")
            return self
        if size != self.size:
            raise ValueError(f"add_fields batch size mismatch: self.size={self.size} vs tensor_dict={size}")
        self.field_schema.update(extract_field_schema(tensor_dict))
        if set_all_ready:
            self.production_status[:] = 1
        return self

    def select_samples(self, sample_indices: list[int]) -> BatchMeta:
        """The samples at these positions."""
        if any(not 0 <= i < self.size for i in sample_indices):
            raise ValueError(f"Sample indices must be in range [0, {self.size}), not {sample_indices}")
        return BatchMeta(
            [self.global_indexes[i] for i in sample_indices],
            [self.partition_ids[i] for i in sample_indices],
            schema_at(self.field_schema, sample_indices),
            self.production_status[list(sample_indices)],
            self.extra_info,
            copy.deepcopy([self.custom_meta[i] for i in sample_indices]),
            copy.deepcopy([self._custom_backend_meta[i] for i in sample_indices]),
        )

    def select_fields(self, field_names: list[str]) -> BatchMeta:
        """All samples with these fields; names that it has not got are left out."""
        meta = self.copy()
        meta.field_schema = {name: meta.field_schema[name] for name in field_names if name in meta.field_schema}
        meta._custom_backend_meta = [
            {key: value for key, value in held.items() if key.startswith("_") or key in field_names}
            for held in meta._custom_backend_meta
        ]
        return meta

    def copy(self) -> BatchMeta:
        """A deep copy."""
        return copy.deepcopy(self)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, item: int | slice) -> BatchMeta:
        if isinstance(item, slice):
            return self.select_samples(list(range(self.size))[item])
        if isinstance(item, int | np.integer):  # pyright: ignore[reportUnnecessaryIsInstance]
            if not -self.size <= item < self.size:
                raise IndexError(f"BatchMeta index out of range: {item} of {self.size}")
            return self.select_samples([int(item) % self.size])
        raise TypeError(f"Indexing with {type(item)} is not supported.")

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """`chunks` contiguous parts; the first ones have one sample more where it does not divide."""
        return [self.select_samples(list(part)) for part in even_parts(self.size, chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """One part per partition."""
        positions: dict[str, list[int]] = {}
        for i, partition in enumerate(self.partition_ids):
            positions.setdefault(partition, []).append(i)
        return [self.select_samples(part) for part in positions.values()]

    def union(self, other: BatchMeta) -> BatchMeta:
        """The same samples with the fields of both; where both have one, `other`'s description is taken."""
        if not other:
            return self.copy()
        if not self:
            return other.copy()
        for name in ("global_indexes", "partition_ids"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    f"BatchMeta.union: {name} do not match: {getattr(self, name)} and {getattr(other, name)}"
                )
        mine, theirs = self.copy(), other.copy()
        return BatchMeta(
            mine.global_indexes,
            mine.partition_ids,
            {**mine.field_schema, **theirs.field_schema},
            mine.production_status & theirs.production_status,
            {**mine.extra_info, **theirs.extra_info},
            [{**a, **b} for a, b in zip(mine.custom_meta, theirs.custom_meta, strict=True)],
            [{**a, **b} for a, b in zip(mine._custom_backend_meta, theirs._custom_backend_meta, strict=True)],
        )

    @classmethod
    def concat(cls, data: list[BatchMeta], validate: bool = True) -> BatchMeta:
        """The samples of all parts, in order. Empty parts do not count."""
        parts = [part for part in data if part]
        if not parts:
            return cls.empty()
        first = parts[0]
        if validate:
            for i, part in enumerate(parts):
                if part.field_names != first.field_names:
                    raise ValueError(
                        f"BatchMeta.concat: field_names mismatch at chunk[{i}]: "
                        f"{part.field_names}, and chunk[0] has {first.field_names}"
                    )
                for name in first.field_names:
                    dtypes = [meta.field_schema[name].get("dtype") for meta in (first, part)]
                    if dtypes[0] != dtypes[1]:
                        raise ValueError(
                            f"Field '{name}' dtype mismatch in concat: chunk[0]={dtypes[0]}, chunk[{i}]={dtypes[1]}"
                        )
        return cls(
            [index for part in parts for index in part.global_indexes],
            [partition for part in parts for partition in part.partition_ids],
            {
                name: joined_schema([part.field_schema.get(name, {}) for part in parts], [part.size for part in parts])
                for name in first.field_schema
            },
            np.concatenate([part.production_status for part in parts]),
            joined_info([part.extra_info for part in parts], "BatchMeta"),
            [meta for part in parts for meta in part.custom_meta],
            [meta for part in parts for meta in part._custom_backend_meta],
        )

    def reorder(self, indices: list[int]) -> None:
        """Put the samples in another order, in place."""
        if len(indices) != self.size:
            raise ValueError(f"Indices length {len(indices)} mismatch batch size {self.size}")
        if len(set(indices)) != self.size:
            raise ValueError("Indices contain duplicates")
        if any(not 0 <= i < self.size for i in indices):
            raise ValueError(f"Reorder indices must be in range [0, {self.size})")
        self.__dict__.update(self.select_samples(indices).__dict__)

    @classmethod
    def empty(cls, extra_info: dict[str, Any] | None = None) -> BatchMeta:
        """No samples."""
        return cls([], [], extra_info=extra_info)

    def __str__(self) -> str:
        return (
            f"BatchMeta(size={self.size}, field_names={self.field_names}, is_ready={self.is_ready}, "
            f"global_indexes={self.global_indexes}, extra_info={self.extra_info})"
        )


class SampleView:
    """One sample of a `BatchMeta`, read-only."""

    def __init__(self, batch: BatchMeta, index: int) -> None:
        self._batch = batch
        self._index = index

    @property
    def global_index(self) -> int:
        """Its number."""
        return self._batch.global_indexes[self._index]

    @property
    def partition_id(self) -> str:
        """Its partition."""
        return self._batch.partition_ids[self._index]

    @property
    def production_status(self) -> int:
        """1 where all fields are there, else 0."""
        return int(self._batch.production_status[self._index])

    @property
    def custom_meta(self) -> Mapping[str, Any]:
        """Its tags."""
        return MappingProxyType(self._batch.custom_meta[self._index])

    @property
    def fields(self) -> Mapping[str, Mapping[str, Any]]:
        """What its fields are: `shape` is this sample's."""
        found: dict[str, Mapping[str, Any]] = {}
        for name, schema in self._batch.field_schema.items():
            own = dict(schema)
            shapes = own.pop("per_sample_shapes", None)
            if shapes is not None:
                own["shape"] = shapes[self._index]
            found[name] = MappingProxyType(own)
        return MappingProxyType(found)


class _Samples(Sequence[SampleView]):
    """All samples of a `BatchMeta`."""

    def __init__(self, batch: BatchMeta) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return self._batch.size

    def __getitem__(self, index: Any) -> Any:
        return SampleView(self._batch, range(len(self))[index])

    def __iter__(self) -> Iterator[SampleView]:
        return (SampleView(self._batch, i) for i in range(len(self)))


@dataclass
class KVBatchMeta:
    """References to samples of one partition by key."""

    keys: list[str] = field(default_factory=list[str])
    tags: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise ValueError(f"keys and tags must have same length, but got {len(self.keys)} and {len(self.tags)}")
        for what, names in (("keys", self.keys), ("fields", self.fields or [])):
            if len(set(names)) < len(names):
                raise ValueError(f"Got duplicated {what}: {names}")
        self.tags = copy.deepcopy(self.tags)
        self.extra_info = copy.deepcopy(self.extra_info)

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        return f"KVBatchMeta(size={self.size}, field_names={self.fields}, extra_info={self.extra_info})"

    def select_keys(self, keys_to_select: list[str]) -> KVBatchMeta:
        """The samples of these keys, in this order."""
        if len(set(keys_to_select)) != len(keys_to_select):
            raise ValueError(f"Contain duplicate keys: {keys_to_select}")
        position = {key: i for i, key in enumerate(self.keys)}
        if missing := [key for key in keys_to_select if key not in position]:
            raise RuntimeError(f"Keys {missing} not found in current batch.")
        return self._at([position[key] for key in keys_to_select])

    def reorder(self, indexes: list[int]) -> None:
        """Put the samples in another order, in place."""
        if len(indexes) != self.size:
            raise ValueError(
                f"Attempted to reorder with indexes length {len(indexes)} that does not match the batch size "
                f"{self.size}."
            )
        if len(set(indexes)) != len(indexes):
            raise ValueError("Contain duplicate indexes.")
        self.keys = [self.keys[i] for i in indexes]
        self.tags = [self.tags[i] for i in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """`chunks` contiguous parts; the first ones have one sample more where it does not divide."""
        return [self._at(part) for part in even_parts(self.size, chunks)]

    @classmethod
    def concat(cls, data: list[KVBatchMeta]) -> KVBatchMeta:
        """The samples of all parts, in order. Empty parts do not count."""
        parts = [part for part in data if part]
        if not parts:
            return cls()
        first = parts[0]
        for part in parts:
            if part.fields is not None and set(part.fields) != set(first.fields or []):
                raise ValueError(f"Field names do not match for concatenation: {first.fields} and {part.fields}.")
            if part.partition_id != first.partition_id:
                raise ValueError(
                    f"Partition do not match for concatenation: {first.partition_id!r} and {part.partition_id!r}."
                )
        return cls(
            [key for part in parts for key in part.keys],
            [tag for part in parts for tag in part.tags],
            first.partition_id,
            first.fields,
            joined_info([part.extra_info or {} for part in parts], "KVBatchMeta") or None,
        )

    def _at(self, positions: Sequence[int]) -> KVBatchMeta:
        return KVBatchMeta(
            [self.keys[i] for i in positions], [self.tags[i] for i in positions], self.partition_id, self.fields,
            self.extra_info,
        )  # fmt: skip


def _fields(meta: BatchMeta) -> dict[str, Any]:
    return dict(vars(meta))


codec.register(BatchMeta, _fields)
codec.register(KVBatchMeta, _fields)
