"""`TensorSpec`, dtype codes, and conversion between tensors and bytes without copies where possible."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from rl_ckpt.errors import TensorError
from rl_csrc.buffers.frames import DTYPES

CPU = torch.device("cpu")
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES, start=1)}
"""Wire code of each dtype. Codes are never reused; WIRE.md lists them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Spec of a tensor: name, dtype and shape."""

    name: str
    """Name of the tensor."""
    dtype: torch.dtype
    """One of `DTYPES`."""
    shape: tuple[int, ...]
    """Elements along each axis; () for a scalar."""
    alias_of: int | None = field(default=None, compare=False)
    """Index of the earlier tensor of a manifest of which it is an alias."""
    num_bytes: int = field(init=False, repr=False, compare=False)
    """Size of the elements, bytes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_bytes", math.prod(self.shape) * self.dtype.itemsize)  # read often


def spec_of(name: object, tensor: object) -> TensorSpec:
    """Spec of an item of a source.

    Raises:
        TensorError: it is not a name with a dense tensor that has memory and a supported dtype.
    """
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise TensorError(f"the source yielded ({name!r}, {type(tensor).__name__}); it must yield (str, torch.Tensor)")
    if hasattr(tensor, "full_tensor"):
        raise TensorError(f"{name!r} is a DTensor, of which this rank holds a shard; yield tensor.full_tensor()")
    if is_lazy(tensor):
        raise TensorError(f"{name!r} is not initialized; call its lazy module once before")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
        raise TensorError(
            f"{name!r} has layout {tensor.layout} on {tensor.device}; only dense tensors with memory can be sent"
        )
    if tensor.dtype not in DTYPE_CODES:
        raise TensorError(f"{name!r} has dtype {tensor.dtype}; allowed are {', '.join(map(str, DTYPES))}")
    require_memory(name, tensor)
    return _spec(name, tensor.dtype, tensor.shape)


def require_memory(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor has memory that can be read or written.

    Raises:
        TensorError: it is a meta tensor, a subclass that only wraps others, or its storage was freed (by FSDP, an
            offload, a sleeping engine).
    """
    try:
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes() if storage.data_ptr() else 0
    except (RuntimeError, NotImplementedError):  # wrappers and sparse layouts have no storage
        num_bytes = 0
    if num_bytes < end_of(tensor) * tensor.itemsize:
        raise TensorError(
            f"{name!r} is a {type(tensor).__name__} of shape {list(tensor.shape)} on {tensor.device} without that much "
            "own memory: a wrapper (DTensor, quantized, asynchronous), or one on the meta device, or its "
            "storage was freed; pass the plain tensors that it is made of, or bring it back first"
        )


def end_of(tensor: torch.Tensor) -> int:
    """End of a tensor's last element in its storage, in elements; 0 for an empty tensor."""
    num_elements = tensor.numel()
    if not num_elements:
        return 0
    if not tensor.is_contiguous():
        num_elements = 1 + sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + num_elements


@lru_cache(maxsize=1 << 16)
def _spec(name: str, dtype: torch.dtype, shape: torch.Size) -> TensorSpec:
    """Spec, cached between syncs because a model has many tensors."""
    return TensorSpec(name=name, dtype=dtype, shape=tuple(shape))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Elements in row-major order as uint8 [num_bytes], on the same device; a view if contiguous."""
    plain = tensor.detach()
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    if not is_plain(plain):
        plain = plain.resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # view(-1) keeps the stride of a single element


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Elements in row-major order: the tensor itself where its memory is that, else a copy. Calls torch only then."""
    if type(tensor) in {torch.Tensor, torch.nn.Parameter} and is_plain(tensor):
        return tensor
    return as_bytes(tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor's memory is its elements in row-major order, without gaps."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def is_plain_on(target: torch.Tensor, device: torch.device = CPU) -> bool:
    """Whether a tensor is plain memory on that device, so that it can be written as bytes."""
    return target.device == device and target.layout == torch.strided and is_plain(target)


def memory_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Key of a dense tensor's memory: equal keys of two existing tensors mean the same memory with the same layout."""
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def from_bytes(raw: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """View of `raw`, uint8 [num_bytes], contiguous, as a tensor of this spec."""
    return raw.view(spec.dtype).view(spec.shape)


def buffer_tensor(buffer: Any, *, offset: int, num_bytes: int) -> torch.Tensor:
    """Tensor uint8 [num_bytes] over a writable buffer, which it keeps alive."""
    return torch.frombuffer(buffer, dtype=torch.uint8, offset=offset, count=num_bytes)


def memory_of(raw: torch.Tensor) -> memoryview:
    """The memory of uint8 [num_bytes], contiguous, on the CPU, as a writable buffer. It does not keep `raw` alive."""
    return memoryview((ctypes.c_uint8 * raw.numel()).from_address(raw.data_ptr())).cast("B")
