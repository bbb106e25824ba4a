"""The whole of a sharded tensor, or which part of it this rank holds, under its Hugging Face name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rl_engine.types import ShardSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shards(
    named: Mapping[str, Tensor], convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
) -> Iterator[tuple[ShardSpec, Tensor]]:
    """This rank's part of every tensor in `named`; nothing is communicated.

    Args:
        named: The model's tensors, sharded ones as DTensors.
        convert: From one tensor of the model to those of the folder that it is made of. A tensor that is several, such
            as all experts of a layer, takes twice its whole size for a moment.
    """
    for name, tensor in named.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        offsets, sizes = _box(tensor)
        if list(convert({name: torch.empty(tensor.shape, device="meta")})) == [name]:
            yield ShardSpec(name=name, shape=tuple(tensor.shape), offsets=offsets, sizes=sizes), local.detach()
            continue
        part = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        whole = local.new_zeros(tensor.shape)
        held = torch.zeros(tensor.shape, dtype=torch.int8, device=local.device)
        whole[part], held[part] = local.detach(), 1
        mask = convert({name: held})
        for own, full in convert({name: whole}).items():
            yield from _cut(own, full, mask[own])


def _cut(name: str, full: Tensor, mask: Tensor) -> Iterator[tuple[ShardSpec, Tensor]]:
    """The box where `mask` is 1: what was a slice of the model's tensor is one of the folder's."""
    found = mask.nonzero()
    if not len(found):
        return
    low, high = found.amin(0), found.amax(0) + 1
    part = tuple(slice(start, stop) for start, stop in zip(low.tolist(), high.tolist(), strict=True))
    spec = ShardSpec(
        name=name, shape=tuple(full.shape), offsets=tuple(low.tolist()), sizes=tuple((high - low).tolist())
    )
    yield spec, full[part].contiguous()


def _box(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of this rank's part, cut as `torch.distributed.tensor` cuts: the first ranks get more."""
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    if not isinstance(tensor, DTensor):
        return tuple(offsets), tuple(sizes)
    mesh = tensor.device_mesh
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            dim, rank = placement.dim, mesh.get_local_rank(axis)
            chunk = -(-sizes[dim] // mesh.size(axis))
            start = min(rank * chunk, sizes[dim])
            sizes[dim] = min(chunk, sizes[dim] - start)
            offsets[dim] += start
    return tuple(offsets), tuple(sizes)
