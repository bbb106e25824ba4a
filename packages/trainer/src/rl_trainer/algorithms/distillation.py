"""Distillation losses on the policy's own completions. Legend: `T` tokens (packed), `K` candidates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

import rl_csrc
from rl_csrc import LossSpec, coarse_kl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.types import ModelOutput
    from rl_trainer.config.schema import TeacherSection

ALONE = "distill"
"""The `algorithm.loss` that learns from the teacher and from nothing else."""


def teacher_columns(teacher: TeacherSection) -> dict[str, str]:
    """Columns by output of the teacher's engine, as the loss reads them."""
    if teacher.divergence == "reverse":
        return {"logprobs": "teacher_logprobs"}
    candidates = {"candidate_token_ids": "candidate_token_ids", "candidate_logprobs": "teacher_candidate_logprobs"}
    return {"logprobs": "teacher_logprobs", **candidates}


def teacher_loss(
    output: ModelOutput,
    rows: TensorDict,
    mask: Tensor,
    teacher: TeacherSection,
    plain: LossSpec,
    counted: Mapping[str, Any],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The divergence of policy and teacher (generalised knowledge distillation, arXiv 2306.13649), as a share.

    Reverse is half the squared log-ratio of each sampled token, whose gradient is that of KL(policy || teacher) where
    the policy sampled it. Forward is KL(teacher || policy) over the teacher's candidates and all other tokens as one,
    jsd is `coarse_jsd` over the same. Metrics: `teacher_kl`, the mean log-ratio policy / teacher of the sampled tokens,
    and `teacher_forward_kl` or `teacher_jsd`.

    Args:
        output: The policy's output for one micro-batch.
        rows: With the columns of `teacher_columns`.
        mask: (T,) bool, the tokens that are learned from.
        teacher: Divergence and its weight.
        plain: REINFORCE, with the run's way to add tokens up.
        counted: Counts that it divides by.
    """
    cu_seqlens = output.cu_seqlens
    sampled = rows["teacher_logprobs"].values().to(output.logprobs.dtype)
    nothing = torch.zeros_like(sampled)
    gap = torch.where(mask, output.logprobs.detach() - sampled, 0.0)
    metrics = {"teacher_kl": gap.sum() / max(output.counts.tokens, 1.0)}
    weight = {"reverse": 0.0, "mixed": teacher.forward_weight}.get(teacher.divergence, 1.0)
    total = nothing.sum()
    if weight < 1:
        total = rl_csrc.policy_loss(
            output.logprobs,
            output.logprobs.detach(),
            nothing,
            mask,
            cu_seqlens,
            replace(plain, kl="k2", kl_coef=teacher.coef * (1 - weight)),
            ref_logprobs=sampled,
            **counted,
        ).loss
    if weight > 0:
        theirs, own = rows["teacher_candidate_logprobs"].values(), output.candidate_logprobs
        is_jsd = teacher.divergence == "jsd"
        divergence = coarse_jsd(theirs, own, teacher.jsd_beta) if is_jsd else coarse_kl(theirs, own)
        mean = torch.where(mask, divergence.detach(), 0.0).sum() / max(output.counts.tokens, 1.0)
        metrics["teacher_jsd" if is_jsd else "teacher_forward_kl"] = mean
        # REINFORCE is -advantage * what it is given, added up as configured.
        share = rl_csrc.policy_loss(divergence, divergence.detach(), nothing - 1, mask, cu_seqlens, plain, **counted)
        total = total + teacher.coef * weight * share.loss
    return total, metrics


def coarse_jsd(teacher: Tensor, policy: Tensor, beta: float) -> Tensor:
    """(T,) generalized Jensen-Shannon divergence over K candidates and one outcome for all other tokens.

    beta KL(teacher || M) + (1 - beta) KL(policy || M) with M = beta teacher + (1 - beta) policy: arXiv 2306.13649,
    equation 1. Over beta it is the forward KL for beta to 0, over 1 - beta the reverse one for beta to 1.

    Args:
        teacher: (T, K) log-probs of the candidates.
        policy: (T, K) log-probs of the same candidates.
        beta: Between 0 and 1.
    """
    theirs, own = (
        torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).clamp(min=1e-6).log()], -1)  # below is only rounding
        for x in (y.to(torch.promote_types(y.dtype, torch.float32)) for y in (teacher, policy))
    )
    mixture = torch.logaddexp(theirs + math.log(beta), own + math.log1p(-beta))
    forward, reverse = theirs.exp() * (theirs - mixture), own.exp() * (own - mixture)
    return (beta * forward + (1 - beta) * reverse).sum(-1)
