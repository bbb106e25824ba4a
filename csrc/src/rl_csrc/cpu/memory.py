"""The native module, and the memory that its kernels write to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_csrc import _cpu

native: Any = _cpu
"""The kernels are called by address: their arguments are checked where they are wrapped."""

LARGE_BYTES = 8 << 20
"""Below this the C library's allocator mostly gives memory that was in use before."""


def in_huge_pages(x: Tensor) -> Tensor:
    """Ask for huge pages under a tensor that nothing was written to yet, and return it.

    torch gives large CPU tensors back to the system, so each result starts on pages that were never touched, and the
    first write to a page costs more than the rest of them; a huge page is one such write in place of 512. Linux takes
    it as advice (`madvise`); elsewhere, and where huge pages are switched off, nothing happens.
    """
    if x.is_cpu and x.nbytes >= LARGE_BYTES:
        _cpu.advise_huge_pages(x)
    return x


def new_floats(*shape: int) -> Tensor:
    """Float32 of any content."""
    return torch.empty(shape, dtype=torch.float32)


def with_adjacent_columns(logits: Tensor) -> Tensor:
    """Logits whose columns are adjacent, as the kernels want them."""
    return logits if logits.stride(1) == 1 or logits.shape[1] < 2 else logits.contiguous()
