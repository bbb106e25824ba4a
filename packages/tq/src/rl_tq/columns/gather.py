"""Gathering a batch from the extents that hold its rows: one copy per column, or views of a single extent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

# The class behind torch.nested.nested_tensor_from_jagged, whose checks cost three times as much as the construction.
from torch.nested._internal.nested_tensor import NestedTensor

from rl_csrc import rows
from rl_tq.columns.encode import INDEX
from rl_tq.columns.extent import ExtentView, Opened, copied, lay
from rl_tq.columns.output import Bounds, Lengths
from rl_tq.columns.schema import ColumnKind, ColumnSchema
from rl_tq.memory.pool import new_memory

if TYPE_CHECKING:
    from tensordict import NonTensorStack, TensorDict

    from rl_tq.columns.extent import LocatedColumns
    from rl_tq.columns.locations import Run
    from rl_tq.columns.output import Output

_PRIVATE_COPY_BYTES = 1 << 20
"""An extent of at most this size is copied whole instead of column by column, if all of it is requested."""
_MANY_RUNS = 8
_SMALL_ROW_BYTES = 4096
"""From `_MANY_RUNS` runs on, rows of at most this size are copied by index, which is faster than by slices."""


Parts: TypeAlias = Mapping[str, Sequence[torch.Tensor]]
"""Column name to its values, in consecutive pieces."""
Turns: TypeAlias = "Mapping[str, Sequence[Sequence[int]]]"
"""Column name to the lengths of each row's turns."""


class Collected(NamedTuple):
    """Collected values of a batch's rows, as views of the extents."""

    parts: Parts
    bounds: Mapping[str, Bounds]
    """Row bounds of ragged columns."""
    turns: Turns


def gather(columns: LocatedColumns, opened: Opened, num_rows: int, output: Output) -> TensorDict:
    """Batch with rows in the order of the runs: dense tensors, jagged nested tensors, and `NonTensorStack` for JSON."""
    if not output.is_given:
        opened = _privately(columns, opened)
    known = [each.bounds.offsets for each in output.kept.lengths]
    collected = collect(columns, opened, is_joined=not output.is_given, known=known)
    is_known: dict[int, bool] = {}
    is_own: dict[str, bool] = {}
    for name, (_, runs) in columns.items() if not output.is_given else ():
        if id(runs) not in is_known:  # columns of one extent share their runs
            is_known[id(runs)] = _may_view(runs, opened, name)
        is_joined = len(runs) >= _MANY_RUNS and len(collected.parts[name]) == 1
        is_own[name] = is_known[id(runs)] or is_joined
    return assemble({name: schema for name, (schema, _) in columns.items()}, collected, is_own, num_rows, output)


def collect(
    columns: LocatedColumns, opened: Opened, *, is_joined: bool = False, known: Sequence[torch.Tensor] = ()
) -> Collected:
    """Views of the rows' values in the extents; with `is_joined`, ragged rows in many pieces are copied.

    `known` are offsets that are reused instead of equal new ones.
    """
    parts: dict[str, Sequence[torch.Tensor]] = {}
    bounds: dict[str, Bounds] = {}
    turns: dict[str, Sequence[Sequence[int]]] = {}
    indexes: dict[int, np.ndarray[Any, Any]] = {}
    for name, (schema, runs) in columns.items():
        if schema.kind is ColumnKind.DENSE:
            parts[name] = _dense(name, runs, opened, indexes)
        elif schema.kind is ColumnKind.TURNS:
            parts[name], turns[name] = _turns(name, runs, opened)
        else:
            offsets = [*known, *(each.offsets for each in bounds.values())]
            parts[name], bounds[name] = _ragged(
                name, runs, opened, offsets, is_joined=is_joined and len(runs) >= _MANY_RUNS
            )
    return Collected(parts, bounds, turns)


def assemble(
    schemas: Mapping[str, ColumnSchema], collected: Collected, is_own: Mapping[str, bool], num_rows: int, output: Output
) -> TensorDict:
    """Assemble a batch from collected values; a value in one piece that `is_own` is returned without a copy.

    With an output given everything is copied to it. Ragged columns with equal row lengths share one offsets tensor, so
    that torch can add and multiply them.
    """
    if output.is_given:
        output.reserve([sum(part.nbytes for part in collected.parts[n]) for n, s in schemas.items() if s.is_tensor])
    placed: dict[str, torch.Tensor] = {}
    for name, schema in schemas.items():
        parts = collected.parts[name]
        is_there = len(parts) == 1 and (not schema.is_tensor or (not output.is_given and is_own[name]))
        placed[name] = parts[0] if is_there else output.place(parts) if schema.is_tensor else _joined(parts)
    output.begin()
    try:
        return _batch(schemas, placed, collected, num_rows, output)
    finally:
        output.finish()


