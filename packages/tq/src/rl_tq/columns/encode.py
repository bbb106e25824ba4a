"""Encoding of the data of a put: each column's kind, number of rows, and the tensors that hold its values."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
from torch.nested._internal.nested_tensor import NestedTensor

from rl_csrc.buffers.rows import ends, row_offsets
from rl_tq.columns.schema import ColumnKind, ColumnSchema, schema_of
from rl_tq.errors import SchemaError
from rl_tq.types import PerGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensordict import TensorDictBase


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """Column of a put, before it is copied."""

    schema: ColumnSchema
    """Kind, dtype and row shape."""
    num_rows: int
    """Number of rows, B."""
    pieces: Sequence[torch.Tensor]
    """Values: tensors of shape (n, *row shape), to be concatenated."""
    offsets: torch.Tensor | None = None
    """int64 [B + 1] into the values, or into the turns; None where the column is dense."""
    turns: torch.Tensor | None = None
    """int64 [turns + 1] into the values; None where rows have no turns."""
    index: torch.Tensor | None = None
    """int64 [B]: each row's index into G shared values; the other fields then describe the G values."""


INDEX = "\0"
"""Suffix of the name under which an extent stores the index of a shared column."""


def encode_columns(
    data: TensorDictBase | Mapping[str, Any],
    tags: Sequence[Mapping[str, Any]] | None = None,
    borrowed: Sequence[str] = (),
) -> dict[str, Column]:
    """Encode every column of `data` except those in `borrowed`; the rows have `tags`.

    Raises:
        SchemaError: there are no columns or rows, row counts differ, or a value has an unsupported type.
    """
    columns: dict[str, Column] = {}
    num_rows = -1
    is_even = True
    # items() gives the values as they were put; data[name] would unwrap a NonTensorStack.
    for name, value in cast("Mapping[Any, Any]", data).items():
        if not isinstance(name, str) or INDEX in name:
            raise SchemaError(f"columns are named by strings without NUL, not by {name!r}")
        if name in borrowed:
            continue
        column = _shared_column(name, value, tags) if isinstance(value, PerGroup) else _column(name, value)
        columns[name] = column
        is_even = is_even and num_rows in (-1, column.num_rows)
        num_rows = column.num_rows
    if not columns:
        given = list(borrowed) or "none"
        raise SchemaError(
            f"a put takes one or more columns, and the values of {given} are those of the rows' groups: put "
            "at least one of their own"
        )
    if not is_even:
        counts = {name: column.num_rows for name, column in columns.items()}
        raise SchemaError(f"the columns of one put have one value per row, but their row counts differ: {counts}")
    if not num_rows:
        raise SchemaError(f"columns {list(columns)} have no rows: a put takes at least one")
    return columns


def borrowed_columns(data: TensorDictBase | Mapping[str, Any]) -> list[str]:
    """Names of columns given as `PerGroup()`, whose values the rows' groups have already."""
    if _is_of_tensordict(data, "TensorDictBase"):
        return []
    return [name for name, value in cast("Any", data).items() if isinstance(value, PerGroup) and value.values is None]


def _is_of_tensordict(value: object, *names: str) -> bool:
    """Whether a value is of a class of tensordict's. Its import takes two seconds, and none has one before."""
    module = sys.modules.get("tensordict")
    return isinstance(value, tuple(kind for name in names if (kind := getattr(module, name, None)) is not None))


