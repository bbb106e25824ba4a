"""Fresh memory for large results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_csrc import _cpu

if TYPE_CHECKING:
    from torch import Tensor

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
