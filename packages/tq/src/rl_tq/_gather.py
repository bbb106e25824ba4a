"""Assembles a batch from the extents its rows lie in: one copy per column, or a view where one extent is the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

# What torch.nested.nested_tensor_from_jagged makes after checks that cost three times as much; these offsets are ours.
from torch.nested._internal.nested_tensor import NestedTensor

from rl_csrc import frames, rows
from rl_tq._columns import INDEX
from rl_tq._device import Mover
from rl_tq._extent import copied, lay, read_extent
from rl_tq._schema import ColumnKind, ColumnSchema
from rl_tq._segments import new_memory

if TYPE_CHECKING:
    from rl_tq._extent import Views
    from rl_tq._rows import Run

_PRIVATE_COPY_BYTES = 1 << 20
"""An extent of at most this many bytes is copied at once, instead of column by column, when all of it is asked for."""
_MANY_RUNS = 8
_SMALL_ROW_BYTES = 4096
"""From so many runs on, rows of at most so many bytes are copied by index: each slice would take longer."""


@dataclass(slots=True, kw_only=True)
class OpenExtent:
    """An extent that this process can read."""

    memory: torch.Tensor
    """uint8 [n], all of it."""
    is_private: bool
    """Nobody else sees writes to this memory, so that views of it may be given away."""
    _views: Views | None = None
    _has_shared: bool = False
    """Whether rows of any column share values."""
    _ragged: dict[str, tuple[torch.Tensor, np.ndarray[Any, Any]]] = field(
        default_factory=dict[str, "tuple[torch.Tensor, np.ndarray[Any, Any]]"]
    )
    """Columns that were looked at."""
    _bounds: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """Offsets of those that were looked at row by row."""

    @property
    def views(self) -> Views:
        """Its columns."""
        if self._views is None:
            self._views = read_extent(self.memory)
            self._has_shared = any(INDEX in name for name in self._views)
        return self._views

    def ragged(self, name: str) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
        """The values and offsets of a ragged column; the latter an array, which is cut in a tenth of the time."""
        if name not in self._ragged:
            column = self.views[name]
            assert isinstance(column, frames.Ragged)
            assert isinstance(column.values, torch.Tensor)
            self._ragged[name] = (column.values, column.offsets.numpy())
        return self._ragged[name]

    def bounds(self, name: str) -> list[int]:
        """The offsets of a ragged column."""
        if name not in self._bounds:
            self._bounds[name] = self.ragged(name)[1].tolist()
        return self._bounds[name]

    def turns(self, name: str) -> tuple[torch.Tensor, list[int], list[int]]:
        """The values of a column of turns, the turns' offsets, and the rows' offsets into these."""
        column = self.views[name]
        assert isinstance(column, frames.Ragged)
        assert isinstance(column.values, frames.Ragged)
        assert isinstance(column.values.values, torch.Tensor)
        return column.values.values, column.values.offsets.tolist(), column.offsets.tolist()

    def stretches(self, name: str, start: int, count: int) -> list[tuple[int, int]]:
        """Where the values of `count` rows from `start` on lie, as (first, number): elsewhere, if they are shared."""
        views = self.views
        if not self._has_shared or name + INDEX not in views:
            return [(start, count)]
        found: list[tuple[int, int]] = []
        indexes = views[name + INDEX]
        assert isinstance(indexes, torch.Tensor)
        for index in indexes[start : start + count].tolist():
            if found and found[-1][0] + found[-1][1] == index:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((index, 1))
        return found

    def num_rows(self, name: str) -> int:
        """Rows it was written with."""
        column = self.views[name + INDEX] if name + INDEX in self.views else self.views[name]
        return len(column.offsets) - 1 if isinstance(column, frames.Ragged) else column.size(0)


Opened: TypeAlias = Mapping[int, OpenExtent]
LocatedColumns: TypeAlias = "Mapping[str, tuple[ColumnSchema, Sequence[Run]]]"
"""Column name to its schema, and where the rows of a batch lie in extents."""


class Landing:
    """Where a batch's values are to lie: new memory, a buffer of the caller's, or a device."""

    def __init__(self, out: torch.Tensor | None, device: torch.device | str | None) -> None:
        if out is not None and device is not None:
            raise ValueError(f"out is a buffer on {out.device} and device is {device!r}: give one of them")
        if out is not None and (out.dtype is not torch.uint8 or out.dim() != 1 or not out.is_contiguous()):
            raise ValueError(
                f"out is a {out.dtype} tensor of shape {tuple(out.shape)}: it must be uint8 [n] and contiguous"
            )
        if out is not None and out.storage_offset() % frames.ALIGNMENT:
            raise ValueError(
                f"out begins {out.storage_offset()} bytes into its storage: it must be at a multiple of "
                f"{frames.ALIGNMENT}"
            )
        self._device = None if device is None else torch.device(device)
        self._out = out
        self._cursor = 0
        self._mover: Mover | None = None
        self._to_copy: list[tuple[Sequence[torch.Tensor], torch.Tensor]] = []
        self.is_taken = False
        """Whether a message is or was received straight into the caller's buffer."""

    @property
    def is_given(self) -> bool:
        """Whether the caller said where."""
        return self._out is not None or self._device is not None

    def take_over(self, nbytes: int) -> torch.Tensor | None:
        """The caller's buffer, if a message of so many bytes can be received straight into it."""
        if self._out is None or self._out.device.type != "cpu" or len(self._out) < nbytes:
            return None
        buffer, self._out, self.is_taken = self._out[:nbytes], None, True
        return buffer

    def reserve(self, sizes: Sequence[int]) -> None:
        """Prepare for tensors of so many bytes each.

        Raises:
            ValueError: they do not fit.
        """
        total = sum(size + -size % frames.ALIGNMENT for size in sizes)
        if self._device is not None:
            self._out = torch.empty(total, dtype=torch.uint8, device=self._device)
        if self._out is not None and len(self._out) < total:
            raise ValueError(f"out has {len(self._out)} bytes, and these columns of these rows take {total}")
        if self._out is not None and (self._device is not None or self._out.device.type != "cpu"):
            self._mover = Mover(self._out.device)

    def place(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The next place, where the parts lie one after the other once `finish` returns."""
        assert self._out is not None
        nbytes = sum(part.nbytes for part in parts)
        target = self._out[self._cursor : self._cursor + nbytes]
        self._cursor += nbytes + -nbytes % frames.ALIGNMENT
        placed = target.view(parts[0].dtype).view(sum(map(len, parts)), *parts[0].shape[1:])
        if self._mover is not None:
            self._mover.move(parts, target)
        else:  # at the end: a copy of megabytes empties the caches of all that is done between columns
            self._to_copy.append((parts, placed))
        return placed

    def finish(self) -> None:
        """Have all be in place."""
        for parts, placed in self._to_copy:
            lay(parts, placed)
        if self._mover is not None:
            self._mover.finish()


Parts: TypeAlias = Mapping[str, Sequence[torch.Tensor]]
"""Column name to its values, in pieces that follow one another."""
Offsets: TypeAlias = Mapping[str, torch.Tensor]
"""Name of a column whose rows have lengths to where they begin and end in its values, int64 [B + 1]."""
Turns: TypeAlias = "Mapping[str, Sequence[Sequence[int]]]"
"""Name of a column of turns to the lengths of each row's turns."""


class Collected(NamedTuple):
    """The values of rows, where they lie."""

    parts: Parts
    offsets: Offsets
    turns: Turns


def gather(
    columns: Mapping[str, tuple[ColumnSchema, Sequence[Run]]], opened: Opened, num_rows: int, landing: Landing
) -> TensorDict:
    """Rows in the order of the runs: dense tensors, jagged nested tensors, and `NonTensorStack` for JSON."""
    if not landing.is_given:
        opened = _privately(columns, opened)
    collected = collect(columns, opened, is_joined=not landing.is_given)
    is_known: dict[int, bool] = {}
    is_own: dict[str, bool] = {}
    for name, (_, runs) in columns.items() if not landing.is_given else ():
        if id(runs) not in is_known:  # columns of one extent share their runs
            is_known[id(runs)] = _may_view(runs, opened, name)
        is_joined = len(runs) >= _MANY_RUNS and len(collected.parts[name]) == 1
        is_own[name] = is_known[id(runs)] or is_joined
    return assemble({name: schema for name, (schema, _) in columns.items()}, collected, is_own, num_rows, landing)


def collect(
    columns: Mapping[str, tuple[ColumnSchema, Sequence[Run]]], opened: Opened, *, is_joined: bool = False
) -> Collected:
    """Where the values of rows lie: views of the extents; with `is_joined`, ragged rows in many pieces are copied."""
    parts: dict[str, Sequence[torch.Tensor]] = {}
    offsets: dict[str, torch.Tensor] = {}
    turns: dict[str, Sequence[Sequence[int]]] = {}
    indexes: dict[int, np.ndarray[Any, Any]] = {}
    for name, (schema, runs) in columns.items():
        if schema.kind is ColumnKind.DENSE:
            parts[name] = _dense(name, runs, opened, indexes)
        elif schema.kind is ColumnKind.TURNS:
            parts[name], turns[name] = _turns(name, runs, opened)
        else:
            parts[name], offsets[name] = _ragged(name, runs, opened, is_joined=is_joined and len(runs) >= _MANY_RUNS)
    return Collected(parts, offsets, turns)


def assemble(
    schemas: Mapping[str, ColumnSchema],
    collected: Collected,
    is_own: Mapping[str, bool],
    num_rows: int,
    landing: Landing,
) -> TensorDict:
    """A batch of values that are copied, except those that are the caller's own and in one piece.

    With a landing everything is copied, and `is_own` is not asked.

    Ragged columns whose rows are equally long share one offsets tensor, so that torch can add and multiply them.
    """
    parts, offsets, turns = collected
    if landing.is_given:
        landing.reserve(
            [sum(part.nbytes for part in parts[name]) for name, schema in schemas.items() if schema.is_tensor]
        )
    distinct: list[tuple[torch.Tensor, torch.Tensor]] = []
    """Offsets, on the host and where the values are."""
    result: dict[str, Any] = {}
    for name, schema in schemas.items():
        if not schema.is_tensor:
            result[name] = _documents(_joined(parts[name], is_view=True), offsets[name].tolist(), schema.kind)
            continue
        values = landing.place(parts[name]) if landing.is_given else _joined(parts[name], is_view=is_own[name])
        if schema.kind is ColumnKind.DENSE:
            result[name] = values
            continue
        if schema.kind is ColumnKind.TURNS:
            result[name] = _packed_turns(values, turns[name], num_rows)
            continue
        own = offsets[name]
        there = next((there for known, there in distinct if torch.equal(known, own)), None)
        if there is None:
            there = own.to(values.device)
            distinct.append((own, there))
        result[name] = NestedTensor(values, there)
    landing.finish()
    # The constructor looks at the shape of every value, which takes 30 us for each that is nested; these are ours.
    return TensorDict._new_unsafe(source=result, batch_size=torch.Size([num_rows]))  # pyright: ignore


def _privately(columns: Mapping[str, tuple[ColumnSchema, Sequence[Run]]], opened: Opened) -> Opened:
    """Copy a small extent at once, if all of its rows and most of its bytes are asked for."""
    if len(opened) != 1:
        return opened
    [(number, extent)] = opened.items()
    if extent.is_private or len(extent.memory) > _PRIVATE_COPY_BYTES or 2 * len(columns) < len(extent.views):
        return opened
    num_rows = extent.num_rows(next(iter(columns)))
    for runs in {id(r): r for _, r in columns.values()}.values():
        if len(runs) != 1 or runs[0][1] or runs[0][2] != num_rows:
            return opened
    return {number: OpenExtent(memory=copied(extent.memory), is_private=True)}


def _dense(
    name: str, runs: Sequence[Run], opened: Opened, indexes: dict[int, np.ndarray[Any, Any]]
) -> Sequence[torch.Tensor]:
    """The values of all rows, in pieces; `indexes` keeps what columns of the same runs have in common."""
    if len(runs) >= _MANY_RUNS and (picked := _picked(name, runs, opened, indexes)) is not None:
        return [picked]
    parts: list[torch.Tensor] = []
    for extent, start, count in runs:
        held = opened[extent]
        values = held.views[name]
        parts += [_rows(values, first, number) for first, number in held.stretches(name, start, count)]
    return parts


def _picked(
    name: str, runs: Sequence[Run], opened: Opened, indexes: dict[int, np.ndarray[Any, Any]]
) -> torch.Tensor | None:
    """Small rows of one extent, copied together; None where they are large, or lie in several."""
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
    # As bytes, since numpy lacks some dtypes.
    rows = values.reshape(-1).view(torch.uint8).numpy().reshape(len(values), row_nbytes)[index]
    return torch.from_numpy(rows).view(-1).view(values.dtype).view(-1, *values.shape[1:])


def _rows(values: Any, start: int, count: int) -> torch.Tensor:
    return values if count == values.size(0) else values[start : start + count]


def _ragged(
    name: str, runs: Sequence[Run], opened: Opened, *, is_joined: bool
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The values of all rows, in pieces or copied together, and where the rows begin and end in them."""
    if len(runs) == 1:
        [(extent, start, count)] = runs
        if len(stretches := opened[extent].stretches(name, start, count)) == 1:
            [(first, number)] = stretches
            values, offsets = opened[extent].ragged(name)
            begin, end = int(offsets[first]), int(offsets[first + number])
            return [_rows(values, begin, end - begin)], torch.from_numpy(offsets[first : first + number + 1] - begin)
    pieces: list[tuple[int, int, int]] = []
    lengths: list[int] = []
    for extent, start, count in runs:
        bounds = opened[extent].bounds(name)
        for first, number in opened[extent].stretches(name, start, count):
            edges = bounds[first : first + number + 1]
            pieces.append((extent, edges[0], edges[-1]))
            lengths += [b - a for a, b in pairwise(edges)]
    sources = {extent: opened[extent].ragged(name)[0] for extent in {piece[0] for piece in pieces}}
    if is_joined:
        return [_picked_values(pieces, sources)], cumulated(lengths)
    return [_rows(sources[extent], start, stop - start) for extent, start, stop in pieces], cumulated(lengths)


def _picked_values(pieces: Sequence[tuple[int, int, int]], sources: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """A copy of pieces (extent, start, stop) of values."""
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
    """The values of all rows, in pieces, and the lengths of each row's turns."""
    parts: list[torch.Tensor] = []
    lengths: list[list[int]] = []
    for extent, start, count in runs:
        values, turns, offsets = opened[extent].turns(name)
        for first, number in opened[extent].stretches(name, start, count):
            edges = offsets[first : first + number + 1]
            parts.append(_rows(values, turns[edges[0]], turns[edges[-1]] - turns[edges[0]]))
            lengths += [[b - a for a, b in pairwise(turns[a : b + 1])] for a, b in pairwise(edges)]
    return parts, lengths


def _may_view(runs: Sequence[Run], opened: Opened, name: str) -> bool:
    """Whether the answer is most of one private extent: a view of a small part would keep all of it in memory."""
    extent, _, count = runs[0]
    return len(runs) == 1 and opened[extent].is_private and 2 * count >= opened[extent].num_rows(name)


def _joined(parts: Sequence[torch.Tensor], *, is_view: bool) -> torch.Tensor:
    if len(parts) > 1:
        joined = new_memory(sum(part.nbytes for part in parts)).view(parts[0].dtype)
        joined = joined.view(sum(part.size(0) for part in parts), *parts[0].shape[1:])
        lay(parts, joined)
        return joined
    return parts[0] if is_view else copied(parts[0])


def _documents(values: torch.Tensor, bounds: Sequence[int], kind: ColumnKind) -> NonTensorStack:
    text = values.numpy().tobytes()
    documents = [text[start:stop] for start, stop in pairwise(bounds)]
    return NonTensorStack(*(map(json.loads, documents) if kind is ColumnKind.JSON else documents))


def _packed_turns(values: torch.Tensor, lengths: Sequence[Sequence[int]], num_rows: int) -> TensorDict:
    sizes = torch.tensor([length for row in lengths for length in row], dtype=torch.int64, device=values.device)
    rows = cumulated([sum(row) for row in lengths]).to(values.device)
    counts = cumulated([len(row) for row in lengths]).to(values.device)
    packed: dict[str, Any] = {"values": NestedTensor(values, rows), "lengths": NestedTensor(sizes, counts)}
    return TensorDict(packed, batch_size=[num_rows])


def cumulated(lengths: Sequence[int]) -> torch.Tensor:
    """Offsets of rows of these lengths, int64 [B + 1]."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int64), 0, out=offsets[1:])
    return offsets
