"""Values that rows of a group share over several puts: a later row refers to what a mate of its group already has.

It does so by an extent of its own number, over the same memory, that has the shared columns alone: clears, moves and
reads need not know.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rl_tq._checks import few
from rl_tq.errors import MissingDataError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_tq._requests import Put
    from rl_tq._rows import Extent, Partition, Row
    from rl_tq._state import State


def check(put: Put, home: Partition | None, existing: Sequence[Row | None]) -> None:
    """Raise what keeps rows of a put from sharing columns with their groups.

    Raises:
        SchemaError: a row has no group.
        MissingDataError: nobody of its group has such a column.
    """
    for name in put.shared:
        lacking: dict[str, None] = {}
        for i in range(put.num_rows):
            tags = put.tags[i] if put.tags else {}
            row = existing[i] if existing else None
            group = tags.get("group_id", row.group if row else None)
            if group is None:
                raise SchemaError(
                    f"column {name!r} is that of each row's group, and a row has no tag 'group_id': tag all of them"
                )
            if home is None or not any(name in home.rows[mate].columns for mate in home.by_group.get(group, ())):
                lacking[repr(group)] = None
        if lacking:
            raise MissingDataError(
                f"no row of {len(lacking)} groups of partition {put.partition!r} has {name!r} "
                f"({few([*lacking], quote=False)}): put its values, PerGroup(values), with the first rows of a group"
            )


def lend(state: State, home: Partition, put: Put, rows: Sequence[Row], alias: Callable[[int], int]) -> None:
    """Have rows that were just put refer to what their groups have; `alias(extent)` numbers the same memory anew."""
    places: defaultdict[tuple[int, frozenset[str]], list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        wanted = frozenset(put.shared)
        found: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        for name in wanted:
            extent, index = _lender(home, row, name, wanted)
            found[extent.number, index].add(name)
        for (number, index), names in found.items():
            places[number, frozenset(names)].append((row.number, index))
    for (number, names), borrowers in places.items():
        is_whole = state.extents[number].columns == names
        extent = number if is_whole else alias(number)
        state.share(home.name, extent, number, sorted(names), *map(list, zip(*borrowers, strict=True)))


def _lender(home: Partition, row: Row, name: str, wanted: frozenset[str]) -> tuple[Extent, int]:
    """Who has a column for a row's group; of several, one that has nothing else in the same extent."""
    found: tuple[Extent, int] | None = None
    for mate in home.by_group[row.group]:
        for extent, index in home.rows[mate].pieces:
            if name in extent.columns:
                found = extent, index
                if extent.columns <= wanted:
                    return found
    assert found is not None
    return found