def _batch(
    schemas: Mapping[str, ColumnSchema],
    joined: Mapping[str, torch.Tensor],
    collected: Collected,
    num_rows: int,
    output: Output,
) -> TensorDict:
    """Batch whose columns have these values, each in one piece; copies into them may still be in progress."""
    distinct = [*output.kept.lengths]
    used: dict[int, Lengths] = {}
    nested: dict[str, NestedTensor] = {}
    result: dict[str, Any] = {}
    for name, schema in schemas.items():
        values = joined[name]
        if not schema.is_tensor:
            result[name] = _documents(values, collected.bounds[name].offsets.tolist(), schema.kind)
            continue
        if schema.kind is ColumnKind.DENSE:
            result[name] = values
            continue
        if schema.kind is ColumnKind.TURNS:
            result[name] = _packed_turns(values, collected.turns[name], num_rows)
            continue
        own = collected.bounds[name]
        alike = next((each for each in distinct if _are_equal(each.bounds, own)), None)
        if alike is None:
            alike = Lengths(own, own.offsets.to(values.device), _longest(own))
            distinct.append(alike)
        used[id(alike)] = alike
        before = output.kept.nested(name, values, alike.offsets)
        result[name] = nested[name] = _jagged(values, alike.offsets, alike.longest) if before is None else before
    output.keep(nested, [*used.values()])
    from tensordict import TensorDict  # two seconds, which a process that only puts does not wait for

    # The constructor checks the shape of every value, which takes 30 us for each nested tensor.
    return TensorDict._new_unsafe(source=result, batch_size=torch.Size([num_rows]))  # pyright: ignore


def _privately(columns: LocatedColumns, opened: Opened) -> Opened:
    """Copy a small extent whole, if all of its rows and most of its columns are requested."""
    if len(opened) != 1:
        return opened
    [(number, extent)] = opened.items()
    if extent.is_private or extent.memory.nbytes > _PRIVATE_COPY_BYTES or 2 * len(columns) < len(extent.views):
        return opened
    num_rows = extent.num_rows(next(iter(columns)))
    for runs in {id(r): r for _, r in columns.values()}.values():
        if len(runs) != 1 or runs[0][1] or runs[0][2] != num_rows:
            return opened
    return {number: ExtentView(memory=copied(extent.memory), is_private=True)}


def _dense(
    name: str, runs: Sequence[Run], opened: Opened, indexes: dict[int, np.ndarray[Any, Any]]
) -> Sequence[torch.Tensor]:
    """Values of a dense column, in pieces; `indexes` caches the row index of columns with the same runs."""
    if len(runs) >= _MANY_RUNS and (picked := _picked(name, runs, opened, indexes)) is not None:
        return [picked]
    parts: list[torch.Tensor] = []
    for extent, start, count in runs:
        held = opened[extent]
        values = held.views[name]
        parts += [_rows(values, first, number) for first, number in held.spans(name, start, count)]
    return parts


def _picked(
    name: str, runs: Sequence[Run], opened: Opened, indexes: dict[int, np.ndarray[Any, Any]]
) -> torch.Tensor | None:
    """Copy of small rows of one extent by index; None if they are large or in several extents."""
    if len(opened) > 1 and any(run[0] != runs[0][0] for run in runs):
        return None
    values = opened[runs[0][0]].views[name]
    assert isinstance(values, torch.Tensor)
    row_nbytes = values.nbytes // len(values)
    if not 0 < row_nbytes <= _SMALL_ROW_BYTES or name + INDEX in opened[runs[0][0]].views:
        return None
    index = indexes.get(id(runs))
    if index is None:
        index = indexes[id(runs)] = np.array([row for _, start, count in runs for row in range(start, start + count)])
    # As bytes, because numpy lacks some dtypes.
    rows = values.reshape(-1).view(torch.uint8).numpy().reshape(len(values), row_nbytes)[index]
    return torch.from_numpy(rows).view(-1).view(values.dtype).view(-1, *values.shape[1:])


def _rows(values: Any, start: int, count: int) -> torch.Tensor:
    return values if count == values.size(0) else values[start : start + count]


