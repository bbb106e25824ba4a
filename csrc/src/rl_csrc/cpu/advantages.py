"""Recurrences, group and batch statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_csrc.cpu.memory import native
from rl_csrc.types import GROUP_MODES, MASK_MODES, SCAN_KINDS


def scan_reverse(
    rewards: Tensor,
    values: Tensor | None,
    cu_seqlens: Tensor,
    loss_mask: Tensor | None,
    kind: str,
    gamma: float,
    lam: float | Tensor,
    bootstrap_values: Tensor | None,
    mask_mode: str,
    rho: Tensor | None,
    rho_clip: float,
    c_clip: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, `[T]`."""
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    native.scan_reverse(
        rewards,
        values,
        cu_seqlens,
        loss_mask,
        rho,
        lam,
        bootstrap_values,
        SCAN_KINDS.index(kind),  # pyright: ignore[reportArgumentType]
        MASK_MODES.index(mask_mode),  # pyright: ignore[reportArgumentType]
        gamma,
        rho_clip,
        c_clip,
        advantages,
        returns,
        torch.get_num_threads(),
    )
    return advantages, returns


def group_norm(rewards: Tensor, group_ids: Tensor | None, cu_groups: Tensor | None, mode: str, eps: float) -> Tensor:
    """Advantages, `[B]`."""
    out = torch.empty_like(rewards)
    native.group_norm(rewards, group_ids, cu_groups, GROUP_MODES.index(mode), eps, out)  # pyright: ignore[reportArgumentType]
    return out


def masked_moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and centred second moment, `[]` float64."""
    out = torch.empty(3, dtype=torch.float64)
    native.masked_moments(x, mask, out, torch.get_num_threads())
    num, mean, m2 = out.unbind()
    return num, mean, m2


def whiten(
    x: Tensor,
    mask: Tensor | None,
    shift_mean: bool,
    eps: float,
    moments: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """Whitened x, its shape."""
    num, mean, m2 = (float(m) for m in (masked_moments(x, mask) if moments is None else moments))
    out = torch.empty_like(x)
    scale = (m2 / max(num - 1, 1) + eps) ** -0.5
    native.whiten(x, mask, mean, scale, 0.0 if shift_mean else mean, out, torch.get_num_threads())
    return out
