"""The compiled CPU module, the memory that its kernels write to, and how this installation was built."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

# By name: static analysis takes `from rl_csrc import _cpu` for an import of the whole package.
cpu: Any = importlib.import_module("rl_csrc._cpu")
"""The CPU kernels. They are called by address: their arguments are checked where they are wrapped."""

LARGE_BYTES = 8 << 20
"""Below this the C library's allocator mostly gives memory that was in use before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInfo:
    """Build description of the installed wheel."""

    version: str
    """Version of the distribution."""
    compiler: str
    """The C++ compiler that built the CPU module."""
    has_cuda: bool
    """Whether the CUDA module was built in. It says nothing about this machine having a GPU."""


def build_info() -> BuildInfo:
    """Return the version, compiler and modules of this build. Loads no CUDA library and touches no device."""
    return BuildInfo(version=version("rl-csrc"), compiler=cpu.compiler, has_cuda=has_cuda())


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
