"""Stand-ins for a GPU whose memory processes share, and for NCCL.

"Device" memory is memfds, which others open through /proc.

It keeps to what NVIDIA documents of `cuIpcGetMemHandle`, `cuIpcOpenMemHandle` and `cuIpcCloseMemHandle`
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html): a handle is of a whole allocation, wherever in it
a tensor lies; one that is exported again has the same handle, and memory allocated later at the same address another;
a handle that is opened again in a process is mapped once and counted, and has to be closed as often; who reads what it
has closed is killed, as a kernel that does is.

Of what that leaves undefined, this takes the worst for who relies on it: memory that is freed while another process
maps it is overwritten there. What a process had that was killed is as it was in the mappings that there are, and cannot
be opened any more. Streams are not modelled: everything is done when a call returns.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import struct
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rl_ckpt.backends import cuda_ipc, nccl
from rl_ckpt.errors import BackendError
from rl_ckpt.protocol.messages import HANDLE_BYTES
from rl_ckpt.tensors.spec import as_bytes, buffer_tensor
from rl_ckpt.transports import group
from rl_csrc.buffers.bucket import aligned

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from torch import Tensor

_HANDLE = struct.Struct(f"<QQQ{HANDLE_BYTES - 24}x")
"""Process, descriptor in it, and inode: a descriptor that is used again is other memory."""


_NO_ACCESS = 0
"""PROT_NONE."""


class FakeGpu:
    """Fake CUDA driver, with the calls of `rl_ckpt.backends.cuda_ipc`. One for each process.

    Args:
        has_all: Let every tensor of this process count as on the device, in an allocation as large as its storage.
            Such memory can be opened in this process alone.
    """

    device_id = "fake-gpu".ljust(36, "-")

    def __init__(self, *, has_all: bool = False) -> None:
        self.exported: set[bytes] = set()
        """Handles that were given out."""
        self.expandable: set[int] = set()
        """Addresses of storages that count as expandable segments."""
        self.num_opened = 0
        """Successful calls of `open`."""
        self.num_closed = 0
        """Successful calls of `close`."""
        self._has_all = has_all
        self._storages: dict[int, Tensor] = {}
        """Other memory that was asked for with `has_all`, uint8 [size], by address."""
        self._lent: dict[bytes, Tensor] = {}
        """And what of it was exported."""
        self._exports: dict[int, tuple[int, int]] = {}
        """Descriptor and size of each allocation of this process, by address."""
        self._mapped: dict[bytes, tuple[Tensor, int]] = {}
        """Mapped allocations, and how often each was opened."""

    @property
    def opened(self) -> list[bytes]:
        """Handles of what is mapped now."""
        return list(self._mapped)

    def hold(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the device, contiguous, all in one allocation, as torch lays out a model."""
        whole = self.allocate(sum(aligned(tensor.nbytes) for tensor in weights.values()) or 1)
        held: dict[str, Tensor] = {}
        end = 0
        for name, tensor in weights.items():
            room = whole[end : end + tensor.nbytes].copy_(as_bytes(tensor))
            held[name] = room.view(tensor.dtype).view(tensor.shape)
            end += aligned(tensor.nbytes)
        return held

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether it lies in an allocation of this process."""
        return self._has_all or tensor.untyped_storage().data_ptr() in self._exports

    def allocation_of(self, tensor: Tensor) -> tuple[int, int]:
        """Allocation of a tensor's storage."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self.expandable:
            raise BackendError("expandable segments; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False")
        if address in self._exports:
            return address, self._exports[address][1]
        self._storages[address] = torch.empty(0, dtype=torch.uint8).set_(storage)  # pyright: ignore[reportArgumentType]
        return address, storage.nbytes()

    def allocate(self, num_bytes: int) -> Tensor:
        """Freed with the last tensor in it."""
        descriptor = os.memfd_create("emulated-gpu")
        os.ftruncate(descriptor, num_bytes)
        memory = mmap.mmap(descriptor, num_bytes)
        whole = buffer_tensor(memory, offset=0, num_bytes=num_bytes)
        self._exports[whole.data_ptr()] = descriptor, num_bytes
        weakref.finalize(memory, self._free, whole.data_ptr())
        return whole

    def _free(self, address: int) -> None:
        descriptor, num_bytes = self._exports.pop(address)
        os.pwrite(descriptor, b"\xff" * num_bytes, 0)
        os.close(descriptor)

    def export(self, address: int) -> bytes:
        """The same for the same allocation; of other memory another each time."""
        if address in self._exports:
            descriptor, _ = self._exports[address]
            handle = _HANDLE.pack(os.getpid(), descriptor, os.fstat(descriptor).st_ino)
        else:
            handle = secrets.token_bytes(HANDLE_BYTES)
            self._lent[handle] = self._storages[address]
        self.exported.add(handle)
        return handle

    def open(self, handle: bytes, num_bytes: int) -> Tensor:
        """Map it, once; fails as CUDA does."""
        if handle not in self._mapped:
            self._mapped[handle] = self._map(handle, num_bytes), 0
        mapped, count = self._mapped[handle]
        self._mapped[handle] = mapped, count + 1
        self.num_opened += 1
        return mapped.view(-1)

    def _map(self, handle: bytes, num_bytes: int) -> Tensor:
        if handle in self._lent:
            return self._lent[handle]
        pid, descriptor, inode = _HANDLE.unpack(handle)
        try:
            mine = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        except OSError as error:
            raise _failure("cuIpcOpenMemHandle_v2", 400, "invalid resource handle") from error
        try:
            found = os.fstat(mine)
            if (found.st_ino, found.st_size) != (inode, num_bytes):
                raise _failure("cuIpcOpenMemHandle_v2", 400, "invalid resource handle")
            return buffer_tensor(mmap.mmap(mine, num_bytes), offset=0, num_bytes=num_bytes)
        finally:
            os.close(mine)

    def close(self, mapped: Tensor) -> None:
        """Unmap what was opened as often as it was closed with this."""
        for handle, (memory, count) in self._mapped.items():
            if memory.data_ptr() == mapped.data_ptr():
                self.num_closed += 1
                self._mapped[handle] = memory, count - 1
                if count == 1:
                    del self._mapped[handle]
                    if handle not in self._lent:
                        _forbid(memory)
                return
        raise _failure("cuIpcCloseMemHandle", 1, "invalid argument")

    def synchronize(self) -> None:
        """Synchronize: nothing is under way."""


