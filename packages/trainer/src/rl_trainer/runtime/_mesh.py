"""The mesh of a group that is about to be created."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from rl_trainer.dispatch import Mesh
from rl_trainer.errors import PlacementError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def checked_mesh(num_ranks: int, axes: Mapping[str, int] | None, worker: Callable[..., Any]) -> Mesh:
    """The ranks of a group of `worker`.

    Raises:
        PlacementError: the axes are not for so many ranks, or the class names one that is not there.
    """
    try:
        mesh = Mesh(num_ranks, axes)
        mesh.check(cast("type", worker))
    except ValueError as error:
        raise PlacementError(str(error)) from None
    return mesh
