"""Weight updates: staged in a second copy, checked for completeness, then swapped in together.

The served weights are not touched until every tensor has arrived, so a failed update leaves the old version as it
was. The price is the staging copy, kept from one update to the next. After a sleep of level 2 there is nothing to
protect: the next update then arrives in the weights' own memory, without a second copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_rollout.errors import ModelFolderError, WeightUpdateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rl_rollout.backends.embedded.kv_cache import Memory

_ALIGNMENT = 256
"""Alignment of each weight in `WeightMemory`, bytes: matrix products on a GPU load whole aligned lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Location of a weight on disk inside one of the module's tensors."""

    name: str
    """The module's name of the tensor."""
    shape: torch.Size
    """Shape of the weight."""
    stride: tuple[int, ...]
    """Strides of the weight inside the tensor, elements."""
    offset: int
    """Offset of its first element inside the tensor, elements."""

    def of(self, whole: Tensor) -> Tensor:
        """View of the weight inside the contiguous tensor `whole`, which may itself be a view of other memory."""
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


def find_places(module: Any, tensors: dict[str, Tensor]) -> dict[str, Place]:
    """Location of every weight, by its name on disk.

    Args:
        module: A transformers model.
        tensors: Its state dict, by the module's own names.

    Raises:
        ModelFolderError: a weight on disk is computed from the module's tensors and is not a slice of one.
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
            # Filled with 0, 1, 2, ..., a weight shows which elements of the tensor it is made of.
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
        raise ModelFolderError(
            f"weight {disk_name!r} on disk is not a part of {name!r}, so that no update could bring it"
        )
    return place


class WeightMemory:
    """All weights of a module in one allocation that can be released and mapped again at the same address.

    Args:
        module: Its parameters and persistent buffers are moved into the allocation, and so onto its device.
        joined: Groups of names whose weights are laid out back to back, so that `joined` can view them as one tensor.
        new_memory: Allocates so many bytes.
    """

    def __init__(self, module: Any, joined: Sequence[Sequence[str]], new_memory: Callable[[int], Memory]) -> None:
        state: dict[str, Tensor] = dict(module.state_dict(keep_vars=True))
        alone = [[name] for name in state if not any(name in names for names in joined)]
        self._joined: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        offsets: dict[int, int] = {}
        end = 0
        for names in [*joined, *alone]:
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
            first = state[names[0]]
            shape = (sum(state[name].shape[0] for name in names), *first.shape[1:]) if first.ndim else ()
            self._joined[names[0]] = end, shape, first.dtype
            for name in names:
                if id(state[name]) not in offsets:  # a tied weight is one tensor under several names
                    offsets[id(state[name])] = end
                    end += state[name].nbytes
        self.memory = new_memory(end)
        for tensor in {id(tensor): tensor for tensor in state.values()}.values():
            place = self.memory.tensor(offsets[id(tensor)], tuple(tensor.shape), tensor.dtype)
            place.copy_(tensor.detach())
            tensor.data = place

    def joined(self, name: str) -> Tensor:
        """View of the group of back-to-back weights that begins with `name`, as one tensor."""
        return self.memory.tensor(*self._joined[name])


class WeightStore:
    """Weight updates of a module: tensors arrive under their names on disk, and are swapped in together.

    `stage` and `check_complete` may run while the module computes; `swap` and `release` must not.

    Args:
        module: The served module.
        keeps_places: Copy new weights to the addresses of the old ones, which CUDA graphs hold. False: exchange the
            two copies without copying.
        memory: The weights' allocation, if `release` is to unmap it and the next update to arrive in it.
    """

    def __init__(self, module: Any, *, keeps_places: bool = False, memory: Memory | None = None) -> None:
        self._keeps_places = keeps_places
        self._memory = memory
        self._is_empty = False
        """Whether `memory` was released and holds no complete version since."""
        self._tensors: dict[str, Tensor] = dict(module.state_dict(keep_vars=True))
        self._layouts = {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in self._tensors.items()}
        self._places = find_places(module, self._tensors)
        # Tied weights are one tensor under several names: the first name stands for it.
        first_of: dict[int, str] = {}
        self._owner = {name: first_of.setdefault(id(tensor), name) for name, tensor in self._tensors.items()}
        self._staged: dict[str, Tensor] = {}
        self._host: dict[str, Tensor] = {}
        """Copy of the served weights on the host, after `offload`."""
        self._targets: dict[str, Tensor] = {}
        self._arrived: set[tuple[str, int]] = set()
        """(tensor's name, offset in it) of every weight that has arrived."""

    @property
    def has_arrived(self) -> bool:
        """Whether a weight has arrived since `begin`."""
        return bool(self._arrived)

    def begin(self) -> None:
        """Start an update: no weight has arrived."""
        self._arrived.clear()

    def forget_targets(self) -> None:
        """Drop `targets`, whose content is about to be overwritten: no difference can be applied to it any more."""
        self._targets = {}

    def stage(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor next to the served one.

        Raises:
            WeightUpdateError: no such name, another shape, or two different tensors for tied names.
        """
        if name not in self._places:
            raise WeightUpdateError(
                f"the model has no weight {name!r}; it has {len(self._places)}, e.g. {self._nearest(name)!r}"
            )
        place = self._places[name]
        if tensor.shape != place.shape:
            wanted = tuple(place.shape)
            raise WeightUpdateError(f"weight {name!r} arrived as {tuple(tensor.shape)}; the model holds {wanted}")
        owner = self._owner[place.name]
        staged = place.of(self._room(owner))
        if (owner, place.offset) in self._arrived:
            if not torch.equal(staged, tensor.to(staged)):
                raise WeightUpdateError(f"weight {name!r} is tied to another, and a different value arrived for each")
            return
        staged.copy_(tensor)
        self._arrived.add((owner, place.offset))

    def targets(self) -> Mapping[str, Tensor]:
        """Destination of every weight by its name on disk: the staging copy, or the weights' own memory if released.

        The mapping is the same object as long as its content may serve as the base of a difference.
        """
        if not self._targets:
            places = self._places.items()
            self._targets = {name: place.of(self._room(self._owner[place.name])) for name, place in places}
        return self._targets

    def note_arrived(self, names: Iterable[str]) -> None:
        """Mark these weights of `targets` as received."""
        self._arrived |= {(self._owner[self._places[name].name], self._places[name].offset) for name in names}

    def _room(self, owner: str) -> Tensor:
        """Memory that a tensor arrives in: the staging copy, or the served tensor's own where nothing is served."""
        if self._is_empty and self._memory is not None:
            self._memory.take()
            return self._tensors[owner].data
        if owner not in self._staged:
            shape, dtype, device = self._layouts[owner]
            self._staged[owner] = torch.empty(shape, dtype=dtype, device=device)
        return self._staged[owner]

    def check_complete(self) -> None:
        """Check that every weight has arrived; of tied weights one name is enough.

        Raises:
            WeightUpdateError: some are missing; says how many, and the name of one.
        """
        missing = sorted(n for n, p in self._places.items() if (self._owner[p.name], p.offset) not in self._arrived)
        if missing:
            raise WeightUpdateError(f"{len(missing)} weights did not arrive, e.g. {missing[0]!r}")

    def swap(self, *, keeps_staged: bool = False) -> bool:
        """Serve the staged weights, and keep the other copy for the next update. Returns whether addresses changed.

        With `keeps_staged` the staging copy keeps the new version too: the base of the next update's differences.
        """
        if self._is_empty:
            self._targets = {}  # it may be the served weights themselves, which no update may write to
            if self._memory is not None:
                self._memory.take()
        self._host = {}
        has_moved = self._is_empty = False
        for owner, new in self._staged.items():
            served = self._tensors[owner]
            old = served.data
            if (self._keeps_places or keeps_staged) and old.numel():
                old.copy_(new)
                continue
            served.data = new
            self._staged[owner] = old
            self._targets = {}
            has_moved = True
        self._staged = {owner: old for owner, old in self._staged.items() if old.numel()}
        self._arrived.clear()
        return has_moved

    def release_staging(self) -> None:
        """Free the staging copy."""
        self._staged.clear()
        self._targets = {}
        self._arrived.clear()

    def offload(self) -> None:
        """Free both copies, and keep one on the host for `reload`."""
        if not self._is_empty:
            host = {owner: self._tensors[owner].data.to("cpu", copy=True) for owner in set(self._owner.values())}
            self.release()
            self._host = host

    def reload(self) -> bool:
        """Bring back the weights that `offload` has moved, unless an update was installed since; returns whether."""
        if self._host and self._memory is not None:
            self._memory.take()
        for owner, host in self._host.items():
            shape, dtype, device = self._layouts[owner]
            if self._memory is None:
                self._tensors[owner].data = torch.empty(shape, dtype=dtype, device=device)
            self._tensors[owner].data.copy_(host)
        if was_moved := bool(self._host):
            self._host, self._is_empty = {}, False
        return was_moved

    def release(self) -> None:
        """Free both copies. The module cannot run until the next `swap`."""
        self.release_staging()
        if self._memory is not None:
            self._is_empty = True
            self._memory.give_back()
            return
        for tensor in self._tensors.values():
            tensor.data = tensor.data.new_empty(0)

    def _nearest(self, name: str) -> str:
        from difflib import get_close_matches

        return next(iter(get_close_matches(name, self._places, n=1, cutoff=0)), "")
