"""Transfer buckets: a plan that packs many tensors into few buckets, and copies into and out of a bucket.

The plan is a pure function of sizes, so both sides of a transfer can compute it. Every piece starts at a multiple of
256 bytes; a tensor larger than a bucket is split over several buckets; gaps are zeros, so that the digest of a bucket
is defined by its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from rl_csrc.errors import ArgumentError
from rl_csrc.native import cpu, has_cuda, plain_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ALIGNMENT = 256
"""Bytes: the alignment that CUDA copies and DMA engines prefer, and a multiple of every vector width."""


class Piece(NamedTuple):
    """A run of bytes of one tensor inside a bucket."""

    tensor: int
    """Index of the tensor in the list that was planned."""
    tensor_offset: int
    """Bytes into the tensor's contiguous content. Not 0 only for the later pieces of a split tensor."""
    bucket_offset: int
    """Bytes into the bucket, a multiple of the alignment."""
    nbytes: int
    """Length in bytes; 0 for a tensor without elements, which is listed too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Bucket of a plan: the pieces of tensors that one transfer carries."""

    pieces: tuple[Piece, ...]
    """Pieces in the order of their offsets."""
    nbytes: int
    """Bytes used, a multiple of the alignment."""


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


def plan(sizes: Iterable[int], *, bucket_nbytes: int, alignment: int = ALIGNMENT) -> list[Bucket]:
    """Lay tensors of the given sizes (bytes) into buckets of at most ``bucket_nbytes``, in order, as `BucketPlan` does.

    Raises:
        ArgumentError: the alignment is no power of two from 8 on, or a bucket is smaller than it.
    """
    if alignment < 8 or alignment & (alignment - 1) or bucket_nbytes < alignment:
        raise ArgumentError(
            f"alignment={alignment}, bucket_nbytes={bucket_nbytes}: the alignment is a power of two from 8 on, "
            "and a bucket holds at least one such unit"
        )
    placing = BucketPlan(bucket_nbytes - bucket_nbytes % alignment, alignment)
    pieces: list[list[Piece]] = []
    for tensor, size in enumerate(sizes):
        for bucket, offset, start, nbytes in placing.place(size):
            if bucket == len(pieces):
                pieces.append([])
            pieces[bucket].append(Piece(tensor=tensor, tensor_offset=offset, bucket_offset=start, nbytes=nbytes))
    ends = ((found, found[-1]) for found in pieces)
    return [
        Bucket(pieces=tuple(found), nbytes=last.bucket_offset + aligned(last.nbytes, alignment)) for found, last in ends
    ]


def pack(
    bucket: Bucket,
    tensors: Sequence[torch.Tensor],
    out: torch.Tensor | memoryview,
    *,
    digest: bool = False,
    num_threads: int = 1,
) -> int | None:
    """Copy a bucket's pieces into ``out`` and zero the gaps. With ``digest`` return the digest of the bucket's bytes.

    ``out`` is CPU memory of at least ``bucket.nbytes`` bytes. A tensor that is not contiguous is made so first, for
    this call. The digest is taken while copying: on most machines it costs nothing.
    """
    pieces = [(plain_memory(tensors[p.tensor]), p.tensor_offset, p.bucket_offset, p.nbytes) for p in bucket.pieces]
    return cpu.move_bucket(out, pieces, bucket.nbytes, True, digest, num_threads)


def unpack(
    bucket: Bucket,
    data: torch.Tensor | memoryview,
    tensors: Sequence[torch.Tensor],
    *,
    digest: bool = False,
    num_threads: int = 1,
) -> int | None:
    """Copy a bucket's pieces from ``data`` into the tensors; with ``digest`` return the digest of the bytes read.

    The tensors must be contiguous and on the CPU. The digest is of the bytes as they were copied: compare it before
    the tensors are used.
    """
    touched = {p.tensor: tensors[p.tensor] for p in bucket.pieces}
    for index, tensor in touched.items():
        if not tensor.is_contiguous() or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
            raise ArgumentError(
                f"tensor {index} is not contiguous CPU memory that holds its values as they are (it is strided, on "
                "another device, or lazily conjugated or negated): unpack into one that is, then copy it over"
            )
    pieces = [(tensors[p.tensor].detach(), p.tensor_offset, p.bucket_offset, p.nbytes) for p in bucket.pieces]
    result = cpu.move_bucket(data, pieces, bucket.nbytes, False, digest, num_threads)
    torch.autograd.graph.increment_version(list(touched.values()))
    return result


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
