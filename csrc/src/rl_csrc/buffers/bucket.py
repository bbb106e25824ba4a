"""Transfer buckets: a plan that packs many tensors into few buckets, and copies into and out of a bucket.

Every piece starts at a multiple of 256 bytes; a tensor larger than a bucket is split over several buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from rl_csrc.errors import ArgumentError
from rl_csrc.native import cpu, has_cuda

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGNMENT = 256
"""Bytes: the alignment that CUDA copies and DMA engines prefer, and a multiple of every vector width."""


class Placement(NamedTuple):
    """Position in a bucket of one run of bytes of the content that was planned."""

    bucket: int
    """Number of the bucket, from 0."""
    offset: int
    """Start of the run in the content, bytes."""
    bucket_offset: int
    """Start of the run in the bucket, bytes; a multiple of the alignment."""
    num_bytes: int
    """Length of the run, bytes; 0 for content without bytes."""


@dataclass(slots=True)
class BucketPlan:
    """Streaming bucket plan: packs contents into buckets of one size in order, without knowing their sizes ahead.

    Content that fits a bucket is never split: if the rest of the current bucket is too short, it goes to the next one.
    Larger content starts a new bucket and fills as many as it needs; what follows continues in the last of them.
    """

    bucket_bytes: int
    """Size of every bucket, bytes; a multiple of the alignment."""
    alignment: int = ALIGNMENT
    """Bytes. A power of two from 8 on."""
    bucket: int = 0
    """Number of the bucket being filled."""
    offset: int = 0
    """First free byte in it, aligned."""

    def place(self, num_bytes: int) -> list[Placement]:
        """Placements of the next content of `num_bytes` bytes, in order."""
        if num_bytes > self.bucket_bytes - self.offset:
            self.close()
        placed: list[Placement] = []
        start = 0
        while num_bytes - start > self.bucket_bytes:  # then `offset` is 0
            placed.append(Placement(self.bucket, start, 0, self.bucket_bytes))
            self.bucket += 1
            start += self.bucket_bytes
        length = num_bytes - start
        placed.append(Placement(self.bucket, start, self.offset, length))
        self.offset += length + -length % self.alignment
        return placed

    def close(self) -> None:
        """Close the current bucket if it holds anything: the next content starts a new one."""
        if self.offset > 0:
            self.bucket += 1
            self.offset = 0


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """The smallest multiple of the alignment that is not below `num_bytes`."""
    return -(-num_bytes // alignment) * alignment


def pack_leaves(
    out: torch.Tensor, pieces: list[tuple[torch.Tensor, int, int, int]], *, leaf_nbytes: int
) -> list[list[int]]:
    """Copy pieces into ``out``; return of each the digests of its leaves of ``leaf_nbytes`` bytes, taken in passing.

    A piece is ``(tensor, bytes into it, bytes into out, nbytes)``: contiguous CPU tensors, in the order of their places
    in ``out``, uint8 `[N]`. The gaps are left as they are. A piece without bytes has one leaf. Raises ``ArgumentError``
    where a piece does not fit.
    """
    return cpu.move_leaves(out, pieces, out.numel(), leaf_nbytes, True)


def unpack_leaves(
    data: torch.Tensor, pieces: list[tuple[torch.Tensor, int, int, int]], *, leaf_nbytes: int
) -> list[list[int]]:
    """Inverse of ``pack_leaves``: copy pieces out of ``data`` and return the digests of the bytes read."""
    found = cpu.move_leaves(data, pieces, data.numel(), leaf_nbytes, False)
    torch.autograd.graph.increment_version([piece[0] for piece in pieces])
    return found


def bucket_copy(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    """Copy each source into its destination, many tensors per call. No gradient.

    Shapes must agree pairwise; dense pairs of one real dtype are copied together, the others one by one by torch. A
    destination may be its source, but must not overlap it in part.
    """
    if len(sources) != len(destinations):
        raise ArgumentError(f"{len(sources)} sources for {len(destinations)} destinations; give as many of both.")
    if not sources:
        return
    for i in _copied_natively(sources, destinations):
        destinations[i].detach().copy_(sources[i].detach())
    torch.autograd.graph.increment_version(destinations)


def _copied_natively(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> Sequence[int]:
    """Copy the pairs that the native kernel supports; return the positions of the others, for torch to copy."""
    device = sources[0].device.type
    if device == "cpu":
        return cpu.bucket_copy(list(sources), list(destinations), torch.get_num_threads())
    if device == "cuda" and has_cuda():
        from rl_csrc import cuda  # loads the CUDA module: only when a tensor lives there

        cuda.bucket_copy(sources, destinations)
        return ()
    return range(len(sources))
