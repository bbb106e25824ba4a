"""A stand-in for the CUDA driver: "device" memory is the CPU's, "handles" are kept in this process."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rl_ckpt.backends import cuda_ipc
from rl_ckpt.errors import BackendError
from rl_ckpt.protocol.messages import HANDLE_BYTES

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor


class FakeCuda:
    """What `rl_ckpt.backends.cuda_ipc` asks of the driver, for sessions whose ends are in one process.

    An "allocation" is the storage of a tensor, so that a handle is of all tensors that share it.
    """

    device_id = "fake".ljust(36, "-")

    def __init__(self) -> None:
        self.exported: dict[bytes, Tensor] = {}
        """By handle, all memory that was exported, uint8 [size]."""
        self.opened: list[Tensor] = []
        """What is mapped now."""
        self.expandable: set[int] = set()
        """Addresses of storages that count as expandable segments."""
        self._storages: dict[int, Tensor] = {}

    def is_on_device(self, tensor: Tensor) -> bool:
        """Every tensor is."""
        del tensor
        return True

    def allocation_of(self, tensor: Tensor) -> tuple[int, int]:
        """Its storage."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.expandable:
            raise BackendError("expandable segments; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False")
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # pyright: ignore[reportArgumentType]  # a storage
        self._storages[storage.data_ptr()] = whole
        return storage.data_ptr(), storage.nbytes()

    def allocate(self, num_bytes: int) -> Tensor:
        """On the CPU."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def export(self, address: int) -> bytes:
        """Another handle each time."""
        handle = secrets.token_bytes(HANDLE_BYTES)
        self.exported[handle] = self._storages[address]
        return handle

    def open(self, handle: bytes, num_bytes: int) -> Tensor:
        """The memory itself; an unknown handle is what CUDA says of a process that died."""
        if handle not in self.exported:
            raise BackendError("cuIpcOpenMemHandle failed with CUDA error 201: invalid device context")
        mapped = self.exported[handle]
        if mapped.numel() != num_bytes:
            raise BackendError(f"an allocation of {mapped.numel()} bytes was opened as one of {num_bytes}")
        self.opened.append(mapped)
        return mapped

    def close(self, mapped: Tensor) -> None:
        """Forget it."""
        self.opened = [other for other in self.opened if other is not mapped]

    def synchronize(self) -> None:
        """Nothing is under way."""


@contextmanager
def fake_cuda() -> Generator[FakeCuda]:
    """Let `cuda-ipc` sessions that are opened inside use a `FakeCuda`."""
    driver, real = FakeCuda(), cuda_ipc.driver_of
    cuda_ipc.driver_of = lambda device_id=None: driver
    try:
        yield driver
    finally:
        cuda_ipc.driver_of = real
