"""Where the pieces of a bucket go, and what a span says of its tensor. Knows no transaction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from rl_ckpt.tensors import delta as _zstd
from rl_ckpt.tensors.digest import LEAF_BYTES
from rl_ckpt.tensors.buckets import Codec, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from rl_ckpt.protocol.messages import Bucket
    from rl_ckpt.tensors.spec import TensorSpec

CPU = torch.device("cpu")


class Memory(Protocol):
    """Where the bytes of a bucket come from."""

    slots: Sequence[Tensor]
    """uint8 [bucket_bytes] each."""
    is_lent: bool
    """Whether they are the sender's own, and can be written: tensors in them are not handed out."""

    def fetch(self, bucket: Bucket, contents: Callable[[], Sequence[Tensor]]) -> bool:
        """Read a bucket into `contents()`, uint8 each, one after the other; False if it is in its slot instead."""
        ...

    def refresh(self, slot: int) -> bool:
        """Undo what this process itself has written to a slot; False if that cannot hide what the sender wrote."""
        ...


@dataclass(slots=True)
class Scratch:
    """Memory for tensors that came in several pieces, kept from one to the next."""

    _memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def get(self, num_bytes: int, device: torch.device) -> Tensor:
        """uint8 [num_bytes], the same memory as the last time where it is enough."""
        if self._memory.numel() < num_bytes or self._memory.device != device:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free it first
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._memory[:num_bytes]

    def forget(self) -> None:
        """Use other memory from now on: who has a tensor in this keeps it."""
        self._memory = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the piece of a span goes."""

    span: Span
    spec: TensorSpec
    content: Tensor | None
    """uint8 [total_bytes], of which it is a piece; None: it is whole, and is in the slot."""
    is_target: bool
    """Whether `content` is the memory of the consumer's own tensor."""


def leaf_bytes(span: Span, spec: TensorSpec) -> int:
    """Length of the leaf that a span starts in."""
    return min(LEAF_BYTES, spec.num_bytes - span.start)


def end_of(span: Span, spec: TensorSpec) -> int:
    """Where the part of a span ends in its tensor, bytes."""
    if span.codec == Codec.TIED:
        return spec.num_bytes
    return span.start + (span.total_bytes if span.codec == Codec.RAW else leaf_bytes(span, spec))


def readable_codecs() -> int:
    """A bit for every `Codec` that this end can read."""
    is_unreadable = {Codec.DELTA_ZSTD} if not _zstd.is_installed() else set[Codec]()
    return sum(1 << codec for codec in Codec if codec not in is_unreadable)


def is_base(targets: Mapping[str, Tensor]) -> bool:
    """Whether differences can be applied to all of these."""
    return all(is_plain_on(target) for target in targets.values())


def is_plain_on(target: Tensor, device: torch.device = CPU) -> bool:
    """Whether a tensor's memory can be written as bytes, from that device."""
    return (
        target.device == device
        and target.layout == torch.strided
        and target.is_contiguous()
        and not (target.is_conj() or target.is_neg())
    )


def piece_of(slot: Tensor, span: Span) -> Tensor:
    """What a span means of a slot."""
    return slot[span.bucket_offset : span.bucket_offset + span.num_bytes]


def part_of(content: Tensor, start: int, num_bytes: int) -> Tensor:
    """A run of bytes; no view where it is all of them."""
    return content if num_bytes == content.numel() else content[start : start + num_bytes]


def contents_of(bucket: Bucket, places: Sequence[Place], slot: Tensor) -> list[Tensor]:
    """The memory that the bytes of a bucket go to, in their order; the slot's own for what is not wanted elsewhere."""
    contents: list[Tensor] = []
    in_slot = 0
    for place in places:
        span = place.span
        if place.content is not None:
            contents.append(slot[in_slot : span.bucket_offset])
            contents.append(place.content[span.offset : span.offset + span.num_bytes])
            in_slot = span.bucket_offset + span.num_bytes
    contents.append(slot[in_slot : bucket.used_bytes])
    return [content for content in contents if content.numel()]
