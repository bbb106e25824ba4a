"""LoRA adapters of an inference engine: new tensors for those it was started with, or new adapters for its room.

What the engine then holds is read back from its memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_ckpt.errors import AttestationError, TensorError
from rl_ckpt.tensors.spec import as_bytes

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "adapters."
"""Prefix of the names of an adapter's tensors in a sync: `adapters.NAME.`, then the name that peft gives it."""
SCALING = "scaling"
"""Name, after the prefix, of what the product of an adapter's factors is multiplied by: one number, of new adapters."""
REMOVED = "removed"
"""Name, after the prefix, of the only tensor of an adapter that is to be removed."""
TENSORS_FILE = "adapter_model.safetensors"
"""File of peft in the folder of an adapter."""


def brings_adapters(weights: Mapping[str, Tensor]) -> bool:
    """Whether a sync brings adapters.

    Raises:
        TensorError: it brings weights of the model as well.
    """
    count = sum(name.startswith(PREFIX) for name in weights)
    if count not in (0, len(weights)):
        raise TensorError(
            f"{count} tensors of adapters and {len(weights) - count} of the model came in one sync; send them in two "
            "sessions"
        )
    return count > 0


class Copy(NamedTuple):
    """A part of an adapter's tensor in an engine's memory."""

    held: Tensor
    """View of what a layer computes with."""
    want: Tensor
    """Values that it should have: those that came, in the engine's number format and as the engine scales them."""


class Adapters(ABC):
    """Adapters by name, as requests choose them.

    Args:
        started: By adapter, the tensors that the engine was started with, under peft's names.
        is_room: Whether these are room for adapters that syncs bring, name as they like, and remove.
    """

    def __init__(self, started: Mapping[str, Mapping[str, Tensor]], *, is_room: bool = False) -> None:
        self._started, self.is_room = started, is_room
        self.slots: dict[str, str] = {} if is_room else {name: name for name in started}
        """Adapter of `started` in whose place each served one is."""
        self.sent: dict[str, Mapping[str, Tensor]] = {}
        """Tensors installed last, by adapter, if they were sent."""
        self._before = dict(self.slots), dict(self.sent)
        """`slots` and `sent` before the last load."""

    @abstractmethod
    def install(self, adapter: str, tensors: Mapping[str, Tensor]) -> Mapping[str, list[Copy]]:
        """Put an adapter in the place of a started one. By tensor, the copies that layers took of it.

        The tensors are valid until the next sync; `scaling` is among them where the started ones are room for others.
        """

    def load(self, weights: Mapping[str, Tensor]) -> HeldAdapters:
        """Serve these adapters from now on, each of them whole; returns what the engine holds of them.

        Raises:
            TensorError: an adapter is unknown, tensors of it are missing, unknown or of another shape, or there is no
                room for it.
            AttestationError: the engine took a tensor nowhere.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in weights.items():
            adapter, _, key = name.removeprefix(PREFIX).partition(".")
            found.setdefault(adapter, {})[key] = tensor
        self._before = dict(self.slots), dict(self.sent)
        copies: dict[str, list[Copy]] = {}
        if self.is_room:
            copies |= {name: [] for name in weights if name.endswith((f".{SCALING}", f".{REMOVED}"))}
            found = self._take_slots(found)
        else:
            for adapter, tensors in found.items():
                self._require_same(adapter, tensors)
        for adapter, tensors in found.items():
            made = self.install(self.slots[adapter], tensors)
            for key in tensors.keys() - {SCALING}:
                if not made.get(key):
                    raise AttestationError(
                        f"the engine took {key!r} of adapter {adapter!r} nowhere that it could be read back from; "
                        "leave its layer out of the adapter's target modules, or send the adapter merged into the "
                        "weights"
                    )
                copies[f"{PREFIX}{adapter}.{key}"] = made[key]
        self.sent |= found
        return HeldAdapters(weights, copies)

    def restore(self) -> None:
        """Serve what the engine was started with again; with room for adapters, those before the last load."""
        if self.is_room:
            self.slots, self.sent = self._before
            for adapter, tensors in self.sent.items():
                self.install(self.slots[adapter], tensors)
            return
        for adapter, tensors in self._started.items():
            self.install(adapter, tensors)
        self.sent = {}

    def _take_slots(self, found: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Free the slots of removed adapters, and give one to each new adapter; returns those to install."""
        for adapter in [name for name, tensors in found.items() if REMOVED in tensors]:
            if self.slots.pop(adapter, None) is None:
                raise TensorError(f"there is no adapter {adapter!r} to remove; loaded are: {', '.join(self.slots)}")
            self.sent.pop(adapter, None)
            del found[adapter]
        for adapter, tensors in found.items():
            needed = {SCALING}
            for one, other in ("AB", "BA"):
                needed |= {key.replace(f".lora_{one}.", f".lora_{other}.") for key in tensors}
            if (missing := sorted(needed - tensors.keys())) or len(tensors) == 1:
                raise TensorError(f"adapter {adapter!r} came without {missing[0] if missing else 'factors'!r}")
            if adapter not in self.slots:
                free = next((name for name in self._started if name not in self.slots.values()), None)
                if free is None:
                    raise TensorError(
                        f"adapter {adapter!r} came, and there is room for {len(self._started)}; remove one of "
                        f"{', '.join(self.slots)} in the same sync"
                    )
                self.slots[adapter] = free
        return found

    def _require_same(self, adapter: str, tensors: Mapping[str, Tensor]) -> None:
        known = self._started.get(adapter)
        if known is None:
            raise TensorError(f"there is no adapter {adapter!r}; loaded are: {', '.join(self._started) or 'none'}")
        if other := sorted(tensors.keys() ^ known.keys()):
            what = "did not come" if other[0] in known else "came, and the engine's has none"
            raise TensorError(f"{len(other)} tensors of adapter {adapter!r} {what}, {other[0]!r} the first")
        for key, tensor in tensors.items():
            if tensor.shape != known[key].shape:
                raise TensorError(
                    f"{key!r} of adapter {adapter!r} came as {list(tensor.shape)}; the engine's is "
                    f"{list(known[key].shape)}"
                )


