"""Offload between a GPU and page-locked host memory, which gives what it leaves back to the driver.

Another process on the GPU (a rollout server that is colocated) can take only what the driver has: what torch's caching
allocator keeps for this process is lost to it. Host copies lie in buffers that are page-locked once and used again at
every offload, as pinned memory of torch's own is rounded up to a power of two: nearly twice what 8 B parameters need.
"""

from __future__ import annotations

import mmap
import warnings
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_engine.errors import BackendError

_SMALL_BYTES = 1 << 16
"""Below it a tensor is copied as it is: locking a page of its own would take longer."""


def has_gpu() -> bool:
    """Whether there is another device than the CPU."""
    return torch.cuda.is_available()


def idle_accelerator() -> str | None:
    """Kind of an accelerator of this machine that is not computed on (`mps`, `npu`, `xpu`); None without one.

    Raises:
        BackendError: torch is built for ROCm and sees a GPU, which it would take for one of CUDA.
    """
    if torch.version.hip is not None and torch.cuda.is_available():
        raise BackendError(
            f"torch is built for ROCm {torch.version.hip} and sees a GPU; engines here compute on NVIDIA's GPUs or on "
            "the CPU. Hide it (HIP_VISIBLE_DEVICES=-1) to compute on the CPU."
        )
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in ("cpu", "cuda") else found.type


def has_float8() -> bool:
    """Whether there is a GPU that multiplies float8 numbers."""
    return has_gpu() and torch.cuda.get_device_capability() >= (8, 9)


class Driver:
    """Driver calls on the current GPU, by torch; tests have one that counts."""

    def pin(self, address: int, num_bytes: int) -> bool:
        """Page-lock host memory; False where that is refused, and copies are slower."""
        runtime: Any = torch.cuda.cudart()
        return int(runtime.cudaHostRegister(address, num_bytes, 0)) == 0

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(address)

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy on the GPU, that may still be under way."""
        return tensor.to(device, non_blocking=True)

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether the tensor is in host memory."""
        return tensor.device.type == "cpu"

    def synchronize(self) -> None:
        """Wait for copies."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def give_back(self) -> None:
        """Return what the caching allocator holds free to the driver."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class DeviceMemory:
    """Moves the tensors of one engine between its GPU and the host.

    `move` copies without waiting; `finish`, once nothing refers to what was moved any more, waits and gives back.
    """

    def __init__(self, driver: Driver | None = None) -> None:
        self._driver = driver or Driver()
        self._free: defaultdict[int, list[_Buffer]] = defaultdict(list)
        self._lent: dict[int, _Buffer] = {}
        """Buffers of tensors on the host, by address."""
        self._returned: list[_Buffer] = []
        """Buffers that a copy may still be reading."""

    def move(self, tensor: Tensor, target: torch.device) -> Tensor:
        """A copy of the tensor (or of this rank's shard) at `target`, which may still be under way."""
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        own = own.detach()
        if target.type != "cpu":
            buffer = self._lent.pop(own.data_ptr(), None)
            if buffer is not None:
                self._returned.append(buffer)
            return self._driver.to_device(tensor.detach(), target)
        if self._driver.is_on_host(own):
            return tensor
        if own.nbytes < _SMALL_BYTES or not own.is_contiguous():
            return tensor.detach().to("cpu", copy=True)
        host = self._take(own.nbytes).memory.view(own.dtype).view(own.shape)
        host.copy_(own, non_blocking=True)
        if not isinstance(tensor, DTensor):
            return host
        sharded = torch.empty_like(tensor.detach(), device="cpu")
        sharded._local_tensor = host  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue] - no other way in
        return sharded

    def finish(self) -> None:
        """Wait for the copies, and return free GPU memory to the driver."""
        self._driver.synchronize()
        for buffer in self._returned:
            self._free[buffer.num_bytes].append(buffer)
        self._returned.clear()
        self._driver.give_back()

    def close(self) -> None:
        """Unlock the buffers that no tensor uses; the others go with their tensors."""
        for buffers in self._free.values():
            for buffer in buffers:
                buffer.unpin()
        self._free.clear()

    def _take(self, num_bytes: int) -> _Buffer:
        free = self._free[num_bytes]
        buffer = free.pop() if free else _Buffer(num_bytes, self._driver)
        self._lent[buffer.memory.data_ptr()] = buffer
        return buffer


class _Buffer:
    """Page-locked host memory of whole pages."""

    def __init__(self, num_bytes: int, driver: Driver) -> None:
        self.num_bytes, self._driver = num_bytes, driver
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)
        self._is_pinned = driver.pin(self.memory.data_ptr(), num_bytes)
        if not self._is_pinned:
            warnings.warn("the host's memory cannot be page-locked: offloading will be slower", stacklevel=2)

    def unpin(self) -> None:
        """Unlock the pages."""
        if self._is_pinned:
            self._driver.unpin(self.memory.data_ptr())
            self._is_pinned = False
