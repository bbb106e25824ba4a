"""Launch helpers of CUDA kernels: dtype codes, the current device and stream, and zeroed counters."""

from __future__ import annotations

import functools
import importlib
import threading
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


native: Any = importlib.import_module("rl_csrc._cuda")
"""The CUDA kernels, built with RL_CSRC_CUDA=ON only. They take raw addresses; the wrappers check arguments."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element types the kernels take, and their codes in the C interface."""


_COUNTERS = 1 << 14


_counters: dict[int, Tensor] = {}
"""Counters by device, all zero between launches: kernels count in them and reset them. Entry 0 is unused."""


_taken: dict[tuple[int, int], int] = {}
"""Index of the counter of each (device, stream), and under (device, -1) how many counters are assigned."""


_lock = threading.Lock()


def on_its_device(run: Callable[P, R]) -> Callable[P, R]:
    """Decorator: make the device of the first tensor (or of the first tensor of a list) current during the call.

    A stream handle does not identify its device: 0 is the default stream of whichever device is current.
    """

    @functools.wraps(run)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        device = (first if isinstance(first, torch.Tensor) else first[0]).device
        if device.index == torch.cuda.current_device():
            return run(*args, **kwargs)
        with torch.cuda.device(device):
            return run(*args, **kwargs)

    return guarded


def stream_of(x: Tensor) -> int:
    """Handle of torch's current stream on the tensor's device."""
    return torch.cuda.current_stream(x.device).cuda_stream


def counter_on(device: torch.device) -> Tensor:
    """Counter `[1]`, zero, that a kernel counts in and resets; launches that may run concurrently never share one.

    Every stream has its own, and so does every launch captured in a CUDA graph.
    """
    stream = torch.cuda.current_stream(device)
    capturing = torch.cuda.is_current_stream_capturing()
    with _lock:
        pool = _counters.get(stream.device_index)
        if pool is None and not capturing:
            pool = _counters[stream.device_index] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
            stream.synchronize()  # the next call may come on a stream that does not wait for this one
        entry = None if pool is None else _entry(stream, capturing)
    if pool is None or entry is None:
        return torch.zeros(1, dtype=torch.int32, device=device)
    return pool[entry : entry + 1]


def _entry(stream: torch.cuda.Stream, capturing: bool) -> int | None:
    """Index of the counter for a launch on the stream; None if all are assigned."""
    key = (stream.device_index, stream.cuda_stream)
    if not capturing and key in _taken:
        return _taken[key]
    entry = _taken.get((stream.device_index, -1), 0) + 1
    if entry >= _COUNTERS:
        return None
    _taken[stream.device_index, -1] = entry
    if not capturing:
        _taken[key] = entry
    return entry


def new_floats(like: Tensor, *shape: int) -> Tensor:
    """Uninitialized float32 tensor on the device of `like`."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def row_stride_of(x: Tensor) -> int:
    """Elements from one row of a matrix to the next."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]
