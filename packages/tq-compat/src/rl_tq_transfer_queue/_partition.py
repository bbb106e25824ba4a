"""What the controller knows of one partition."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rl_tq_transfer_queue import _codec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Row = tuple[int, int]
"""Row number and generation, of the queue that holds the values."""


class Place(NamedTuple):
    """Where one field of one sample lies."""

    row: Row
    column: str


@dataclass(slots=True)
class Field:
    """One field of a partition."""

    dtype: torch.dtype | None
    is_non_tensor: bool
    is_nested: bool = False
    places: dict[int, Place] = field(default_factory=dict[int, Place])
    """By sample."""
    shapes: dict[int, Any] = field(default_factory=dict[int, Any])
    """By sample; None where it is no tensor."""

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
    """Samples under one name. `field_name_mapping` and `production_status` are for those who look at a snapshot."""

    partition_id: str
    global_indexes: set[int] = field(default_factory=set[int])
    pre_allocated_global_indexes: list[int] = field(default_factory=list[int])
    """Samples that are expected: they count as neither produced nor consumed."""
    fields: dict[str, Field] = field(default_factory=dict[str, Field])
    consumed: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    custom_meta: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    keys_mapping: dict[str, int] = field(default_factory=dict[str, int])
    revert_keys_mapping: dict[int, str] = field(default_factory=dict[int, str])
    rows: Counter[Row] = field(default_factory=Counter[Row])
    """How many fields of samples lie in a row of the queue."""

    @property
    def field_name_mapping(self) -> dict[str, int]:
        """Field to column of `production_status`."""
        return {name: i for i, name in enumerate(self.fields)}

    @property
    def production_status(self) -> torch.Tensor:
        """int8 [highest index + 1, fields]: 1 where the value is there."""
        status = torch.zeros(max(self.global_indexes, default=-1) + 1, len(self.fields), dtype=torch.int8)
        for column, each in enumerate(self.fields.values()):
            status[list(each.places), column] = 1
        return status

    @property
    def expected(self) -> list[int]:
        """All samples, those to come among them."""
        return sorted({*self.global_indexes, *self.pre_allocated_global_indexes})

    def get_custom_meta(self, global_indices: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Tags of samples, by index."""
        return {index: dict(self.custom_meta.get(index, {})) for index in global_indices}

    def ready(self, names: Iterable[str], task: str) -> list[int]:
        """Samples that have all of these fields and were not consumed, in rising order."""
        found = self.global_indexes - self.consumed.get(task, set())
        for name in names:
            held = self.fields.get(name)
            found &= held.places.keys() if held else set()
        return sorted(found)

    def common_fields(self, indexes: Sequence[int]) -> list[str]:
        """Fields that all of these samples have."""
        return [name for name, each in self.fields.items() if indexes and all(i in each.places for i in indexes)]

    def place(self, name: str, index: int, where: Place) -> None:
        """Note where a field of a sample lies; what it replaces is let go."""
        self.let_go(name, index)
        self.fields[name].places[index] = where
        self.rows[where.row] += 1

    def let_go(self, name: str, index: int) -> None:
        """Forget a field of a sample."""
        where = self.fields[name].places.pop(index, None)
        if where is not None:
            self.rows[where.row] -= 1

    def forget(self, indexes: Iterable[int]) -> None:
        """Forget samples."""
        for index in indexes:
            for name in self.fields:
                self.let_go(name, index)
                self.fields[name].shapes.pop(index, None)
            self.global_indexes.discard(index)
            self.custom_meta.pop(index, None)
            for done in self.consumed.values():
                done.discard(index)
            key = self.revert_keys_mapping.pop(index, None)
            if key is not None:
                del self.keys_mapping[key]

    def unused_rows(self) -> list[Row]:
        """Rows of the queue that no sample needs any more: returned once."""
        unused = [row for row, times in self.rows.items() if not times]
        for row in unused:
            del self.rows[row]
        return unused


def _slots(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in fields(value)}


_codec.register(Place, Place._asdict)
_codec.register(Field, _slots)
_codec.register(Partition, _slots)
