"""Buckets in use: slots that the consumer still reads, the one yielded last and those under `hold`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from rl_ckpt.base import Hold
from rl_ckpt.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

POISON = 0xFF
"""Byte that overwrites tensors which are no longer valid: NaN in all floating-point formats of 16 bits or more."""


class HeldBuckets:
    """Buckets of one sync from being yielded to being freed.

    Args:
        num_slots: Slots of the session; one of them cannot be held.
        is_debug: Whether to yield copies, and to overwrite them once they are no longer valid.
    """

    def __init__(self, num_slots: int, *, is_debug: bool) -> None:
        self._num_slots = num_slots
        self._is_debug = is_debug
        self._last: int | None = None
        self._held: Counter[int] = Counter()
        """Number of holds on each bucket."""
        self._released: list[int] = []
        self._copies: dict[int, list[Tensor]] = {}

    def hand_out(self, sequence: int, tensors: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Tensors of a bucket for the consumer; copies in debug mode."""
        self._last = sequence
        if self._is_debug:
            tensors = [(name, tensor.clone()) for name, tensor in tensors]
            self._copies[sequence] = [tensor for _, tensor in tensors]
        return tensors

    def hold(self) -> Hold:
        """Hold the bucket that was yielded last.

        Raises:
            UsageError: there is none, or no slot would be left for the rest of the sync.
        """
        sequence = self._last
        if sequence is None:
            raise UsageError("hold() keeps the tensors that were handed out last, and there are none now")
        if len({*self._held, sequence}) >= self._num_slots:
            raise UsageError(
                f"{len(self._held)} buckets are held, and a session has {self._num_slots}; release one, or take clones"
            )
        self._held[sequence] += 1
        return Hold(lambda: self._release(sequence))

    def recycle(self) -> list[int]:
        """Buckets that are free now: the consumer advanced or released them."""
        free, self._released = self._released, []
        if self._last is not None and self._last not in self._held:
            free.append(self._last)
        self._last = None
        for sequence in free:
            for tensor in self._copies.pop(sequence, []):
                tensor.reshape(-1).view(torch.uint8).fill_(POISON)
        return free

    def close(self) -> list[int]:
        """Buckets in use at the end of a sync, to be reported as free: nothing will overwrite them."""
        held, self._held = sorted(self._held), Counter()
        return held

    def _release(self, sequence: int) -> None:
        if sequence not in self._held:  # the sync is over
            return
        self._held[sequence] -= 1
        if not self._held[sequence]:
            del self._held[sequence]
            if sequence != self._last:
                self._released.append(sequence)
