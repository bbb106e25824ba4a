"""The Ray actor that keeps values of a `ray` queue on one node. Imports nothing heavy: nodes run one per queue."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import ray

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMESPACE = "rl-tq"
"""Of the actors of every queue."""


Where: TypeAlias = tuple[str, int, str, str]
"""Host, port and token of a queue's server, and its node."""


class Keeper:
    """Owner of the objects of one node: whoever made the values may go, they stay."""

    def __init__(self, where: Where | None) -> None:
        """`where`: None for a keeper on another node than the queue's server."""
        self._where = where
        self._objects: dict[int, Any] = {}
        self._numbers = count(1)

    def where(self) -> Where | None:
        """Where the queue's server is."""
        return self._where

    def keep(self, values: Any) -> int:
        """Take values, uint8 [n] of numpy, into this node's object store; returns what `give` and `drop` call them."""
        number = next(self._numbers)
        self._objects[number] = ray.put(values)
        return number

    def give(self, numbers: Sequence[int]) -> list[Any]:
        """References to values; None for those that were dropped."""
        return [self._objects.get(number) for number in numbers]

    def drop(self, numbers: Sequence[int]) -> None:
        """Let go of values. Who has a reference may read on."""
        for number in numbers:
            self._objects.pop(number, None)


def actor_name(queue: str, node: str) -> str:
    """Of the keeper on a node; the server's own has no node in its name."""
    return f"rl-tq/{queue}/{node}" if node else f"rl-tq/{queue}"
