"""Extents: the memory block that one put writes, k rows of F columns as one `rl_csrc` frame.

The block is self-describing. JSON columns are ragged bytes in it; only the server's schema says that they are JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import torch

from rl_csrc import frames, rows
from rl_csrc.errors import FrameError
from rl_tq.columns.encode import INDEX
from rl_tq.errors import SchemaError
from rl_tq.memory.pool import new_memory

if TYPE_CHECKING:
    import numpy as np

    from rl_tq.columns.encode import Column
    from rl_tq.columns.locations import Run
    from rl_tq.columns.schema import ColumnSchema

Views: TypeAlias = "dict[str, torch.Tensor | frames.Ragged]"
"""Column name to the values of all rows of one extent, as views of its memory."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Layout of an extent that is not written yet."""

    nbytes: int
    """Bytes of the whole block."""
    frame: frames.Frame
    """Encoded frame: the header, and references to columns that are one contiguous piece on the CPU."""
    is_whole: bool
    """Whether the frame refers to the memory of every column."""
    regions: list[tuple[int, int, Sequence[torch.Tensor]]]
    """Start, size in bytes, and pieces of each region of the block. Empty if the frame is whole."""

    def write(self, block: torch.Tensor | np.ndarray[Any, Any]) -> None:
        """Copy every column into `block`, uint8 [nbytes], from any device and any strides."""
        if self.is_whole:
            self.frame.write_into(block)
            return
        memory = block if isinstance(block, torch.Tensor) else torch.from_numpy(block)
        cursor = len(self.frame.header)
        memory[:cursor].copy_(torch.frombuffer(bytearray(self.frame.header), dtype=torch.uint8))
        for start, nbytes, pieces in self.regions:
            memory[cursor:start].zero_()
            cursor = start + nbytes
            lay(pieces, memory[start:cursor])
        memory[cursor:].zero_()


def plan_extent(columns: Mapping[str, Column]) -> Layout:
    """Layout of an extent for `columns`.

    Raises:
        SchemaError: a frame cannot hold one of them (a quantized dtype, for example).
    """
    values: dict[str, Any] = {}
    is_whole = True
    for name, column in columns.items():
        flat, is_it = _one_piece(column)
        is_whole = is_whole and is_it
        rows = flat if column.turns is None else (flat, column.turns)
        values[name] = rows if column.offsets is None else (rows, column.offsets)
        if column.index is not None:
            values[name + INDEX] = column.index
    try:
        frame = frames.encode(values)
    except FrameError as error:
        raise SchemaError(f"columns {sorted(columns)} cannot be stored: {error}") from error
    return Layout(
        nbytes=frame.nbytes, frame=frame, is_whole=is_whole, regions=[] if is_whole else _regions(frame, columns)
    )


def _regions(frame: frames.Frame, columns: Mapping[str, Column]) -> list[tuple[int, int, Sequence[torch.Tensor]]]:
    sources: list[Sequence[torch.Tensor]] = []
    for column in columns.values():
        sources.append(column.pieces)
        sources += [[each] for each in (column.turns, column.offsets, column.index) if each is not None]
    regions: list[tuple[int, int, Sequence[torch.Tensor]]] = []
    cursor = len(frame.header)
    for buffer, pieces in zip(frame.buffers, sources, strict=True):
        regions.append((cursor, buffer.nbytes, pieces))
        cursor += buffer.nbytes + -buffer.nbytes % frames.ALIGNMENT
    return regions


def _one_piece(column: Column) -> tuple[torch.Tensor, bool]:
    """Tensor of the column's final shape: the value itself (True), or an unwritten placeholder (False)."""
    first = column.pieces[0]
    if (
        len(column.pieces) == 1
        and first.is_cpu
        and first.is_contiguous()
        and not first.is_neg()
        and not first.is_conj()
    ):
        return first, True
    ends = column.turns if column.turns is not None else column.offsets
    num_values = sum(map(len, column.pieces)) if ends is None else int(ends[-1])
    return torch.empty((num_values, *first.shape[1:]), dtype=first.dtype), False


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a contiguous CPU tensor in separate memory."""
    copy = new_memory(tensor.nbytes)
    lay([tensor], copy)
    if tensor.dtype is torch.uint8 and tensor.dim() == 1:  # usually a whole extent
        return copy
    return copy.view(tensor.dtype).view(tensor.shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View of a contiguous tensor as uint8 [n]; of a copy if it is not contiguous."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    # A single value is contiguous with any stride, but a view as bytes needs stride 1.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def lay(pieces: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Concatenate pieces of any device and strides in `out`, contiguous and of the same size in bytes."""
    if rows.join([*pieces], out):
        return
    out = as_bytes(out)
    start = 0
    for piece in map(as_bytes, pieces):
        end = start + len(piece)
        copy_bytes(piece, out[start:end])
        start = end


def copy_bytes(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy uint8 tensors in this thread only, without the GIL.

    torch would use its thread pool, which gains little for a copy and costs much when other processes keep the cores
    busy: each call then waits for a thread that got no core.
    """
    if source.device.type == "cpu":
        out.numpy()[:] = source.numpy()
    else:
        out.copy_(source)


@dataclass(slots=True, kw_only=True)
class ExtentView:
    """Readable extent: its memory, and views of its columns made on first use."""

    memory: torch.Tensor
    """The whole extent, uint8 [n]."""
    is_private: bool
    """Whether writes to this memory are private, so that views of it can be returned to the caller."""
    _views: Views | None = None
    _has_shared: bool = False
    """Whether rows of any column share values."""
    _ragged: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict[str, tuple[torch.Tensor, torch.Tensor]]
    )
    """Cache of values and offsets of ragged columns."""
    _bounds: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """Cache of offsets as lists."""

    @property
    def views(self) -> Views:
        """Views of all columns."""
        if self._views is None:
            self._views = frames.decode(self.memory).to_dict()  # checks the bytes
            self._has_shared = any(INDEX in name for name in self._views)
        return self._views

    def ragged(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and offsets (int64 [rows + 1]) of a ragged column."""
        if name not in self._ragged:
            column = self.views[name]
            assert isinstance(column, frames.Ragged)
            assert isinstance(column.values, torch.Tensor)
            self._ragged[name] = (column.values, column.offsets.long())
        return self._ragged[name]

    def bounds(self, name: str) -> list[int]:
        """Offsets of a ragged column, as a list."""
        if name not in self._bounds:
            self._bounds[name] = self.ragged(name)[1].tolist()
        return self._bounds[name]

    def turns(self, name: str) -> tuple[torch.Tensor, list[int], list[int]]:
        """Values of a column of turns, offsets of the turns, and offsets of the rows into these."""
        column = self.views[name]
        assert isinstance(column, frames.Ragged)
        assert isinstance(column.values, frames.Ragged)
        assert isinstance(column.values.values, torch.Tensor)
        return column.values.values, column.values.offsets.tolist(), column.offsets.tolist()

    def spans(self, name: str, start: int, count: int) -> list[tuple[int, int]]:
        """Spans (first, number) of the values of `count` rows from `start` on, through the index of a shared column."""
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
        """Number of rows that the extent was written with."""
        column = self.views[name + INDEX] if name + INDEX in self.views else self.views[name]
        return column.offsets.size(0) - 1 if isinstance(column, frames.Ragged) else column.size(0)


Opened: TypeAlias = Mapping[int, ExtentView]
LocatedColumns: TypeAlias = "Mapping[str, tuple[ColumnSchema, Sequence[Run]]]"
"""Column name to its schema, and the runs of extents that hold the rows of a batch."""
