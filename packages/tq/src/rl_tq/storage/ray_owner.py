"""OwnerActor: the Ray actor that owns a `ray` queue's values on one node."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import ray

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMESPACE = "rl-tq"
"""Ray namespace of the keeper actors."""


Where: TypeAlias = tuple[str, int, str, str]
"""Host, port and token of a queue's server, and its node."""

TRANSPORTS = ("nixl",)
"""Ray's tensor transports that a reader can use alone. gloo and nccl are collectives: the maker would have to send."""


class OwnerActor:
    """Owner of a queue's objects on one node, so that they outlive their producers."""

    def __init__(self, where: Where | None, transport: str | None) -> None:
        """Make an owner of nothing.

        Args:
            where: None for a keeper on another node than the queue's server.
            transport: Ray's tensor transport, by which values move between processes; None: its object store.
        """
        self._where = where
        self._transport = transport
        self._by: dict[str, Any] = {} if transport is None else {"_tensor_transport": transport}
        self._objects: dict[int, Any] = {}
        self._numbers = count(1)

    def where(self) -> tuple[Where | None, str | None]:
        """Address of the queue's server, and the tensor transport."""
        return self._where, self._transport

    def keep(self, values: Any) -> int:
        """Own values, uint8 [n]: a numpy array, or a tensor that came by the tensor transport; returns their number."""
        number = next(self._numbers)
        self._objects[number] = ray.put(values, **self._by)
        return number

    def give(self, numbers: Sequence[int]) -> list[Any]:
        """Object references of values by number; None for dropped ones."""
        return [self._objects.get(number) for number in numbers]

    def drop(self, numbers: Sequence[int]) -> None:
        """Drop values. Readers that have a reference can still read them."""
        for number in numbers:
            self._objects.pop(number, None)


def actor_name(queue: str, node: str) -> str:
    """Actor name of the keeper on a node; that of the server has no node in it."""
    return f"rl-tq/{queue}/{node}" if node else f"rl-tq/{queue}"
