"""Serialization of plain values and tensors, for what ranks tell each other: JSON, then the bytes of the tensors.

Not pickle: bytes that come from a socket can name no code here. None, bool, int, float (NaN and infinities too), str,
tensors, and lists, tuples and dictionaries of these come back as they were; anything else is refused where it is sent.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from rl_engine.errors import EngineError

_HEADER_BYTES = 8
_MARKS = ("tensor", "tuple", "dict")


def encode(value: Any) -> bytes:
    """`value` as bytes; tensors come back on the CPU, detached.

    Raises:
        EngineError: it holds something that is no plain value, which is named.
    """
    tensors: list[Tensor] = []
    header = json.dumps(_to_json(value, tensors), separators=(",", ":")).encode()
    blobs = (_bytes_of(tensor) for tensor in tensors)
    return b"".join((len(header).to_bytes(_HEADER_BYTES, "little"), header, *blobs))


def decode(data: bytes) -> Any:
    """What `encode` was given.

    Raises:
        EngineError: the bytes are not `encode`'s.
    """
    try:
        start = _HEADER_BYTES + int.from_bytes(data[:_HEADER_BYTES], "little")
        reader = _Reader(data, start)
        value = reader.value(json.loads(data[_HEADER_BYTES:start]))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise EngineError(f"A rank sent {len(data)} bytes that are no message ({error!r}).") from error
    if reader.position != len(data):
        raise EngineError(f"A rank sent {len(data)} bytes, of which its message takes {reader.position}.")
    return value


def _to_json(value: Any, tensors: list[Tensor]) -> Any:
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, (int, float)):  # a subclass, such as a NumPy scalar or an enum
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, list):
        return [_to_json(item, tensors) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_to_json(item, tensors) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_to_json(key, tensors), _to_json(item, tensors)] for key, item in value.items()]}
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        tensors.append(plain)
        return {"tensor": [str(plain.dtype).removeprefix("torch."), list(plain.shape)]}
    raise EngineError(
        f"Ranks exchange plain values and tensors; a {type(value).__name__} is neither. Send its parts instead."
    )


class _Reader:
    """Rebuilds values; tensors are taken from the data in the order in which they were put there."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data, self.position = data, position

    def value(self, found: Any) -> Any:
        if isinstance(found, list):
            return [self.value(item) for item in found]
        if not isinstance(found, dict):
            return found
        ((mark, content),) = found.items()
        if mark == "tuple":
            return tuple(self.value(item) for item in content)
        if mark == "dict":
            return {self.value(key): self.value(item) for key, item in content}
        if mark == "tensor":
            return self._tensor(*content)
        raise ValueError(f"{mark} is none of {', '.join(_MARKS)}")

    def _tensor(self, name: str, shape: list[int]) -> Tensor:
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} is no dtype")
        tensor = torch.empty(0, dtype=dtype)
        count = 1
        for size in shape:
            if size < 0:
                raise ValueError(f"shape {shape}")
            count *= size
        stop = self.position + count * tensor.element_size()
        if stop > len(self._data):
            raise ValueError(f"a tensor of {count} {name} ends after the data")
        if count:
            part = bytearray(memoryview(self._data)[self.position : stop])  # a copy: writable, and aligned
            tensor = torch.frombuffer(part, dtype=torch.uint8).view(dtype)
        self.position = stop
        return tensor.reshape(shape)


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
