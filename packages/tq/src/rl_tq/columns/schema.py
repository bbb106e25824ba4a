"""Column schemas: kind, dtype and row shape. Imports no torch, which the server's bookkeeping does not need."""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class ColumnKind(StrEnum):
    """Kind of a column: how its rows are stored."""

    DENSE = "dense"
    """Every row has the same shape."""
    RAGGED = "ragged"
    """Rows differ in their first dimension."""
    TURNS = "turns"
    """Every row is a list of turns, which differ in their first dimension: doubly ragged."""
    BYTES = "bytes"
    """Every row is a string of bytes."""
    JSON = "json"
    """Every row is one JSON document, in UTF-8."""


class ColumnSchema(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Schema of a column in a partition. In messages: the array of its fields."""

    kind: ColumnKind
    """Kind of the column."""
    dtype: str
    """`int64`, `bfloat16`, ...: torch's name. `utf8` for JSON."""
    shape: tuple[int, ...]
    """Shape of one row; of a ragged one, without its first dimension; of turns, that of one turn without its first."""

    @property
    def is_tensor(self) -> bool:
        """Whether get returns its values as tensors."""
        return self.kind not in (ColumnKind.JSON, ColumnKind.BYTES)

    def to_json(self) -> list[Any]:
        """The three fields, in order, as JSON values."""
        return [str(self.kind), self.dtype, list(self.shape)]

    @classmethod
    def from_json(cls, value: list[Any]) -> ColumnSchema:
        """The inverse of `to_json`."""
        kind, dtype, shape = value
        return schema_of(kind, dtype, tuple(shape))

    def __str__(self) -> str:
        if self.kind in (ColumnKind.JSON, ColumnKind.BYTES):
            return self.kind.value
        stars = {ColumnKind.RAGGED: 1, ColumnKind.TURNS: 2}.get(self.kind, 0)
        sizes = ["*"] * stars + [str(size) for size in self.shape]
        return f"{self.kind.value} {self.dtype} [{', '.join(sizes)}]"


class Schema(dict[str, ColumnSchema]):
    """Schema of an extent: column name to `ColumnSchema`, with cached names and JSON form. Immutable."""

    __slots__ = ("as_json", "names")

    def __init__(self, columns: Mapping[str, ColumnSchema]) -> None:
        super().__init__(columns)
        self.names = frozenset(self)
        self.as_json = {name: column.to_json() for name, column in self.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, list[Any]]) -> Schema:
        """The inverse of `as_json`."""
        return cls({name: ColumnSchema.from_json(each) for name, each in value.items()})


def pack_schema(columns: Iterable[tuple[str, ColumnSchema]]) -> bytes:
    """Schema of an extent as bytes, for `read_schema`."""
    return _ENCODE(dict(columns))


@lru_cache(maxsize=4096)
def read_schema(packed: bytes) -> Schema:
    """Schema of an extent from a message, cached: equal bytes give the same object.

    Raises:
        msgspec.DecodeError: the bytes are not a schema.
    """
    return Schema(_DECODE(packed))


_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(dict[str, ColumnSchema]).decode


@lru_cache(maxsize=4096)
def schema_of(kind: str, dtype: str, shape: tuple[int, ...]) -> ColumnSchema:
    """Column schema, cached: equal arguments give the same object."""
    return ColumnSchema(kind=ColumnKind(kind), dtype=dtype, shape=shape)
