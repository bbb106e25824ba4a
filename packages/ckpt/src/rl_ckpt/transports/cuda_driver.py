"""CUDA driver calls for sharing device memory between processes. Knows no sessions.

The driver API and not the runtime, because it gives the allocation of an address: torch places many tensors in one
allocation, and a handle is for all of it. https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rl_ckpt.errors import BackendError
from rl_ckpt.protocol.messages import HANDLE_BYTES

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

_IS_SHAREABLE = 10
"""CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE."""
_ENABLE_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""
_exported: dict[bytes, int] = {}
"""Addresses of what this process exported, by handle: CUDA opens no handle in the process that it is of (error 201)."""


class Driver(Protocol):
    """Interface of memory sharing; `rl_ckpt.testing.FakeGpu` implements it for machines without a GPU."""

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the session's device."""
        ...

    def allocation_of(self, tensor: Tensor) -> tuple[int, int]:
        """Address and size, bytes, of the allocation that contains a tensor.

        Raises:
            BackendError: such an allocation cannot be shared; the message says what to set.
        """
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] on the session's device."""
        ...

    def export(self, address: int) -> bytes:
        """The handle, 64 bytes, of the allocation at an address."""
        ...

    def open(self, handle: bytes, num_bytes: int) -> Tensor:
        """Map an allocation, of another process or of this one: uint8 [num_bytes]. Valid until `close`."""
        ...

    def close(self, mapped: Tensor) -> None:
        """Unmap what `open` gave."""
        ...

    def synchronize(self) -> None:
        """Wait for all pending work on the device."""
        ...

    @property
    def device_id(self) -> str:
        """Id of the device, 36 characters, the same in every process."""
        ...


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriver:
    """The CUDA driver of a device.

    Args:
        device_id: UUID of the device; None: torch's current device.

    Raises:
        BackendError: there is no CUDA here, or this process does not see that device.
    """

    def __init__(self, device_id: str | None = None) -> None:
        if not torch.cuda.is_available():
            raise BackendError("cuda-ipc shares the memory of a GPU, and torch finds none here; use shm instead")
        self._library: Any = ctypes.CDLL("libcuda.so.1")
        self._library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
        index = torch.cuda.current_device() if device_id is None else _index_of(device_id)
        self._device = torch.device("cuda", index)
        torch.zeros(1, device=self._device)  # creates the context
        self._own: list[int] = []
        """Addresses of this process's own memory that is open."""

    @property
    def device_id(self) -> str:
        """UUID."""
        return _uuid_of(self._device.index)

    def is_on_device(self, tensor: Tensor) -> bool:
        """See `Driver`."""
        return tensor.device == self._device

    def allocation_of(self, tensor: Tensor) -> tuple[int, int]:
        """See `Driver`."""
        address, size, pointer = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64(tensor.data_ptr())
        is_shareable = ctypes.c_int()
        with self._context():
            self._call("cuPointerGetAttribute", ctypes.byref(is_shareable), _IS_SHAREABLE, pointer)
            if not is_shareable.value:
                raise BackendError(
                    "it is in memory that CUDA IPC cannot share, of expandable segments or cudaMallocAsync; start "
                    "this process with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, and without "
                    "backend:cudaMallocAsync"
                )
            self._call("cuMemGetAddressRange_v2", ctypes.byref(address), ctypes.byref(size), pointer)
        return address.value, size.value

    def allocate(self, num_bytes: int) -> Tensor:
        """See `Driver`."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def export(self, address: int) -> bytes:
        """See `Driver`."""
        handle = _Handle()
        with self._context():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        _exported[bytes(handle)] = address
        return bytes(handle)

    def open(self, handle: bytes, num_bytes: int) -> Tensor:
        """See `Driver`."""
        if handle in _exported:
            self._own.append(_exported[handle])
            return torch.as_tensor(_Array(_exported[handle], num_bytes), device=self._device)
        address = ctypes.c_uint64()
        with self._context():
            given = _Handle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, _ENABLE_PEER_ACCESS)
        return torch.as_tensor(_Array(address.value, num_bytes), device=self._device)

    def close(self, mapped: Tensor) -> None:
        """See `Driver`."""
        if mapped.data_ptr() in self._own:
            self._own.remove(mapped.data_ptr())
            return
        with self._context():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(mapped.data_ptr()))

    def synchronize(self) -> None:
        """See `Driver`."""
        torch.cuda.synchronize(self._device)

    @contextmanager
    def _context(self) -> Generator[None]:
        """Make the device's context current in this thread, and restore the previous one."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            yield

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise BackendError(f"{name} failed with CUDA error {status}: {(text.value or b'unknown').decode()}")


class _Array:
    """Device memory with the CUDA array interface, which torch wraps without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _uuid_of(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _index_of(device_id: str) -> int:
    seen = [_uuid_of(index) for index in range(torch.cuda.device_count())]
    if device_id not in seen:
        raise BackendError(
            f"the sender's GPU is {device_id}, and this process sees {', '.join(seen)}: start both on the same one, or "
            "let CUDA_VISIBLE_DEVICES name the sender's here as well"
        )
    return seen.index(device_id)
