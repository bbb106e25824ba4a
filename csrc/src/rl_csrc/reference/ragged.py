"""Ragged copies in plain torch. Legend: `B` sequences, `L` padded length, `T` packed tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from rl_csrc.types import Packed

if TYPE_CHECKING:
    from collections.abc import Sequence


def _packed_index(lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sequence `[T]` and offset `[T]` of each packed token, and cu_seqlens `[B + 1]`."""
    lengths = lengths.long()
    cu_seqlens = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=cu_seqlens[1:])
    total = int(cu_seqlens[-1])
    sequence = torch.repeat_interleave(
        torch.arange(lengths.shape[0], device=lengths.device), lengths, output_size=total
    )
    return sequence, torch.arange(total, device=lengths.device) - cu_seqlens[:-1][sequence], cu_seqlens


def pack(padded: Tensor, lengths: Tensor, *, starts: Tensor | None = None) -> Packed:
    """`[B, L, ...]` to `[T, ...]`: row b gives `padded[b, starts[b] : starts[b] + lengths[b]]`."""
    sequence, offset, cu_seqlens = _packed_index(lengths)
    first = 0 if starts is None else starts.long()[sequence]
    return Packed(padded[sequence, offset + first], cu_seqlens)


def unpack(
    values: Tensor,
    cu_seqlens: Tensor,
    *,
    length: int,
    padding_value: float = 0,
    side: Literal["left", "right"] = "right",
) -> Tensor:
    """`[T, ...]` to `[B, length, ...]`, padded on `side` with `padding_value`."""
    lengths = cu_seqlens.diff()
    sequence, offset, _ = _packed_index(lengths)
    first = (length - lengths)[sequence] if side == "left" else 0
    padded = values.new_full((lengths.shape[0], length, *values.shape[1:]), padding_value)
    return padded.index_put((sequence, offset + first), values)


def bucket_copy(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Copy each source into its destination."""
    for source, destination in zip(sources, destinations, strict=True):
        destination.copy_(source)


def roll_labels(
    token_ids: Tensor, cu_seqlens: Tensor, *, loss_mask: Tensor | None = None, ignore_index: int = -100
) -> Tensor:
    """`labels[t] = token_ids[t + 1]` inside each sequence; its last token, and masked-out targets, are ignored."""
    labels = torch.full_like(token_ids, ignore_index)
    if token_ids.shape[0] > 1:
        labels[:-1] = token_ids[1:]
        if loss_mask is not None:
            labels[:-1] = torch.where(loss_mask[1:].bool(), labels[:-1], ignore_index)
    ends = cu_seqlens[1:][cu_seqlens.diff() > 0].long() - 1
    labels[ends] = ignore_index
    return labels


def cp_slice(x: Tensor, cu_seqlens: Tensor, *, cp_rank: int, cp_size: int) -> Packed:
    """This context-parallel rank's tokens: of each sequence's 2 * cp_size chunks, number cp_rank and its mirror."""
    lengths = cu_seqlens.diff().long()
    chunks = (lengths // (2 * cp_size)).tolist()
    pieces = [
        x[start + number * chunk : start + (number + 1) * chunk]
        for start, chunk in zip(cu_seqlens[:-1].tolist(), chunks, strict=True)
        for number in (cp_rank, 2 * cp_size - 1 - cp_rank)
    ]
    return Packed(torch.cat(pieces) if pieces else x[:0], torch.div(cu_seqlens.long(), cp_size, rounding_mode="floor"))
