"""A whole state as the records of changes that make it: what a snapshot holds, and what a long journal becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

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
