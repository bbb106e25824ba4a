"""Recurrences, group and batch statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_csrc.cuda.launch import counter_on, native, on_its_device, stream_of
from rl_csrc.types import GROUP_MODES, MASK_MODES, SCAN_KINDS

if TYPE_CHECKING:
    from torch import Tensor


@on_its_device
def scan_reverse(
    rewards: Tensor,
    values: Tensor | None,
    cu_seqlens: Tensor,
    loss_mask: Tensor | None,
    kind: str,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None,
    mask_mode: str,
    rho: Tensor | None,
    rho_clip: float,
    c_clip: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns `[T]`; one block per sequence."""
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    per_sequence = isinstance(lam, torch.Tensor)
    native.scan_reverse(
        rewards,
        values,
        loss_mask,
        rho,
        lam if per_sequence else None,
        bootstrap,
        cu_seqlens,
        cu_seqlens.shape[0] - 1,
        1.0 if per_sequence else float(lam),
        gamma,
        rho_clip,
        c_clip,
        [*SCAN_KINDS].index(kind),
        [*MASK_MODES].index(mask_mode),
        advantages,
        returns,
        stream_of(rewards),
    )
    return advantages, returns


MAX_SCATTERED = 1 << 15
"""Rewards beyond which arbitrary group ids are sorted first: finding the members costs rewards times groups."""


@on_its_device
def group_norm(rewards: Tensor, group_ids: Tensor | None, cu_groups: Tensor | None, mode: str, eps: float) -> Tensor:
    """Group advantages `[B]`; a warp per group."""
    num = rewards.shape[0]
    order = None
    if group_ids is not None and num > MAX_SCATTERED:  # waits for the device: the number of groups is a shape
        order = torch.argsort(group_ids, stable=True)
        counts = torch.unique_consecutive(group_ids[order], return_counts=True)[1]
        cu_groups = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        rewards, group_ids = rewards[order], None
    advantages = torch.empty_like(rewards)
    native.group_norm(
        rewards,
        group_ids,
        cu_groups,
        num,
        0 if cu_groups is None else cu_groups.shape[0] - 1,
        [*GROUP_MODES].index(mode),
        eps,
        advantages,
        stream_of(rewards),
    )
    return advantages if order is None else torch.empty_like(advantages).index_copy_(0, order, advantages)


@on_its_device
def masked_moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared distances, float64 scalars."""
    return tuple(_moments(x, mask))  # pyright: ignore[reportReturnType]  # three rows


def _moments(x: Tensor, mask: Tensor | None) -> Tensor:
    found = torch.empty(3, dtype=torch.float64, device=x.device)
    partials = torch.empty(3 * native.moments_blocks(x.numel()), dtype=torch.float64, device=x.device)
    native.masked_moments(
        x,
        mask,
        x.numel(),
        found,
        partials,
        counter_on(x.device),
        stream_of(x),
    )
    return found


@on_its_device
def whiten(
    x: Tensor, mask: Tensor | None, shift_mean: bool, eps: float, moments: tuple[Tensor, Tensor, Tensor] | None
) -> Tensor:
    """Whitened values, float32 of x's shape; 0 outside the mask."""
    found = _moments(x, mask) if moments is None else torch.stack([*moments]).to(x.device, torch.float64)
    out = torch.empty_like(x, dtype=torch.float32)
    native.whiten(x, mask, x.numel(), found, shift_mean, eps, out, stream_of(x))
    return out
