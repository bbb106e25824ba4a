"""The content of leaves as their difference from the base version: bytes to put into buckets, and back.

The codec is `rl_csrc.delta`, bit-exact: what changed, and what it is now. `BaseCopy` is the base, at the sender.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from rl_ckpt.errors import BackendError, ProtocolError
from rl_ckpt.tensors.buckets import Codec
from rl_ckpt.tensors.digest import LEAF_BYTES
from rl_ckpt.tensors.spec import TensorSpec, buffer_tensor, from_bytes, memory_of
from rl_csrc import delta

if TYPE_CHECKING:
    from collections.abc import Callable, ItemsView, Iterable, Iterator, Sequence

    from torch import Tensor


_HEAD = struct.Struct("<QQ")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_FRACTION = 0.5
"""A difference of more than this part of a leaf's bytes is sent as the leaf."""
ENOUGH_BYTES = 128 << 10
"""Bytes of differences that are sent as soon as they are found, so that receivers work meanwhile."""


@dataclass(frozen=True, slots=True)
class LeafUpdate:
    """Update of one leaf of a tensor, as it is sent."""

    start: int
    """Start in the tensor, bytes."""
    codec: Codec
    """Encoding of the content."""
    content: Tensor
    """uint8 [bytes], on the CPU."""
    content_digest: int | None
    """Digest of the content, if it is known already."""
    digest: int
    """Digest of the leaf's new elements."""


class BaseCopy:
    """Copy of the version sent last, for differences and for late receivers. As large as the weights."""

    def __init__(self, squeeze: Callable[[Tensor], Tensor] | None = None) -> None:
        self.version: int | None = None
        """The committed version that it is; None while it is none."""
        self.is_whole = True
        """Whether it has every tensor that was ever sent."""
        self._squeeze = squeeze
        """Compresses differences, if they are to be compressed."""
        self._contents: dict[str, tuple[TensorSpec, Tensor]] = {}
        self._leaves: dict[str, list[int]] = {}
        """The digests of their leaves. Tied tensors have one content and one list."""
        self._groups: dict[str, set[str]] = {}
        """Names of all tensors that share their content, by each of them."""
        self._names: set[str] = set()
        self._room = torch.empty(ENOUGH_BYTES + LEAF_BYTES, dtype=torch.uint8)
        """Memory in which differences are laid out: untouched pages cost nothing."""

    @property
    def names(self) -> frozenset[str]:
        """Names of its tensors."""
        return frozenset(self._contents)

    def tensors(self) -> ItemsView[str, Tensor]:
        """Tensors in the order of their first appearance. They change with the next sync."""
        return {name: from_bytes(content, spec) for name, (spec, content) in self._contents.items()}.items()

    def open(self) -> int | None:
        """Begin to change it, and return the version that it was."""
        base, self.version = self.version, None
        if base is None:
            self._contents.clear()
            self._groups.clear()
        return base

    def commit(self, version: int) -> None:
        """Note that the copy is of that version now."""
        self.version = version
        self._names |= self._contents.keys()
        self.is_whole = self._names == self._contents.keys()

    def knows(self, spec: TensorSpec) -> bool:
        """Whether there is a tensor of this name, dtype and shape to compute differences from."""
        return self._contents.get(spec.name, (None,))[0] == spec

    def replace(self, spec: TensorSpec, raw: Tensor) -> Tensor:
        """Take the new content of a tensor, uint8 [num_bytes] on any device, whole; return the copy."""
        if self.knows(spec):
            return self._contents[spec.name][1].copy_(raw)
        copied = raw.to("cpu", copy=True)
        self._contents[spec.name] = (spec, copied)
        return copied

    def separate(self, name: str, alias: Iterable[str]) -> None:
        """Copy a tensor's content if it shares it with others than these."""
        group = self._groups.get(name, set())
        if not group <= {name, *alias}:
            self._leave(name)
            spec, content = self._contents[name]
            self._contents[name] = (spec, content.clone())
            self._leaves[name] = list(self._leaves[name])

    def add_aliases(self, spec: TensorSpec, alias: Sequence[TensorSpec]) -> None:
        """Let others have the content of a tensor from now on."""
        names = {spec.name, *(other.name for other in alias)}
        if len(names) == 1:
            return
        for other in alias:
            self._contents[other.name] = (other, self._contents[spec.name][1])
            self._leaves[other.name] = self._leaves[spec.name]
        for name in names:
            self._leave(name)
            self._groups[name] = names

    def _leave(self, name: str) -> None:
        """Take it out of the names that share its content."""
        self._groups.pop(name, set()).discard(name)

    def note(self, spec: TensorSpec, leaves: list[int]) -> None:
        """Keep the digests of the leaves of what it holds of a tensor."""
        self._leaves[spec.name] = leaves

    def can_advance(self, spec: TensorSpec) -> bool:
        """Whether differences of a tensor can be computed from the stored version."""
        return self.knows(spec) and spec.dtype.itemsize in _WORDS and spec.num_bytes > 0

    def advance(self, spec: TensorSpec, raw: Tensor) -> Iterator[list[LeafUpdate]]:
        """Take the new content of a tensor that it can advance; say what its leaves are sent as, a few at a time.

        What is yielded is valid until the next step.
        """
        word = _WORDS[spec.dtype.itemsize]
        fresh, base, leaves = raw.to("cpu"), self._contents[spec.name][1], self._leaves[spec.name]
        first = 0
        while first < len(leaves):
            changed = delta.advance(
                fresh.view(word),
                base.view(word),
                leaves,
                self._room,
                first=first,
                leaf_nbytes=LEAF_BYTES,
                enough=ENOUGH_BYTES,
                max_fraction=MAX_FRACTION,
            )
            leaves[first : first + len(changed)] = [leaf.digest for leaf in changed]
            yield [self._part((first + i) * LEAF_BYTES, base, leaf) for i, leaf in enumerate(changed)]
            first += len(changed)

    def _part(self, start: int, base: Tensor, leaf: delta.Leaf) -> LeafUpdate:
        """Update of the leaf at `start` of `base`, which has the new elements already."""
        whole = base[start : start + LEAF_BYTES]
        if leaf.nbytes == 0:
            return LeafUpdate(start, Codec.RAW, whole, leaf.digest, leaf.digest)
        content = self._room[leaf.offset : leaf.offset + leaf.nbytes]
        if self._squeeze is None:
            return LeafUpdate(start, Codec.DELTA, content, leaf.content_digest, leaf.digest)
        squeezed = self._squeeze(content)
        if squeezed.numel() < whole.numel():
            return LeafUpdate(start, Codec.DELTA_ZSTD, squeezed, None, leaf.digest)
        return LeafUpdate(start, Codec.RAW, whole, leaf.digest, leaf.digest)


