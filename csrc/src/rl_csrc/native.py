"""The compiled CPU module, whether the CUDA module was built, and the memory that CPU kernels write to."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# By name: static analysis takes `from rl_csrc import _cpu` for an import of the whole package.
cpu: Any = importlib.import_module("rl_csrc._cpu")
"""The CPU kernels. They are called by address: their arguments are checked where they are wrapped."""

LARGE_BYTES = 8 << 20
"""Below this the C library's allocator mostly gives memory that was in use before."""


def has_cuda() -> bool:
    """Whether the CUDA module was built. It says nothing about this machine having a GPU."""
    return importlib.util.find_spec("rl_csrc._cuda") is not None


def in_huge_pages(x: Tensor) -> Tensor:
    """Ask for huge pages under a tensor that nothing was written to yet, and return it.

    torch gives large CPU tensors back to the system, so each result starts on pages that were never touched, and the
    first write to a page costs more than the rest of them; a huge page is one such write in place of 512. Linux takes
    it as advice (`madvise`); elsewhere, and where huge pages are switched off, nothing happens.
    """
    if x.is_cpu and x.nbytes >= LARGE_BYTES:
        cpu.advise_huge_pages(x)
    return x


def new_floats(*shape: int) -> Tensor:
    """Float32 of any content, on the CPU."""
    return torch.empty(shape, dtype=torch.float32)


def with_adjacent_columns(logits: Tensor) -> Tensor:
    """Logits with unit column stride, copied where they have another: the kernels need it."""
    return logits if logits.stride(1) == 1 or logits.shape[1] < 2 else logits.contiguous()


@lru_cache(maxsize=64)
def native_spec(module: Any, spec: Any) -> Any:
    """The struct `rl_loss_spec` of a native module for a `reference.LossSpec`, made once for each set of options."""
    return module.LossSpec(**spec.fields())


def rows_of(x: Any, rows: slice) -> Any:
    """Rows of a per-token argument: a tensor is sliced, a number or None holds for every row."""
    return x[rows] if isinstance(x, Tensor) else x


def plain_memory(x: Tensor) -> Tensor:
    """Detached contiguous tensor of class `torch.Tensor` with the values of x as they are; a copy only where needed."""
    if type(x) is torch.Tensor and x.is_contiguous() and not (x.requires_grad or x.is_conj() or x.is_neg()):
        return x
    return x.detach().resolve_conj().resolve_neg().contiguous().as_subclass(torch.Tensor)
