"""The loss that the trainer injects into the model engine for a policy update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import rl_csrc
from rl_csrc import METRIC_NAMES
from rl_trainer.algorithms import distillation
from rl_trainer.algorithms.correction import correction_weights, mismatch_metrics, rejection_mask
from rl_trainer.algorithms.selection import COV_LOSSES

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.types import ModelOutput
    from rl_trainer.config import AlgorithmConfig, TeacherSection

_FUSED = ("ppo", "gspo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "dro", "reinforce")
POLICY_LOSSES = (*_FUSED, *COV_LOSSES, distillation.ALONE)
"""Policy losses: formulas and papers are in `rl_csrc.policy_loss`, of the others in `selection` and `distillation`."""

_NO_CLIP = 1e9
"""An upper bound of the importance ratio that nothing reaches."""

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

    def __call__(self, output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss share and metric shares of one micro-batch."""
        config = self.config
        has_reference = config.kl_coef > 0 and not config.kl_in_reward
        weights, mismatch = self._correct(output, rows)
        old, mask = rows["old_logprobs"].values(), rows["loss_mask"].values()
        loss, clip_low, clip_high, clip_dual = config.loss, config.clip_low, config.clip_high, config.clip_dual
        advantages = rows["advantages"].values()
        selected = rows["selected"].values().bool() if loss in COV_LOSSES else None
        if loss == "clip_cov":  # ppo, but for the chosen tokens, which get no gradient
            assert selected is not None
            kept = (~selected).float()
            loss, weights = "ppo", kept if weights is None else weights * kept
        elif loss == "kl_cov":  # the plain ratio; the chosen tokens pay for leaving the old policy below
            loss, clip_low, clip_high, clip_dual = "ppo", 1.0, _NO_CLIP, 0.0
        elif loss == distillation.ALONE:
            loss, advantages = "reinforce", torch.zeros_like(advantages)
        counted = {
            "aggregation": config.aggregation,
            "num_tokens": output.counts.tokens,
            "num_sequences": output.counts.sequences,
            "norm_constant": config.norm_constant,
        }
        result = rl_csrc.policy_loss(
            output.logprobs,
            old,
            advantages,
            mask,
            output.cu_seqlens,
            loss=loss,  # pyright: ignore[reportArgumentType] - checked against POLICY_LOSSES before anything starts
            clip_low=clip_low,
            clip_high=clip_high,
            clip_dual=clip_dual or None,
            kl=config.kl_estimator if has_reference else "none",
            kl_coef=config.kl_coef,
            ref_logprobs=rows["ref_logprobs"].values() if has_reference else None,
            entropy=output.entropy,
            entropy_coef=config.entropy_coef,
            weights=weights,
            **counted,
        )
        total = result.loss
        if config.loss == "kl_cov":
            assert selected is not None
            penalty = rl_csrc.policy_loss(
                output.logprobs,
                old,
                torch.zeros_like(old),
                mask,
                output.cu_seqlens,
                loss="reinforce",
                kl="abs",
                kl_coef=config.cov_kl_coef,
                ref_logprobs=torch.where(selected, old, output.logprobs.detach()),  # no distance, no penalty
                **counted,
            )
            total = total + penalty.loss
        taught: dict[str, Tensor] = {}
        if self.teacher is not None:
            pull, taught = distillation.teacher_loss(output, rows, self.teacher, counted)
            total = total + pull
        sums = dict(zip(METRIC_NAMES, result.metrics, strict=True))
        metrics = {"policy_loss": sums["policy_loss"], "kl": sums["kl_loss"], "entropy": sums["entropy"]}
        metrics |= {name: sums[name] / output.counts.tokens for name in _PER_TOKEN}
        return total, metrics | mismatch | taught

    def _correct(self, output: ModelOutput, rows: TensorDict) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Weights for the sampler's difference, and how large it is; nothing where the sampler's log-probs are used."""
        config = self.config
        if config.old_logprobs == "rollout":
            return None, {}
        old, rollout = rows["old_logprobs"].values(), rows["rollout_logprobs"].values()
        mask = rows["loss_mask"].values()
        weights = None
        if config.correction != "none":
            weights = correction_weights(
                old,
                rollout,
                mask,
                output.cu_seqlens,
                correction=config.correction,
                level=config.correction_level,
                low=config.correction_low,
                high=config.correction_high,
            )
        if config.rejection != "none":
            accepted = rejection_mask(
                old,
                rollout,
                mask,
                output.cu_seqlens,
                level=config.rejection,
                divergence=config.rejection_divergence,
                low=config.rejection_low,
                high=config.rejection_high,
            ).float()
            weights = accepted if weights is None else weights * accepted
        return weights, mismatch_metrics(old, rollout, mask, weights, output.counts.tokens)
