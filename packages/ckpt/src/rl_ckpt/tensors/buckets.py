"""Where tensors go in buckets. Pure arithmetic: knows sizes, and neither tensors nor memory nor peers."""

from __future__ import annotations

from dataclasses import dataclass
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


class Piece(NamedTuple):
    """Where the plan puts a run of bytes."""

    bucket: int
    """Number of the bucket, from 0."""
    offset: int
    """Where the piece starts in the content, bytes."""
    bucket_offset: int
    """Where it starts in the bucket, bytes; a multiple of 256."""
    num_bytes: int
    """Length of the piece; 0 for content without bytes."""


def aligned(num_bytes: int) -> int:
    """The smallest multiple of 256 that is not below `num_bytes`."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(slots=True)
class BucketPlan:
    """Places tensors in order, one after the other, in buckets of one size.

    A tensor that fits a bucket is never split: where the rest of the current bucket is too short, it opens the next. A
    larger one starts a bucket and runs over as many as it needs; its followers go on to fill the last of them.
    """

    bucket_bytes: int
    """Size of every bucket, bytes; a multiple of 256."""
    bucket: int = 0
    """Bucket being filled."""
    offset: int = 0
    """First free byte in it, aligned."""

    def add(self, num_bytes: int) -> list[Piece]:
        """Return the pieces of the next content, in order."""
        if num_bytes > self.bucket_bytes - self.offset:
            self.close()
        placed: list[Piece] = []
        start = 0
        while True:
            if self.offset == self.bucket_bytes and start < num_bytes:
                self.close()
            length = min(num_bytes - start, self.bucket_bytes - self.offset)
            placed.append(Piece(self.bucket, start, self.offset, length))
            self.offset += aligned(length)
            start += length
            if start == num_bytes:
                return placed

    def close(self) -> None:
        """Put nothing more into a bucket that holds something already."""
        if self.offset > 0:
            self.bucket += 1
            self.offset = 0
