"""Sources of weights: an iterable or a registered source, its manifest and aliases; the clock of a sync."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import ItemsView, Mapping
from dataclasses import dataclass, field, replace
from operator import index
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rl_ckpt.errors import TensorError, UsageError, VersionError
from rl_ckpt.tensors.spec import TensorSpec, memory_key, spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.optim import Optimizer


_AT_REST = (type({}.items()), type(OrderedDict[str, torch.Tensor]().items()))
"""Items views of real dicts; other mappings may create each item on request, in the same memory."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Tensor classes with known memory semantics."""


def checked_version(version: object, last: int, limit: int) -> int:
    """Validated version, as a plain int.

    Raises:
        VersionError: it is not an integer, or not above the last one and at most the limit.
    """
    try:
        number = index(version)  # pyright: ignore[reportArgumentType]  # whether it is one is to be found out
    except TypeError as error:
        raise VersionError(f"version is {version!r}, a {type(version).__name__}; give an int") from error
    if not last < number <= limit:
        raise VersionError(f"version is {number}; the next one must be above {last}, the last committed one")
    return number


@dataclass(slots=True)
class Clock:
    """Clock of a sync: seconds per phase. `with clock("pack_s"): ...` adds to a field."""

    export_s: float = 0.0
    pack_s: float = 0.0
    wire_s: float = 0.0
    verify_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def __call__(self, name: str) -> PhaseTimer:
        """Add the time spent inside to the field `name`."""
        return PhaseTimer(self, name)


class PhaseTimer:
    """See `Clock`. A separate class, because a sync has thousands of them."""

    __slots__ = ("_before", "_clock", "_name", "_since")

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name

    def __enter__(self) -> None:
        self._before = getattr(self._clock, self._name)
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:  # a lap inside another of that name is counted once
        setattr(self._clock, self._name, self._before + time.perf_counter() - self._since)


def copy_gb_per_s(one: Tensor, other: Tensor) -> float:
    """Copy bandwidth of this thread between two slots, 1e9 bytes per second: the best of three after a warm-up."""
    times: list[float] = []
    for _ in range(4):
        since = time.perf_counter()
        other.copy_(one)
        if other.is_cuda:
            torch.cuda.synchronize(other.device)
        times.append(time.perf_counter() - since)
    return one.numel() / max(min(times[1:]), 1e-9) / 1e9


