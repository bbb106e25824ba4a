"""What a bucket says of its content: spans of tensors and their codecs. `rl_csrc.buffers.bucket` places them."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

ALIGNMENT_BYTES = 256
"""Every tensor starts at a multiple of this in its bucket."""


class Codec(IntEnum):
    """How the bytes of a span stand for a tensor."""

    RAW = 0
    """They are its elements."""
    DELTA = 1
    """They say which elements of a leaf differ from the base version, and what they are now."""
    DELTA_ZSTD = 2
    """The same, compressed by Zstandard."""
    ALIAS = 3
    """There are none: the tensor has the elements of the one before it, to which its manifest says it is tied."""


class Span(NamedTuple):
    """One contiguous piece of the content of one part of a tensor, in one bucket. Fields in the order of WIRE.md.

    A tensor is one part, raw; or, where differences are told, one part for each of its leaves, raw or a difference.
    """

    tensor: int
    """Index of the tensor in the session's manifest."""
    codec: int
    """A `Codec`: what the content is."""
    start: int
    """Where the part starts in the tensor, bytes; a multiple of a leaf."""
    offset: int
    """Where the piece starts in the content of the part, bytes."""
    bucket_offset: int
    """Where it starts in the bucket, bytes; a multiple of 256."""
    num_bytes: int
    """Length of the piece; 0 for a tensor without elements."""
    total_bytes: int
    """Length of the content of the part."""
    digest: int
    """Of the piece."""

    @property
    def is_last(self) -> bool:
        """Whether the part is whole with it."""
        return self.offset + self.num_bytes == self.total_bytes
