"""Which implementation runs an op: the device's kernels where they exist and take the dtype, else the reference."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from rl_csrc import _impl_reference

if TYPE_CHECKING:
    from collections.abc import Callable

_KERNEL_MODULES = {"cpu": "rl_csrc.cpu", "cuda": "rl_csrc.cuda"}
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def kernel(name: str, x: torch.Tensor) -> Callable[..., Any]:
    """Return the function that runs op `name` on a tensor like `x`."""
    return _find(name, "cpu" if x.is_cpu else x.device.type, x.dtype in _KERNEL_DTYPES)


def copier(name: str, x: torch.Tensor) -> Callable[..., Any]:
    """As `kernel`, for ops that move bytes and take every dtype."""
    return _find(name, x.device.type, True)


@cache
def _find(name: str, device_type: str, has_dtype: bool) -> Callable[..., Any]:
    module = _kernels(device_type) if has_dtype else None
    return getattr(module, name, None) or getattr(_impl_reference, name)


@cache
def _kernels(device_type: str) -> Any:
    """Return the kernel module of a device type, or None where it was not built."""
    name = _KERNEL_MODULES.get(device_type)
    built = device_type == "cpu" or importlib.util.find_spec("rl_csrc._cuda") is not None
    return importlib.import_module(name) if name and built else None
