"""Ragged copies and label shifts: no gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_csrc._dispatch import copier, kernel
from rl_csrc._library._schema import op

if TYPE_CHECKING:
    from collections.abc import Sequence


@op("pack", "(Tensor padded, Tensor lengths, Tensor? starts, SymInt? total) -> (Tensor, Tensor)")
def _pack(padded: Tensor, lengths: Tensor, starts: Tensor | None, total: int | None) -> tuple[Tensor, ...]:
    return copier("pack", padded)(padded, lengths, starts, total)


@_pack.register_fake
def _(padded: Tensor, lengths: Tensor, starts: Tensor | None, total: int | None) -> tuple[Tensor, ...]:
    total = torch.library.get_ctx().new_dynamic_size() if total is None else total
    return padded.new_empty((total, *padded.shape[2:])), lengths.new_empty(lengths.shape[0] + 1)


@op("unpack", "(Tensor values, Tensor cu_seqlens, SymInt length, float padding_value, bool left) -> Tensor")
def _unpack(values: Tensor, cu_seqlens: Tensor, length: int, padding_value: float, left: bool) -> Tensor:
    return copier("unpack", values)(values, cu_seqlens, length, padding_value, left)


@_unpack.register_fake
def _(values: Tensor, cu_seqlens: Tensor, length: int, *_rest: Any) -> Tensor:
    return values.new_empty((cu_seqlens.shape[0] - 1, length, *values.shape[1:]))


@op("bucket_copy", "(Tensor[] sources, Tensor(a!)[] destinations) -> ()", ("destinations",))
def _bucket_copy(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    if sources:
        copier("bucket_copy", sources[0])(sources, destinations)


@op("roll_labels", "(Tensor token_ids, Tensor cu_seqlens, Tensor? loss_mask, int ignore_index) -> Tensor")
def _roll_labels(token_ids: Tensor, *rest: Any) -> Tensor:
    return kernel("roll_labels", token_ids)(token_ids, *rest)


@_roll_labels.register_fake
def _(token_ids: Tensor, *_rest: Any) -> Tensor:
    return torch.empty_like(token_ids)


@op("cp_slice", "(Tensor x, Tensor cu_seqlens, int cp_rank, int cp_size) -> (Tensor, Tensor)")
def _cp_slice(x: Tensor, cu_seqlens: Tensor, cp_rank: int, cp_size: int) -> tuple[Tensor, ...]:
    return copier("cp_slice", x)(x, cu_seqlens, cp_rank, cp_size)


@_cp_slice.register_fake
def _(x: Tensor, cu_seqlens: Tensor, cp_rank: int, cp_size: int) -> tuple[Tensor, ...]:
    return x.new_empty((x.shape[0] // cp_size, *x.shape[1:])), torch.empty_like(cu_seqlens)
