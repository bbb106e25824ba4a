"""Columns of a queue for the fields of a TransferQueue batch, and back.

A field of tensors with dimensions is a ragged column, whatever the batch looked like, so that samples of other lengths
may come later. Its name ends in the inner shape, so that samples may even differ there. Scalars are a dense column.
Anything else is JSON where JSON gives it back as it was, and packed (`codec`) else. What that does not carry, objects
of classes of one's own, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rl_tq.errors import SchemaError
from rl_tq_transfer_queue.values import codec
from rl_tq_transfer_queue.values.field_schema import names_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_JSON, _PACKED, _SCALAR = "json", "packed", "scalar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Columns of a subset of a batch's samples."""

    positions: Sequence[int]
    """Positions of the samples in the batch."""
    columns: dict[str, Any]
    """Column name to values, for `TransferQueue.put`."""
    names: dict[str, str]
    """Field name to column name."""


def encode(data: Mapping[str, Any], size: int) -> list[Piece]:
    """Every field of a batch of `size` samples, as columns: one piece, and more where a field's inner shapes differ.

    Raises:
        ValueError: a field has another number of samples.
        SchemaError: a sample is an object that is not carried.
    """
    whole = Piece(positions=range(size), columns={}, names={})
    others: list[Piece] = []
    for field, value in data.items():
        rows, column, values = _column(field, value)
        if rows != size:
            raise ValueError(f"field {field!r} has {rows} samples, and the batch {size}")
        if column:
            whole.columns[column], whole.names[field] = values, column
            continue
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for i, row in enumerate(values):
            by_shape.setdefault(tuple(row.shape[1:]), []).append(i)
        for shape, positions in by_shape.items():
            name = _ragged_name(field, shape)
            part = {name: [values[i] for i in positions]}
            others.append(Piece(positions=positions, columns=part, names={field: name}))
    return [whole, *others] if whole.columns else others


def _column(field: str, value: Any) -> tuple[int, str, Any]:
    """Number of samples, column, and values; no column where the samples' inner shapes differ."""
    if isinstance(value, torch.Tensor):
        if not value.is_nested:
            if value.dim() < 2:
                return len(value), f"{field}:{_SCALAR}", value
            return len(value), _ragged_name(field, value.shape[2:]), _even(value)
        if value.layout is torch.jagged and cast("Any", value)._ragged_idx == 1 and value.dim() >= 2:
            return value.size(0), _ragged_name(field, value.shape[2:]), value
        rows = list(value.unbind())
        shapes = {tuple(row.shape[1:]) for row in rows}
        return len(rows), _ragged_name(field, shapes.pop()) if len(shapes) == 1 else "", rows
    items = items_of(value)
    if all(map(_is_json, items)):
        return len(items), f"{field}:{_JSON}", items
    try:
        packed = list(map(codec.encode, items))
    except TypeError as error:
        raise SchemaError(f"field {field!r} cannot be stored: {error}") from error
    return len(items), f"{field}:{_PACKED}", [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in packed]


def items_of(value: Any) -> list[Any]:
    """Samples of a field that is not a tensor."""
    if isinstance(value, NonTensorData):  # of a whole batch: a TensorDict keeps a list or an array in one of these
        data: Any = cast("Any", value).data
        return list(data if isinstance(data, list | tuple | np.ndarray) else value.tolist())
    return list(value.tolist() if isinstance(value, NonTensorStack) else value)


def _ragged_name(field: str, shape: Sequence[int]) -> str:
    return f"{field}:{'x'.join(map(str, shape))}"


def _even(value: torch.Tensor) -> torch.Tensor:
    rows, length = value.shape[:2]
    offsets = torch.arange(rows + 1, dtype=torch.int64) * length
    return torch.nested.nested_tensor_from_jagged(value.detach().cpu().reshape(-1, *value.shape[2:]), offsets)


def _is_json(value: Any) -> bool:
    """Whether a round trip through JSON is exact."""
    kind = type(value)
    if kind is dict:
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    if kind is list:
        return all(map(_is_json, value))
    return value is None or kind in (str, int, float, bool)


def decode(column: str, values: Any) -> Any:
    """Values of a field from its column: a tensor or a list."""
    kind = column.rpartition(":")[2]
    if kind == _JSON:
        return values.tolist()
    if kind == _PACKED:
        return [codec.decode(row.numpy()) for row in values.unbind()]
    return values


def join(parts: Sequence[tuple[Sequence[int], Any]], size: int) -> Any:
    """One field of `size` samples: tensors with dimensions nested, scalars dense, the others a `NonTensorStack`."""
    if len(parts) == 1 and isinstance(parts[0][1], torch.Tensor):
        return parts[0][1]
    rows: list[Any] = [None] * size
    for positions, values in parts:
        items = values.unbind() if isinstance(values, torch.Tensor) else values
        for position, item in zip(positions, items, strict=True):
            rows[position] = item
    if not all(isinstance(row, torch.Tensor) for row in rows):
        return NonTensorStack(*rows)
    if all(row.dim() == 0 for row in rows):
        return torch.stack(rows)
    is_jagged = len({row.shape[1:] for row in rows}) == 1
    if is_jagged:
        offsets = torch.tensor([0, *accumulate(map(len, rows))])
        return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)
    return torch.nested.nested_tensor(rows, layout=torch.strided)


def plain_fields(data: TensorDict | Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a batch without unwrapping, unlike `TensorDict.items`."""
    mapping = cast("Mapping[str, Any]", data)
    return {name: mapping.get(name) for name in names_of(data)}
