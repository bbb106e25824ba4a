"""What is left of extents, laid out as one new extent."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from rl_tq._columns import Column
from rl_tq._extent import Layout, plan_extent
from rl_tq._gather import Collected, collect, cumulated
from rl_tq._schema import ColumnKind

if TYPE_CHECKING:
    from rl_tq._opened import LocatedColumns, Opened
    from rl_tq._schema import ColumnSchema


def rewritten(columns: LocatedColumns, opened: Opened, num_rows: int) -> Layout:
    """An extent of these rows. Values that rows share are laid out for each: it may be larger than what there was."""
    collected = collect(columns, opened)
    return plan_extent({name: _column(name, schema, collected, num_rows) for name, (schema, _) in columns.items()})


def _column(name: str, schema: ColumnSchema, collected: Collected, num_rows: int) -> Column:
    bounds = collected.bounds.get(name)
    offsets, turns = None if bounds is None else bounds.offsets, None
    if schema.kind is ColumnKind.TURNS:
        lengths = collected.turns[name]
        offsets, turns = cumulated([len(row) for row in lengths]), cumulated(list(chain.from_iterable(lengths)))
    return Column(schema=schema, num_rows=num_rows, pieces=collected.parts[name], offsets=offsets, turns=turns)
