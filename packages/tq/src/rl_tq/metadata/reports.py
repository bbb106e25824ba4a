"""Reports on a store: its counters, and why a claim waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_tq.metadata.checks import few
from rl_tq.policies import Fifo

if TYPE_CHECKING:
    from rl_tq.metadata.ledger import TaskLedger
    from rl_tq.metadata.requests import Claim
    from rl_tq.metadata.rows import Partition
    from rl_tq.metadata.state import State


def explain_claim(state: State, request: Claim) -> str:
    """Reason why a claim waits: ready rows, leases and their holders, missing columns and producers."""
    home = state.partitions.get(request.partition)
    wanted = (
        f"task {request.task!r} wanted {request.batch_size} rows of partition {request.partition!r} with "
        f"{list(request.columns)}" + ("" if isinstance(request.policy, Fifo) else f", chosen by {request.policy}")
    )
    if home is None:
        return f"{wanted}, and nothing was put there; there are {sorted(state.partitions) or 'no partitions'}"
    ledger = state.ledger(home, request.task)
    index = ledger.index(home.rows, request.columns, request.policy)
    needs = frozenset(request.columns)
    lacking = [row for row in home.rows.values() if ledger.is_free(row.number) and not needs <= row.columns]
    clauses = [f"{len(index)} of its {len(home.rows)} rows are ready"]
    if not request.is_claim and len(index) >= request.batch_size:
        clauses[0] += ", among which the sampler did not choose"
    clauses[0] += f", {len(ledger.leased) + len(ledger.acked)} were given to this task before"
    clauses[0] += f", {len(lacking)} are incomplete"
    if why := index.why_waiting():
        clauses.append(why)
    for column in request.columns:
        rows = [row for row in lacking if column not in row.columns]
        if rows:
            owners = sorted({extent.owner for row in rows for extent, _ in row.pieces})
            names = few([row.sample_id for row in rows], 3)
            clauses.append(
                f"{len(rows)} lack {column!r} ({names}; the rest of them was put by {few(owners, 3, quote=False)})"
            )
    if ledger.leased:
        clauses.append(_holders(ledger))
    if ledger.dead:
        clauses.append(f"{len(ledger.dead)} are dead letters ({next(iter(ledger.dead.values()))})")
    if home.dropped:
        clauses.append("dropped so far: " + ", ".join(f"{times} {reason}" for reason, times in home.dropped.items()))
    return f"{wanted}: " + "; ".join(clauses)


def _holders(ledger: TaskLedger) -> str:
    leases = {lease.number: lease for lease in ledger.leased.values()}
    clauses = [
        f"{len(lease.rows)} to {lease.label}" + ("" if lease.lease_s is None else f" for {lease.lease_s} s at a time")
        for lease in list(leases.values())[:3]
    ]
    more = f" and {len(leases) - 3} more" if len(leases) > 3 else ""
    return f"leased and not acked: {', '.join(clauses)}{more}"


def partition_stats(home: Partition) -> dict[str, Any]:
    """Counters of one partition."""
    versions = sorted(home.by_version)
    return {
        "generation": home.generation,
        "rows": len(home.rows),
        "bytes": home.nbytes,
        "columns": {column: str(schema) for column, schema in home.schema.items()},
        "weight_version": home.weight_version,
        "lag": home.weight_version - versions[0] if versions else 0,
        "dropped": dict(home.dropped),
        "consumed": {task: len(ledger.leased) + len(ledger.acked) for task, ledger in home.tasks.items()},
        "tasks": {
            task: {
                "leased": len(ledger.leased),
                "acked": ledger.num_acked,
                "dead": len(ledger.dead),
                "returns": sum(ledger.attempts.values()),
            }
            for task, ledger in home.tasks.items()
        },
        "options": home.options.to_json(),
    }
