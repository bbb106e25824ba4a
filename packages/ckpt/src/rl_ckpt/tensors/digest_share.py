"""Tree digest of a sharded model from partial digests of its slices, which add up however the model is cut.

`rl_csrc.digest` sums mixed 64-bit words before it finishes, so that a slice contributes a partial sum to each leaf. A
word that is cut by a slice boundary is kept as bytes, and joined from its parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rl_ckpt.errors import TensorError
from rl_ckpt.tensors.digest import LEAF_BYTES, combine, model_digest
from rl_ckpt.tensors.spec import CPU, TensorSpec, as_bytes, memory_of
from rl_csrc import digest_finish, digest_sum

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import Tensor

    from rl_ckpt.resharding import Box

_WORD = 8
_MASK = 2**64 - 1


@dataclass(slots=True)
class DigestShare:
    """Share of one tensor's digest that slices contribute. Picklable, and small: a number for every 4 MiB."""

    dtype: torch.dtype
    """Dtype of the tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    sums: dict[int, int] = field(default_factory=dict[int, int])
    """Sum of each leaf's mixed words."""
    words: dict[int, int] = field(default_factory=dict[int, int])
    """Words of which a slice has a part, by their number in the tensor; other bytes are 0."""
    num_elements: int = 0
    """Number of elements in the slices."""

    def add(self, part: Tensor, box: Box) -> None:
        """Count a slice, `part`, that is `box` of the tensor. Slices must not overlap."""
        size, num_bytes = part.element_size(), math.prod(self.shape) * part.element_size()
        raw = as_bytes(part)
        content = memory_of(raw) if raw.device == CPU else raw
        self.num_elements += part.numel()
        start = 0
        for first, count in _runs(box, self.shape):
            self._add_run(content[start : start + count * size], first * size, num_bytes)
            start += count * size

    def _add_run(self, content: Tensor | memoryview, position: int, num_bytes: int) -> None:
        """Bytes that are neighbours in the tensor, whose first is at `position` of its `num_bytes`."""
        start, end = 0, len(content)
        while start < end:
            at = position + start
            leaf, inner = divmod(at, LEAF_BYTES)
            stop = min(end, start + LEAF_BYTES - inner)
            head = min(-inner % _WORD, stop - start)
            tail = (position + stop) % _WORD if position + stop < num_bytes else 0
            middle = max(stop - tail, start + head)
            self._add_bytes(content[start : start + head], at)
            if middle > start + head:
                total = digest_sum(content[start + head : middle], offset=inner + head)
                self.sums[leaf] = (self.sums.get(leaf, 0) + total) & _MASK
            self._add_bytes(content[middle:stop], position + middle)
            start = stop

    def _add_bytes(self, piece: Tensor | memoryview, position: int) -> None:
        """A part of one word."""
        if len(piece):
            data = bytes(piece) if isinstance(piece, memoryview) else bytes(piece.tolist())
            word, shift = divmod(position, _WORD)
            self.words[word] = self.words.get(word, 0) | int.from_bytes(data, "little") << 8 * shift


def join_digest(shares: Iterable[Mapping[str, DigestShare]]) -> int:
    """The tree digest of the model, of which each mapping has the shares of other slices by tensor.

    Raises:
        TensorError: slices of a tensor are missing, or were counted twice.
    """
    by_name: dict[str, list[DigestShare]] = {}
    for mapping in shares:
        for name, share in mapping.items():
            by_name.setdefault(name, []).append(share)
    return model_digest(_joined(name, own) for name, own in by_name.items())


def _joined(name: str, shares: Sequence[DigestShare]) -> tuple[TensorSpec, int]:
    spec = TensorSpec(name=name, dtype=shares[0].dtype, shape=shares[0].shape)
    if (counted := sum(share.num_elements for share in shares)) != math.prod(spec.shape):
        raise TensorError(f"{counted} elements of {name!r} were counted; it has {math.prod(spec.shape)}")
    sums, words = dict[int, int](), dict[int, int]()
    for share in shares:
        for leaf, total in share.sums.items():
            sums[leaf] = sums.get(leaf, 0) + total
        for word, value in share.words.items():
            words[word] = words.get(word, 0) | value
    for word, value in words.items():
        leaf, inner = divmod(word * _WORD, LEAF_BYTES)
        sums[leaf] = sums.get(leaf, 0) + digest_sum(value.to_bytes(_WORD, "little"), offset=inner)
    leaves = [
        digest_finish(sums.get(leaf, 0) & _MASK, min(LEAF_BYTES, spec.num_bytes - leaf * LEAF_BYTES))
        for leaf in range(max(1, -(-spec.num_bytes // LEAF_BYTES)))
    ]
    return spec, combine(leaves)


def _runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The elements of a box that are neighbours in the tensor: the first one's index there, and how many."""
    if any(first == end for first, end in box):
        return
    cut = max((axis for axis, bounds in enumerate(box) if bounds != (0, shape[axis])), default=0)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    count = math.prod(end - first for first, end in box[cut:])
    inner = box[cut][0] * strides[cut] if box else 0
    for number in range(math.prod(end - first for first, end in box[:cut])):
        first, rest = inner, number
        for axis in reversed(range(cut)):
            rest, index = divmod(rest, box[axis][1] - box[axis][0])
            first += (box[axis][0] + index) * strides[axis]
        yield first, count
