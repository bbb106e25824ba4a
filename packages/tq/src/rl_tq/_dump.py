"""A whole state as the records of changes that make it: what a snapshot holds, and what a long journal becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_tq._schema import ColumnSchema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rl_tq._rows import Partition, Row
    from rl_tq._state import Record, State


def dump(state: State) -> Iterator[Record]:
    """Records that make this state out of an empty one."""
    for name, options in state.options.items():
        yield ["configure", name, options.to_json()]
    for name, version in state.versions.items():
        yield ["advance", name, version]
    holders: dict[int, list[tuple[Row, int]]] = {number: [] for number in state.extents}
    homes: dict[int, Partition] = {}
    for name, home in state.partitions.items():
        yield ["open", name, home.generation]
        yield ["note_schema", name, {column: schema.to_json() for column, schema in home.schema.items()}]
        for row in home.rows.values():
            for extent, index in row.pieces:
                holders[extent.number].append((row, index))
                homes[extent.number] = home
    for number in sorted(holders):
        extent, rows = state.extents[number], holders[number]
        home = homes[number]
        schema = {column: home.schema[column].to_json() for column in extent.columns}
        yield [
            "put", home.name, number, schema, extent.nbytes, extent.num_rows, extent.owner,
            [index for _, index in rows], [row.number for row, _ in rows], [row.sample_id for row, _ in rows],
            [dict(row.tags) for row, _ in rows], extent.is_spilled,
        ]  # fmt: skip
    for name, home in state.partitions.items():
        for task, ledger in home.tasks.items():
            groups = [[group, times] for group, times in ledger.acked_groups.items()]
            yield [
                "note_ledger", name, task, sorted([n, *ack] for n, ack in ledger.acked.items()),
                sorted(ledger.dead.items()), sorted(ledger.attempts.items()), groups,
                sorted(ledger.cleared.items()), ledger.num_acked,
                sorted(ledger.returned),
            ]  # fmt: skip
        yield ["note_dropped", name, dict(home.dropped)]
    for lease in state.leases.values():
        yield [
            "lease", lease.partition, lease.task, lease.number, sorted(lease.rows), lease.lease_s, lease.is_grouped
        ]  # fmt: skip
    yield ["note_numbers", state.next_row, state.next_generation, state.next_lease]


# Records of what no change says alone


def note_schema(state: State, partition: str, schema: Mapping[str, list[Any]]) -> None:
    """Columns, those that no row has now among them."""
    state.partitions[partition].schema = {name: ColumnSchema.from_json(value) for name, value in schema.items()}


def note_ledger(
    state: State,
    partition: str,
    task: str,
    acked: Sequence[Sequence[int]],
    dead: Sequence[Any],
    attempts: Sequence[tuple[int, int]],
    groups: Sequence[Any],
    cleared: Sequence[tuple[int, int]],
    num_acked: int,
    returned: Sequence[int],
) -> None:
    """What a task consumed."""
    ledger = state.ledger(state.partitions[partition], task)
    ledger.acked = {number: (step, lease) for number, step, lease in acked}
    ledger.dead = dict(dead)
    ledger.attempts = dict(attempts)
    ledger.acked_groups.update(dict(groups))
    ledger.cleared.update(dict(cleared))
    ledger.num_acked = num_acked
    ledger.returned = set(returned)


def note_dropped(state: State, partition: str, dropped: Mapping[str, int]) -> None:
    """Counters."""
    state.partitions[partition].dropped.update(dropped)


def note_numbers(state: State, next_row: int, next_generation: int, next_lease: int) -> None:
    """The end of a dump: what was given before, and must not be given again."""
    for home in state.partitions.values():
        numbers = sorted(home.rows)  # extents may be numbered in another order than their rows
        if numbers != list(home.rows):
            home.rows = {number: home.rows[number] for number in numbers}
    state.next_row, state.next_generation, state.next_lease = next_row, next_generation, next_lease


NOTES: dict[str, Callable[..., None]] = {
    each.__name__: each for each in (note_schema, note_ledger, note_dropped, note_numbers)
}
"""By the names that records call them."""
