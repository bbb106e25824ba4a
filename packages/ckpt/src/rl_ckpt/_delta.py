"""The content of a tensor as its difference from the base version: bytes to put into buckets, and back.

The codec is `rl_csrc.delta`, bit-exact: what changed, and what it is now. Its three arrays follow one another, as
WIRE.md lays them out; here is the arithmetic of that, and `Snapshot`, which is the base.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from rl_ckpt._tensors import TensorSpec, buffer_tensor, from_bytes
from rl_ckpt.errors import ProtocolError
from rl_csrc import delta

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_HEAD = struct.Struct("<QQ")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_FRACTION = 0.5
"""A difference of more than this part of a tensor's bytes is sent as the tensor."""


class Snapshot:
    """What the sender sent last: to tell differences from, and to give to who comes late. As large as the weights."""

    def __init__(self) -> None:
        self.version: int | None = None
        """The committed version that it is; None while it is none."""
        self.is_whole = True
        """Whether it has every tensor that was ever sent."""
        self._contents: dict[str, tuple[TensorSpec, Tensor]] = {}
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

    def advance(self, spec: TensorSpec, raw: Tensor, *, is_base: bool) -> Tensor | None:
        """Take the new content of a tensor, uint8 [num_bytes]; return how it differs, None if not wanted or not small.

        Args:
            spec: Of the tensor.
            raw: Its content, on any device.
            is_base: Whether a difference is wanted.
        """
        known = self._contents.get(spec.name)
        if known is None or known[0] != spec:
            self._contents[spec.name] = (spec, raw.to("cpu", copy=True))
            return None
        fresh, base = raw.to("cpu"), known[1]
        difference = encode(fresh, base, spec) if is_base else None
        if difference is None:
            base.copy_(fresh)
        else:
            apply(difference, base, spec)
        return difference


def encode(fresh: Tensor, base: Tensor, spec: TensorSpec) -> Tensor | None:
    """The difference of two contents of one tensor as bytes, or None if it is not small or cannot be told.

    Args:
        fresh: uint8 [num_bytes], contiguous, on the CPU.
        base: Likewise.
        spec: Of the tensor.

    Returns:
        uint8 [bytes of the difference].
    """
    word = _WORDS.get(spec.dtype.itemsize)
    if word is None or spec.num_bytes == 0 or fresh.data_ptr() % spec.dtype.itemsize:
        return None
    found = delta.encode(fresh.view(word), base.view(word), max_fraction=MAX_FRACTION)
    if found is None:
        return None
    head = buffer_tensor(bytearray(_HEAD.pack(found.gaps.numel(), found.num_changed)), offset=0, num_bytes=_HEAD.size)
    parts = [head, found.table.view(-1).view(torch.uint8), found.gaps, found.values.view(torch.uint8)]
    filling = torch.zeros(-found.gaps.numel() % 8, dtype=torch.uint8)
    return torch.cat([*parts[:3], filling, parts[3]])


def apply(content: Tensor, target: Tensor, spec: TensorSpec) -> None:
    """Overwrite in `target`, uint8 [num_bytes] on the CPU, what `encode` found to be different.

    Raises:
        ProtocolError: `content` is no difference of such a tensor; nothing was written.
    """
    word = _WORDS.get(spec.dtype.itemsize)
    if word is None or content.numel() < _HEAD.size:
        raise ProtocolError(f"{spec.name!r} came as a difference of {content.numel()} bytes, which cannot be one")
    gap_bytes, num_changed = _HEAD.unpack(bytes(content[: _HEAD.size].tolist()))
    num_chunks = -(-(spec.num_bytes // spec.dtype.itemsize) // delta.CHUNK_ELEMENTS)
    gaps_at = _HEAD.size + 8 * num_chunks
    values_at = gaps_at + gap_bytes + -gap_bytes % 8
    if values_at + num_changed * spec.dtype.itemsize != content.numel():
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
