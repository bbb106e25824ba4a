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
"""The CPU kernels. They take raw addresses; the wrappers check arguments."""

LARGE_BYTES = 8 << 20
"""Smaller blocks usually reuse memory of the C library's allocator that was touched before."""


def has_cuda() -> bool:
    """Whether the CUDA module was built; the machine may still have no GPU."""
    return importlib.util.find_spec("rl_csrc._cuda") is not None


def in_huge_pages(x: Tensor) -> Tensor:
    """Request huge pages (`madvise`) for a large CPU tensor that was not written to yet; returns the tensor.

    torch returns large CPU tensors to the system, so every result starts on untouched pages, and the page faults cost
    more than the writes; with huge pages there is one fault in place of 512. A no-op where huge pages are off.
    """
    if x.is_cpu and x.nbytes >= LARGE_BYTES:
        cpu.advise_huge_pages(x)
    return x


def new_floats(*shape: int) -> Tensor:
    """Uninitialized float32 tensor on the CPU."""
    return torch.empty(shape, dtype=torch.float32)


def with_adjacent_columns(logits: Tensor) -> Tensor:
    """Matrix with unit column stride, as the kernels need it; copied only if its stride is another."""
    return logits if logits.stride(1) == 1 or logits.shape[1] < 2 else logits.contiguous()


@lru_cache(maxsize=64)
def native_spec(module: Any, spec: Any) -> Any:
    """The struct `rl_loss_spec` of a native module for a `LossSpec`, made once for each set of options."""
    return module.LossSpec(**spec.fields())


def rows_of(x: Any, rows: slice) -> Any:
    """Rows of a per-token argument: a tensor is sliced, a number or None holds for every row."""
    return x[rows] if isinstance(x, Tensor) else x


def plain_memory(x: Tensor) -> Tensor:
    """Detached contiguous tensor of class `torch.Tensor` with the values of x as they are; a copy only where needed."""
    if type(x) is torch.Tensor and x.is_contiguous() and not (x.requires_grad or x.is_conj() or x.is_neg()):
        return x
    return x.detach().resolve_conj().resolve_neg().contiguous().as_subclass(torch.Tensor)
