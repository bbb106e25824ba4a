"""Which buckets a consumer still looks at: the one handed out last, and those that it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_ckpt.base import Hold
from rl_ckpt.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

POISON = 0xFF
"""Every byte of a tensor that must not be looked at any more: NaN in all floating-point formats of 16 bits or more."""


class HeldBuckets:
    """The buckets of one sync, from being handed out to being free.

    Args:
        num_slots: Of the session; one of them always goes on.
        is_debug: Whether to hand out copies, and to overwrite them when they are not valid any more.
    """

    def __init__(self, num_slots: int, *, is_debug: bool) -> None:
        self._num_slots = num_slots
        self._is_debug = is_debug
        self._last: int | None = None
        self._held: set[int] = set()
        self._released: list[int] = []
        self._copies: dict[int, list[Tensor]] = {}

    def hand_out(self, sequence: int, tensors: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """The tensors of a bucket for the consumer."""
        self._last = sequence
        if self._is_debug:
            tensors = [(name, tensor.clone()) for name, tensor in tensors]
            self._copies[sequence] = [tensor for _, tensor in tensors]
        return tensors

    def hold(self) -> Hold:
        """Keep the bucket that was handed out last.

        Raises:
            UsageError: there is none, or no slot would be left for the rest of the sync.
        """
        sequence = self._last
        if sequence is None:
            raise UsageError("hold() keeps the tensors that were handed out last, and there are none now")
        if len(self._held | {sequence}) >= self._num_slots:
            raise UsageError(
                f"{len(self._held)} buckets are held, and a session has {self._num_slots}; release one, or take clones"
            )
        self._held.add(sequence)
        return Hold(lambda: self._release(sequence))

    def recycle(self) -> list[int]:
        """The buckets that are free now, because the consumer goes on or has released them."""
        free, self._released = self._released, []
        if self._last is not None and self._last not in self._held:
            free.append(self._last)
        self._last = None
        for sequence in free:
            for tensor in self._copies.pop(sequence, []):
                tensor.reshape(-1).view(torch.uint8).fill_(POISON)
        return free

    def close(self) -> list[int]:
        """The buckets that are held when there are no more to come: nobody else's will be written over them."""
        held, self._held = sorted(self._held), set()
        return held

    def _release(self, sequence: int) -> None:
        if sequence in self._held:
            self._held.remove(sequence)
            if sequence != self._last:
                self._released.append(sequence)
