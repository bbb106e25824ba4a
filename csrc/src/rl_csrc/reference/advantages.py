"""Advantage recurrences and batch statistics in plain torch.

Legend: `T` tokens, `B` sequences or rewards, `L` padded length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_csrc.types import GroupMode, MaskMode, Moments, Scan, ScanKind


def _padding_index(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Index `[B, L]` of each padded cell into the packed tokens (0 for padding), and which cells are real."""
    lengths = cu_seqlens.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    steps = torch.arange(longest, device=cu_seqlens.device)
    real = steps < lengths[:, None]
    return torch.where(real, cu_seqlens[:-1, None] + steps, 0), real


def scan_reverse(
    rewards: Tensor,
    values: Tensor | None,
    cu_seqlens: Tensor,
    loss_mask: Tensor | None = None,
    kind: ScanKind = "gae",
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    bootstrap_values: Tensor | None = None,
    mask_mode: MaskMode = "hold",
    rho: Tensor | None = None,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> Scan:
    """Backward recurrence over packed sequences, carried in float64. See `rl_csrc.scan_reverse`."""
    index, real = _padding_index(cu_seqlens)
    num_sequences, longest = index.shape
    out_dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32

    def pad(x: Tensor | None) -> Tensor:
        return rewards.new_zeros(index.shape, dtype=torch.float64) if x is None else x.double()[index]

    counted = torch.ones_like(real) if loss_mask is None or mask_mode == "none" else loss_mask.bool()[index]
    r, v = pad(rewards), pad(values)
    ratio = torch.ones_like(r) if rho is None else pad(rho)
    lam_column = lam.double() if isinstance(lam, Tensor) else r.new_full((num_sequences,), lam)
    next_value = r.new_zeros(num_sequences) if bootstrap_values is None else bootstrap_values.double()
    next_return = next_value
    carry = torch.zeros_like(next_value)
    advantages, returns = torch.zeros_like(r), torch.zeros_like(r)
    for t in reversed(range(longest)):
        if kind == "vtrace":
            bound = ratio[:, t].clamp(max=rho_clip)
            delta = bound * (r[:, t] + gamma * next_value - v[:, t])
            new_carry = delta + gamma * lam_column * ratio[:, t].clamp(max=c_clip) * carry
            new_return = v[:, t] + new_carry
            new_advantage = bound * (r[:, t] + gamma * next_return - v[:, t])
        elif kind == "returns":
            new_carry = new_return = r[:, t] + gamma * next_return
            new_advantage = new_return - v[:, t]
        else:  # td_lambda's return is the value plus the generalised advantage
            new_carry = r[:, t] + gamma * next_value - v[:, t] + gamma * lam_column * carry
            new_return = v[:, t] + new_carry
            new_advantage = new_carry
        on = real[:, t] & counted[:, t]
        off = real[:, t] & ~counted[:, t]
        if mask_mode == "zero":  # every run of counted tokens is an episode of its own
            next_value = torch.where(off, 0.0, next_value)
            next_return = torch.where(off, 0.0, next_return)
            carry = torch.where(off, 0.0, carry)
        held = advantages[:, t + 1] if t + 1 < longest else torch.zeros_like(carry)
        hold = off & (mask_mode == "hold")
        advantages[:, t] = torch.where(on, new_advantage, torch.where(hold, held, 0.0))
        returns[:, t] = torch.where(on, new_return, torch.where(hold, next_return, 0.0))
        carry = torch.where(on, new_carry, carry)
        next_return = torch.where(on, new_return, next_return)
        next_value = torch.where(on, v[:, t], next_value)
    return Scan(advantages[real].to(out_dtype), returns[real].to(out_dtype))


def group_norm(
    rewards: Tensor,
    group_ids: Tensor | None = None,
    cu_groups: Tensor | None = None,
    mode: GroupMode = "grpo",
    eps: float = 1e-6,
) -> Tensor:
    """Advantage of each reward within its group, two-pass float64. See `rl_csrc.group_norm`."""
    out_dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    group = _dense_groups(rewards.shape[0], group_ids, cu_groups, rewards.device)
    num_groups = int(group.max()) + 1 if group.numel() else 0
    x = rewards.double()

    def total(y: Tensor) -> Tensor:
        return x.new_zeros(num_groups).index_add(0, group, y)[group]

    first = x.new_zeros(num_groups)
    first[group.flip(0)] = x.flip(0)  # the group's first member: distances from it are exact where rewards are equal
    shifted = x - first[group]
    count = total(torch.ones_like(x))
    centred = shifted - total(shifted) / count
    if mode == "rloo":
        advantages = centred * count / (count - 1).clamp(min=1)
    elif mode == "dr_grpo":
        advantages = centred
    else:
        std = (total(centred * centred) / (count - 1).clamp(min=1)).sqrt()
        advantages = torch.where(count == 1, x, centred / (std + eps))
    return advantages.to(out_dtype)


def _dense_groups(num: int, group_ids: Tensor | None, cu_groups: Tensor | None, device: torch.device) -> Tensor:
    if group_ids is not None:
        return torch.unique(group_ids, return_inverse=True)[1]
    assert cu_groups is not None
    ids = torch.arange(cu_groups.shape[0] - 1, device=device)
    return torch.repeat_interleave(ids, cu_groups.diff(), output_size=num)


def masked_moments(x: Tensor, mask: Tensor | None = None) -> Moments:
    """Count, mean and centred second moment over the masked entries of x, two-pass float64."""
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.bool()
    chosen = torch.where(mask, x.double(), 0.0)
    count = mask.sum().double()
    mean = chosen.sum() / count.clamp(min=1)
    centred = torch.where(mask, chosen - mean, 0.0)
    return Moments(count, mean, (centred * centred).sum())


def whiten(
    x: Tensor, mask: Tensor | None = None, shift_mean: bool = True, eps: float = 1e-8, moments: Moments | None = None
) -> Tensor:
    """(x - mean) / sqrt(var + eps) over the masked entries; 0 elsewhere. See `rl_csrc.whiten`."""
    out_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    m = masked_moments(x, mask) if moments is None else moments
    white = (x.double() - m.mean) * (m.variance + eps).rsqrt()
    white = white if shift_mean else white + m.mean
    return (white if mask is None else torch.where(mask.bool(), white, 0.0)).to(out_dtype)
