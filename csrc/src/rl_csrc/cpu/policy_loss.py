"""Policy losses, alone and with the logits' gradient in the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_csrc.cpu.memory import native, new_floats, with_adjacent_columns
from rl_csrc.types import AGGREGATIONS, KLS, LOSSES, METRIC_NAMES, LossSpec


def spec_codes(spec: LossSpec) -> tuple[float, ...]:
    """The fields of rl_loss_spec, in its order."""
    return (
        LOSSES.index(spec.loss),
        KLS.index(spec.kl),
        AGGREGATIONS.index(spec.aggregation),
        int(spec.clip_dual is not None),
        spec.clip_low,
        spec.clip_high,
        spec.clip_dual or 0.0,
        spec.ratio_max,
        spec.tau_pos,
        spec.tau_neg,
        spec.dro_beta,
        spec.kl_coef,
        spec.entropy_coef,
    )


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    spec: LossSpec,
    denominator: float | Tensor,
    entropy: Tensor | None,
    ref_logprobs: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loss `[]`, metrics `[M]`, and the gradients of logprobs and entropy `[T]`."""
    num = logprobs.shape[0]
    loss, metrics, grad = new_floats(), new_floats(len(METRIC_NAMES)), new_floats(num)
    grad_entropy = None if entropy is None else new_floats(num)
    native.policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        loss_mask,
        cu_seqlens,
        ref_logprobs,
        weights,
        entropy,
        denominator if isinstance(denominator, torch.Tensor) and denominator.dim() == 1 else float(denominator),
        spec_codes(spec),
        loss,
        metrics,
        grad,
        grad_entropy,
        torch.get_num_threads(),
    )
    return loss, metrics, grad, grad_entropy


def policy_loss_from_logits(
    logits: Tensor,
    labels: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    spec: LossSpec,
    denominator: float | Tensor,
    ref_logprobs: Tensor | None,
    weights: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    row_index: Tensor | None,
    entropy: bool,
    out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loss, metrics, log-probs and entropy; the gradient of the logits goes to `out` (which may be the logits)."""
    num = labels.shape[0]
    loss, metrics, scored = new_floats(), new_floats(len(METRIC_NAMES)), new_floats(num)
    entropies = new_floats(num) if entropy else None
    native.policy_loss_from_logits(
        with_adjacent_columns(logits),
        labels,
        temperature,
        softcap or 0.0,
        row_index,
        old_logprobs,
        advantages,
        loss_mask,
        cu_seqlens,
        ref_logprobs,
        weights,
        float(denominator),
        spec_codes(spec),
        scored,
        entropies,
        out,
        loss,
        metrics,
        torch.get_num_threads(),
    )
    return loss, metrics, scored, entropies
