"""A buffer of the caller's that gets are copied into, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory for `get(..., out=buffer)`, with what the get before left of tensors that need not be made again.

    A batch's values are good until the next get into its buffer, which overwrites them as it does where `out` is a
    plain tensor. What else a batch is stays as it was: its columns, the lengths of its rows, and all that was computed
    from it. Columns whose rows are as long as they were in the get before, and which come to lie where they lay, are
    the same tensor objects as before: torch takes about as long to make a nested tensor as to copy a megabyte.

    One get at a time.
    """

    memory: torch.Tensor
    """uint8 [n], contiguous, on any device; how a get lays values into it: `TransferQueue.get`."""
    kept: Any = field(default=None, init=False, repr=False)
    """What the get before left; the client's own."""