class Source:
    """Source of one sync: an iterator over the caller's weights, with checks for changes and tied tensors.

    Tensors that all exist when the sync begins (a registered source, the items of a mapping) must stay one version: a
    change before a tensor's turn is an error. It is detected by torch's version counter, and by optimizer steps (except
    fused ones). Writes by other kernels or through `.data` are not detected.

    Tied tensors are known for a registered source and the items of a dict. For other iterables they are not: the memory
    of one item may be reused for the next.
    """

    def __init__(
        self, weights: Iterable[tuple[str, Tensor]], clock: Clock, registered: RegisteredSource | None = None
    ) -> None:
        self.registered = registered
        is_there = registered is not None or isinstance(weights, ItemsView)
        there = list(weights) if is_there else []
        self.is_at_rest = registered is not None or type(weights) in _AT_REST
        """Whether all items exist already, so that none is waited for."""
        self.aliases = aliases_of(there) if self.is_at_rest else {}
        """Names of tied tensors, by the name of the first tensor with the same memory; read-only."""
        self.alias_of = {name: first for first, names in self.aliases.items() for name in names}
        """Name of a tied tensor to the name of the first one."""
        self._counts = {name: (tensor, _num_changes(tensor)) for name, tensor in there if _is_dense(tensor)}
        self._stepped: set[int] = set()
        """Addresses of storages that an optimizer has written to since the sync began."""
        self._hook = register_optimizer_step_pre_hook(self._note_step) if is_there else None
        self._iterator = iter(there if self.is_at_rest else weights)
        self._clock = clock
        self._is_over = False

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        item = self._take()
        if not isinstance(item, tuple) or len(item) != 2:
            raise TensorError(
                f"the source yielded {str(item)[:80]!r}; it must yield (name, tensor), as .items() of a state dict does"
            )
        return item

    def require_unchanged(self, names: Iterable[str] | None = None) -> None:
        """Check that these tensors, or all of the source, were not modified since the sync began.

        Raises:
            TensorError: one was modified.
        """
        for name in self._counts if names is None else names:
            if name not in self._counts:
                continue
            tensor, before = self._counts[name]
            if _num_changes(tensor) != before or tensor.untyped_storage().data_ptr() in self._stepped:
                raise TensorError(
                    f"{name!r} was written to while the sync was under way, so that what is sent would be of two "
                    "versions; let training wait until the sync has returned, or send copies"
                )

    def _note_step(self, optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not hasattr(parameter, "full_tensor"):  # a DTensor cannot be sent
                    self._stepped.add(parameter.untyped_storage().data_ptr())

    def close(self) -> None:
        """End the sync."""
        if self._hook is not None:
            self._hook.remove()

    def drain(self, error: Exception) -> None:
        """Consume the remaining items after an error, for which other ranks of a collective export wait."""
        try:
            while not self._is_over:
                self._take()
        except StopIteration:
            pass
        except Exception as another:  # noqa: BLE001  # of the caller's source; the first error is reported
            error.add_note(f"draining the rest of the source failed as well: {another!r}")

    def _take(self) -> object:
        with self._clock("export_s"):
            try:
                return next(self._iterator)
            except BaseException:
                self._is_over = True
                raise


def _is_dense(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and not is_lazy(tensor) and tensor.layout == torch.strided


def _num_changes(tensor: Tensor) -> int | None:
    """Version counter of torch for in-place writes; None if the tensor has none."""
    return None if tensor.is_inference() else tensor._version


def aliases_of(items: Iterable[tuple[str, Tensor]]) -> dict[str, list[str]]:
    """Tied tensors among these, which all exist: later names by the first name with the same memory."""
    by_address: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in items:
        is_plain = type(tensor) in _PLAIN and tensor.layout == torch.strided and not tensor.is_nested
        if is_plain and tensor.numel() and (address := tensor.data_ptr()):
            by_address.setdefault(address, []).append((name, tensor))
    aliases: dict[str, list[str]] = {}
    for sharing in by_address.values():
        if len(sharing) > 1:
            firsts: dict[tuple[object, ...], str] = {}
            for name, tensor in sharing:
                first = firsts.setdefault(memory_key(tensor), name)
                if first != name:
                    aliases.setdefault(first, []).append(name)
    return aliases


class ManifestIndex:
    """Manifest of a session at the sender: specs of all tensors so far, by index."""

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []
        self._index: dict[tuple[TensorSpec, int | None], int] = {}

    def index(self, spec: TensorSpec, alias_of: int | None = None) -> int:
        """Index of a tensor; a new one if the tensor is new, or tied to another than before."""
        index = self._index.get((spec, alias_of))
        if index is None:
            index = self._index[spec, alias_of] = len(self.specs)
            self.specs.append(spec if alias_of is None else replace(spec, alias_of=alias_of))
        return index


_AGAIN = "; call register_source again after whatever replaces storages (an offload, .data = ..., resize_)"
_Place: TypeAlias = tuple[TensorSpec, int, tuple[int, ...]]
"""Spec, address and strides of a tensor."""


class RegisteredSource:
    """Source given to `WeightSender.register_source`; evaluated for every sync and compared with the first time.

    Args:
        named_tensors: A mapping, or a function that returns `(name, tensor)` pairs. Names must be unique.

    Raises:
        TensorError: an item cannot be sent, a name is repeated, or there are no items.
    """

    def __init__(self, named_tensors: Mapping[str, Tensor] | Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._named = named_tensors.items if isinstance(named_tensors, Mapping) else named_tensors
        self.mapped: object = None
        """A transport's map of it, kept between syncs."""
        self._layouts: dict[str, _Place] = {}
        for name, tensor in self._named():
            if name in self._layouts:
                raise TensorError(f"{name!r} is registered twice; names must differ")
            self._layouts[name] = _layout_of(name, tensor)
        if not self._layouts:
            raise TensorError("no tensor was registered; give a function that returns (name, tensor), or a mapping")

    def items(self) -> list[tuple[str, Tensor]]:
        """Present tensors of the source.

        Raises:
            TensorError: a tensor was moved, or the set of tensors changed.
        """
        items = list(self._named())
        if len(items) != len(self._layouts):
            raise TensorError(f"{len(self._layouts)} tensors were registered and there are {len(items)}{_AGAIN}")
        for name, tensor in items:
            before, now = self._layouts.get(name), _layout_of(name, tensor)
            if before is None:
                raise TensorError(f"{name!r} was not among the tensors that were registered{_AGAIN}")
            if now != before:
                raise TensorError(
                    f"{name!r} was registered at {before[1]:#x} as {before[0]}, and is at {now[1]:#x} as {now[0]}: its "
                    f"storage is another{_AGAIN}"
                )
        return items


def _layout_of(name: str, tensor: Tensor) -> _Place:
    return spec_of(name, tensor), tensor.data_ptr(), tensor.stride()


def items_of(registered: RegisteredSource | None) -> list[tuple[str, Tensor]]:
    """Tensors of the registered source.

    Raises:
        UsageError: there is none.
        TensorError: see `RegisteredSource.items`.
    """
    if registered is None:
        raise UsageError("send_weights was given no weights; pass them, or call register_source once before")
    return registered.items()
