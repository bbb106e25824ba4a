"""The content of a leaf as its difference from the base version: bytes to put into buckets, and back.

The codec is `rl_csrc.delta`, bit-exact: what changed, and what it is now. Its three arrays follow one another, as
WIRE.md lays them out; here is the arithmetic of that, and `Snapshot`, which is the base.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import rl_csrc
from rl_ckpt._digest import LEAF_BYTES
from rl_ckpt._plan import Codec
from rl_ckpt._tensors import TensorSpec, buffer_tensor, from_bytes, memory_of
from rl_ckpt.errors import ProtocolError
from rl_csrc import delta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

_HEAD = struct.Struct("<QQ")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_FRACTION = 0.5
"""A difference of more than this part of a leaf's bytes is sent as the leaf."""
_FILLING = torch.zeros(8, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Part:
    """What one leaf of a tensor has to be sent as."""

    start: int
    """Where it begins in the tensor, bytes."""
    codec: Codec
    """What the content is."""
    content: Tensor
    """uint8 [bytes], on the CPU."""
    digest: int
    """Of the leaf's new elements."""


class Snapshot:
    """What the sender sent last: to tell differences from, and to give to who comes late. As large as the weights."""

    def __init__(self, squeeze: Callable[[Tensor], Tensor] | None = None) -> None:
        self.version: int | None = None
        """The committed version that it is; None while it is none."""
        self.is_whole = True
        """Whether it has every tensor that was ever sent."""
        self._squeeze = squeeze
        """Compresses differences, if they are to be compressed."""
        self._contents: dict[str, tuple[TensorSpec, Tensor]] = {}
        self._leaves: dict[str, list[int]] = {}
        """The digests of their leaves."""
        self._names: set[str] = set()

    @property
    def names(self) -> frozenset[str]:
        """Of its tensors."""
        return frozenset(self._contents)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All of them, in the order of their first appearance. They change with the next sync."""
        for name, (spec, content) in self._contents.items():
            yield name, from_bytes(content, spec)

    def open(self) -> int | None:
        """Begin to change it, and return the version that it was."""
        base, self.version = self.version, None
        if base is None:
            self._contents.clear()
        return base

    def commit(self, version: int) -> None:
        """It is that version now."""
        self.version = version
        self._names |= self._contents.keys()
        self.is_whole = self._names == self._contents.keys()

    def knows(self, spec: TensorSpec) -> bool:
        """Whether there is a tensor of this name, dtype and shape to tell differences from."""
        return self._contents.get(spec.name, (None,))[0] == spec

    def replace(self, spec: TensorSpec, raw: Tensor) -> Tensor:
        """Take the new content of a tensor, uint8 [num_bytes] on any device, whole; return the copy."""
        if self.knows(spec):
            return self._contents[spec.name][1].copy_(raw)
        copied = raw.to("cpu", copy=True)
        self._contents[spec.name] = (spec, copied)
        return copied

    def note(self, spec: TensorSpec, leaves: list[int]) -> None:
        """Keep the digests of the leaves of what it holds of a tensor."""
        self._leaves[spec.name] = leaves

    def advance(self, spec: TensorSpec, raw: Tensor) -> Iterator[Part]:
        """Take the new content of a tensor that it knows, leaf by leaf; say of each what has to be sent."""
        base, leaves = self._contents[spec.name][1], self._leaves[spec.name]
        for index, start in enumerate(range(0, max(1, raw.numel()), LEAF_BYTES)):
            fresh, old = raw[start : start + LEAF_BYTES].to("cpu"), base[start : start + LEAF_BYTES]
            found = find(fresh, old, spec.dtype.itemsize)
            if found is None:
                old.copy_(fresh)
            elif found.num_changed:
                delta.apply(old.view(_WORDS[spec.dtype.itemsize]), found)
            if found is None or found.num_changed:  # or else it is what it was, bit for bit
                leaves[index] = rl_csrc.digest(fresh)
            yield self._part(start, fresh, found, leaves[index])

    def _part(self, start: int, fresh: Tensor, found: delta.Delta | None, digest: int) -> Part:
        if found is not None:
            content, codec = _lay_out(found), Codec.DELTA
            if self._squeeze is not None:
                content, codec = self._squeeze(content), Codec.DELTA_ZSTD
            if content.numel() < fresh.numel():
                return Part(start, codec, content, digest)
        return Part(start, Codec.RAW, fresh, digest)


def find(fresh: Tensor, base: Tensor, itemsize: int) -> delta.Delta | None:
    """How two contents differ, or None if not in little, or if it cannot be told for elements of this size.

    Args:
        fresh: uint8 [num_bytes], contiguous, on the CPU.
        base: Likewise.
        itemsize: Of an element, bytes.
    """
    word = _WORDS.get(itemsize)
    if word is None or fresh.numel() == 0:
        return None
    return delta.encode(fresh.view(word), base.view(word), max_fraction=MAX_FRACTION)


def encode(fresh: Tensor, base: Tensor, itemsize: int) -> Tensor | None:
    """What `find` found as content: uint8 [bytes of the difference]."""
    found = find(fresh, base, itemsize)
    return None if found is None else _lay_out(found)


def _lay_out(found: delta.Delta) -> Tensor:
    head = buffer_tensor(bytearray(_HEAD.pack(found.gaps.numel(), found.num_changed)), offset=0, num_bytes=_HEAD.size)
    filling = _FILLING[: -found.gaps.numel() % 8]
    return torch.cat(
        [head, found.table.view(-1).view(torch.uint8), found.gaps, filling, found.values.view(torch.uint8)]
    )


def apply(content: Tensor, target: Tensor, spec: TensorSpec) -> None:
    """Overwrite in a leaf what `encode` found to be different.

    Args:
        content: uint8 [bytes of the difference], on the CPU.
        target: uint8 [bytes of the leaf], on the CPU.
        spec: Of the tensor.

    Raises:
        ProtocolError: `content` is no difference of such a leaf; nothing was written.
    """
    itemsize = spec.dtype.itemsize
    word = _WORDS.get(itemsize)
    if word is None or content.numel() < _HEAD.size:
        raise ProtocolError(f"{spec.name!r} came as a difference of {content.numel()} bytes, which cannot be one")
    gap_bytes, num_changed = _HEAD.unpack(bytes(memory_of(content[: _HEAD.size])))
    num_chunks = -(-(target.numel() // itemsize) // delta.CHUNK_ELEMENTS)
    gaps_at = _HEAD.size + 8 * num_chunks
    values_at = gaps_at + gap_bytes + -gap_bytes % 8
    if values_at + num_changed * itemsize != content.numel():
        raise ProtocolError(f"{spec.name!r} came as a difference whose parts do not add up to its length")
    found = delta.Delta(
        table=content[_HEAD.size : gaps_at].view(torch.int32).view(num_chunks, 2),
        gaps=content[gaps_at : gaps_at + gap_bytes],
        values=content[values_at:].view(word),
    )
    try:
        delta.apply(target.view(word), found)
    except ValueError as error:
        raise ProtocolError(f"{spec.name!r} came as a difference that does not fit it: {error}") from error
