"""Recurrences, group and batch statistics: no gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_csrc._dispatch import kernel
from rl_csrc._library._schema import number, op

if TYPE_CHECKING:
    from collections.abc import Sequence


@op(
    "scan_reverse",
    "(Tensor rewards, Tensor? values, Tensor cu_seqlens, Tensor? loss_mask, str kind, float gamma, Tensor? lam, "
    "float scalar_lam, Tensor? bootstrap_values, str mask_mode, Tensor? rho, float rho_clip, "
    "float c_clip) -> (Tensor, Tensor)",
)
def _scan_reverse(
    rewards: Tensor,
    values: Tensor | None,
    cu_seqlens: Tensor,
    loss_mask: Tensor | None,
    kind: str,
    gamma: float,
    lam: Tensor | None,
    scalar_lam: float,
    bootstrap_values: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    run = kernel("scan_reverse", rewards)
    return run(rewards, values, cu_seqlens, loss_mask, kind, gamma, number(lam, scalar_lam), bootstrap_values, *rest)


@_scan_reverse.register_fake
def _(rewards: Tensor, *_rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(rewards), torch.empty_like(rewards)


@op("group_norm", "(Tensor rewards, Tensor? group_ids, Tensor? cu_groups, str mode, float eps) -> Tensor")
def _group_norm(rewards: Tensor, *rest: Any) -> Tensor:
    return kernel("group_norm", rewards)(rewards, *rest)


@_group_norm.register_fake
def _(rewards: Tensor, *_rest: Any) -> Tensor:
    return torch.empty_like(rewards)


@op("masked_moments", "(Tensor x, Tensor? mask) -> (Tensor, Tensor, Tensor)")
def _masked_moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(m.clone() for m in kernel("masked_moments", x)(x, mask))


@_masked_moments.register_fake
def _(x: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(x.new_empty((), dtype=torch.float64) for _ in range(3))


@op("whiten", "(Tensor x, Tensor? mask, bool shift_mean, float eps, Tensor[] moments) -> Tensor")
def _whiten(x: Tensor, mask: Tensor | None, shift_mean: bool, eps: float, moments: Sequence[Tensor]) -> Tensor:
    return kernel("whiten", x)(x, mask, shift_mean, eps, tuple(moments) or None)


@_whiten.register_fake
def _(x: Tensor, *_rest: Any) -> Tensor:
    return torch.empty_like(x)
