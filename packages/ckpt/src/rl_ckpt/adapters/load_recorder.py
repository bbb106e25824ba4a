"""Recorder of loads: where a model's own loader copies its tensors, and their values afterwards.

An inference engine fuses, cuts and renames the weights of a checkpoint. Instead of knowing how each of its models does
that, we watch the copies that its loader makes, and read the same places back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rl_ckpt.errors import AttestationError
from rl_ckpt.receiver.staging import sparse_like

if TYPE_CHECKING:
    from torch import Tensor, nn


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by the size of a number, bytes."""
_MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
"""Operators that make a copy of a tensor elsewhere: on the device, or in separate memory."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a tensor: which elements of its memory it is."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """Layout of a tensor."""
        return cls(tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()))

    def view(self, whole: Tensor) -> Tensor:
        """The same elements of another tensor with the same memory layout."""
        return whole.as_strided(self.size, self.stride, self.offset)

    def span(self) -> tuple[int, int] | None:
        """First element and the one after the last, if it is all between them, in whatever order."""
        length = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size != 1 and stride != length:
                return None
            length *= size
        return self.offset, self.offset + length


@dataclass(frozen=True, slots=True)
class Binding:
    """Binding of one copy of the loader: from a part of a given tensor to a part of one of the model's."""

    source: Layout
    """Part of the given tensor that was copied."""
    path: str
    """Name of the model's parameter or buffer."""
    whole: Layout
    """The model's tensor, when it was filled."""
    part: Layout
    """Part of it that was filled."""


class Origins:
    """Which parts of given tensors others are: views of them, and copies that a loader makes on the way.

    Args:
        given: Name to tensor on the CPU, as a loader is given them; each has memory of its own.
    """

    def __init__(self, given: Mapping[str, Tensor]) -> None:
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in given.items() if tensor.numel()}
        self._moved: dict[int, tuple[StorageWeakRef, Layout, str, Layout]] = {}
        """By address of a copy on the way: its memory and layout, the given tensor's name, and the part of it."""

    def find(self, tensor: Tensor) -> tuple[str, Layout | None] | None:
        """Name of the given tensor, and the part; None for the part where a copy on the way was cut again."""
        pointer = pointer_of(tensor)
        if pointer is None:
            return None
        if tensor.device.type == "cpu" and pointer in self._names:
            return self._names[pointer], Layout.of(tensor)
        if pointer in self._moved:
            memory, layout, name, part = self._moved[pointer]
            if not memory.expired():
                return name, part if layout == Layout.of(tensor) else None
        return None

    def follow(self, func: Any, source: Any, result: Any) -> bool:
        """Note a copy on the way, if an operator has made one of a known part."""
        if func not in _MOVES or result.device.type == "meta" or (origin := self.find(source)) is None:
            return False
        name, part = origin
        if part is None:
            return False
        memory = result.untyped_storage()
        self._moved[memory.data_ptr()] = StorageWeakRef(memory), Layout.of(result), name, part
        return True


