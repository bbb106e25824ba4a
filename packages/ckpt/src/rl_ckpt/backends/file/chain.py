"""Versions as differences from the one before: how a tensor's is stored, and how a chain of them is read.

A difference is uint8 [bytes]: for each leaf (4 MiB) of the tensor a head (codec, length) and the content, as it would
travel over a session, padded to 8 bytes.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from rl_ckpt.errors import ProtocolError
from rl_ckpt.tensors import delta
from rl_ckpt.tensors.buckets import Codec
from rl_ckpt.tensors.digest import LEAF_BYTES, combine, leaves_of
from rl_ckpt.tensors.spec import as_bytes, memory_of, spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from rl_ckpt.backends.file.folder import Entry, Manifest
    from rl_ckpt.tensors.delta import LeafUpdate

_HEAD = struct.Struct("<QQ")


def encode(updates: Iterable[Sequence[LeafUpdate]]) -> tuple[Tensor, int]:
    """Encode a tensor's leaf updates for storage, in order; returns them and the tensor's new digest."""
    stored, digests = bytearray(), list[int]()
    for leaf in (leaf for several in updates for leaf in several):
        stored += _HEAD.pack(leaf.codec, leaf.content.numel())
        stored += memory_of(leaf.content)
        stored += bytes(-len(stored) % 8)
        digests.append(leaf.digest)
    return torch.frombuffer(stored, dtype=torch.uint8), combine(digests)


def apply(stored: Tensor, tensor: Tensor, name: str) -> int:
    """Make of a tensor the version that a difference from it leads to; return the digest of what it is then.

    Raises:
        ProtocolError: it is no difference of such a tensor. The tensor is worthless then.
    """
    spec, raw, position, digests = spec_of(name, tensor), as_bytes(tensor), 0, list[int]()
    for leaf in raw.split(LEAF_BYTES):
        if position + _HEAD.size > stored.numel():
            raise ProtocolError(f"the difference of {name!r} ends in the middle")
        codec, num_bytes = _HEAD.unpack(bytes(memory_of(stored[position : position + _HEAD.size])))
        content = stored[position + _HEAD.size : position + _HEAD.size + num_bytes]
        position += _HEAD.size + num_bytes + -num_bytes % 8
        if codec == Codec.RAW and len(content) == len(leaf):
            digests += leaves_of(leaf.copy_(content))
        elif codec == Codec.DELTA:
            digests.append(delta.apply(content, leaf, spec))
        else:
            raise ProtocolError(f"the difference of {name!r} has a leaf of {len(content)} bytes in codec {codec}")
    return combine(digests)


def read_tensor(
    entry: Entry, chain: Sequence[Manifest], read: Callable[[Entry], Tensor], held: Tensor | None
) -> tuple[Tensor, int]:
    """A tensor of the newest of these versions, which the caller may write to, and its digest.

    Args:
        entry: Entry of the newest.
        chain: That version, the one that it is a difference from, and so on.
        read: Gives what is stored under an entry.
        held: The tensor in the version that the last of the chain is a difference from, which is changed.

    Raises:
        ProtocolError: the chain does not lead to it.
    """
    pending: list[Tensor] = []
    for manifest in chain:
        own = manifest.entries.get(entry.stored_as)
        if own is None:
            break
        stored = read(own)
        if not own.is_difference:
            held = stored if len(chain) == 1 else stored.clone()
            break
        pending.append(stored if stored.data_ptr() % 8 == 0 else stored.clone())
    if held is None:
        raise ProtocolError(f"version {chain[-1].version} has no {entry.stored_as!r} that its differences are from")
    digest = None
    for stored in reversed(pending):
        digest = apply(stored, held, entry.name)
    return held, combine(leaves_of(as_bytes(held))) if digest is None else digest
