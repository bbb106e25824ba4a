"""Where tensors go in buckets. Pure arithmetic: knows sizes, and neither tensors nor memory nor peers."""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT_BYTES = 256
"""Every tensor starts at a multiple of this in its bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One contiguous piece of one tensor in one bucket."""

    tensor: int
    """Index of the tensor in the session's manifest."""
    tensor_offset: int
    """Where the piece starts in the tensor, bytes."""
    bucket_offset: int
    """Where it starts in the bucket, bytes; a multiple of 256."""
    num_bytes: int
    """Length of the piece; 0 for a tensor without elements."""


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

    def place(self, tensor: int, num_bytes: int) -> list[tuple[int, Span]]:
        """Return `(bucket, span)` for each piece of the next tensor, in order."""
        if num_bytes > self.bucket_bytes - self.offset and self.offset > 0:
            self._next_bucket()
        placed: list[tuple[int, Span]] = []
        start = 0
        while True:
            if self.offset == self.bucket_bytes and start < num_bytes:
                self._next_bucket()
            length = min(num_bytes - start, self.bucket_bytes - self.offset)
            span = Span(tensor=tensor, tensor_offset=start, bucket_offset=self.offset, num_bytes=length)
            placed.append((self.bucket, span))
            self.offset += aligned(length)
            start += length
            if start == num_bytes:
                return placed

    def _next_bucket(self) -> None:
        self.bucket += 1
        self.offset = 0
