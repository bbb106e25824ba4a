"""`Span` and `Codec`: description of a bucket's content. `rl_csrc.buffers.bucket` plans the placement."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

ALIGNMENT_BYTES = 256
"""Alignment of tensors in a bucket, bytes."""


class Codec(IntEnum):
    """Encoding of a span's bytes."""

    RAW = 0
    """Elements of the tensor."""
    DELTA = 1
    """Delta of a leaf against the base version: positions and new values of changed elements."""
    DELTA_ZSTD = 2
    """Delta compressed by Zstandard."""
    ALIAS = 3
    """No bytes: the tensor is an alias (tied, by the manifest) of the one before it."""


class Span(NamedTuple):
    """Contiguous piece of a part of a tensor, in one bucket. Fields in the order of WIRE.md.

    A tensor is one raw part; or, with deltas, one part per leaf, raw or a delta.
    """

    tensor: int
    """Index of the tensor in the session's manifest."""
    codec: int
    """`Codec` of the content."""
    start: int
    """Start of the part in the tensor, bytes; a multiple of the leaf size."""
    offset: int
    """Start of the piece in the content of the part, bytes."""
    bucket_offset: int
    """Start of the piece in the bucket, bytes; a multiple of 256."""
    num_bytes: int
    """Size of the piece, bytes; 0 for a tensor without elements."""
    total_bytes: int
    """Size of the content of the part, bytes."""
    digest: int
    """Digest of the piece."""

    @property
    def is_last(self) -> bool:
        """Whether it is the last piece of its part."""
        return self.offset + self.num_bytes == self.total_bytes
