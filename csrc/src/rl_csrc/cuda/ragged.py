"""Ragged copies, many tensors in a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_csrc import _cuda  # pyright: ignore[reportAttributeAccessIssue]  # built with RL_CSRC_CUDA=ON only
from rl_csrc.cuda.launch import on_its_device, stream_of
from rl_csrc.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def _token_bytes(x: Tensor, leading: int) -> int:
    """Bytes of one token of a contiguous tensor whose first `leading` axes are not part of it."""
    return x.element_size() * x.shape[leading:].numel()


@on_its_device
def pack(padded: Tensor, lengths: Tensor, starts: Tensor | None, total: int | None) -> tuple[Tensor, Tensor]:
    """Packed values and cu_seqlens. Waits for the device unless `total` says how many tokens there are."""
    padded = padded.contiguous()
    cu_seqlens = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64, device=padded.device)
    torch.cumsum(lengths, 0, out=cu_seqlens[1:])
    num = int(cu_seqlens[-1]) if total is None else total
    values = padded.new_empty((num, *padded.shape[2:]))
    starts = None if starts is None else starts.long().contiguous()
    _cuda.pack(
        padded,
        cu_seqlens,
        starts,
        *padded.shape[:2],
        num,
        _token_bytes(padded, 2),
        values,
        stream_of(padded),
    )
    return values, cu_seqlens


@on_its_device
def unpack(values: Tensor, cu_seqlens: Tensor, length: int, padding_value: float, left: bool) -> Tensor:
    """Padded rows `[B, length, ...]`."""
    values = values.contiguous()
    num_sequences = cu_seqlens.shape[0] - 1
    padded = values.new_full((num_sequences, length, *values.shape[1:]), padding_value)
    _cuda.unpack(
        values,
        cu_seqlens,
        num_sequences,
        length,
        values.shape[0],
        _token_bytes(values, 1),
        left,
        padded,
        stream_of(values),
    )
    return padded


@on_its_device
def bucket_copy(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Copy each source into its destination; a launch per thousand tensors."""
    plain: list[tuple[int, int, int]] = []
    device = sources[0].device if sources else None
    for source, destination in zip(sources, destinations, strict=True):
        is_lazy = source.is_complex() or source.is_neg() or destination.is_neg()  # complex: maybe conjugated
        dense = not is_lazy and source.is_contiguous() and destination.is_contiguous()
        if dense and source.dtype == destination.dtype and source.device == destination.device == device:
            span = source.data_ptr(), destination.data_ptr(), source.nbytes
            if 0 < abs(span[0] - span[1]) < span[2]:
                raise ArgumentError("a destination overlaps its source; give it memory of its own.")
            plain.append(span)
        else:
            destination.copy_(source)
    if plain:
        _cuda.CopyPlan(*map(list, zip(*plain, strict=True))).run(stream_of(sources[0]))


@on_its_device
def roll_labels(token_ids: Tensor, cu_seqlens: Tensor, loss_mask: Tensor | None, ignore_index: int) -> Tensor:
    """Next-token labels `[T]`."""
    labels = torch.empty_like(token_ids)
    _cuda.roll_labels(
        token_ids,
        cu_seqlens,
        cu_seqlens.shape[0] - 1,
        token_ids.shape[0],
        loss_mask,
        ignore_index,
        labels,
        stream_of(token_ids),
    )
    return labels


@on_its_device
def cp_slice(x: Tensor, cu_seqlens: Tensor, cp_rank: int, cp_size: int) -> tuple[Tensor, Tensor]:
    """This context-parallel rank's tokens and their cu_seqlens."""
    x = x.contiguous()
    num = x.shape[0] // cp_size
    out = x.new_empty((num, *x.shape[1:]))
    _cuda.cp_slice(
        x,
        cu_seqlens,
        cu_seqlens.shape[0] - 1,
        num,
        _token_bytes(x, 1),
        cp_rank,
        cp_size,
        out,
        stream_of(x),
    )
    return out, torch.div(cu_seqlens, cp_size, rounding_mode="floor")
