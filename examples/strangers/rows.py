"""Rows of the stranger's queue: columns are cut into cells when they are put, and joined when they are fetched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import NonTensorStack

from rl_tq.errors import QueueFullError, SchemaError, StaleVersionError
from rl_tq.types import BatchMeta, Credit, PerGroup, Policy, RowMeta
from rl_tq.types.policy import ReadyRows
from rl_tq.types.staleness import ADMITTED, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Cell(NamedTuple):
    """Value of one row in one column."""

    value: Any
    is_ragged: bool
    """Whether rows of the column may differ in length."""


@dataclass(eq=False)
class Row:
    """A row, as policies see it, and its state for each task."""

    number: int
    partition: str
    cells: dict[str, Cell] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)
    """Lease by task; 0: a dead letter."""
    acked: dict[str, int] = field(default_factory=dict)
    """Training step by task."""
    num_returns: int = 0

    @property
    def sample_id(self) -> str:
        return f"row{self.number}"

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(self.cells)

    @property
    def group(self) -> Any:
        return self.tags.get("group_id")

    @property
    def version(self) -> int | None:
        return self.tags.get("weight_version_min")


def fill(rows: Sequence[Row], data: Mapping[str, Any], tags: Sequence[Mapping[str, Any]] | None) -> BatchMeta:
    """Give rows their tags and cells; returns the reference."""
    for row, more in zip(rows, tags or ({},) * len(rows), strict=True):
        row.tags |= more
    for name, column in data.items():
        cells = cells_of(column, [row.group for row in rows])
        if len(cells) != len(rows) or any(name in row.cells for row in rows):
            raise SchemaError(f"{name!r} has {len(cells)} values for {len(rows)} rows, or they have it already")
        for row, cell in zip(rows, cells, strict=True):
            row.cells[name] = cell
    return reference(rows, data.keys())


def reference(rows: Sequence[Row], columns: Any, **claim: Any) -> BatchMeta:
    return BatchMeta(
        partition=rows[0].partition,
        sample_ids=tuple(row.sample_id for row in rows),
        columns=tuple(columns),
        tags=tuple(dict(row.tags) for row in rows),
        rows=tuple(row.number for row in rows),
        **claim,
    )


def choose(ready: Sequence[Row], count: int, sampler: Policy | Callable[..., Any] | None) -> list[Row]:
    """Rows of a claim, oldest first unless an index, a policy or a function chooses; none: it has to wait."""
    if isinstance(sampler, Policy):
        sampler = indexed(sampler, ready)
    if isinstance(sampler, ReadyRows):
        by_number = {row.number: row for row in ready}
        return [by_number[number] for number in sampler.take(count) or ()]
    seen = [RowMeta(sample_id=row.sample_id, tags=row.tags) for row in ready]
    places = sampler(seen, count) if sampler else range(count if len(ready) >= count else 0)
    return [ready[place] for place in places or ()]


def indexed(policy: Policy, rows: Sequence[Row]) -> Any:
    index = policy.make_index(tuple)
    for row in rows:
        index.add(row)
    return index


def outstanding(queue: Any, partition: str, rows: Sequence[Row]) -> Any:
    """Outstanding groups of a partition: those with a credit, and the finished ones that no claim took."""
    options, given = queue.options[partition], queue.credits.values()
    if options.staleness is None:
        return None
    index = indexed(options.staleness, [row for row in rows if options.tasks[0] not in row.leases])
    index.in_flight = {each.group_id: each.weight_version for each in given if each.partition == partition}
    index.version = queue.versions[partition]
    return index


def spend(credit: Credit | Sequence[Credit], known: dict[int, Credit], tags: Any, groups: Any) -> Any:
    """Spend credits; returns the tags of the rows, with the version of the admission of each one's group."""
    used = [credit] if isinstance(credit, Credit) else credit
    if any(each.number not in known for each in used):
        raise QueueFullError("a credit has ended: it is used up or was released")
    since = {each.group_id: each.weight_version for each in used}
    if groups is not None and used:
        for tag in tags:
            span = Span(admitted=since[tag["group_id"]], oldest=tag["weight_version_min"])
            if groups.is_late(span, tag["group_id"]):
                raise StaleVersionError(f"group {tag['group_id']} is too old")
        tags = [{**tag, ADMITTED: since[tag["group_id"]]} for tag in tags]
    for each in used:
        del known[each.number]
    return tags


def cells_of(column: Any, groups: Sequence[Any]) -> list[Cell]:
    """Cells of a column that is put, by row; `groups` has the group of each row."""
    if isinstance(column, PerGroup):
        own = dict(zip(dict.fromkeys(groups), cells_of(column.values, ()), strict=True))
        return [own[group] for group in groups]
    if isinstance(column, torch.Tensor):
        return [Cell(row.clone(), column.is_nested) for row in column.unbind()]
    return [Cell(row, isinstance(row, torch.Tensor)) for row in column]


def column_of(cells: Sequence[Cell]) -> Any:
    """Column that a get returns."""
    values = [cell.value for cell in cells]
    if not isinstance(values[0], torch.Tensor):
        return NonTensorStack(*values)
    if not cells[0].is_ragged:
        return torch.stack(values)
    offsets = torch.tensor([0, *map(len, values)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(values), offsets)
