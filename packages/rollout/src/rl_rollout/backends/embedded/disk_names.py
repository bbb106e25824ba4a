"""Where a weight, under its name on the Hugging Face hub, lies in the model.

Transformers loads some models under other names than those of their files, and joins tensors (the experts of a
layer). Trainers send what the files hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl_rollout.errors import ModelFolderError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A weight as a part of one of the module's tensors."""

    name: str
    """The module's name of the tensor."""
    shape: torch.Size
    """Of the part."""
    stride: tuple[int, ...]
    """Steps of the part in the tensor, numbers."""
    offset: int
    """Of its first number in the tensor, numbers."""

    def of(self, whole: Tensor) -> Tensor:
        """The part, as a view of the contiguous tensor."""
        return whole.as_strided(self.shape, self.stride, self.offset)


def find_places(module: Any, tensors: dict[str, Tensor]) -> dict[str, Place]:
    """The place of every weight by its name on disk.

    Args:
        module: A transformers model.
        tensors: Its state by its own names.

    Raises:
        ModelFolderError: a weight on disk is computed from the module's, and is no part of one.
    """
    from transformers.core_model_loading import revert_weight_conversion

    revert: Any = revert_weight_conversion
    places: dict[str, Place] = {}
    for name, tensor in tensors.items():
        whole = torch.empty(tensor.shape, device="meta")
        parts: dict[str, Tensor] = revert(module, {name: whole})
        if all(part is whole for part in parts.values()):
            found = {disk_name: _whole(name, tensor) for disk_name in parts}
        else:
            # With the numbers 0, 1, ... for weights, a part tells which of them it is made of.
            numbered = torch.arange(tensor.numel()).view(tensor.shape)
            parts = revert(module, {name: numbered})
            found = {disk_name: _part(name, disk_name, numbered, part) for disk_name, part in parts.items()}
        places |= found
    return places


def _whole(name: str, tensor: Tensor) -> Place:
    return Place(name=name, shape=tensor.shape, stride=torch.empty(tensor.shape, device="meta").stride(), offset=0)


def _part(name: str, disk_name: str, numbered: Tensor, part: Tensor) -> Place:
    offset = int(part.flatten()[0])
    steps = [int(part.select(axis, 1).flatten()[0]) - offset if size > 1 else 1 for axis, size in enumerate(part.shape)]
    place = Place(name=name, shape=part.shape, stride=tuple(steps), offset=offset)
    if not torch.equal(place.of(numbered), part):
        raise ModelFolderError(f"weight {disk_name!r} on disk is no part of {name!r}, so that no update could bring it")
    return place
