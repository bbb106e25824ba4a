"""Digests of tensors and of whole models, the same for equal weights whatever carried them. WIRE.md defines them.

A tensor's content is cut into leaves of 4 MiB; a leaf has the digest of `rl_csrc.digest`, a tensor that of its leaves'
digests, a model that of its tensors' names, dtypes, shapes and digests. So a tensor can be checked while it lands, in
the pass that copies it, and a model without an order of its tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import rl_csrc
from rl_ckpt._tensors import DTYPE_CODES, TensorSpec, as_bytes, spec_of
from rl_csrc.bucket import Bucket, Piece, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

LEAF_BYTES = 4 << 20
_HEAD = struct.Struct("<HBB")


def combine(leaves: Sequence[int]) -> int:
    """The digest over the digests of leaves, in order."""
    return leaves[0] if len(leaves) == 1 else rl_csrc.digest(struct.pack(f"<{len(leaves)}Q", *leaves))


def leaves_of(raw: Tensor) -> list[int]:
    """The digests of the leaves of uint8 [num_bytes]; one for content without bytes."""
    return rl_csrc.digest_many(_leaves(raw))


def digests_of(contents: Sequence[Tensor]) -> list[int]:
    """The digests of many contents, uint8 [num_bytes] each: together, because a device has to be waited for."""
    leaves = [_leaves(content) for content in contents]
    found = iter(rl_csrc.digest_many([leaf for of_one in leaves for leaf in of_one]))
    return [combine([next(found) for _ in of_one]) for of_one in leaves]


def pack_leaves(content: Tensor, slot: Tensor) -> list[int]:
    """Copy `content` into `slot`, uint8 [num_bytes] both, and return the digests of its leaves, in one pass."""
    if content.device.type != "cpu" or slot.device.type != "cpu":
        slot.copy_(content)
        return leaves_of(slot)
    pairs = zip(_leaves(content), _leaves(slot), strict=True)
    return [_digest(pack(_plan(leaf.numel()), [leaf], into, digest=True)) for leaf, into in pairs]


def unpack_leaves(slot: Tensor, content: Tensor) -> list[int]:
    """Copy `slot` into `content`, uint8 [num_bytes]; the digests of what was read or, on a device, of the copy."""
    if content.device.type != "cpu" or slot.device.type != "cpu":
        content.copy_(slot)
        return leaves_of(content)
    pairs = zip(_leaves(slot), _leaves(content), strict=True)
    return [_digest(unpack(_plan(leaf.numel()), leaf, [into], digest=True)) for leaf, into in pairs]


def model_digest(tensors: Iterable[tuple[TensorSpec, int]]) -> int:
    """The digest over `(what, digest)` of tensors in any order; names must differ."""
    records: list[bytes] = []
    for spec, digest in sorted(tensors, key=lambda item: item[0].name):
        name = spec.name.encode()
        head = _HEAD.pack(len(name), DTYPE_CODES[spec.dtype], len(spec.shape))
        records.append(head + name + struct.pack(f"<{len(spec.shape) + 1}Q", *spec.shape, digest))
    return rl_csrc.digest(b"".join(records))


def tree_digest(named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> int:
    """See `rl_ckpt.tree_digest`."""
    items = cast("Mapping[str, Tensor]", named_tensors).items() if isinstance(named_tensors, Mapping) else named_tensors
    return model_digest((spec_of(name, tensor), combine(leaves_of(as_bytes(tensor)))) for name, tensor in items)


def _leaves(raw: Tensor) -> list[Tensor]:
    num_bytes = raw.numel()
    if num_bytes <= LEAF_BYTES:
        return [raw]
    return [raw[start : start + LEAF_BYTES] for start in range(0, num_bytes, LEAF_BYTES)]


@lru_cache(maxsize=256)
def _plan(num_bytes: int) -> Bucket:
    """One content, whole."""
    return Bucket(pieces=(Piece(tensor=0, tensor_offset=0, bucket_offset=0, nbytes=num_bytes),), nbytes=num_bytes)


def _digest(value: int | None) -> int:
    if value is None:
        raise TypeError("rl_csrc.bucket returned no digest although it was asked for one")
    return value
