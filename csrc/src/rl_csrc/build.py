"""What this installation of rl-csrc was built with."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib.metadata import version

from rl_csrc import _cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInfo:
    """What is compiled into the installed wheel."""

    version: str
    """Version of the distribution."""
    compiler: str
    """The C++ compiler that built the CPU module."""
    has_cuda: bool
    """Whether the CUDA module was built in. It says nothing about this machine having a GPU."""


def build_info() -> BuildInfo:
    """Return what was built. Loads no CUDA library and touches no device."""
    return BuildInfo(
        version=version("rl-csrc"),
        compiler=_cpu.compiler,
        has_cuda=importlib.util.find_spec("rl_csrc._cuda") is not None,
    )
