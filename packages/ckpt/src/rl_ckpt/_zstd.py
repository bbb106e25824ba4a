"""Differences compressed by Zstandard (RFC 8878), for slow links. Needs the extra `zstd` at both ends."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from rl_ckpt._tensors import buffer_tensor, memory_of
from rl_ckpt.errors import BackendError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

LEVEL = 1
"""The fastest: what is left to find in gaps and low bits is found by entropy coding alone."""


def is_installed() -> bool:
    """Whether this end can read and write it."""
    return find_spec("zstandard") is not None


def compressor() -> Callable[[Tensor], Tensor]:
    """What turns uint8 [num_bytes] on the CPU into fewer bytes.

    Raises:
        BackendError: the extra is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise BackendError(f"zstd=True needs the package zstandard ({error}): pip install 'rl-ckpt[zstd]'") from error
    context = zstandard.ZstdCompressor(level=LEVEL)

    def squeeze(content: Tensor) -> Tensor:
        data = bytearray(context.compress(memory_of(content)))
        return buffer_tensor(data, offset=0, num_bytes=len(data))

    return squeeze


def decompress(content: Tensor, leaf_bytes: int, name: str) -> Tensor:
    """The difference, uint8, at an address that its arrays can be read from.

    Args:
        content: uint8 [num_bytes], on the CPU.
        leaf_bytes: Size of the leaf that it is of; no difference is larger.
        name: Of the tensor, for messages.

    Raises:
        ProtocolError: it is nothing of the kind.
    """
    import zstandard

    try:
        declared = zstandard.frame_content_size(memory_of(content))
        if not 0 < declared <= leaf_bytes:
            raise ProtocolError(f"{name!r} came as a compressed difference of {declared} bytes for {leaf_bytes}")
        data = zstandard.ZstdDecompressor().decompress(memory_of(content), max_output_size=declared)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"{name!r} came as a compressed difference that cannot be read: {error}") from error
    raw = torch.empty(len(data), dtype=torch.uint8)
    memory_of(raw)[:] = data
    return raw