def _failure(call: str, status: int, text: str) -> BackendError:
    return BackendError(f"{call} failed with CUDA error {status}: {text}")


def _forbid(memory: Tensor) -> None:
    """Let whoever looks at these pages from now on be killed."""
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    if protect(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), _NO_ACCESS):
        raise OSError(ctypes.get_errno(), "mprotect")


def hold_on_gpu(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`FakeGpu.hold` of the one that this process uses."""
    gpu = cuda_ipc.driver_of()
    assert isinstance(gpu, FakeGpu), "call use_fake_gpu() first"
    return gpu.hold(weights)


def use_fake_gpu() -> FakeGpu:
    """Let all `cuda-ipc` sessions of this process use one, from now on."""
    gpu = FakeGpu()
    cuda_ipc.driver_of = lambda device_id=None: gpu
    return gpu


@contextmanager
def fake_gpu(*, has_all: bool = False) -> Generator[FakeGpu]:
    """Let `cuda-ipc` sessions that are opened inside use one. See `FakeGpu`."""
    gpu, real = FakeGpu(has_all=has_all), cuda_ipc.driver_of
    cuda_ipc.driver_of = lambda device_id=None: gpu
    try:
        yield gpu
    finally:
        cuda_ipc.driver_of = real


def _allow(address: str) -> None:
    del address


def use_fake_nccl() -> None:
    """Let all `nccl` sessions of this process, from now on, broadcast by gloo between the memory of CPUs.

    What is shown is that sessions, groups and failures of `nccl` are those of the suites. Kernels, streams and the
    abort of a communicator are not modelled.
    """
    group.require_nccl = _allow
    nccl.current_device = lambda: torch.device("cpu")


@contextmanager
def fake_nccl() -> Generator[None]:
    """`use_fake_nccl`, for sessions that are opened inside."""
    real = group.require_nccl, nccl.current_device
    use_fake_nccl()
    try:
        yield
    finally:
        group.require_nccl, nccl.current_device = real
