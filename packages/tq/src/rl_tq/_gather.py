"""Assembles a batch from the extents its rows lie in: one copy per column, or a view where one extent is the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from tensordict import NonTensorStack, TensorDict

from rl_csrc import frames
from rl_tq._extent import copied
from rl_tq._schema import ColumnKind, ColumnSchema

if TYPE_CHECKING:
    from rl_tq._extent import Views

Run: TypeAlias = tuple[int, int, int]
"""Extent, first row in it, number of rows: consecutive rows of the batch that are consecutive in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenExtent:
    """An extent that this process can read."""

    views: Views
    """Its columns."""
    is_private: bool
    """Nobody else sees writes to this memory, so that views of it may be given away."""


Opened: TypeAlias = Mapping[int, OpenExtent]


def gather(columns: Mapping[str, tuple[ColumnSchema, Sequence[Run]]], opened: Opened, num_rows: int) -> TensorDict:
    """Rows in the order of the runs: dense tensors, jagged nested tensors, and `NonTensorStack` for JSON.

    Ragged columns whose rows are equally long share one offsets tensor, so that torch can add and multiply them.
    """
    shared_offsets: dict[tuple[int, ...], torch.Tensor] = {}
    result: dict[str, Any] = {}
    for name, (schema, runs) in columns.items():
        if schema.kind is ColumnKind.DENSE:
            result[name] = _dense(name, runs, opened)
            continue
        values, lengths = _ragged(name, runs, opened)
        if schema.kind is ColumnKind.JSON:
            result[name] = _json(values, lengths)
            continue
        offsets = shared_offsets.setdefault(tuple(lengths), _cumulated(lengths))
        result[name] = torch.nested.nested_tensor_from_jagged(values, offsets)
    return TensorDict(result, batch_size=[num_rows])


def _dense(name: str, runs: Sequence[Run], opened: Opened) -> torch.Tensor:
    parts: list[torch.Tensor] = []
    for extent, start, count in runs:
        values = opened[extent].views[name]
        assert isinstance(values, torch.Tensor)
        parts.append(values[start : start + count])
    return _joined(parts, is_view=_may_view(runs, opened, name))


def _ragged(name: str, runs: Sequence[Run], opened: Opened) -> tuple[torch.Tensor, list[int]]:
    """The values of all rows, one after the other, and the rows' lengths."""
    parts: list[torch.Tensor] = []
    lengths: list[int] = []
    known: dict[int, tuple[torch.Tensor, list[int]]] = {}
    for extent, start, count in runs:
        if extent not in known:
            column = opened[extent].views[name]
            assert isinstance(column, frames.Ragged)
            assert isinstance(column.values, torch.Tensor)
            known[extent] = column.values, column.offsets.tolist()
        values, offsets = known[extent]
        edges = offsets[start : start + count + 1]
        parts.append(values[edges[0] : edges[-1]])
        lengths += [b - a for a, b in pairwise(edges)]
    return _joined(parts, is_view=_may_view(runs, opened, name)), lengths


def _may_view(runs: Sequence[Run], opened: Opened, name: str) -> bool:
    """Whether the answer is most of one private extent: a view of a small part would keep all of it in memory."""
    extent, _, count = runs[0]
    column = opened[extent].views[name]
    num_rows = len(column.offsets) - 1 if isinstance(column, frames.Ragged) else len(column)
    return len(runs) == 1 and opened[extent].is_private and 2 * count >= num_rows


def _joined(parts: list[torch.Tensor], *, is_view: bool) -> torch.Tensor:
    if len(parts) > 1:
        return torch.cat(parts)
    return parts[0] if is_view else copied(parts[0])


def _json(values: torch.Tensor, lengths: list[int]) -> NonTensorStack:
    text = values.numpy().tobytes()
    documents: list[Any] = []
    start = 0
    for length in lengths:
        documents.append(json.loads(text[start : start + length]))
        start += length
    return NonTensorStack(*documents)


def _cumulated(lengths: list[int]) -> torch.Tensor:
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int64), 0, out=offsets[1:])
    return offsets
