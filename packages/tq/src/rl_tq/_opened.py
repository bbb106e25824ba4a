"""An extent that this process can read: its columns, looked up once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch

from rl_csrc import frames
from rl_tq._columns import INDEX
from rl_tq._extent import read_extent

if TYPE_CHECKING:
    from rl_tq._extent import Views
    from rl_tq._rows import Run
    from rl_tq._schema import ColumnSchema


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
    _ragged: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict[str, tuple[torch.Tensor, torch.Tensor]]
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

    def ragged(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The values and offsets (int64 [rows + 1]) of a ragged column."""
        if name not in self._ragged:
            column = self.views[name]
            assert isinstance(column, frames.Ragged)
            assert isinstance(column.values, torch.Tensor)
            self._ragged[name] = (column.values, column.offsets.long())
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
        return column.offsets.size(0) - 1 if isinstance(column, frames.Ragged) else column.size(0)


Opened: TypeAlias = Mapping[int, OpenExtent]
LocatedColumns: TypeAlias = "Mapping[str, tuple[ColumnSchema, Sequence[Run]]]"
"""Column name to its schema, and where the rows of a batch lie in extents."""
