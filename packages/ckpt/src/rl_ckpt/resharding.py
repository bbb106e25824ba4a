"""From one sharding to another without gathering: which slice of which rank's shard goes to which rank.

The plan is computed once, from the `ShardSpec`s of all ranks of both sides, and is the same wherever it is computed.
Then every pair of ranks that has something to exchange has a session of its own, and moves its slices over it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from rl_ckpt.errors import TensorError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from rl_ckpt.types import ShardSpec

Box: TypeAlias = tuple[tuple[int, int], ...]
"""(first, behind the last) along each axis, in the coordinates of the whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One slice on its way from one rank to another."""

    source: ShardSpec
    """The shard that it is cut from."""
    target: ShardSpec
    """The shard that it is a part of."""
    box: Box
    """What it is of the whole tensor."""

    @property
    def name(self) -> str:
        """Under which the slice travels: `name[first:end,...]`; no other of the same pair has it."""
        return f"{self.source.name}[{','.join(f'{first}:{end}' for first, end in self.box)}]"

    @property
    def num_elements(self) -> int:
        """Size of the slice."""
        return _volume(self.box)


class Resharding:
    """The plan that joins two shardings. Each rank of the target gets every element of its shards exactly once.

    Args:
        sources: For each rank of the source, what it holds. Ranks may hold the same or overlapping parts; an element is
            then taken from one of them, so that all have about equally much to send.
        targets: For each rank of the target, what it wants.

    Raises:
        TensorError: a part that is wanted is held by nobody, or the two sides disagree about the shape of a tensor.
    """

    def __init__(self, sources: Sequence[Sequence[ShardSpec]], targets: Sequence[Sequence[ShardSpec]]) -> None:
        self._moves: dict[tuple[int, int], list[Move]] = {}
        self._holders: dict[str, dict[Box, list[tuple[int, ShardSpec]]]] = {}
        self._load = [0] * len(sources)
        for rank, specs in enumerate(sources):
            for spec in specs:
                if 0 not in spec.sizes:
                    self._holders.setdefault(spec.name, {}).setdefault(_box(spec), []).append((rank, spec))
        for rank, specs in enumerate(targets):
            for spec in specs:
                self._join(rank, spec)

    def moves(self, source: int, target: int) -> Sequence[Move]:
        """What goes from one rank to another, in the order of the target's shards."""
        return tuple(self._moves.get((source, target), ()))

    def targets_of(self, source: int) -> list[int]:
        """The ranks that a rank of the source sends to, ascending."""
        return sorted(target for rank, target in self._moves if rank == source)

    def sources_of(self, target: int) -> list[int]:
        """The ranks that a rank of the target receives from, ascending."""
        return sorted(source for source, rank in self._moves if rank == target)

    def outgoing(self, source: int, target: int, shards: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The slices to send from one rank to another: what `send_weights` takes.

        Args:
            source: Rank of the source.
            target: Rank of the target.
            shards: The local tensors of that source, by name.

        Raises:
            TensorError: a local tensor is missing, or has another shape than its `ShardSpec` says.
        """
        for move in self.moves(source, target):
            yield move.name, _slice(shards, move.source, move.box)

    def incoming(self, source: int, target: int, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Where the same slices belong, as views of the target's local tensors: what `receive_into` takes.

        Raises:
            TensorError: as `outgoing`.
        """
        return {move.name: _slice(shards, move.target, move.box) for move in self.moves(source, target)}

    def _join(self, rank: int, target: ShardSpec) -> None:
        wanted = [] if 0 in target.sizes else [_box(target)]
        for box, holders in self._holders.get(target.name, {}).items():
            if holders[0][1].shape != target.shape:
                raise TensorError(
                    f"{target.name!r} is {target.shape} for rank {rank} of the target and {holders[0][1].shape} for "
                    f"rank {holders[0][0]} of the source"
                )
            left: list[Box] = []
            for want in wanted:
                common = _common(want, box)
                if common is None:
                    left.append(want)
                else:
                    self._assign(common, holders, rank, target)
                    left += _without(want, common)
            wanted = left
        if wanted:
            raise TensorError(f"no rank of the source holds {target.name!r} at {wanted[0]}, which target {rank} wants")

    def _assign(self, box: Box, holders: Sequence[tuple[int, ShardSpec]], rank: int, target: ShardSpec) -> None:
        source, spec = min(holders, key=lambda holder: (self._load[holder[0]], holder[0]))
        self._load[source] += _volume(box)
        self._moves.setdefault((source, rank), []).append(Move(source=spec, target=target, box=box))


def _box(spec: ShardSpec) -> Box:
    return tuple((start, start + size) for start, size in zip(spec.offsets, spec.sizes, strict=True))


def _volume(box: Box) -> int:
    return math.prod(end - first for first, end in box)


def _common(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return box if all(first < end for first, end in box) else None


def _without(whole: Box, part: Box) -> list[Box]:
    """The rest of a box without a box inside it, as boxes that do not overlap."""
    rest: list[Box] = []
    for axis, ((first, end), (part_first, part_end)) in enumerate(zip(whole, part, strict=True)):
        before, out_of_date = part[:axis], whole[axis + 1 :]
        if first < part_first:
            rest.append((*before, (first, part_first), *out_of_date))
        if part_end < end:
            rest.append((*before, (part_end, end), *out_of_date))
    return rest


def _slice(shards: Mapping[str, Tensor], spec: ShardSpec, box: Box) -> Tensor:
    shard = shards.get(spec.name)
    if shard is None or tuple(shard.shape) != spec.sizes:
        found = "is missing" if shard is None else f"has shape {tuple(shard.shape)}"
        raise TensorError(f"the local tensor of {spec.name!r} {found}; its ShardSpec says {spec.sizes}")
    local = tuple(slice(first - start, end - start) for (first, end), start in zip(box, spec.offsets, strict=True))
    return shard.detach()[local]
