"""The extent: what one put writes, k rows of F columns in one block of memory, as an `rl_csrc` frame.

A reader needs nothing but the block: it names its columns and says where each lies. JSON columns are ragged bytes
there; that they are JSON is the server's knowledge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from rl_csrc import frames
from rl_csrc.errors import FrameError
from rl_tq.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_tq._columns import Column

Views: TypeAlias = "Mapping[str, torch.Tensor | frames.Ragged]"
"""Column name to the values of all rows of one extent, sharing its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """An extent that is not written yet."""

    nbytes: int
    """Bytes of the whole block."""
    header: bytes
    """What the block starts with."""
    regions: list[tuple[int, int, Sequence[torch.Tensor]]]
    """Where the block's regions start, their bytes, and the pieces that fill them."""

    def write(self, memory: torch.Tensor) -> None:
        """Copy every column into `memory`, uint8 [nbytes], from whatever device and in whatever strides it is."""
        cursor = len(self.header)
        memory[:cursor].copy_(torch.frombuffer(bytearray(self.header), dtype=torch.uint8))
        for start, nbytes, pieces in self.regions:
            memory[cursor:start].zero_()
            cursor = start + nbytes
            _join([_as_bytes(piece) for piece in pieces], memory[start:cursor])
        memory[cursor:].zero_()


def plan_extent(columns: Mapping[str, Column]) -> Layout:
    """Lay out an extent for `columns`.

    Raises:
        SchemaError: a frame cannot hold one of them (a quantized dtype, for example).
    """
    values: dict[str, Any] = {}
    sources: list[Sequence[torch.Tensor]] = []
    for name, column in columns.items():
        flat = _one_piece(column)
        values[name] = flat if column.offsets is None else (flat, column.offsets)
        sources.append(column.pieces)
        if column.offsets is not None:
            sources.append([column.offsets])
    try:
        frame = frames.encode(values)
    except FrameError as error:
        raise SchemaError(f"columns {sorted(columns)} cannot be stored: {error}") from error
    regions: list[tuple[int, int, Sequence[torch.Tensor]]] = []
    cursor = len(frame.header)
    for buffer, pieces in zip(frame.buffers, sources, strict=True):
        regions.append((cursor, buffer.nbytes, pieces))
        cursor += buffer.nbytes + -buffer.nbytes % frames.ALIGNMENT
    return Layout(nbytes=frame.nbytes, header=bytes(frame.header), regions=regions)


def read_extent(memory: torch.Tensor) -> Views:
    """Views of every column in a block that `Layout.write` filled; checked, whatever the bytes are."""
    return frames.decode(memory)


def _one_piece(column: Column) -> torch.Tensor:
    """A tensor of the column's final shape: the value itself, or memory that is never touched and stands for it."""
    first = column.pieces[0]
    if len(column.pieces) == 1 and first.device.type == "cpu" and first.is_contiguous():
        return first
    return torch.empty((sum(len(piece) for piece in column.pieces), *first.shape[1:]), dtype=first.dtype)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a contiguous CPU tensor in memory of its own."""
    copy = torch.empty_like(tensor)
    _copy(_as_bytes(tensor), _as_bytes(copy))
    return copy


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _join(pieces: list[torch.Tensor], out: torch.Tensor) -> None:
    start = 0
    for piece in pieces:
        end = start + len(piece)
        _copy(piece, out[start:end])
        start = end


def _copy(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy bytes on this thread alone, without the GIL.

    torch would share the work among its threads, which gains little for a copy and costs much when other processes keep
    the cores busy: each call then waits for the thread that got no core.
    """
    if source.device.type == "cpu":
        out.numpy()[:] = source.numpy()
    else:
        out.copy_(source)
