"""The loss that the trainer injects into the model engine for a policy update: policy, KL, entropy, teacher.

Legend: `T` tokens (packed), `B` rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

import rl_csrc
from rl_csrc import METRIC_NAMES, LossSpec
from rl_trainer.algorithms import distillation
from rl_trainer.algorithms.aggregation import LOG_MAX, Aggregation, row_of, row_sums
from rl_trainer.algorithms.kl_controller import TOKEN_ENTROPY, UNBIASED, estimate_kl
from rl_trainer.algorithms.losses import PolicyLossInput, loss_named
from rl_trainer.algorithms.rollout_correction import (
    REJECTED_PER_KEPT,
    configured_rejection,
    configured_weights,
    correction_bounds,
    mismatch_metrics,
    off_policy_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.types import ModelOutput
    from rl_trainer.config.schema import AlgorithmConfig, TeacherSection

_SAMPLER = "rollout_logprobs"

_NO_CLIP = 1e9
"""An upper bound of the importance ratio that nothing reaches."""

_SELECTION = ("share", "low", "high")
"""Options of a loss that `select_tokens` reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """Weights and masks of a micro-batch after rollout correction."""

    weights: Tensor | None
    """(T,) weights of the policy loss; None: 1 each."""
    mask: Tensor
    """(T,) bool, the tokens that are learned from: all terms of the loss are theirs alone."""
    row_counts: Tensor | None
    """(B,) tokens per row before rejection; None where nothing was rejected."""
    metrics: dict[str, Tensor]
    """Metrics of the difference between trainer and sampler, and of its correction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Term:
    """Policy term of a micro-batch: arguments of `rl_csrc.policy_loss`, and what it cannot compute."""

    loss: str
    advantages: Tensor
    """(T,)."""
    weights: Tensor | None
    """(T,); None: 1 each."""
    bounds: dict[str, Any]
    extra: Tensor
    """`[]` share of the loss in addition to the formula's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossFunction:
    """An rl-engine loss function: policy loss, KL to the reference and entropy bonus, as shares of the global batch.

    A token that rollout correction rejects has none of these terms, nor a teacher's or KL-Cov's. The means divide by
    the counts before rejection, unless `rejection_counts=after`. KL-Cov's penalty has the correction's weights, as all
    of that objective's expectation over samples (arXiv 2505.22617; verl does the same).

    Reads the columns `old_logprobs`, `advantages`, `loss_mask`; `rollout_logprobs` where `old_logprobs` are the
    engine's own; `ref_logprobs` where the KL coefficient of the loss is positive; `selected` where the loss treats
    some tokens apart; `is_high_entropy` where `top_entropy` is below 1; `distillation.teacher_columns` where there is a
    teacher; `is_given`, where it is there, says whose sampler is not that of the run.
    """

    config: AlgorithmConfig
    """Loss, clipping, aggregation and coefficients."""
    teacher: TeacherSection | None = None
    """Distillation settings; None without a teacher."""
    has_old_logprobs: bool = True
    """False: there is no column `old_logprobs`, because a batch's only update computes them itself."""
    max_new_tokens: int = 1
    """Tokens of the longest completion, the constant that seq-mean-token-sum-norm divides by."""

    @property
    def is_token_local(self) -> bool:
        """See `rl_engine.base.LossFunction`."""
        return self.row_term is None

    @property
    def row_term(self) -> str | None:
        """The setting by which a token's gradient depends on other tokens' log-probs; None where none does."""
        config, teacher = self.config, self.teacher
        if not loss_named(config.loss).is_token_local:
            return f"algorithm.loss is {config.loss}"
        if teacher is not None and teacher.divergence != "reverse":
            return f"teacher.divergence is {teacher.divergence}"
        if config.off_policy_mask > 0:
            return f"algorithm.off_policy_mask is {config.off_policy_mask:g}"
        if config.old_logprobs == "rollout":  # what corrects and rejects is then compared with the policy under update
            for name in ("correction", "rejection"):
                if getattr(config, name).startswith("sequence"):
                    return f"algorithm.{name} is {getattr(config, name)}"
        return None

    @property
    def term_without_advantage(self) -> str | None:
        """The setting by which a row without advantages has a gradient; None where it has none."""
        config = self.config
        if not loss_named(config.loss).scales_with_advantage:
            return f"algorithm.loss is {config.loss}"
        if config.kl_coef > 0 and not config.kl_in_reward:
            return f"algorithm.kl_coef is {config.kl_coef:g}"
        if config.entropy_coef or config.entropy_target:
            return "there is an entropy bonus"
        return None if self.teacher is None else "there is a teacher"

    def has_gradient(self, rows: TensorDict) -> Tensor | None:
        """(B,) bool, rows with an advantage at a token that is learned from: see `rl_engine.base.LossFunction`."""
        if self.term_without_advantage is not None:
            return None
        mask, advantages = rows["loss_mask"], rows["advantages"].values()
        is_pulled = (mask.values().bool() & (advantages != 0)).float()
        offsets = mask.offsets().to(torch.int64)
        return row_sums(is_pulled, row_of(offsets, is_pulled.numel()), offsets) > 0

    def __call__(self, output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss share and metric shares of one micro-batch."""
        config = self.config
        old = rows["old_logprobs"].values() if self.has_old_logprobs else output.logprobs.detach()
        kept = self._correct(output, rows, old)
        term = self._policy_term(output, rows, old, kept)
        extra, mask = term.extra, kept.mask
        num_tokens = max(output.counts.tokens, 1.0)  # all of a batch may be rejected
        counted: dict[str, Any] = {
            "num_tokens": num_tokens,
            "num_sequences": max(output.counts.sequences, 1.0),
            "norm_constant": self.max_new_tokens if config.aggregation.endswith("norm") else None,
            "sequence_counts": kept.row_counts,
        }
        has_reference = config.kl_coef > 0 and not config.kl_in_reward
        is_weighted_kl = has_reference and config.kl_estimator == UNBIASED
        result = rl_csrc.policy_loss(
            output.logprobs,
            old,
            term.advantages,
            mask,
            output.cu_seqlens,
            LossSpec(
                loss=term.loss,  # pyright: ignore[reportArgumentType] - registered, and without a function of its own
                kl=config.kl_estimator if has_reference and not is_weighted_kl else "none",  # pyright: ignore[reportArgumentType] - UNBIASED is left out
                kl_coef=config.kl_coef,
                entropy_coef=config.entropy_coef,
                aggregation=config.aggregation,
                **term.bounds,
            ),
            ref_logprobs=rows["ref_logprobs"].values() if has_reference else None,
            entropy=output.entropy,
            weights=term.weights,
            **counted,
        )
        sums = dict(zip(METRIC_NAMES, result.metrics, strict=True))
        metrics = {name: sums[name] / num_tokens for name in self._measured(term.bounds)}
        if config.loss != distillation.ALONE:
            metrics["policy_loss"] = sums["policy_loss"] + extra.detach()
        if has_reference:
            metrics["kl"] = sums["kl_loss"]
        if is_weighted_kl:
            ratio = (output.logprobs - old).clamp(-LOG_MAX, LOG_MAX).exp()
            kl = ratio * estimate_kl(output.logprobs, rows["ref_logprobs"].values(), "k3")
            share = self._share(kl, output, replace(kept, weights=None))
            extra, metrics["kl"] = extra + config.kl_coef * share, share.detach()
        if output.entropy is not None:
            metrics["entropy"] = sums["entropy"]
            if config.entropy_target > 0:
                metrics[TOKEN_ENTROPY] = torch.where(mask, output.entropy.detach(), 0.0).sum() / num_tokens
        if self.teacher is not None:
            plain = LossSpec(loss="reinforce", aggregation=config.aggregation)
            pull, taught = distillation.teacher_loss(output, rows, mask, self.teacher, plain, counted)
            extra, metrics = extra + pull, metrics | taught
        return result.loss + extra, metrics | kept.metrics

    def _policy_term(self, output: ModelOutput, rows: TensorDict, old: Tensor, kept: _Kept) -> _Term:
        """Policy term of the configured loss.

        That of a `compute` is in `extra`; KL, entropy and metrics are left to a formula without advantages.
        """
        config, spec = self.config, loss_named(self.config.loss)
        options = {**spec.options, **config.loss_options}
        name, weights = config.loss, kept.weights
        advantages, extra = rows["advantages"].values(), torch.zeros((), device=old.device)
        bounds: dict[str, Any] = {name: value for name, value in options.items() if name not in _SELECTION}
        if "clip_dual" in bounds:
            bounds["clip_dual"] = bounds["clip_dual"] or math.inf
        if spec.compute is not None:
            per_token = spec.compute(
                PolicyLossInput(
                    logprobs=output.logprobs,
                    old_logprobs=old,
                    advantages=advantages,
                    loss_mask=kept.mask,
                    cu_seqlens=output.cu_seqlens,
                    options=options,
                    rollout_logprobs=rows["old_logprobs" if config.old_logprobs == "rollout" else _SAMPLER].values(),
                    entropy=output.entropy,
                    columns={name: _values(rows[name]) for name in spec.reads},
                )
            )
            extra = self._share(per_token, output, kept)
            name, advantages, bounds = "reinforce", torch.zeros_like(old), {}
        elif name == distillation.ALONE:
            name, advantages = "reinforce", torch.zeros_like(old)
        elif name == "clip_cov":  # ppo, but for the chosen tokens, which get no gradient
            name, weights = "ppo", _times(weights, ~rows["selected"].values().bool())
        elif name == "kl_cov":  # the plain ratio; the chosen tokens pay for leaving the old policy
            name, bounds = "ppo", {"clip_low": 1.0, "clip_high": _NO_CLIP}
            distance = torch.where(rows["selected"].values().bool(), (output.logprobs - old).abs(), 0.0)
            extra = self._share(options["kl_coef"] * distance, output, kept)
        return _Term(loss=name, advantages=advantages, weights=weights, bounds=bounds, extra=extra)

    def _measured(self, bounds: Mapping[str, Any]) -> Iterator[str]:
        """Names of the token metrics that this loss computes: of the ratio, if it has one, and of clips."""
        if not self.has_old_logprobs:
            return
        yield from ("log_ratio", "k3", "ratio")
        if "clip_high" in bounds and bounds["clip_high"] != _NO_CLIP:
            yield from ("clipped_high", "clipped_low")
        if bounds.get("clip_dual", math.inf) < math.inf:
            yield "clipped_dual"

    def _correct(self, output: ModelOutput, rows: TensorDict, old: Tensor) -> _Kept:
        """Weights and rejection for the sampler's difference, and how large it is.

        Where the sampler's log-probs are the old ones (bypass), the difference is that to the policy under update.
        """
        config, num_tokens = self.config, max(output.counts.tokens, 1.0)
        mask = rows["loss_mask"].values().bool()
        is_bypass = config.old_logprobs == "rollout"
        trained, rollout = (output.logprobs.detach(), old) if is_bypass else (old, rows["rollout_logprobs"].values())
        if "is_given" in rows.keys():  # noqa: SIM118 - a TensorDict; what was given is no sample of the server's
            given = rows["is_given"].bool()[row_of(output.cu_seqlens, mask.numel())]
            rollout = torch.where(given, trained, rollout)
        compared = (trained, rollout, mask, output.cu_seqlens)
        weights, kept, row_counts = configured_weights(config, *compared), mask, None
        metrics = mismatch_metrics(trained, rollout, mask, weights, output.counts.tokens)
        # The mean of -log p over tokens drawn from p: an unbiased estimate of the sampler's entropy, for nothing.
        metrics["entropy_estimate"] = -torch.where(mask, rollout, 0.0).sum() / num_tokens
        if weights is not None:
            bound = correction_bounds(config)[1]
            clipped = (weights >= bound) if config.correction.endswith("tis") else (weights == 0)
            metrics["correction_clipped"] = (clipped & mask).sum().float() / num_tokens
        if config.off_policy_mask > 0:
            now = (output.logprobs.detach(), *compared[1:])
            off = off_policy_rows(*now, rows["advantages"].values(), most=config.off_policy_mask)
            metrics["off_policy_masked"] = (off & mask).sum().float() / num_tokens
            weights = _times(weights, ~off)
        if config.top_entropy < 1:
            weights = _times(weights, rows["is_high_entropy"].values().bool())
        if (accepted := configured_rejection(config, *compared)) is not None:
            kept = accepted
            if config.rejection_counts == "before":
                row_counts = row_sums(mask.float(), row_of(output.cu_seqlens, mask.numel()), output.cu_seqlens)
                metrics["rejected"] = (mask & ~kept).sum().float() / num_tokens
            else:  # the others were taken out of the mask before anything was counted: see `drop_rejected`
                metrics[REJECTED_PER_KEPT] = rows["was_rejected"].values().sum().float() / num_tokens
        return _Kept(weights=weights, mask=kept, row_counts=row_counts, metrics=metrics)

    def _share(self, per_token: Tensor, output: ModelOutput, kept: _Kept) -> Tensor:
        """`[]` share of the loss that (T,) token losses of the policy term make, weighted and aggregated."""
        weighted = per_token if kept.weights is None else per_token * kept.weights
        aggregation = Aggregation(name=self.config.aggregation, norm_constant=self.max_new_tokens)
        return aggregation.share(weighted, kept.mask, output.cu_seqlens, output.counts, kept.row_counts)


def _values(column: Tensor) -> Tensor:
    return column.values() if column.is_nested else column


def _times(weights: Tensor | None, is_kept: Tensor) -> Tensor:
    """(T,) weights, 0 where (T,) `is_kept` is false."""
    return is_kept.float() if weights is None else weights * is_kept
