"""Advantage ops: recurrences over sequences, group normalization and batch statistics; no gradients.

Legend: `T` tokens, `B` sequences or rewards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_csrc.errors import ArgumentError
from rl_csrc.ops.operator import (
    Operator,
    check_one_of,
    check_same_length,
    floats,
    integers,
    kernel,
    like_first,
    optional_booleans,
    optional_floats,
    optional_integers,
    split,
)
from rl_csrc.types import GROUP_MODES, MASK_MODES, SCAN_KINDS, GroupMode, MaskMode, Moments, Scan, ScanKind

if TYPE_CHECKING:
    from collections.abc import Sequence


def scan_reverse(
    rewards: Tensor,
    values: Tensor | None,
    cu_seqlens: Tensor,
    *,
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
    """Backward recurrence over packed sequences: advantages and returns, `[T]` float32.

    - gae (1506.02438): A = r + gamma V' - V + gamma lambda A'; returns = A + V.
    - returns: G = r + gamma G'; advantages = G - V (G where there are no values).
    - td_lambda: G = r + gamma ((1 - lambda) V' + lambda G'); advantages = G - V.
    - vtrace (1802.01561): v = V + min(rho_clip, rho) (r + gamma V' - V) + gamma lambda min(c_clip, rho) (v' - V');
      returns = v; advantages = min(rho_clip, rho) (r + gamma v' - V).

    A prime marks the next token that counts; behind the last one it is `bootstrap_values` (0 unless given).

    Args:
        rewards: `[T]`.
        values: `[T]`, or None for 0.
        cu_seqlens: `[B + 1]` int64 or int32, where each sequence starts; the last entry is T.
        loss_mask: `[T]` bool or 0/1; values at masked-out positions are never read.
        kind: which recurrence.
        gamma: discount.
        lam: lambda, one number or `[B]`, one per sequence.
        bootstrap_values: `[B]`, value of the state behind the last token.
        mask_mode: hold: the recurrence passes over masked-out tokens, which show the held value. compress: the same,
            they show 0. zero: they show 0 and end the recurrence, so that each run of tokens is an episode. none: all
            tokens count.
        rho: `[T]`, importance ratios of vtrace; None: 1.
        rho_clip: vtrace, cap of the ratio in the correction.
        c_clip: vtrace, cap of the ratio in the trace.
    """
    check_one_of("kind", kind, SCAN_KINDS)
    check_one_of("mask_mode", mask_mode, MASK_MODES)
    num = rewards.shape[0]
    for name, x in (("rewards", rewards), ("values", values), ("loss_mask", loss_mask), ("rho", rho)):
        check_same_length(name, x, num)
    rewards, cu_seqlens = floats(rewards), integers(cu_seqlens)
    lam = floats(lam, rewards) if isinstance(lam, Tensor) else float(lam)
    before = (rewards, optional_floats(values, rewards), cu_seqlens, optional_booleans(loss_mask), kind, float(gamma))
    behind = (optional_floats(bootstrap_values, rewards), mask_mode, optional_floats(rho, rewards), rho_clip, c_clip)
    return Scan(*_SCAN(*before, *split(lam), *behind))


def group_norm(
    rewards: Tensor,
    group_ids: Tensor | None = None,
    *,
    cu_groups: Tensor | None = None,
    mode: GroupMode = "grpo",
    eps: float = 1e-6,
) -> Tensor:
    """Advantage of each reward within its group, `[B]` float32. Equal rewards give exactly 0.

    With mean mu and unbiased deviation s of a group of n: grpo (2402.03300) `(r - mu) / (s + eps)`, r where n = 1;
    dr_grpo (2503.20783) `r - mu`; rloo (2402.14740) r minus the mean of the others, 0 where n = 1.

    Args:
        rewards: `[B]`.
        group_ids: `[B]` int64, any numbers in any order; or
        cu_groups: `[G + 1]`, where each group starts, if the members of a group stand together.
        mode: which advantage.
        eps: added to the deviation (grpo).
    """
    check_one_of("mode", mode, GROUP_MODES)
    if (group_ids is None) == (cu_groups is None):
        raise ArgumentError("group_norm takes either group_ids or cu_groups, and exactly one of them.")
    if rewards.dim() != 1:
        raise ArgumentError(f"rewards has shape {list(rewards.shape)}; wanted one dimension. Flatten the batch first.")
    check_same_length("group_ids", group_ids, rewards.size(0))
    return _GROUP_NORM(floats(rewards), optional_integers(group_ids), optional_integers(cu_groups), mode, eps)


def masked_moments(x: Tensor, mask: Tensor | None = None) -> Moments:
    """Count, mean and centred second moment of the masked entries of x; ranks merge them to whiten a global batch."""
    _check_mask(x, mask)
    x = floats(x)
    return Moments(*kernel("masked_moments", x)(x, optional_booleans(mask)))


def whiten(
    x: Tensor, mask: Tensor | None = None, *, shift_mean: bool = True, eps: float = 1e-8, moments: Moments | None = None
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) over the masked entries, float32 of x's shape; 0 elsewhere.

    `moments` are those of the global batch; None: those of x. Without `shift_mean` the mean is
    added back.
    """
    _check_mask(x, mask)
    x, mask = floats(x), optional_booleans(mask)
    return _WHITEN(x, mask, shift_mean, eps, [*moments] if moments is not None else [])


def _check_mask(x: Tensor, mask: Tensor | None) -> None:
    if mask is not None and mask.shape != x.shape:
        raise ArgumentError(f"mask has shape {list(mask.shape)}; wanted that of x, {list(x.shape)}.")


def _scan_reverse(
    rewards: Tensor,
    values: Tensor | None,
    cu_seqlens: Tensor,
    loss_mask: Tensor | None,
    kind: str,
    gamma: float,
    lam: Tensor | None,
    scalar_lam: float,
    *rest: Any,
) -> tuple[Tensor, ...]:
    run = kernel("scan_reverse", rewards)
    return run(rewards, values, cu_seqlens, loss_mask, kind, gamma, scalar_lam if lam is None else lam, *rest)


def _scan_fake(rewards: Tensor, *_rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(rewards), torch.empty_like(rewards)


def _group_norm(rewards: Tensor, group_ids: Tensor | None, cu_groups: Tensor | None, mode: str, eps: float) -> Tensor:
    if rewards.numel() == 0:  # an empty tensor has a null address, which means None to native code
        return torch.empty_like(rewards)
    return kernel("group_norm", rewards)(rewards, group_ids, cu_groups, mode, eps)


def _whiten(x: Tensor, mask: Tensor | None, shift_mean: bool, eps: float, moments: Sequence[Tensor]) -> Tensor:
    return kernel("whiten", x)(x, mask, shift_mean, eps, Moments(*moments) if moments else None)


_SCAN = Operator(
    "scan_reverse",
    "(Tensor rewards, Tensor? values, Tensor cu_seqlens, Tensor? loss_mask, str kind, float gamma, Tensor? lam, "
    "float scalar_lam, Tensor? bootstrap_values, str mask_mode, Tensor? rho, float rho_clip, "
    "float c_clip) -> (Tensor, Tensor)",
    _scan_reverse,
    _scan_fake,
)
_GROUP_NORM = Operator(
    "group_norm",
    "(Tensor rewards, Tensor? group_ids, Tensor? cu_groups, str mode, float eps) -> Tensor",
    _group_norm,
    like_first,
)
_WHITEN = Operator(
    "whiten", "(Tensor x, Tensor? mask, bool shift_mean, float eps, Tensor[] moments) -> Tensor", _whiten, like_first
)