class HeldAdapters(Mapping[str, "Tensor"]):
    """Tensors of a sync that an engine holds, under their names; read when asked for.

    A rank of several has a part of some. The rest is completed from what came: the two are equal if and only if the
    part is.
    """

    def __init__(self, given: Mapping[str, Tensor], copies: Mapping[str, list[Copy]]) -> None:
        self._given = given
        self._copies = copies

    def __len__(self) -> int:
        return len(self._given)

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __getitem__(self, name: str) -> Tensor:
        given = self._given[name]
        for copy in self._copies[name]:
            if not torch.equal(as_bytes(copy.held.to("cpu").contiguous()), as_bytes(copy.want.contiguous())):
                raise AttestationError(f"the layers do not hold {name!r} as it was sent")
        return given

    def require_all(self) -> None:
        """See that the layers hold all of it, bit for bit.

        Raises:
            AttestationError: names a tensor that they do not.
        """
        for name in self:
            self[name]


class CopyRecorder(TorchDispatchMode):
    """While entered, records copies of the given tensors and their targets, concatenations included."""

    def __init__(self, given: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.made: dict[str, list[tuple[Tensor, Tensor]]] = {}
        """Target and source of each copy, views, by name."""
        self._names = {pointer(tensor): name for name, tensor in given.items()}
        self._joined: list[Tensor] = []
        """Parts of a tensor that were put together, kept so that their memory stays theirs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and (name := self._names.get(pointer(args[1]))) is not None:
            self.made.setdefault(name, []).append((args[0], args[1]))
        elif func is torch.ops.aten.cat.default:
            names = {self._names.get(pointer(tensor)) for tensor in args[0]}
            if len(names) == 1 and (name := names.pop()) is not None:
                self._joined.append(result)
                self._names[pointer(result)] = name
        return result


def pointer(tensor: Tensor) -> int:
    """Address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()
