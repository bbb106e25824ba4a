"""Resharding plan without a gather: which slice of which source rank's shard goes to which target rank.

The plan is a deterministic function of the `ShardSpec`s of all ranks of both sides. Every pair of ranks that exchanges
slices has a session of its own.
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
"""(start, end) along each axis, in coordinates of the whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Slice that moves from one rank to another."""

    source: ShardSpec
    """Source shard."""
    target: ShardSpec
    """Target shard."""
    box: Box
    """Position of the slice in the whole tensor."""

    @property
    def name(self) -> str:
        """Name of the slice in the transfer: `name[start:end,...]`, unique for a pair of ranks."""
        return f"{self.source.name}[{','.join(f'{first}:{end}' for first, end in self.box)}]"

    @property
    def num_elements(self) -> int:
        """Number of elements of the slice."""
        return volume(self.box)


class Resharding:
    """Resharding plan between two shardings: each target rank gets every element of its shards exactly once.

    Args:
        sources: Shards that each source rank holds. Ranks may hold equal or overlapping parts; an element is then taken
            from one of them, with the load balanced.
        targets: Shards that each target rank wants.

    Raises:
        TensorError: no source holds a wanted part, or the two sides have different shapes for a tensor.
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
        """Slices from one rank to another, in the order of the target's shards."""
        return tuple(self._moves.get((source, target), ()))

    def targets_of(self, source: int) -> list[int]:
        """Target ranks that a source rank sends to, ascending."""
        return sorted(target for rank, target in self._moves if rank == source)

    def outgoing(self, source: int, target: int, shards: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Slices to send from one rank to another, in the form that `send_weights` takes.

        Raises:
            TensorError: a local tensor is missing, or has another shape than its `ShardSpec` says.
        """
        for move in self.moves(source, target):
            yield move.name, _slice(shards, move.source, move.box)

    def incoming(self, source: int, target: int, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same slices as views of the target's local tensors, in the form that `receive_into` takes.

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
                shared = common(want, box)
                if shared is None:
                    left.append(want)
                else:
                    self._assign(shared, holders, rank, target)
                    left += _without(want, shared)
            wanted = left
        if wanted:
            raise TensorError(f"no rank of the source holds {target.name!r} at {wanted[0]}, which target {rank} wants")

    def _assign(self, box: Box, holders: Sequence[tuple[int, ShardSpec]], rank: int, target: ShardSpec) -> None:
        source, spec = min(holders, key=lambda holder: (self._load[holder[0]], holder[0]))
        self._load[source] += volume(box)
        self._moves.setdefault((source, rank), []).append(Move(source=spec, target=target, box=box))


def _box(spec: ShardSpec) -> Box:
    return tuple((start, start + size) for start, size in zip(spec.offsets, spec.sizes, strict=True))


def volume(box: Box) -> int:
    """Number of elements of a box."""
    return math.prod(end - first for first, end in box)


def common(one: Box, other: Box) -> Box | None:
    """Intersection of two boxes; None if it is empty."""
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return box if all(first < end for first, end in box) else None


def _without(whole: Box, part: Box) -> list[Box]:
    """Difference of a box and a box inside it, as disjoint boxes."""
    rest: list[Box] = []
    for axis, ((first, end), (part_first, part_end)) in enumerate(zip(whole, part, strict=True)):
        before, behind = part[:axis], whole[axis + 1 :]
        if first < part_first:
            rest.append((*before, (first, part_first), *behind))
        if part_end < end:
            rest.append((*before, (part_end, end), *behind))
    return rest


def _slice(shards: Mapping[str, Tensor], spec: ShardSpec, box: Box) -> Tensor:
    shard = shards.get(spec.name)
    if shard is None or tuple(shard.shape) != spec.sizes:
        found = "is missing" if shard is None else f"has shape {tuple(shard.shape)}"
        raise TensorError(f"the local tensor of {spec.name!r} {found}; its ShardSpec says {spec.sizes}")
    return cut(shard, spec, box)


def cut(tensor: Tensor, spec: ShardSpec, box: Box) -> Tensor:
    """View of a shard's tensor: the part in `box`, coordinates of the whole tensor."""
    if all(end - first == size for (first, end), size in zip(box, spec.sizes, strict=True)):
        return tensor.detach()
    local = tuple(slice(first - start, end - start) for (first, end), start in zip(box, spec.offsets, strict=True))
    return tensor.detach()[local]
