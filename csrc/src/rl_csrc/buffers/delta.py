"""Delta codec: the bit-exact difference between two tensors of one shape, as changed positions and new values.

Elements are compared as bits (so a NaN equals itself and 0.0 differs from -0.0) and applying overwrites, so applying
twice is applying once. One changed element costs its own bytes and one more. ``FRAMES.md`` specifies the three
arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from rl_csrc.buffers.digest import digest
from rl_csrc.errors import ArgumentError, DeltaError
from rl_csrc.native import cpu

if TYPE_CHECKING:
    from collections.abc import Mapping

CHUNK_ELEMENTS = 65536
"""Elements of one chunk, which has one line of ``table``."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Difference of two tensors, as three plain tensors that a frame can carry (``as_mapping``, ``from_mapping``)."""

    table: torch.Tensor
    """int32 [chunks, 2]: changed elements and gap bytes of every chunk of 65536 elements."""
    gaps: torch.Tensor
    """uint8: per changed element the number of unchanged ones before it; 255 means 255 of them and no changed one."""
    values: torch.Tensor
    """uint8, int16, int32 or int64 [changed]: the new bits."""

    @property
    def num_changed(self) -> int:
        """Elements that changed."""
        return self.values.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the three arrays."""
        return self.table.nbytes + self.gaps.nbytes + self.values.nbytes

    def as_mapping(self) -> dict[str, torch.Tensor]:
        """Return the arrays by name."""
        return {"table": self.table, "gaps": self.gaps, "values": self.values}

    @classmethod
    def from_mapping(cls, arrays: Mapping[str, torch.Tensor]) -> Delta:
        """Build a delta from the mapping of ``as_mapping`` or from a decoded frame."""
        return cls(table=arrays["table"], gaps=arrays["gaps"], values=arrays["values"])


def encode(fresh: torch.Tensor, base: torch.Tensor, *, max_fraction: float = 0.5) -> Delta | None:
    """Return the delta from ``base`` to ``fresh``, or None if it has more than ``max_fraction`` of the tensor's bytes.

    Both are contiguous CPU tensors of one dtype and shape, of 1, 2, 4 or 8 bytes an element; ``ArgumentError``
    otherwise.
    """
    if fresh.dtype != base.dtype or fresh.shape != base.shape or fresh.device != base.device:
        raise ArgumentError(
            f"fresh is {fresh.dtype} {list(fresh.shape)} on {fresh.device}, base {base.dtype} {list(base.shape)} on "
            f"{base.device}: both need the same dtype, shape and device"
        )
    item = _item_nbytes(fresh, "fresh")
    _item_nbytes(base, "base")
    if fresh.device.type != "cpu":
        from rl_csrc import cuda  # loads the CUDA module: only when a tensor lives there

        arrays = cuda.delta_encode(fresh.detach(), base.detach(), max_fraction)
        return None if arrays is None else Delta(table=arrays[0], gaps=arrays[1], values=arrays[2])
    num_chunks = -(-fresh.numel() // CHUNK_ELEMENTS)
    room = int(fresh.nbytes * max_fraction) // item * item
    table = torch.empty((num_chunks, 2), dtype=torch.int32)
    gaps = torch.empty(room, dtype=torch.uint8)  # untouched pages cost nothing
    values = torch.empty(room // item, dtype=_WORDS[item])
    sizes = cpu.encode_delta(fresh.detach(), base.detach(), item, table, gaps, values)
    if sizes is None:
        return None
    gap_nbytes, num_changed = sizes
    return Delta(table=table, gaps=gaps[:gap_nbytes].clone(), values=values[:num_changed].clone())


@dataclass(frozen=True, slots=True)
class Leaf:
    """Delta of one leaf, as `advance` returns it."""

    offset: int
    """Start of its delta in ``out``, bytes."""
    nbytes: int
    """Size of its delta, bytes; 0: the leaf must be sent whole."""
    content_digest: int
    """Digest of the delta's bytes; 0 if the leaf must be sent whole."""
    digest: int
    """Digest of the leaf's new bytes."""


