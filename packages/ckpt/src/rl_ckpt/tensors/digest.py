"""Leaf, tensor and tree digests, equal for equal weights whatever the transport. Defined in WIRE.md.

A tensor's content is cut into leaves of 4 MiB; a leaf has the digest of `rl_csrc.digest`, a tensor that of its leaves'
digests, a model that of its tensors' names, dtypes, shapes and digests. So a tensor can be verified in the
same pass that copies it, and a model in any order of its tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import rl_csrc
from rl_ckpt.errors import TensorError
from rl_ckpt.tensors.spec import DTYPE_CODES, TensorSpec, as_bytes, spec_of
from rl_csrc import bucket

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

LEAF_BYTES = 4 << 20
_HEAD = struct.Struct("<HBB")


def combine(leaves: Sequence[int]) -> int:
    """Digest of a tensor, from its leaf digests in order."""
    return leaves[0] if len(leaves) == 1 else rl_csrc.digest(struct.pack(f"<{len(leaves)}Q", *leaves))


def leaves_of(raw: Tensor) -> list[int]:
    """Leaf digests of uint8 [num_bytes]; a single one for empty content."""
    return rl_csrc.digest_many(_leaves(raw))


def digests_of(contents: Sequence[Tensor]) -> list[int]:
    """Tensor digests of many contents, uint8 [num_bytes] each, with a single synchronization on a device."""
    leaves = [_leaves(content) for content in contents]
    found = iter(rl_csrc.digest_many([leaf for of_one in leaves for leaf in of_one]))
    return [combine([next(found) for _ in of_one]) for of_one in leaves]


def unpack_leaves(slot: Tensor, pieces: list[tuple[Tensor, int, int, int]]) -> list[list[int]]:
    """Copy pieces of a slot into contents; returns leaf digests of the bytes read or, on a device, of the copies.

    Args:
        slot: uint8 [bucket_bytes].
        pieces: (content uint8, offset in it, offset in the slot, size), in bytes.
    """
    if slot.device.type == "cpu" and all(piece[0].device.type == "cpu" for piece in pieces):
        return bucket.unpack_leaves(slot, pieces, leaf_nbytes=LEAF_BYTES)
    found: list[list[int]] = []
    for content, offset, bucket_offset, num_bytes in pieces:
        into = content[offset : offset + num_bytes].copy_(slot[bucket_offset : bucket_offset + num_bytes])
        found.append(leaves_of(into))
    return found


def model_digest(tensors: Iterable[tuple[TensorSpec, int]]) -> int:
    """Tree digest of a model, from `(spec, digest)` of its tensors in any order; names must be unique."""
    records: list[bytes] = []
    for spec, digest in sorted(tensors, key=lambda item: item[0].name):
        name = spec.name.encode()
        head = _HEAD.pack(len(name), DTYPE_CODES[spec.dtype], len(spec.shape))
        records.append(head + name + struct.pack(f"<{len(spec.shape) + 1}Q", *spec.shape, digest))
    return rl_csrc.digest(b"".join(records))


def tree_digest(named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> int:
    """Tree digest (64 bits) of named tensors, as in a `Receipt`, a `SyncReport` and `CheckpointEngine.digest`.

    It depends on names, dtypes, shapes and bits, and not on the order of the tensors, their strides, their device, or
    how they were sent. WIRE.md defines it. It detects corruption and mistakes, not tampering: there is no secret in it.

    Raises:
        TensorError: an item cannot be sent, and so has no digest; or a name is repeated.
    """
    items = cast("Mapping[str, Tensor]", named_tensors).items() if isinstance(named_tensors, Mapping) else named_tensors
    found = [(spec_of(name, tensor), combine(leaves_of(as_bytes(tensor)))) for name, tensor in items]
    names = [spec.name for spec, _ in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TensorError(f"{twice!r} comes twice; names must differ")
    return model_digest(found)


def _leaves(raw: Tensor) -> list[Tensor]:
    num_bytes = raw.numel()
    if num_bytes <= LEAF_BYTES:
        return [raw]
    return [raw[start : start + LEAF_BYTES] for start in range(0, num_bytes, LEAF_BYTES)]
