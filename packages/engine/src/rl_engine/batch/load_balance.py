"""Which replica of the model computes which rows: agreed by all ranks, moved there, and the results moved back.

Every rank passes its own rows, whatever the layout. Ranks that share one replica of the model all compute the rows of
that replica; rows also move where that makes the replicas' work more even.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from rl_engine.batch.micro_batches import WORTH_MOVING, balance_units
from rl_engine.batch.row_batch import PAIR
from rl_engine.distributed.serialization import decode, encode
from rl_engine.distributed.world import message_device
from rl_engine.errors import BatchError

if TYPE_CHECKING:
    from rl_engine.batch.row_batch import RowBatch
    from rl_engine.distributed.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReplicas:
    """How the ranks share copies of the model."""

    replica_of: tuple[int, ...]
    """By rank, the replica that it is part of."""
    leaders: tuple[int, ...]
    """By replica, the rank that has its results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Where the rows of one logical batch are computed; the same on every rank."""

    replicas: ModelReplicas
    """Of the model."""
    target: tuple[tuple[int, ...], ...]
    """By rank, by row, the replica that computes it."""

    def rows_to(self, rank: int, replica: int) -> list[int]:
        """Rows of `rank` that `replica` computes, in order."""
        return [row for row, target in enumerate(self.target[rank]) if target == replica]


WorkItems = Sequence[tuple[float, Sequence[int]]]
"""The work of rows that go together, and the rows."""


def assign_rows(replicas: ModelReplicas, work: Sequence[tuple[WorkItems, WorkItems]]) -> Assignment | None:
    """Agree on who computes what; None where every rank keeps its rows.

    Args:
        replicas: Of the model.
        work: By rank, its rows cut twice: as it would like to keep them together, and as finely as they may be cut.
            The finer cut is taken where it gains enough to be worth a move.
    """
    coarse, fine = (_Held(replicas, [cuts[way] for cuts in work]) for way in (0, 1))
    best = fine if fine.owners is not None and fine.fullest < WORTH_MOVING * coarse.fullest else coarse
    if best.owners is None and len(replicas.leaders) == len(replicas.replica_of):
        return None
    target = [[replicas.replica_of[rank]] * sum(len(rows) for _, rows in cuts[0]) for rank, cuts in enumerate(work)]
    for mine, owners in zip(best.work_items, best.owners or (), strict=False):
        for (rank, _, rows), owner in zip(mine, owners, strict=True):
            for row in rows:
                target[rank][row] = owner
    return Assignment(replicas=replicas, target=tuple(map(tuple, target)))


class _Held:
    """Parcels by the replica of the model that has them now, and who had better compute them."""

    def __init__(self, replicas: ModelReplicas, by_rank: Sequence[WorkItems]) -> None:
        self.work_items: list[list[tuple[int, float, Sequence[int]]]] = [[] for _ in replicas.leaders]
        for rank, work_items in enumerate(by_rank):
            self.work_items[replicas.replica_of[rank]] += [(rank, cost, rows) for cost, rows in work_items]
        costs = [[cost for _, cost, _ in mine] for mine in self.work_items]
        self.owners = balance_units(costs)
        loads = [0.0] * len(costs)
        for replica, mine in enumerate(costs):
            for index, cost in enumerate(mine):
                loads[replica if self.owners is None else self.owners[replica][index]] += cost
        self.fullest = max(loads)


def send_rows(assignment: Assignment, own: RowBatch, world: World) -> TensorDict:
    """The rows that this rank's replica computes: those of rank 0 first, each rank's in their order. Collective.

    Raises:
        BatchError: rows that meet have different columns.
    """
    parts = {
        replica: own.select(rows)
        for replica in set(assignment.target[world.rank])
        if (rows := assignment.rows_to(world.rank, replica))
    }
    plain = {replica: {str(name): _to_plain(part.get(name)) for name in part.keys()} for replica, part in parts.items()}  # noqa: SIM118 - a TensorDict iterates rows
    arrived = all_to_all(world, [plain.get(replica) for replica in assignment.replicas.replica_of])
    for rank, columns in enumerate(arrived):
        if columns is not None and PAIR in columns:  # each rank numbers its own
            columns[PAIR] = columns[PAIR] * world.size + rank
    found = [columns for columns in arrived if columns is not None]
    differing = next((columns for columns in found if columns.keys() != found[0].keys()), None)
    problems = world.exchange(None if differing is None else (sorted(found[0]), sorted(differing)))
    for problem in problems:
        if problem is not None:
            raise BatchError(f"Ranks passed different columns: {problem[0]} and {problem[1]}. Pass the same ones.")
    if not found:
        return own.select([])
    count = sum(len(assignment.rows_to(rank, assignment.replicas.replica_of[world.rank])) for rank in range(world.size))
    merged = {name: _merge([columns[name] for columns in found]) for name in found[0]}
    return TensorDict(merged, batch_size=[count])  # pyright: ignore[reportArgumentType]


def return_columns(assignment: Assignment, computed: TensorDict | None, own: RowBatch, world: World) -> TensorDict:
    """Per-token results of this rank's own rows, in their order. Collective.

    Args:
        assignment: Which replica computed which.
        computed: This rank's replica's results, in the order of `send_rows`; only speakers need give them.
        own: The rows that this rank passed.
        world: All ranks.
    """
    replica = assignment.replicas.replica_of[world.rank]
    payloads: list[dict[str, Tensor] | None] = [None] * world.size
    if world.rank == assignment.replicas.leaders[replica] and computed is not None and computed.batch_size[0]:
        first = 0
        for rank in range(world.size):
            count = len(assignment.rows_to(rank, replica))
            payloads[rank] = (
                {str(name): _span(column, first, count) for name, column in computed.items()} if count else None
            )  # pyright: ignore[reportCallIssue, reportArgumentType]
            first += count
    arrived: list[Any] = all_to_all(world, payloads)
    rows: list[int] = []
    parts: dict[str, list[Tensor]] = {}
    for replica, leader in enumerate(assignment.replicas.leaders):
        if arrived[leader] is not None:
            rows += assignment.rows_to(world.rank, replica)
            for name, values in arrived[leader].items():
                parts.setdefault(name, []).append(values)
    restored = {name: own.restore(rows, values) for name, values in parts.items()}
    return TensorDict(restored, batch_size=[own.num_rows])  # pyright: ignore[reportArgumentType]


def all_to_all(world: World, payloads: Sequence[Any]) -> list[Any]:
    """All-to-all: send `payloads[r]` to rank r; returns what each rank sent here. Collective.

    Payloads are plain values and tensors, see `rl_engine.distributed.serialization`.

    Raises:
        EngineError: a peer did not answer before the deadline, or went away.
    """
    if world.size == 1:
        return list(payloads)
    place = message_device()
    packed = [b"" if payload is None else encode(payload) for payload in payloads]
    sizes = torch.tensor([len(payload) for payload in packed], device=place)
    incoming = torch.empty_like(sizes)
    sent = torch.frombuffer(bytearray(b"".join(packed)) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())].to(
        place
    )
    with world.together():
        dist.all_to_all_single(incoming, sizes)
        received = torch.empty(int(incoming.sum()), dtype=torch.uint8, device=place)
        dist.all_to_all_single(received, sent, incoming.tolist(), sizes.tolist())
    parts = received.cpu().split(incoming.tolist())
    return [decode(part.numpy().tobytes()) if part.numel() else None for part in parts]


def _to_plain(column: Any) -> Any:
    """Something that travels: values and lengths of a jagged column, a tensor, or a list."""
    if isinstance(column, NonTensorStack):
        return column.tolist()
    if column.is_nested:
        return column.values().cpu(), column.offsets().diff().cpu()
    return column.cpu()


def _merge(parts: list[Any]) -> Any:
    if isinstance(parts[0], list):
        return NonTensorStack(*chain.from_iterable(parts))
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    lengths = torch.cat([lengths for _, lengths in parts])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(torch.cat([values for values, _ in parts]), offsets)


def _span(column: Any, first: int, count: int) -> Tensor:
    """Values of rows `first` to `first + count` of a jagged column, on the CPU."""
    offsets = column.offsets()
    return column.values()[int(offsets[first]) : int(offsets[first + count])].cpu()