def _ragged(
    name: str, runs: Sequence[Run], opened: Opened, known: list[torch.Tensor], *, is_joined: bool
) -> tuple[list[torch.Tensor], Bounds]:
    """Values of a ragged column, in pieces or joined, and the row bounds, with equal `known` offsets reused."""
    if len(runs) == 1:
        [(extent, start, count)] = runs
        if len(spans := opened[extent].spans(name, start, count)) == 1:
            [(first, number)] = spans
            values, offsets = opened[extent].ragged(name)
            start, stop, longest, own = rows.cut(offsets, first, number, known)
            return [_rows(values, start, stop - start)], Bounds(own, longest)
    pieces: list[tuple[int, int, int]] = []
    lengths: list[int] = []
    for extent, start, count in runs:
        offsets = opened[extent].bounds(name)
        for first, number in opened[extent].spans(name, start, count):
            edges = offsets[first : first + number + 1]
            pieces.append((extent, edges[0], edges[-1]))
            lengths += [b - a for a, b in pairwise(edges)]
    sources = {extent: opened[extent].ragged(name)[0] for extent in {piece[0] for piece in pieces}}
    if is_joined:
        return [_picked_values(pieces, sources)], bounds_of(lengths)
    return [_rows(sources[extent], start, stop - start) for extent, start, stop in pieces], bounds_of(lengths)


def _picked_values(pieces: Sequence[tuple[int, int, int]], sources: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Joined copy of pieces (extent, start, stop) of values."""
    first = sources[pieces[0][0]]
    shape = (sum(stop - start for _, start, stop in pieces), *first.shape[1:])
    width = first.element_size() * prod(shape[1:])
    copy = new_memory(shape[0] * width)
    which = {extent: i for i, extent in enumerate(sources)}
    slices = [(which[extent], start, stop) for extent, start, stop in pieces]
    if copy.nbytes:
        rows.join_slices([*sources.values()], slices, copy, width=width)
    return copy.view(first.dtype).view(shape)


def _turns(name: str, runs: Sequence[Run], opened: Opened) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Values of a column of turns, in pieces, and the lengths of each row's turns."""
    parts: list[torch.Tensor] = []
    lengths: list[list[int]] = []
    for extent, start, count in runs:
        values, turns, offsets = opened[extent].turns(name)
        for first, number in opened[extent].spans(name, start, count):
            edges = offsets[first : first + number + 1]
            parts.append(_rows(values, turns[edges[0]], turns[edges[-1]] - turns[edges[0]]))
            lengths += [[b - a for a, b in pairwise(turns[a : b + 1])] for a, b in pairwise(edges)]
    return parts, lengths


def _may_view(runs: Sequence[Run], opened: Opened, name: str) -> bool:
    """Whether to return views: the rows are most of one private extent. A small view would keep all of it in memory."""
    extent, _, count = runs[0]
    return len(runs) == 1 and opened[extent].is_private and 2 * count >= opened[extent].num_rows(name)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    joined = new_memory(sum(part.nbytes for part in parts))
    lay(parts, joined)
    return joined


def _documents(values: torch.Tensor, offsets: Sequence[int], kind: ColumnKind) -> NonTensorStack:
    from tensordict import NonTensorStack

    text = values.numpy().tobytes()
    documents = [text[start:stop] for start, stop in pairwise(offsets)]
    return NonTensorStack(*(map(json.loads, documents) if kind is ColumnKind.JSON else documents))


def _packed_turns(values: torch.Tensor, lengths: Sequence[Sequence[int]], num_rows: int) -> TensorDict:
    sizes = torch.tensor([length for row in lengths for length in row], dtype=torch.int64, device=values.device)
    tokens, counts = bounds_of([sum(row) for row in lengths]), bounds_of([len(row) for row in lengths])
    packed: dict[str, Any] = {
        "values": _jagged(values, tokens.offsets.to(values.device), _longest(tokens)),
        "lengths": _jagged(sizes, counts.offsets.to(values.device), _longest(counts)),
    }
    from tensordict import TensorDict

    return TensorDict(packed, batch_size=[num_rows])


def _are_equal(a: Bounds, b: Bounds) -> bool:
    return a.offsets is b.offsets or (a.longest == b.longest and torch.equal(a.offsets, b.offsets))


def _longest(bounds: Bounds) -> torch.Tensor:
    """Length of the longest row as nested tensors cache it: an empty tensor with that many rows."""
    return torch.empty(bounds.longest, 0)


def _jagged(values: torch.Tensor, offsets: torch.Tensor, longest: torch.Tensor) -> NestedTensor:
    """Jagged nested tensor. Without the longest length, torch would pad every row to the total length."""
    nested: Any = NestedTensor(values, offsets)
    # Passing it to the constructor would mark it for torch.compile; torch itself fills this cache the same way.
    nested._metadata_cache["max_seqlen"] = longest
    return nested


def bounds_of(lengths: Sequence[int]) -> Bounds:
    """Bounds of consecutive rows of these lengths."""
    return Bounds(cumulated(lengths), max(lengths, default=0))


def cumulated(lengths: Sequence[int]) -> torch.Tensor:
    """Offsets of consecutive rows of these lengths, int64 [B + 1]."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int64), 0, out=offsets[1:])
    return offsets
