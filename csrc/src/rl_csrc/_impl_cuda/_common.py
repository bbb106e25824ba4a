"""What all launches share: element types, addresses, streams, and zeros that kernels count in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element types the kernels take, and their codes in the C interface."""


_COUNTERS = 1 << 14


_counters: dict[int, Tensor] = {}
"""Per device, zeros that kernels count in and leave zero; entry 0 stays unused."""


_taken: dict[tuple[int, int], int] = {}
"""Entry of each (device, stream), and how many entries each (device, -1) has given away."""


def stream_of(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream


def address_of(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def counter_on(device: torch.device) -> Tensor:
    """`[1]` a zero that a kernel counts in and leaves zero; launches that may run at once never share one.

    Each stream has its own, and so has each launch captured in a graph.
    """
    stream = torch.cuda.current_stream(device)
    index, key = stream.device_index, (stream.device_index, stream.cuda_stream)
    capturing = torch.cuda.is_current_stream_capturing()
    pool = _counters.get(index)
    if pool is None and not capturing:
        pool = _counters[index] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    entry = _taken.get(key) if not capturing else None
    if entry is None:
        entry = _taken.get((index, -1), 0) + 1
        if pool is None or entry >= _COUNTERS:
            return torch.zeros(1, dtype=torch.int32, device=device)
        _taken[index, -1] = entry
        if not capturing:
            _taken[key] = entry
    assert pool is not None
    return pool[entry : entry + 1]


def new_floats(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def row_stride_of(x: Tensor) -> int:
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]
