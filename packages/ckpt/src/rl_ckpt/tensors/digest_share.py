"""Tree digest of a sharded model from partial digests of its slices, which add up however the model is cut.

`rl_csrc.digest` sums mixed 64-bit words before it finishes, so that a slice contributes a partial sum to each leaf. A
word that is cut by a slice boundary is kept as bytes, and joined from its parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from rl_ckpt.errors import TensorError
from rl_ckpt.tensors.digest import LEAF_BYTES, combine, model_digest
from rl_ckpt.tensors.spec import CPU, TensorSpec, as_bytes, memory_of
from rl_csrc import digest_finish, digest_sum

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from rl_ckpt.resharding import Box

_WORD = 8
_MASK = 2**64 - 1
_CHUNK_BYTES = 1 << 20
"""Bytes of rows that are digested at a time on a CPU: they stay in its cache."""
_LONG_ROW_BYTES = 64 << 10
"""Length from which a call for each row costs less than digesting the bytes around the part."""
_DEVICE_CHUNK_BYTES = 64 << 20
"""The same on a device, where each call costs a launch and a wait."""


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
        self.num_elements += part.numel()
        rows = _rows_of(box, self.shape, size)
        if rows is not None and (rows.num_bytes < _LONG_ROW_BYTES or part.device != CPU):
            self._add_rows(part, box, rows, num_bytes)
            return
        raw = as_bytes(part)
        content = memory_of(raw) if raw.device == CPU else raw
        start = 0
        for first, count in _runs(box, self.shape):
            self.add_run(content[start : start + count * size], first * size, num_bytes)
            start += count * size

    def _add_rows(self, part: Tensor, box: Box, rows: _Rows, num_bytes: int) -> None:
        """A part of each of many short rows: digested as whole rows that are 0 elsewhere, less what these zeros add."""
        limit = _CHUNK_BYTES if part.device == CPU else _DEVICE_CHUNK_BYTES
        chunk = max(1, limit // rows.num_bytes)
        padded = part.new_zeros((min(chunk, rows.end - rows.first), rows.num_elements))
        raw = padded.view(-1).view(torch.uint8)
        content = memory_of(raw) if raw.device == CPU else raw
        cut = part.detach().reshape(rows.end - rows.first, -1)
        for first in range(0, len(cut), chunk):
            own = cut[first : first + chunk]
            padded[: len(own), rows.start : rows.start + own.shape[1]].copy_(own)
            self.add_run(content[: len(own) * rows.num_bytes], (rows.first + first) * rows.num_bytes, num_bytes)
        for leaf, total in _digest_of_zeros(box, self.shape, part.element_size()).items():
            self.sums[leaf] = (self.sums[leaf] - total) & _MASK

    def add_run(self, content: Tensor | memoryview, position: int, num_bytes: int) -> None:
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


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a tensor that a box has a part of each of."""

    first: int
    """Index of the first row."""
    end: int
    """Index after that of the last row."""
    start: int
    """Element of a row where the part begins."""
    num_elements: int
    """Length of a row, elements."""
    num_bytes: int
    """Length of a row, bytes."""


def _rows_of(box: Box, shape: Sequence[int], size: int) -> _Rows | None:
    """The rows that a box is a part of; None if it is no part of several neighbours, or cuts a word."""
    cut = _cut_axis(box, shape)
    outer = box[1:cut]
    if cut == 0 or any(bounds != (0, n) for bounds, n in zip(outer, shape[1:cut], strict=True)):
        return None
    num_elements, inner = math.prod(shape[cut:]), math.prod(shape[cut + 1 :])
    start, stop = (end * inner for end in box[cut])
    if start == stop or any(each * size % _WORD for each in (num_elements, start, stop)):
        return None
    per_first = math.prod(shape[1:cut])
    first, end = (bound * per_first for bound in box[0])
    return _Rows(first, end, start, num_elements, num_elements * size) if first < end else None


@lru_cache(maxsize=256)
def _digest_of_zeros(box: Box, shape: tuple[int, ...], size: int) -> dict[int, int]:
    """Digest, by leaf, of the zeros around the box that `_add_rows` counts. Cached, as layers are alike."""
    rows = _rows_of(box, shape, size)
    assert rows is not None, "it was asked for rows"
    share = DigestShare(torch.uint8, (0,))
    num_bytes, stop = (
        math.prod(shape) * size,
        rows.start * size + math.prod(b - a for a, b in box) * size // (rows.end - rows.first),
    )
    zeros = memoryview(bytes(rows.num_bytes))
    for row in range(rows.first, rows.end):
        for start, end in ((0, rows.start * size), (stop, rows.num_bytes)):
            share.add_run(zeros[start:end], row * rows.num_bytes + start, num_bytes)
    return share.sums


def _cut_axis(box: Box, shape: Sequence[int]) -> int:
    """The last axis along which a box is not all of the tensor; 0 if there is none."""
    return max((axis for axis, bounds in enumerate(box) if bounds != (0, shape[axis])), default=0)


def _runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The elements of a box that are neighbours in the tensor: the first one's index there, and how many."""
    if any(first == end for first, end in box):
        return
    cut = _cut_axis(box, shape)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    count = math.prod(end - first for first, end in box[cut:])
    inner = box[cut][0] * strides[cut] if box else 0
    for number in range(math.prod(end - first for first, end in box[:cut])):
        first, rest = inner, number
        for axis in reversed(range(cut)):
            rest, index = divmod(rest, box[axis][1] - box[axis][0])
            first += (box[axis][0] + index) * strides[axis]
        yield first, count
