"""The loss that the trainer injects into the model engine for a policy update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import rl_csrc
from rl_csrc import METRIC_NAMES
from rl_trainer.algorithms import distillation
from rl_trainer.algorithms._rows import row_of, row_sums
from rl_trainer.algorithms.correction import (
    correction_bounds,
    correction_weights,
    mismatch_metrics,
    rejection_bounds,
    rejection_mask,
    split_correction,
    split_rejection,
)
from rl_trainer.algorithms.losses import PolicyLossInput, loss_named

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.types import ModelOutput
    from rl_trainer.config import AlgorithmConfig, TeacherSection

_NO_CLIP = 1e9
"""An upper bound of the importance ratio that nothing reaches."""

_SELECTION = ("share", "low", "high")
"""Options of a loss that `selection` reads."""

_PER_TOKEN = ("log_ratio", "k3", "clipped_high", "clipped_low", "clipped_dual", "ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossFunction:
    """An rl-engine loss function: policy loss, KL to the reference and entropy bonus, as shares of the global batch.

    Reads the columns `old_logprobs`, `advantages`, `loss_mask`; `rollout_logprobs` where `old_logprobs` are the
    engine's own; `ref_logprobs` where the KL coefficient of the loss is positive; `selected` where the loss treats
    some tokens apart; `distillation.teacher_columns` where there is a teacher.
    """

    config: AlgorithmConfig
    """Loss, clipping, aggregation and coefficients."""
    teacher: TeacherSection | None = None
    """What is learned from a teacher."""
    has_old_logprobs: bool = True
    """False: there is no column `old_logprobs`, because a batch's only update tells what the policy before it says."""
    max_new_tokens: int = 1
    """Tokens of the longest completion, the constant that seq-mean-token-sum-norm divides by."""

    def __call__(self, output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss share and metric shares of one micro-batch."""
        config, spec = self.config, loss_named(self.config.loss)
        options = {**spec.options, **config.loss_options}
        old = rows["old_logprobs"].values() if self.has_old_logprobs else output.logprobs.detach()
        advantages = rows["advantages"].values()
        weights, mismatch = self._correct(output, rows, old)
        mask = rows["loss_mask"].values()
        counted: dict[str, Any] = {
            "aggregation": config.aggregation,
            "num_tokens": output.counts.tokens,
            "num_sequences": output.counts.sequences,
            "norm_constant": self.max_new_tokens if config.aggregation.endswith("norm") else None,
        }
        bounds: dict[str, Any] = {name: value for name, value in options.items() if name not in _SELECTION}
        if "clip_dual" in bounds:
            bounds["clip_dual"] = bounds["clip_dual"] or None
        name, extra = config.loss, torch.zeros((), device=old.device)
        if spec.compute is not None:
            per_token = spec.compute(
                PolicyLossInput(
                    logprobs=output.logprobs,
                    old_logprobs=old,
                    advantages=advantages,
                    loss_mask=mask.bool(),
                    cu_seqlens=output.cu_seqlens,
                    options=options,
                )
            )
            extra = self._aggregate(per_token if weights is None else per_token * weights, mask, output)
            name, advantages, bounds = "reinforce", torch.zeros_like(old), {}  # KL, entropy and metrics are left to it
        elif name == distillation.ALONE:
            name, advantages = "reinforce", torch.zeros_like(old)
        elif name == "clip_cov":  # ppo, but for the chosen tokens, which get no gradient
            kept = (~rows["selected"].values().bool()).float()
            name, weights = "ppo", kept if weights is None else weights * kept
        elif name == "kl_cov":  # the plain ratio; the chosen tokens pay for leaving the old policy
            name, bounds = "ppo", {"clip_low": 1.0, "clip_high": _NO_CLIP, "clip_dual": None}
            extra = _penalty(output, rows, old, options["kl_coef"], counted)
        has_reference = config.kl_coef > 0 and not config.kl_in_reward
        result = rl_csrc.policy_loss(
            output.logprobs,
            old,
            advantages,
            mask,
            output.cu_seqlens,
            loss=name,  # pyright: ignore[reportArgumentType] - registered, and without a function of its own
            kl=config.kl_estimator if has_reference else "none",
            kl_coef=config.kl_coef,
            ref_logprobs=rows["ref_logprobs"].values() if has_reference else None,
            entropy=output.entropy,
            entropy_coef=config.entropy_coef,
            weights=weights,
            **bounds,
            **counted,
        )
        sums = dict(zip(METRIC_NAMES, result.metrics, strict=True))
        policy_loss = sums["policy_loss"] if spec.compute is None else extra.detach()
        metrics = {"policy_loss": policy_loss, "kl": sums["kl_loss"], "entropy": sums["entropy"]}
        metrics |= {name: sums[name] / output.counts.tokens for name in _PER_TOKEN}
        if self.teacher is not None:
            pull, taught = distillation.teacher_loss(output, rows, self.teacher, counted)
            extra, metrics = extra + pull, metrics | taught
        return result.loss + extra, metrics | mismatch

    def _correct(self, output: ModelOutput, rows: TensorDict, old: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Weights for the sampler's difference, and how large it is.

        Where the sampler's log-probs are the old ones, the difference is that to the policy under update.
        """
        config = self.config
        mask = rows["loss_mask"].values()
        if config.old_logprobs == "rollout":
            return None, mismatch_metrics(output.logprobs.detach(), old, mask, None, output.counts.tokens)
        rollout = rows["rollout_logprobs"].values()
        weights = clipped = None
        if config.correction != "none":
            correction, level = split_correction(config.correction)
            low, high = correction_bounds(config)
            weights = correction_weights(
                old, rollout, mask, output.cu_seqlens, correction=correction, level=level, low=low, high=high
            )
            clipped = (weights >= high) if correction == "tis" else (weights == 0)
        if config.rejection != "none":
            level, divergence = split_rejection(config.rejection)
            low, high = rejection_bounds(config)
            accepted = rejection_mask(
                old, rollout, mask, output.cu_seqlens, level=level, divergence=divergence, low=low, high=high
            ).float()
            weights = accepted if weights is None else weights * accepted
        metrics = mismatch_metrics(old, rollout, mask, weights, output.counts.tokens)
        if clipped is not None:
            metrics["correction_clipped"] = (clipped & mask.bool()).sum().float() / max(output.counts.tokens, 1.0)
        return weights, metrics

    def _aggregate(self, per_token: Tensor, loss_mask: Tensor, output: ModelOutput) -> Tensor:
        """This micro-batch's share of the loss that the global batch's (T,) token losses make, aggregated.

        As `rl_csrc.policy_loss` does it.
        """
        masked = torch.where(loss_mask.bool(), per_token, 0.0)
        if self.config.aggregation == "seq-mean-token-mean":
            rows = row_of(output.cu_seqlens, loss_mask.numel())
            masked = masked / row_sums(loss_mask.float(), rows, output.cu_seqlens).clamp(min=1.0)[rows]
        total, counts = masked.sum(), output.counts
        if self.config.aggregation == "token-sum":
            return total
        if self.config.aggregation == "token-mean":
            return total / max(counts.tokens, 1.0)
        constant = self.max_new_tokens if self.config.aggregation.endswith("norm") else 1
        return total / (max(counts.sequences, 1.0) * constant)


def _penalty(output: ModelOutput, rows: TensorDict, old: Tensor, coef: float, counted: dict[str, Any]) -> Tensor:
    """What the chosen tokens pay for their distance from the old policy."""
    mask = rows["loss_mask"].values()
    free = output.logprobs.detach()  # no distance, no penalty
    return rl_csrc.policy_loss(
        output.logprobs,
        old,
        torch.zeros_like(old),
        mask,
        output.cu_seqlens,
        loss="reinforce",
        kl="abs",
        kl_coef=coef,
        ref_logprobs=torch.where(rows["selected"].values().bool(), old, free),
        **counted,
    ).loss
