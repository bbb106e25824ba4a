"""Device memory with a fixed virtual address, whose physical memory can be released and taken again (CUDA VMM).

A CUDA graph holds addresses. Buffers in such memory can leave the GPU for a while and come back without a new capture
of the graph; their contents are lost.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import torch

from rl_csrc.cuda.launch import native

if TYPE_CHECKING:
    from torch import Tensor


class MappedMemory:
    """Device memory at a fixed address, allocated at construction. Do not use its tensors while it is released.

    Args:
        num_bytes: Size, rounded up to whole device pages (usually 2 MiB).
        device: CUDA device.

    Raises:
        RuntimeError: the driver has no virtual memory management, or the device is full (`torch.OutOfMemoryError`).
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device = device
        if _is_cuda(device):
            torch.cuda.synchronize(device)  # as in `take`
        self._index = torch.empty(0, device=device).device.index if _is_cuda(device) else 0
        page = native.map_granularity(self._index)
        self.num_bytes = -(-max(num_bytes, 1) // page) * page
        self._address: int = native.map_reserve(self.num_bytes)
        self._handle: int | None = None
        try:
            self.take()
            self._all = _tensor_at(self._address, self.num_bytes, device)
        except BaseException:
            self.close()
            raise

    @property
    def is_there(self) -> bool:
        """Whether physical memory is mapped now."""
        return self._handle is not None

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Contiguous tensor `offset` bytes from the start; the same memory at every call."""
        size = math.prod(shape) * dtype.itemsize
        if offset % dtype.itemsize or offset + size > self.num_bytes:
            raise ValueError(f"{size} bytes at {offset} are not whole elements inside {self.num_bytes} bytes")
        return self._all[offset : offset + size].view(dtype).view(shape)

    def take(self) -> None:
        """Map physical memory again, at the same address and with any content. Idempotent.

        Raises:
            torch.OutOfMemoryError: the device does not have that much free memory.
        """
        if self._handle is not None:
            return
        if _is_cuda(self.device):
            torch.cuda.synchronize(self.device)  # this thread may have no context yet, and the driver wants one
        self._handle = native.map_take(self._index, self._address, self.num_bytes)
        if self._handle is None:
            free = f"{torch.cuda.mem_get_info(self.device)[0] / 2**30:.2f} GiB" if _is_cuda(self.device) else "less"
            raise torch.OutOfMemoryError(
                f"{self.num_bytes / 2**30:.2f} GiB were asked of {self.device}, and {free} is free; other processes "
                "may hold the rest (nvidia-smi)"
            )

    def give_back(self) -> None:
        """Synchronize with the device, and release the physical memory to the driver. Idempotent."""
        if self._handle is not None:
            if _is_cuda(self.device):
                torch.cuda.synchronize(self.device)
            native.map_give(self._address, self.num_bytes, self._handle)
            self._handle = None

    def close(self) -> None:
        """Release the memory and its address; tensors in it are invalid from now on."""
        self.give_back()
        if self._address:
            native.map_free(self._address, self.num_bytes)
            self._address = 0


class _Bytes:
    """Device bytes with the CUDA array interface (version 3), which torch wraps without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def _tensor_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    if _is_cuda(device):
        return torch.as_tensor(_Bytes(address, num_bytes), device=device)
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
