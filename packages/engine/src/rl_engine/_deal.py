"""Which copy of the model computes which rows: agreed by all ranks, moved there, and the results moved back.

Every rank passes its own rows, whatever the layout. Ranks that share one copy of the model all compute the rows of that
copy; rows also move where that makes the copies' work more even.
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

from rl_engine._distributed import message_device
from rl_engine._plan import WORTH_MOVING, deal_units
from rl_engine._rows import PAIR
from rl_engine._serial import decode, encode
from rl_engine.errors import BatchError

if TYPE_CHECKING:
    from rl_engine._distributed import World
    from rl_engine._rows import RowBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """How the ranks share copies of the model."""

    copy_of: tuple[int, ...]
    """By rank, the copy that it is part of."""
    speakers: tuple[int, ...]
    """By copy, the rank that has its results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """Where the rows of one logical batch are computed; the same on every rank."""

    copies: Copies
    """Of the model."""
    target: tuple[tuple[int, ...], ...]
    """By rank, by row, the copy that computes it."""

    def rows_to(self, rank: int, copy: int) -> list[int]:
        """Rows of `rank` that `copy` computes, in order."""
        return [row for row, target in enumerate(self.target[rank]) if target == copy]


Parcels = Sequence[tuple[float, Sequence[int]]]
"""The work of rows that go together, and the rows."""


def deal_rows(copies: Copies, work: Sequence[tuple[Parcels, Parcels]]) -> Deal | None:
    """Agree on who computes what; None where every rank keeps its rows.

    Args:
        copies: Of the model.
        work: By rank, its rows cut twice: as it would like to keep them together, and as finely as they may be cut.
            The finer cut is taken where it gains enough to be worth a move.
    """
    coarse, fine = (_Held(copies, [cuts[way] for cuts in work]) for way in (0, 1))
    best = fine if fine.owners is not None and fine.fullest < WORTH_MOVING * coarse.fullest else coarse
    if best.owners is None and len(copies.speakers) == len(copies.copy_of):
        return None
    target = [[copies.copy_of[rank]] * sum(len(rows) for _, rows in cuts[0]) for rank, cuts in enumerate(work)]
    for mine, owners in zip(best.parcels, best.owners or (), strict=False):
        for (rank, _, rows), owner in zip(mine, owners, strict=True):
            for row in rows:
                target[rank][row] = owner
    return Deal(copies=copies, target=tuple(map(tuple, target)))


class _Held:
    """Parcels by the copy of the model that has them now, and who had better compute them."""

    def __init__(self, copies: Copies, by_rank: Sequence[Parcels]) -> None:
        self.parcels: list[list[tuple[int, float, Sequence[int]]]] = [[] for _ in copies.speakers]
        for rank, parcels in enumerate(by_rank):
            self.parcels[copies.copy_of[rank]] += [(rank, cost, rows) for cost, rows in parcels]
        costs = [[cost for _, cost, _ in mine] for mine in self.parcels]
        self.owners = deal_units(costs)
        loads = [0.0] * len(costs)
        for copy, mine in enumerate(costs):
            for index, cost in enumerate(mine):
                loads[copy if self.owners is None else self.owners[copy][index]] += cost
        self.fullest = max(loads)


def send_rows(deal: Deal, own: RowBatch, world: World) -> TensorDict:
    """The rows that this rank's copy computes: those of rank 0 first, each rank's in their order. Collective.

    Raises:
        BatchError: rows that meet have different columns.
    """
    parts = {
        copy: own.select(rows) for copy in set(deal.target[world.rank]) if (rows := deal.rows_to(world.rank, copy))
    }
    plain = {copy: {str(name): _to_plain(part.get(name)) for name in part.keys()} for copy, part in parts.items()}  # noqa: SIM118 - a TensorDict iterates rows
    arrived = trade(world, [plain.get(copy) for copy in deal.copies.copy_of])
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
    count = sum(len(deal.rows_to(rank, deal.copies.copy_of[world.rank])) for rank in range(world.size))
    merged = {name: _merge([columns[name] for columns in found]) for name in found[0]}
    return TensorDict(merged, batch_size=[count])  # pyright: ignore[reportArgumentType]


def return_columns(deal: Deal, computed: TensorDict | None, own: RowBatch, world: World) -> TensorDict:
    """Per-token results of this rank's own rows, in their order. Collective.

    Args:
        deal: Which copy computed which.
        computed: This rank's copy's results, in the order of `send_rows`; only speakers need give them.
        own: The rows that this rank passed.
        world: All ranks.
    """
    copy = deal.copies.copy_of[world.rank]
    parcels: list[dict[str, Tensor] | None] = [None] * world.size
    if world.rank == deal.copies.speakers[copy] and computed is not None and computed.batch_size[0]:
        first = 0
        for rank in range(world.size):
            count = len(deal.rows_to(rank, copy))
            parcels[rank] = (
                {str(name): _span(column, first, count) for name, column in computed.items()} if count else None
            )  # pyright: ignore[reportCallIssue, reportArgumentType]
            first += count
    arrived: list[Any] = trade(world, parcels)
    rows: list[int] = []
    parts: dict[str, list[Tensor]] = {}
    for copy, speaker in enumerate(deal.copies.speakers):
        if arrived[speaker] is not None:
            rows += deal.rows_to(world.rank, copy)
            for name, values in arrived[speaker].items():
                parts.setdefault(name, []).append(values)
    restored = {name: own.restore(rows, values) for name, values in parts.items()}
    return TensorDict(restored, batch_size=[own.num_rows])  # pyright: ignore[reportArgumentType]


def trade(world: World, parcels: Sequence[Any]) -> list[Any]:
    """Send `parcels[r]` (plain values and tensors, see `_serial`) to rank r; what each rank sent here. Collective.

    Raises:
        EngineError: a peer did not answer before the deadline, or went away.
    """
    if world.size == 1:
        return list(parcels)
    place = message_device()
    packed = [b"" if parcel is None else encode(parcel) for parcel in parcels]
    sizes = torch.tensor([len(parcel) for parcel in packed], device=place)
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
