"""One sample of a reference, read-only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_tq_transfer_queue.metadata import BatchMeta


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


class Samples(Sequence[SampleView]):
    """All samples of a `BatchMeta`."""

    def __init__(self, batch: BatchMeta) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return self._batch.size

    def __getitem__(self, index: Any) -> Any:
        return SampleView(self._batch, range(len(self))[index])

    def __iter__(self) -> Iterator[SampleView]:
        return (SampleView(self._batch, i) for i in range(len(self)))
