"""A source that is declared once: tensors whose storages stay where they are from sync to sync."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from rl_ckpt._tensors import TensorSpec, spec_of
from rl_ckpt.errors import TensorError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from rl_ckpt._mapped import SourceMap
    from rl_ckpt._transport import SendTransport

_AGAIN = "; call register_source again after whatever replaces storages (an offload, .data = ..., resize_)"
_Place: TypeAlias = tuple[TensorSpec, int, tuple[int, ...]]
"""What a tensor is, its address, and its strides."""


class Registered:
    """What `CheckpointEngine.register_source` was given. It is asked again for every sync, and compared.

    Args:
        named_tensors: A mapping, or what returns `(name, tensor)` whenever it is called. Names differ.

    Raises:
        TensorError: an item cannot be sent, a name comes twice, or there is none.
    """

    def __init__(self, named_tensors: Mapping[str, Tensor] | Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._named = named_tensors.items if isinstance(named_tensors, Mapping) else named_tensors
        self._places: dict[str, _Place] = {}
        self._map: SourceMap | None = None
        for name, tensor in self._named():
            if name in self._places:
                raise TensorError(f"{name!r} is registered twice; names must differ")
            self._places[name] = _place_of(name, tensor)
        if not self._places:
            raise TensorError("no tensor was registered; give a function that returns (name, tensor), or a mapping")

    def items(self) -> list[tuple[str, Tensor]]:
        """Its tensors as they are now.

        Raises:
            TensorError: one is not where it was, or they are not the same.
        """
        items = list(self._named())
        if len(items) != len(self._places):
            raise TensorError(f"{len(self._places)} tensors were registered and there are {len(items)}{_AGAIN}")
        for name, tensor in items:
            before, now = self._places.get(name), _place_of(name, tensor)
            if before is None:
                raise TensorError(f"{name!r} was not among the tensors that were registered{_AGAIN}")
            if now != before:
                raise TensorError(
                    f"{name!r} was registered at {before[1]:#x} as {before[0]}, and is at {now[1]:#x} as {now[0]}: its "
                    f"storage is another{_AGAIN}"
                )
        return items

    def map_with(self, transport: SendTransport) -> SourceMap | None:
        """What of it the receivers of a session can read where it is; found out once. None: nothing."""
        if self._map is None:
            self._map = transport.map_source(self.items())
        return self._map

    def forget_map(self) -> None:
        """Find out anew at the next sync what receivers can read where it is."""
        self._map = None


def _place_of(name: str, tensor: Tensor) -> _Place:
    return spec_of(name, tensor), tensor.data_ptr(), tensor.stride()


def items_of(registered: Registered | None) -> list[tuple[str, Tensor]]:
    """The tensors of a source, if one was registered.

    Raises:
        UsageError: none was.
        TensorError: see `Registered.items`.
    """
    if registered is None:
        raise UsageError("send_weights was given no weights; pass them, or call register_source once before")
    return registered.items()
