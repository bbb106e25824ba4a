"""Where the values of a get are to lie: new memory, a buffer of the caller's, or a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_csrc import frames
from rl_tq._device import Mover
from rl_tq._extent import lay

if TYPE_CHECKING:
    from collections.abc import Sequence


class Landing:
    """Where a batch's values are to lie: new memory, a buffer of the caller's, or a device."""

    def __init__(self, out: torch.Tensor | None, device: torch.device | str | None) -> None:
        if out is not None and device is not None:
            raise ValueError(f"out is a buffer on {out.device} and device is {device!r}: give one of them")
        if out is not None and (out.dtype is not torch.uint8 or out.dim() != 1 or not out.is_contiguous()):
            raise ValueError(
                f"out is a {out.dtype} tensor of shape {tuple(out.shape)}: it must be uint8 [n] and contiguous"
            )
        if out is not None and out.storage_offset() % frames.ALIGNMENT:
            raise ValueError(
                f"out begins {out.storage_offset()} bytes into its storage: it must be at a multiple of "
                f"{frames.ALIGNMENT}"
            )
        self._device = None if device is None else torch.device(device)
        self._out = out
        self._cursor = 0
        self._mover: Mover | None = None
        self._to_copy: list[tuple[Sequence[torch.Tensor], torch.Tensor]] = []
        self.is_taken = False
        """Whether a message is or was received straight into the caller's buffer."""

    @property
    def is_given(self) -> bool:
        """Whether the caller said where."""
        return self._out is not None or self._device is not None

    def take_over(self, nbytes: int) -> torch.Tensor | None:
        """The caller's buffer, if a message of so many bytes can be received straight into it."""
        if self._out is None or not self._out.is_cpu or len(self._out) < nbytes:
            return None
        buffer, self._out, self.is_taken = self._out[:nbytes], None, True
        return buffer

    def reserve(self, sizes: Sequence[int]) -> None:
        """Prepare for tensors of so many bytes each.

        Raises:
            ValueError: they do not fit.
        """
        total = sum(size + -size % frames.ALIGNMENT for size in sizes)
        if self._device is not None:
            self._out = torch.empty(total, dtype=torch.uint8, device=self._device)
        if self._out is not None and len(self._out) < total:
            raise ValueError(f"out has {len(self._out)} bytes, and these columns of these rows take {total}")
        if self._out is not None and (self._device is not None or not self._out.is_cpu):
            self._mover = Mover(self._out.device)

    def place(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The next place, where the parts lie one after the other once `finish` returns."""
        assert self._out is not None
        nbytes = sum(part.nbytes for part in parts)
        target = self._out[self._cursor : self._cursor + nbytes]
        self._cursor += nbytes + -nbytes % frames.ALIGNMENT
        placed = target.view(parts[0].dtype)
        if shape := parts[0].shape[1:]:
            placed = placed.view(sum(map(len, parts)), *shape)
        if self._mover is not None:
            self._mover.move(parts, target)
        else:  # at the end: a copy of megabytes empties the caches of all that is done between columns
            self._to_copy.append((parts, placed))
        return placed

    def finish(self) -> None:
        """Have all be in place."""
        for parts, placed in self._to_copy:
            lay(parts, placed)
        if self._mover is not None:
            self._mover.finish()
