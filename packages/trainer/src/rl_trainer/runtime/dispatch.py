"""Dispatch of calls over ranks: split the arguments, join the answers. Pure planning: nothing is called here."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, cast

from rl_trainer.errors import PlacementError
from rl_trainer.runtime.base import DISPATCH_ATTRIBUTE, Call, Dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_FIRST_ANSWERS = (Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO, Dispatch.SPLIT_REDUCED)


def calls_of(worker: type) -> Mapping[str, Call]:
    """The registered methods of a worker class."""
    return {
        name: getattr(m, DISPATCH_ATTRIBUTE)
        for name in dir(worker)
        if hasattr(m := getattr(worker, name), DISPATCH_ATTRIBUTE)
    }


class Mesh:
    """Mesh: the ranks of a group as a grid with named axes; neighbouring ranks differ in the last axis.

    Raises:
        PlacementError: the sizes do not multiply to the number of ranks.
    """

    def __init__(self, num_ranks: int, axes: Mapping[str, int] | None = None) -> None:
        if axes is not None and (min(axes.values()) < 1 or math.prod(axes.values()) != num_ranks):
            raise PlacementError(
                f"a mesh {dict(axes)} has {math.prod(axes.values())} ranks, but the group has {num_ranks}; make the "
                "product of the axes that number"
            )
        self.num_ranks, self._axes = num_ranks, dict(axes or {})

    def check(self, worker: Callable[..., Any]) -> Mesh:
        """Refuse a class whose methods name an axis that is not there; returns the mesh.

        Raises:
            PlacementError: says which.
        """
        for name, call in calls_of(cast("type", worker)).items():
            if call.axis is not None and call.axis not in self._axes:
                raise PlacementError(
                    f"{cast('type', worker).__name__}.{name} goes along axis {call.axis!r}, but the group's mesh has "
                    f"{list(self._axes) or 'no axes'}; give create_group a mesh with it"
                )
        return self

    def size(self, axis: str | None) -> int:
        """Number of ranks along an axis, or of all for None."""
        return self.num_ranks if axis is None else self._axes[axis]

    def coordinate(self, rank: int, axis: str | None) -> int:
        """Coordinate of a rank on an axis."""
        if axis is None:
            return rank
        names = list(self._axes)
        inner = math.prod(self._axes[name] for name in names[names.index(axis) + 1 :])
        return rank // inner % self._axes[axis]

    def leads(self, rank: int, axis: str | None) -> bool:
        """Whether a rank is the first of those with its coordinate on an axis: it answers for them."""
        return axis is None or all(self.coordinate(rank, name) == 0 for name in self._axes if name != axis)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


def spread(call: Call, mesh: Mesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Arguments | None]:
    """Arguments for each rank; None where a rank is not called.

    `SPLIT` cuts every argument that is a list or has `reorder` (a `BatchMeta`) into contiguous parts whose lengths
    differ by at most one row, `SPLIT_GROUPS` a `BatchMeta` into whole groups; other arguments go to every rank.
    """
    num_ranks, mode = mesh.num_ranks, call.mode
    whole: Arguments = (args, dict(kwargs))
    if mode is Dispatch.RANK_ZERO:
        return [whole, *([None] * (num_ranks - 1))]
    if mode not in {Dispatch.SPLIT, Dispatch.SPLIT_REDUCED, Dispatch.SPLIT_GROUPS}:
        return [whole] * num_ranks
    num_parts, cut_by = mesh.size(call.axis), cut_groups if mode is Dispatch.SPLIT_GROUPS else cut
    parts = [_parts(given, num_parts, cut_by) for given in args]
    named = {name: _parts(given, num_parts, cut_by) for name, given in kwargs.items()}
    places = [mesh.coordinate(rank, call.axis) for rank in range(num_ranks)]
    return [(tuple(p[at] for p in parts), {name: p[at] for name, p in named.items()}) for at in places]


def _parts(argument: Any, num_parts: int, cut_by: Callable[[Any, int], list[Any]]) -> list[Any]:
    is_cut = isinstance(argument, list) or hasattr(argument, "reorder")
    return cut_by(argument, num_parts) if is_cut else [argument] * num_parts


def cut(argument: Any, num_parts: int) -> list[Any]:
    """Split a list or `BatchMeta` into contiguous parts whose lengths differ by at most one."""
    base, longer = divmod(len(argument), num_parts)
    bounds = [rank * base + min(rank, longer) for rank in range(num_parts + 1)]
    if isinstance(argument, list):
        return [argument[a:b] for a, b in itertools.pairwise(bounds)]
    return [argument.reorder(range(a, b)) for a, b in itertools.pairwise(bounds)]


def cut_groups(batch: Any, num_parts: int) -> list[Any]:
    """Split a `BatchMeta` into parts of whole groups, in order, of about equal rows; a part may be empty."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    before = 0
    for rows in batch.positions("group_id").values():
        parts[(2 * before + len(rows)) * num_parts // (2 * len(batch))] += rows  # where the group's middle lies
        before += len(rows)
    return [batch.reorder(rows) for rows in parts]


def join(call: Call, mesh: Mesh, answers: Sequence[Any]) -> Any:
    """Join the answers of the ranks that were called into one, of the same type as a single rank's."""
    if call.axis is not None:
        answers = [answer for rank, answer in enumerate(answers) if mesh.leads(rank, call.axis)]
    first = answers[0]
    if call.mode in _FIRST_ANSWERS or len(answers) == 1:
        return first
    if isinstance(first, list):
        return [item for answer in answers for item in answer]
    if hasattr(type(first), "concat"):
        return type(first).concat([a for a in answers if len(a)])
    raise TypeError(f"answers of type {type(first).__name__} cannot be joined; return a list or a type with concat()")
