"""Ragged copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_csrc.cpu.memory import in_huge_pages, native

if TYPE_CHECKING:
    from collections.abc import Sequence


def _offsets(lengths: Tensor) -> Tensor:
    cu_seqlens = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=cu_seqlens[1:])
    return cu_seqlens


def pack(padded: Tensor, lengths: Tensor, starts: Tensor | None, total: int | None) -> tuple[Tensor, Tensor]:
    """Values `[T, ...]` and cu_seqlens."""
    cu_seqlens = _offsets(lengths)
    values = in_huge_pages(padded.new_empty((int(cu_seqlens[-1]), *padded.shape[2:])))
    native.pack(padded.contiguous(), values, cu_seqlens, starts, False, torch.get_num_threads())
    return values, cu_seqlens


def unpack(values: Tensor, cu_seqlens: Tensor, length: int, padding_value: float, left: bool) -> Tensor:
    """Padded rows `[B, length, ...]`."""
    lengths = cu_seqlens.diff()
    padded = in_huge_pages(values.new_empty((lengths.shape[0], length, *values.shape[1:]))).fill_(padding_value)
    starts = length - lengths if left else None
    native.pack(padded, values.contiguous(), cu_seqlens, starts, True, torch.get_num_threads())
    return padded


def bucket_copy(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Copy many tensors in one call; what is strided or changes type goes through torch."""
    for i in native.bucket_copy(list(sources), list(destinations), torch.get_num_threads()):
        destinations[i].detach().copy_(sources[i].detach())


def roll_labels(token_ids: Tensor, cu_seqlens: Tensor, loss_mask: Tensor | None, ignore_index: int) -> Tensor:
    """Next-token labels, `[T]`."""
    labels = torch.empty_like(token_ids)
    native.roll_labels(token_ids, cu_seqlens, loss_mask, ignore_index, labels)
    return labels


def cp_slice(x: Tensor, cu_seqlens: Tensor, cp_rank: int, cp_size: int) -> tuple[Tensor, Tensor]:
    """This rank's tokens and their cu_seqlens."""
    out = in_huge_pages(x.new_empty((x.shape[0] // cp_size, *x.shape[1:])))
    native.cp_slice(x.contiguous(), cu_seqlens, cp_rank, cp_size, out, torch.get_num_threads())
    return out, torch.div(cu_seqlens, cp_size, rounding_mode="floor")