def _column(name: str, value: Any) -> Column:
    if isinstance(value, torch.Tensor):
        return _tensor_column(name, value)
    if _is_of_tensordict(value, "NonTensorStack", "NonTensorData"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        if not items:
            raise SchemaError(f"column {name!r} has no rows: a put takes at least one")
        if any(isinstance(item, list) and any(isinstance(turn, torch.Tensor) for turn in item) for item in items):
            return _turns_column(name, items)
        if any(isinstance(item, bytes | bytearray | memoryview) for item in items):
            return _bytes_column(name, items)
        is_tensor = [isinstance(item, torch.Tensor) for item in items]
        if any(is_tensor):
            if not all(is_tensor):
                raise SchemaError(f"column {name!r} mixes tensors with other values in one list: use one or the other")
            return _list_column(name, [*items])
        return _json_column(name, items)
    is_mapping = isinstance(value, Mapping) or _is_of_tensordict(value, "TensorDictBase")
    if is_mapping and {*cast("Any", value).keys()} == {"values", "lengths"}:
        return _packed_turns_column(name, cast("Any", value))
    raise SchemaError(
        f"column {name!r} is a {type(value).__module__}.{type(value).__qualname__}: pass a tensor of shape (B, ...), "
        "a jagged nested tensor, or a list of B tensors, lists of tensors, bytes or JSON values (of numpy: "
        "torch.from_numpy)"
    )


def _tensor_column(name: str, tensor: torch.Tensor) -> Column:
    is_jagged = isinstance(tensor, NestedTensor)
    if is_jagged or tensor.is_nested:
        nested: Any = tensor
        # Views with holes, or ragged elsewhere than in dim 1, are taken row by row. The attributes are those behind
        # values() and offsets(), which cost 40 us each; to ask is_nested and layout costs 20.
        if is_jagged and nested._lengths is None and nested._ragged_idx == 1:
            offsets: torch.Tensor = nested._offsets
            if offsets.dtype is not torch.int64 or not offsets.is_cpu or not offsets.is_contiguous():
                offsets = offsets.to("cpu", torch.int64).contiguous()
            values: torch.Tensor = nested._values
            if values.requires_grad:
                values = values.detach()
            first, last = ends(offsets)
            if first or last != values.shape[0]:
                values, offsets = values[first:last], offsets - first
            return _ragged(values.dtype, values.shape[1:], [values], offsets)
        return _list_column(name, list(tensor.detach().unbind()))
    if tensor.layout is not torch.strided or tensor.dim() == 0:
        raise SchemaError(
            f"column {name!r} is a {tensor.layout} tensor of shape {tuple(tensor.shape)}: "
            "a dense column is strided, of shape (B, ...)"
        )
    num_rows, *shape = tensor.shape
    return Column(
        schema=schema_of(ColumnKind.DENSE, _dtype_name(tensor.dtype), tuple(shape)),
        num_rows=num_rows,
        pieces=[tensor.detach() if tensor.requires_grad else tensor],
    )


def _list_column(name: str, rows: list[torch.Tensor]) -> Column:
    if (offsets := row_offsets(rows)) is not None:
        return _ragged(rows[0].dtype, rows[0].shape[1:], rows, offsets)
    rows = [row.detach() for row in rows]
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
        schema=schema_of(ColumnKind.RAGGED, _dtype_name(dtype), tuple(shape)),
        num_rows=len(offsets) - 1,
        pieces=pieces,
        offsets=offsets,
    )


def _turns_column(name: str, rows: Sequence[Any]) -> Column:
    wrong = [row for row in rows if not isinstance(row, list) or not all(isinstance(t, torch.Tensor) for t in row)]
    if wrong:
        raise SchemaError(f"column {name!r} mixes lists of tensors with other values in one list: use one or the other")
    flat = _list_column(name, [turn for row in rows for turn in row])
    assert flat.offsets is not None
    counts = torch.tensor([0, *accumulate(map(len, rows))], dtype=torch.int64)
    schema = msgspec.structs.replace(flat.schema, kind=ColumnKind.TURNS)
    return Column(schema=schema, num_rows=len(rows), pieces=flat.pieces, offsets=counts, turns=flat.offsets)