class LoadRecorder(TorchDispatchMode):
    """While it is entered, notes where the given tensors are copied to in a model.

    Copies on the way, to the device for example, are followed. A loader that computes something of a tensor before it
    copies it leaves no binding for it.

    Args:
        model: Model whose parameters and buffers are filled.
        given: Name to tensor on the CPU, as the loader is given them; each has memory of its own.
        owner: Name of the module that they are all weights of, which is searched first; the model's for none.
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Tensor], owner: str = "") -> None:
        super().__init__()
        self.bindings: dict[str, list[Binding]] = {}
        """Bindings by the name of the given tensor."""
        self._model, self._owner = model, owner
        self._origins = Origins(given)
        self._paths: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and args[0].device.type != "meta":
            self._note(args[0], args[1])
        elif args:
            self._origins.follow(func, args[0], result)
        return result

    def _note(self, target: Tensor, source: Tensor) -> None:
        name, part = self._origins.find(source) or ("", None)
        path = None if part is None else self._find(target)
        if part is not None and path is not None:
            whole = Layout.of(_tensors(self._model, path)[0])
            self.bindings.setdefault(name, []).append(Binding(part, path, whole, Layout.of(target)))

    def _find(self, target: Tensor) -> str | None:
        """The name of the tensor whose memory that is now: layers may be filled and freed one after the other."""
        pointer = target.untyped_storage().data_ptr()
        path = self._paths.get(pointer)
        if path is not None and any(pointer_of(tensor) == pointer for tensor in _tensors(self._model, path)):
            return path
        for prefix in dict.fromkeys((self._owner, "")):  # a loader may fill another module too
            module = self._model.get_submodule(prefix)
            for name, tensor in itertools.chain(module.named_parameters(prefix), module.named_buffers(prefix)):
                if pointer_of(tensor) == pointer:
                    self._paths[pointer] = name
                    return name
        return None


def filled_by(bindings: Mapping[str, Sequence[Binding]]) -> set[str]:
    """Names of the model's tensors that a load filled whole, of whatever was there. In doubt, one is not among them."""
    spans: dict[tuple[str, Layout], list[tuple[int, int]]] = {}
    for binding in itertools.chain.from_iterable(bindings.values()):
        span = binding.part.span()
        if span is not None and binding.part.dtype == binding.whole.dtype:
            spans.setdefault((binding.path, binding.whole), []).append(span)
    filled: set[str] = set()
    for (path, whole), parts in spans.items():
        start, end = whole.span() or (0, math.inf)
        for first, last in sorted(parts):
            if first <= start:
                start = max(start, last)
        if start >= end:
            filled.add(path)
    return filled


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy of a weight that a model keeps."""

    layout: Layout
    """Its layout."""
    read: Callable[[], Tensor]
    """Gives it as a tensor, which takes work where it is packed."""


def copies_in(model: nn.Module, path: str, whole: Layout) -> list[Copy]:
    """The model's tensor under a name: one or none. An engine that packs its weights has more."""
    del whole
    return [Copy(Layout.of(tensor), partial(_itself, tensor)) for tensor in _tensors(model, path)]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class Held(Mapping[str, "Tensor"]):
    """Tensors that a model holds of those that its loader was given, under their names; read when asked for.

    Where the model has a part of a tensor (as one rank of several), the rest is completed from what was given: the two
    are equal if and only if the part is. Names that the loader took nowhere, or whose place cannot be read any more
    because the model keeps something else there, are not in it.

    Args:
        model: The model, after loading.
        given: Name to tensor, as the loader was given them.
        bindings: Bindings that the recorder saw.
        copies: All that the model keeps under the name of one of its tensors, which was laid out like that when it was
            filled. It is asked for every name that the tensor has: tied layers may keep copies of their own.
    """

    def __init__(
        self,
        model: nn.Module,
        given: Mapping[str, Tensor],
        bindings: Mapping[str, Sequence[Binding]],
        copies: Callable[[nn.Module, str, Layout], Sequence[Copy]] = copies_in,
    ) -> None:
        self._model = model
        self._given = given
        self._copies = copies
        self._aliases: dict[int | None, list[str]] = {}
        for path, tensor in model.named_parameters(remove_duplicate=False):
            if tensor.numel():
                self._aliases.setdefault(pointer_of(tensor), []).append(path)
        self._bindings = dict(bindings) | {
            name: alias for name in given if name not in bindings if (alias := _tied(model, name, bindings))
        }
        self._names = dict.fromkeys(name for name in given if self._is_readable(name))

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        given = self._given[name]
        for binding in self._bindings.get(name, ()):
            sent = binding.source.view(given)
            for each in self._all_copies(binding):
                copy = each.read()
                held = binding.part.view(copy).to("cpu")
                if held.dtype == sent.dtype and held.shape == sent.shape and torch.equal(_bits(held), _bits(sent)):
                    continue
                again = held.to(sent.dtype)
                if again.shape == sent.shape and torch.equal(_bits(again), _bits(sent)):
                    continue
                if copy.dtype != given.dtype:
                    raise AttestationError(
                        f"the engine keeps {name!r} as {copy.dtype} and was sent {given.dtype}, which does not fit; "
                        "start it with the number format of the sender, or send its own"
                    )
                if not given.is_contiguous():
                    raise AttestationError(f"the engine does not hold {name!r} as it was sent")
                tensor = given.clone()
                binding.source.view(tensor).copy_(held)
                return tensor
        return given

    def require_all(self) -> None:
        """See that the model holds all that its loader was given, bit for bit.

        Raises:
            AttestationError: names a tensor that it has nothing of, or other numbers.
        """
        for name, given in self._given.items():
            if name not in self._names:
                raise AttestationError(f"the engine's loader took {name!r} nowhere that it could be read back from")
            if self[name] is not given:
                raise AttestationError(f"the engine does not hold {name!r} as it was sent")

    def forget_given(self) -> None:
        """Let go of what was given: `read` goes on, and nothing is compared any more."""
        self._given = {
            name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            for name, tensor in self._given.items()
        }

    def owners(self) -> dict[str, list[str]]:
        """Names by the module that they are weights of: a numbered layer with all that is in it, or a single module."""
        found: dict[str, list[str]] = {}
        for name in self._names:
            parts = (self._bindings[name][0].path if name in self._bindings else name).split(".")[:-1]
            number = next((index for index, part in enumerate(parts) if part.isdecimal()), len(parts))
            found.setdefault(".".join(parts[: number + 1]), []).append(name)
        return found

    def read(self, name: str, room: Tensor | None = None) -> Tensor:
        """A tensor like the one that was given, of which what the model has is as the model has it now.

        Args:
            name: Of the tensor.
            room: Memory to read it into, which is laid out like the given one; None: other memory.
        """
        room = sparse_like(self._given[name]) if room is None else room
        for binding in self._bindings.get(name, ()):
            binding.source.view(room).copy_(binding.part.view(self._all_copies(binding)[0].read()))
        return room

    def _is_readable(self, name: str) -> bool:
        bindings = self._bindings.get(name, ())
        return not self._given[name].numel() or (bool(bindings) and all(map(self._is_as_filled, bindings)))

    def _all_copies(self, binding: Binding) -> list[Copy]:
        pointers = [pointer_of(tensor) for tensor in _tensors(self._model, binding.path)]
        paths = {binding.path, *(path for pointer in pointers for path in self._aliases.get(pointer, ()))}
        return [copy for path in sorted(paths) for copy in self._copies(self._model, path, binding.whole)]

    def _is_as_filled(self, binding: Binding) -> bool:
        copies = self._all_copies(binding)
        return bool(copies) and all(copy.layout == binding.whole for copy in copies)


def _tied(model: nn.Module, name: str, bindings: Mapping[str, Sequence[Binding]]) -> Sequence[Binding]:
    """The bindings of the tensor that a model uses in place of the one of this name, which its loader left out."""
    mine = [pointer_of(tensor) for tensor in _tensors(model, name)]
    for other in bindings.values():
        if mine and mine == [pointer_of(tensor) for tensor in _tensors(model, other[0].path)]:
            return other
    return ()


def _tensors(model: nn.Module, path: str) -> list[Tensor]:
    """The parameter or buffer of that name, if there is one."""
    owner, _, name = path.rpartition(".")
    try:
        tensor = getattr(model.get_submodule(owner), name)
    except AttributeError:
        return []
    return [tensor] if isinstance(tensor, torch.Tensor) else []


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as whole numbers, of which equal ones have equal bits."""
    return tensor.view(_WHOLE[tensor.element_size()]) if tensor.is_floating_point() else tensor


def pointer_of(tensor: Tensor) -> int | None:
    """Address of a tensor's memory; None if it has none."""
    return None if tensor.device.type == "meta" else tensor.untyped_storage().data_ptr()