def apply(content: Tensor, target: Tensor, spec: TensorSpec) -> int:
    """Overwrite in a leaf what a sender found to be different; return the digest of what the leaf is then, read back.

    Args:
        content: uint8 [bytes of the difference], on the CPU.
        target: uint8 [bytes of the leaf], on the CPU.
        spec: Spec of the tensor.

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
        return delta.apply_digest(target.view(word), found)
    except ValueError as error:
        raise ProtocolError(f"{spec.name!r} came as a difference that does not fit it: {error}") from error


LEVEL = 1
"""The fastest: what is left to find in gaps and low bits is found by entropy coding alone."""


def is_installed() -> bool:
    """Whether this end can read and write it."""
    return find_spec("zstandard") is not None


def compressor() -> Callable[[Tensor], Tensor]:
    """Compressor of uint8 [num_bytes] on the CPU.

    Raises:
        BackendError: the extra is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise BackendError(f"zstd=True needs the package zstandard ({error}): pip install 'rl-ckpt[zstd]'") from error
    context = zstandard.ZstdCompressor(level=LEVEL)

    def squeeze(content: Tensor) -> Tensor:
        data = bytearray(context.compress(memory_of(content)))
        return buffer_tensor(data, offset=0, num_bytes=len(data))

    return squeeze


def decompress(content: Tensor, leaf_bytes: int, name: str) -> Tensor:
    """The difference, uint8, at an address that its arrays can be read from.

    Args:
        content: uint8 [num_bytes], on the CPU.
        leaf_bytes: Size of the leaf that it is of; no difference is larger.
        name: Name of the tensor, for messages.

    Raises:
        ProtocolError: it is nothing of the kind.
    """
    import zstandard

    try:
        declared = zstandard.frame_content_size(memory_of(content))
        if not 0 < declared <= leaf_bytes:
            raise ProtocolError(f"{name!r} came as a compressed difference of {declared} bytes for {leaf_bytes}")
        data = zstandard.ZstdDecompressor().decompress(memory_of(content), max_output_size=declared)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"{name!r} came as a compressed difference that cannot be read: {error}") from error
    raw = torch.empty(len(data), dtype=torch.uint8)
    memory_of(raw)[:] = data
    return raw