def _packed_turns_column(name: str, value: Mapping[str, Any]) -> Column:
    """Column of turns in the form that get returns: jagged `values`, and jagged int64 `lengths` of each row's turns."""
    parts = [_column(name, value[part]) for part in ("values", "lengths")]
    values, lengths = parts
    is_ragged = all(part.schema.kind is ColumnKind.RAGGED for part in parts)
    if not is_ragged or lengths.schema.dtype != "int64" or lengths.schema.shape or values.num_rows != lengths.num_rows:
        raise SchemaError(
            f"column {name!r} is given as 'values' {values.schema} and 'lengths' {lengths.schema}: turns are jagged "
            "values, and as many jagged rows of int64 lengths"
        )
    assert values.offsets is not None
    assert lengths.offsets is not None
    sizes = torch.cat([*lengths.pieces]).cpu()
    turns = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    if (sizes < 0).any() or not torch.equal(turns[lengths.offsets], values.offsets):
        raise SchemaError(
            f"column {name!r}: the 'lengths' of a row's turns must be 0 or more, and add up to its values"
        )
    return Column(
        schema=msgspec.structs.replace(values.schema, kind=ColumnKind.TURNS), num_rows=values.num_rows,
        pieces=values.pieces, offsets=lengths.offsets, turns=turns,
    )  # fmt: skip


def _bytes_column(name: str, rows: Sequence[Any]) -> Column:
    wrong = [row for row in rows if not isinstance(row, bytes | bytearray | memoryview)]
    if wrong:
        raise SchemaError(f"column {name!r} mixes bytes with other values in one list: use one or the other")
    return _documents(ColumnSchema(kind=ColumnKind.BYTES, dtype="uint8", shape=()), [bytes(row) for row in rows])


def _shared_column(name: str, value: PerGroup, tags: Sequence[Mapping[str, Any]] | None) -> Column:
    groups = [tag.get("group_id") for tag in tags or ()]
    if not groups or None in groups:
        raise SchemaError(f"column {name!r} is given per group, and rows have no tag 'group_id': tag all of them")
    order = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    column = _column(name, value.values)
    if column.num_rows != len(order):
        raise SchemaError(f"column {name!r} has {column.num_rows} values for {len(order)} groups: one each is needed")
    return msgspec.structs.replace(column, num_rows=len(groups), index=torch.tensor([order[group] for group in groups]))


def _json_column(name: str, values: Sequence[Any]) -> Column:
    documents = [_encode(name, row, value) for row, value in enumerate(values)]
    return _documents(ColumnSchema(kind=ColumnKind.JSON, dtype="utf8", shape=()), documents)


def _documents(schema: ColumnSchema, documents: Sequence[bytes]) -> Column:
    return Column(
        schema=schema,
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


MAX_DEPTH = 100
"""Deepest nesting of JSON, so that reading it never overflows the stack."""


def check_json(value: Any, *, is_message: bool = False, depth: int = 0) -> None:
    """Raise TypeError for a value that JSON cannot hold, or would silently change (keys that are not strings).

    `is_message`: the value is part of a message, whose integers have 64 bits.
    """
    if depth > MAX_DEPTH:
        raise TypeError(f"it is nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        for key, item in cast("dict[Any, Any]", value).items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is a {type(key).__name__}; keys must be strings")
            check_json(item, is_message=is_message, depth=depth + 1)
    elif isinstance(value, list | tuple):
        for item in cast("Sequence[Any]", value):
            check_json(item, is_message=is_message, depth=depth + 1)
    elif value is not None and not isinstance(value, str | int | float):
        raise TypeError(f"{value!r} is a {type(value).__name__}")
    elif is_message and isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise TypeError(f"{value} has more than 64 bits")


def check_tags(tags: Sequence[dict[str, Any]]) -> None:
    """Raise TypeError for tags that a message cannot hold; a fast path for plain values takes a third of the time."""
    values = list(chain.from_iterable(map(dict.values, tags)))
    is_plain = {*map(type, chain.from_iterable(tags))} <= {str} and {*map(type, values)} <= {str, int, float, bool}
    if not is_plain or any(not -(1 << 63) <= value < 1 << 63 for value in values if type(value) is int):
        check_json(tags, is_message=True)


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
