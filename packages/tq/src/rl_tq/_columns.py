"""Turns what a caller puts into columns: which kind each is, how many rows, and the pieces of memory that hold them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from rl_tq._schema import ColumnKind, ColumnSchema
from rl_tq.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of one put, not copied yet."""

    schema: ColumnSchema
    """Kind, dtype and row shape."""
    num_rows: int
    """B."""
    pieces: Sequence[torch.Tensor]
    """The values: tensors of shape (n, *row shape), to be laid one after the other."""
    offsets: torch.Tensor | None = None
    """int64 [B + 1] into the values; None where the column is dense."""


def parse_columns(data: TensorDictBase | Mapping[str, Any]) -> dict[str, Column]:
    """Classify every column of `data`.

    Raises:
        SchemaError: there are no columns or rows, row counts differ, or a value is of no kind that a queue holds.
    """
    names = list(cast("Mapping[Any, Any]", data).keys())
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong or not names:
        raise SchemaError(f"a put takes one or more columns named by strings, not {wrong or 'none'}")
    # TensorDict.get keeps a NonTensorStack as it is, where [] would unwrap it; a Mapping's get does the same for both.
    columns = {name: _column(name, data.get(name)) for name in names}
    counts = {name: column.num_rows for name, column in columns.items()}
    if len(set(counts.values())) > 1:
        raise SchemaError(f"the columns of one put have one value per row, but their row counts differ: {counts}")
    if not counts[names[0]]:
        raise SchemaError(f"columns {names} have no rows: a put takes at least one")
    return columns


def _column(name: str, value: Any) -> Column:
    if isinstance(value, torch.Tensor):
        return _tensor_column(name, value)
    if isinstance(value, NonTensorStack | NonTensorData):
        value = value.tolist()
    if isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        if not items:
            raise SchemaError(f"column {name!r} has no rows: a put takes at least one")
        is_tensor = [isinstance(item, torch.Tensor) for item in items]
        if any(is_tensor):
            if not all(is_tensor):
                raise SchemaError(f"column {name!r} mixes tensors with other values in one list: use one or the other")
            return _list_column(name, [item.detach() for item in items])
        return _json_column(name, items)
    raise SchemaError(
        f"column {name!r} is a {type(value).__module__}.{type(value).__qualname__}: pass a tensor of shape (B, ...), "
        "a jagged nested tensor, a list of B tensors or a list of B JSON values (numpy: torch.from_numpy)"
    )


def _tensor_column(name: str, tensor: torch.Tensor) -> Column:
    if tensor.is_nested:
        nested: Any = tensor
        # Views with holes, or ragged elsewhere than in dim 1, are taken row by row. The attributes are those behind
        # values() and offsets(), which cost 40 us each.
        if nested.layout is torch.jagged and nested._lengths is None and nested._ragged_idx == 1:
            offsets: torch.Tensor = nested._offsets.cpu().to(torch.int64)
            values: torch.Tensor = nested._values.detach()
            first, last = int(offsets[0]), int(offsets[-1])
            if first or last != len(values):
                values, offsets = values[first:last], offsets - first
            return _ragged(values.dtype, values.shape[1:], [values], offsets)
        return _list_column(name, list(tensor.detach().unbind()))
    if tensor.layout is not torch.strided or tensor.dim() == 0:
        raise SchemaError(
            f"column {name!r} is a {tensor.layout} tensor of shape {tuple(tensor.shape)}: "
            "a dense column is strided, of shape (B, ...)"
        )
    return Column(
        schema=ColumnSchema(kind=ColumnKind.DENSE, dtype=_dtype_name(tensor.dtype), shape=tuple(tensor.shape[1:])),
        num_rows=len(tensor),
        pieces=[tensor.detach()],
    )


def _list_column(name: str, rows: list[torch.Tensor]) -> Column:
    dtypes = {row.dtype for row in rows}
    if len(dtypes) > 1:
        raise SchemaError(f"column {name!r} has rows of several dtypes: {sorted(map(_dtype_name, dtypes))}")
    shapes = {tuple(row.shape[1:]) for row in rows}
    if len(shapes) > 1 or any(row.dim() == 0 for row in rows):
        raise SchemaError(
            f"column {name!r} has rows of shapes {sorted({tuple(row.shape) for row in rows})[:5]}: the rows of a "
            "ragged column have at least one dimension and differ in their first only (scalars: a tensor of shape (B,))"
        )
    offsets = torch.tensor([0, *accumulate(len(row) for row in rows)], dtype=torch.int64)
    return _ragged(dtypes.pop(), shapes.pop(), rows, offsets)


def _ragged(dtype: torch.dtype, shape: Sequence[int], pieces: Sequence[torch.Tensor], offsets: torch.Tensor) -> Column:
    return Column(
        schema=ColumnSchema(kind=ColumnKind.RAGGED, dtype=_dtype_name(dtype), shape=tuple(shape)),
        num_rows=len(offsets) - 1,
        pieces=pieces,
        offsets=offsets,
    )


def _json_column(name: str, values: Sequence[Any]) -> Column:
    documents = [_encode(name, row, value) for row, value in enumerate(values)]
    return Column(
        schema=ColumnSchema(kind=ColumnKind.JSON, dtype="utf8", shape=()),
        num_rows=len(documents),
        pieces=[torch.frombuffer(bytearray(b"".join(documents)), dtype=torch.uint8)],
        offsets=torch.tensor([0, *accumulate(map(len, documents))], dtype=torch.int64),
    )


def _encode(name: str, row: int, value: Any) -> bytes:
    try:
        check_json(value)
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise SchemaError(f"row {row} of column {name!r} cannot be kept as JSON: {error}") from error


def check_json(value: Any) -> None:
    """Raise TypeError for what JSON would change in silence: a mapping's keys that are not strings."""
    if isinstance(value, dict):
        for key, item in cast("dict[Any, Any]", value).items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is a {type(key).__name__}; keys must be strings")
            check_json(item)
    elif isinstance(value, list | tuple):
        for item in cast("Sequence[Any]", value):
            check_json(item)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