def advance(
    fresh: torch.Tensor,
    base: torch.Tensor,
    digests: list[int],
    out: torch.Tensor,
    *,
    first: int = 0,
    leaf_nbytes: int = 4 << 20,
    alignment: int = 256,
    enough: int | None = None,
    max_fraction: float = 0.5,
) -> list[Leaf]:
    """Delta of ``fresh`` against ``base`` leaf by leaf; base is overwritten with fresh in the same pass over both.

    Does the work of ``encode``, of ``apply`` to the base, and of ``digest`` of the leaf without reading anything twice:
    the digest of a leaf is a sum over its words, so it is updated from the words that changed. The delta of a leaf is
    one run of bytes: gap bytes u64, changed elements u64, then ``table``, ``gaps`` (zero-padded to a multiple of 8) and
    ``values``.

    Args:
        fresh: The new content, contiguous, on the CPU, elements of 1, 2, 4 or 8 bytes.
        base: The old content, likewise; from leaf ``first`` on it is overwritten as far as leaves are returned.
        digests: ``rl_csrc.digest`` of every leaf of base. Not changed: take the new ones from what is returned.
        out: uint8, contiguous, on the CPU: memory for the deltas, each at a multiple of ``alignment``.
        first: Index of the first leaf to encode.
        leaf_nbytes: Size of a leaf, a multiple of 512 KiB; the last leaf may be shorter.
        alignment: A multiple of 8.
        enough: Stop once so many bytes of ``out`` are used; None: go on while another delta is sure to fit.
        max_fraction: A leaf whose gaps and values would be larger than this fraction of it is to be sent whole.

    Returns:
        Leaves, in order. Only the last may have to be sent whole; ``out`` then holds nothing of it. An empty list means
        that ``out`` is too small for the largest possible delta of the next leaf (about ``max_fraction`` of a leaf).

    Raises:
        ArgumentError: fresh and base differ in dtype or shape, or an argument is not as described.
    """
    if fresh.dtype != base.dtype or fresh.shape != base.shape or base.device.type != "cpu":
        raise ArgumentError(
            f"fresh is {fresh.dtype} {list(fresh.shape)}, base {base.dtype} {list(base.shape)} on {base.device}: both "
            "need the same dtype and shape, and to be on the CPU"
        )
    item = _item_nbytes(fresh, "fresh")
    _item_nbytes(base, "base")
    if out.dtype != torch.uint8 or not out.is_contiguous() or out.device.type != "cpu" or first < 0:
        raise ArgumentError(
            f"out is {out.dtype} on {out.device} and first is {first}: wanted contiguous uint8 on the CPU, and >= 0"
        )
    leaves = cpu.advance_delta(
        fresh.detach(),
        base.detach(),
        item,
        leaf_nbytes,
        first,
        digests,
        out,
        alignment,
        out.numel() if enough is None else enough,
        max_fraction,
    )
    torch.autograd.graph.increment_version(base)
    return [Leaf(*leaf) for leaf in leaves]


def apply(target: torch.Tensor, delta: Delta) -> int:
    """Overwrite the changed elements of ``target`` in place and return how many there were.

    The delta is checked as a whole first: ``DeltaError`` means that it does not fit this tensor or was damaged, and
    that nothing was written.
    """
    item = _checked_item(target, delta)
    if target.device.type == "cpu":
        cpu.apply_delta(target.detach(), item, delta.table, delta.gaps, delta.values, False)
    else:
        from rl_csrc import cuda

        if not cuda.delta_apply(target.detach(), delta.table, delta.gaps, delta.values):
            raise DeltaError("the arrays of the delta do not fit each other or this tensor; it was not touched")
    torch.autograd.graph.increment_version(target)
    return delta.num_changed


def apply_digest(target: torch.Tensor, delta: Delta) -> int:
    """Apply a delta as ``apply`` does; return ``rl_csrc.digest`` of the whole target afterwards, read back from memory.

    On the CPU both are one pass over the target.
    """
    if target.device.type != "cpu":
        apply(target, delta)
        return digest(target)
    item = _checked_item(target, delta)
    found = cpu.apply_delta(target.detach(), item, delta.table, delta.gaps, delta.values, True)
    torch.autograd.graph.increment_version(target)
    return cast("int", found)


def _checked_item(target: torch.Tensor, delta: Delta) -> int:
    """Element size of the target in bytes; ``DeltaError`` if the delta is not for elements of that size."""
    item = _item_nbytes(target, "target")
    arrays: tuple[tuple[str, torch.Tensor, torch.dtype], ...] = (
        ("table", delta.table, torch.int32),
        ("gaps", delta.gaps, torch.uint8),
        ("values", delta.values, _WORDS[item]),
    )
    for name, array, dtype in arrays:
        if array.dtype != dtype or array.device != target.device or not array.is_contiguous():
            raise DeltaError(
                f"the delta's {name} is {array.dtype} on {array.device}; for {target.dtype} it is contiguous {dtype}"
            )
    return item


def _item_nbytes(tensor: torch.Tensor, name: str) -> int:
    item = tensor.element_size()
    if item not in _WORDS or tensor.device.type not in ("cpu", "cuda") or not tensor.is_contiguous():
        raise ArgumentError(
            f"{name} is {tensor.dtype} on {tensor.device}, contiguous: {tensor.is_contiguous()}; a delta works on "
            "contiguous CPU or CUDA tensors with elements of 1, 2, 4 or 8 bytes"
        )
    return item
