"""64-bit digest of bytes, the same on every machine and device, for any thread count and any split into pieces.

The definition is in ``FRAMES.md``: every 64-bit word is mixed with a key made from its position, the mixed words are
summed modulo 2**64, and the sum is finished with the length. A sum has no order of evaluation, so the digest of a
stream that is sent in pieces is the sum of the pieces' sums, each taken at its own offset. It detects corruption, not
tampering: there is no secret in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from rl_csrc.errors import ArgumentError
from rl_csrc.native import cpu, has_cuda, plain_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

Data: TypeAlias = "torch.Tensor | bytes | bytearray | memoryview | Any"
"""A tensor on any device, or anything with the buffer protocol."""

KEY_STEP = 0x9E3779B97F4A7C15
"""Distance between the keys of two neighbouring words: 2**64 divided by the golden ratio, made odd."""
MULTIPLIER = 0xD6E8FEB86659FD93
"""The odd multiplier of the mixer."""
WORD_BYTES = 8
MASK = (1 << 64) - 1
_CHUNK_WORDS = 1 << 17


def digest(data: Data) -> int:
    """Return the 64-bit digest of the bytes of a tensor (row-major order, any device) or of a buffer.

    Only the bytes count, not dtype, shape or name. Raises ``TypeError`` if `data` is neither tensor nor buffer.
    """
    plain = plain_memory(data) if isinstance(data, torch.Tensor) else data
    if isinstance(plain, torch.Tensor) and plain.device.type != "cpu":
        return digest_finish(_device_sum(plain, 0), plain.numel() * plain.element_size())
    return cpu.digest(plain)


def digest_many(pieces: Sequence[torch.Tensor]) -> list[int]:
    """Digests of contiguous uint8 `[N]` tensors; on a GPU with few launches and a single synchronization."""
    if not pieces or not pieces[0].is_cuda or not has_cuda():
        return [digest(piece) for piece in pieces]
    if any(piece.dtype != torch.uint8 or piece.device != pieces[0].device for piece in pieces) or not all(
        piece.is_contiguous() for piece in pieces
    ):
        raise ArgumentError(
            "the pieces of digest_many must be contiguous uint8 tensors on one device: convert them first"
        )
    from rl_csrc import cuda  # loads the CUDA module: only when a tensor lives there

    sums = cuda.digest_many(pieces)
    return [digest_finish(total, piece.numel()) for total, piece in zip(sums, pieces, strict=True)]


def digest_sum(data: Data, *, offset: int = 0) -> int:
    """Return the unfinished digest of a piece that starts ``offset`` bytes into its stream; pieces add modulo 2**64.

    ``offset`` must be a multiple of 8, and so must the length of every piece but the last; ``ArgumentError``
    otherwise.
    """
    if offset < 0 or offset % WORD_BYTES:
        raise ArgumentError(
            f"offset is {offset}; a piece must start at a non-negative multiple of 8 bytes of its stream"
        )
    plain = plain_memory(data) if isinstance(data, torch.Tensor) else data
    if isinstance(plain, torch.Tensor) and plain.device.type != "cpu":
        return _device_sum(plain, offset)
    return cpu.digest_sum(plain, offset)


def digest_finish(total: int, nbytes: int) -> int:
    """Turn the summed pieces of a stream of ``nbytes`` bytes into its digest."""
    return _mix((total + (nbytes + 1) * KEY_STEP) & MASK)


def _device_sum(tensor: torch.Tensor, offset: int) -> int:
    raw = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # reshape keeps the stride of a single element
    if not raw.is_cuda or not has_cuda():
        return reference_sum(raw, offset)
    from rl_csrc import cuda  # loads the CUDA module: only when a tensor lives there

    return cuda.digest_sum(raw, offset)


def reference_sum(raw: torch.Tensor, offset: int = 0) -> int:
    """Digest sum by its definition, in plain torch on any device: the reference that native code is tested against."""
    num_words = (raw.numel() + WORD_BYTES - 1) // WORD_BYTES
    total = 0
    for start in range(0, num_words, _CHUNK_WORDS):
        piece = raw[start * WORD_BYTES : (start + _CHUNK_WORDS) * WORD_BYTES]
        padding = -piece.numel() % WORD_BYTES
        if padding or piece.storage_offset() % WORD_BYTES or piece.data_ptr() % WORD_BYTES:
            piece = torch.cat([piece, piece.new_zeros(padding)])
        words = piece.view(torch.int64)
        first = offset // WORD_BYTES + start + 1
        index = torch.arange(first, first + words.numel(), dtype=torch.int64, device=raw.device)
        total += int(_mix_words(words ^ (index * _signed(KEY_STEP))).sum())
    return total & MASK


def _mix_words(x: torch.Tensor) -> torch.Tensor:
    multiplier = _signed(MULTIPLIER)
    x = (x ^ _high(x)) * multiplier
    x = (x ^ _high(x)) * multiplier
    return x ^ _high(x)


def _high(x: torch.Tensor) -> torch.Tensor:
    """The upper 32 bits, zero-extended (torch shifts int64 arithmetically)."""
    return (x >> 32) & 0xFFFFFFFF


def _mix(x: int) -> int:
    x = ((x ^ (x >> 32)) * MULTIPLIER) & MASK
    x = ((x ^ (x >> 32)) * MULTIPLIER) & MASK
    return x ^ (x >> 32)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
