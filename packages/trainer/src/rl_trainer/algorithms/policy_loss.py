"""Policy losses: the registry, and the loss that the trainer injects into the model engine for a policy update.

Formulas are in `rl_csrc.policy_loss`. One of your own is a `PolicyLoss` with a `compute`, named in the entry point
group `rl_trainer.policy_losses`. Legend: `T` tokens (packed), `B` rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

import rl_csrc
from rl_csrc import METRIC_NAMES
from rl_trainer.algorithms import distillation
from rl_trainer.algorithms.advantages import BatchRanks
from rl_trainer.algorithms.aggregation import Aggregation, row_of, row_sums
from rl_trainer.algorithms.rollout_correction import (
    REJECTED_PER_KEPT,
    configured_rejection,
    configured_weights,
    correction_bounds,
    mismatch_metrics,
)
from rl_trainer.errors import ConfigError, PlanError
from rl_trainer.plugins import named, reads_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.types import ModelOutput
    from rl_trainer.config import AlgorithmConfig, TeacherSection

GROUP = "rl_trainer.policy_losses"
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
"""The importance ratio is clipped at 1 - clip_low and 1 + clip_high; of gmpo its logarithm, of dppo the divergence."""
CLIP_DUAL, NO_CLIP_DUAL = {"clip_dual": 3.0}, {"clip_dual": 0.0}
"""Bound on the ratio for negative advantages; 0 turns it off, as it is for losses whose papers have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossInput:
    """What a policy loss of one's own is given."""

    logprobs: Tensor
    """(T,) of the policy that is being updated, with gradient."""
    old_logprobs: Tensor
    """(T,) of the policy before the update."""
    advantages: Tensor
    """(T,)."""
    loss_mask: Tensor
    """(T,) bool, true where the model wrote the token; nothing else is aggregated."""
    cu_seqlens: Tensor
    """(B + 1,) int64 row offsets into T."""
    options: Mapping[str, float]
    """`algorithm.loss_options` over the loss's own defaults."""
    rollout_logprobs: Tensor
    """(T,) of the sampler."""
    entropy: Tensor | None = None
    """(T,) of the policy, with gradient; None unless `algorithm.entropy_coef` has it computed."""
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    """What `reads` names, of this micro-batch: (T,) of ragged columns such as `ref_logprobs` and `values`, (B, ...) of
    others such as `group_id`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A registered policy loss and what has to be known before a run starts."""

    source: str
    """arXiv number or other reference."""
    options: Mapping[str, float] = field(default_factory=dict[str, float])
    """What `algorithm.loss_options` may hold, and the values it has otherwise."""
    selects_tokens: bool = False
    """Whether it treats some tokens apart that are chosen over the whole batch: see `select_tokens`."""
    has_ratio: bool = True
    """Whether it weighs tokens by the policy's ratio to the old one. One that does not takes the weights of
    `algorithm.correction` where the sampler's log-probs are the old ones."""
    is_token_local: bool = False
    """Whether its gradient at a token depends on that token's log-prob (and entropy) alone: the engine may then make it
    in one pass over the logits. See `rl_engine.base.LossFunction`."""
    compute: Callable[[PolicyLossInput], Tensor] | None = None
    """(T,) loss of each token, to minimise; None: `rl_csrc.policy_loss` has it. Aggregation, rollout correction, KL and
    entropy are added to it as to the others."""
    reads: tuple[str, ...] = ()
    """Columns of the queue that `compute` reads beside those it always has: those of the rollouts, of the reference and
    the critic where there are any, and of stages."""


_SAMPLER = "rollout_logprobs"

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(
        source="1707.06347; clip-higher 2503.14476; dual clip 1912.09729", is_token_local=True, options=CLIP | CLIP_DUAL
    ),
    "gspo": PolicyLoss(source="2507.18071", options={"clip_low": 3e-4, "clip_high": 4e-4} | NO_CLIP_DUAL),
    "cispo": PolicyLoss(source="2506.13585", is_token_local=True, options={"clip_low": 1.0, "clip_high": 0.28}),
    "sapo": PolicyLoss(source="2511.20347", is_token_local=True, options={"tau_pos": 1.0, "tau_neg": 1.05}),
    "gmpo": PolicyLoss(source="2507.20673", options={"clip_low": 0.4, "clip_high": 0.4}),
    "dppo_tv": PolicyLoss(source="2602.04879", is_token_local=True, options=CLIP | {"ratio_max": 20.0}),
    "dppo_kl": PolicyLoss(source="2602.04879", is_token_local=True, options=CLIP | {"ratio_max": 20.0}),
    "dro": PolicyLoss(source="2405.19107", is_token_local=True, options={"dro_beta": 0.1}),
    "reinforce": PolicyLoss(source="Williams 1992; GPG 2504.02546", is_token_local=True, has_ratio=False),
    "clip_cov": PolicyLoss(
        source="2505.22617",
        is_token_local=True,
        options=CLIP | NO_CLIP_DUAL | {"share": 0.0002, "low": 1.0, "high": 5.0},
        selects_tokens=True,
    ),
    distillation.ALONE: PolicyLoss(source="2306.13649; the teacher alone (`teacher`)", is_token_local=True),
    "kl_cov": PolicyLoss(
        source="2505.22617", is_token_local=True, options={"share": 0.0002, "kl_coef": 1.0}, selects_tokens=True
    ),
}


def loss_named(name: str) -> PolicyLoss:
    """The policy loss that `algorithm.loss` names: see `rl_trainer.plugins`.

    Raises:
        ConfigError: there is none of that name; lists what there is.
    """
    return named(
        name,
        POLICY_LOSSES,
        group=GROUP,
        kind=PolicyLoss,
        key="algorithm.loss",
        make=lambda compute: PolicyLoss(
            source=compute.__name__,
            compute=compute,
            reads=reads_of(compute),
            is_token_local=bool(getattr(compute, "is_token_local", False)),
        ),
    )


_MEANT: dict[str, tuple[Callable[[float], bool], str]] = {
    **{name: (lambda value: value >= 0, "0 or more") for name in ("clip_low", "clip_high", "kl_coef", "dro_beta")},
    **{name: (lambda value: value > 0, "above 0") for name in ("tau_pos", "tau_neg", "ratio_max")},
    "clip_dual": (lambda value: value == 0 or value > 1, "0 (off), or above 1"),
}
"""By option of our losses: whether a value can be meant, and which can."""


def check_loss(algorithm: AlgorithmConfig) -> None:
    """Check the options of the chosen loss.

    Raises:
        ConfigError: the loss or an option of it does not exist.
        PlanError: a value that cannot be meant.
    """
    loss = loss_named(algorithm.loss)
    for name in algorithm.loss_options:
        if name not in loss.options:
            raise ConfigError(
                f"algorithm.loss_options.{name} is not read by algorithm.loss={algorithm.loss}; its options are: "
                f"{', '.join(loss.options) or 'none'}"
            )
    options = {**loss.options, **algorithm.loss_options}
    for name, (is_meant, wanted) in _MEANT.items() if loss.compute is None else ():
        if name in options and not is_meant(value := options[name]):
            raise PlanError(f"algorithm.loss_options.{name}={value:g} cannot be meant; it has to be {wanted}")
    if loss.selects_tokens and not 0 < options["share"] <= 1:
        raise PlanError(f"algorithm.loss_options.share={options['share']:g} is a share of the tokens; give 0 to 1")


def select_tokens(
    logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    loss: Literal["clip_cov", "kl_cov"],
    share: float,
    low: float = 1.0,
    high: float = 5.0,
    seed: int = 0,
    ranks: BatchRanks | None = None,
) -> Tensor:
    """(T,) uint8, 1 at the model tokens that Clip-Cov and KL-Cov (arXiv 2505.22617) treat apart.

    They drive the entropy down. Chosen over the whole batch, seeded, so that neither micro-batches nor ranks change it.

    A token's covariance is (logprob - mean logprob) (advantage - mean advantage), means over the model tokens.

    Args:
        logprobs: (T,) before the update.
        advantages: (T,).
        loss_mask: (T,) 1 where the model wrote the token.
        loss: `clip_cov`: at random among the tokens whose covariance is within [low, high]; `kl_cov`: those of the
            largest covariance.
        share: Share of the model tokens to choose; at least one is chosen where there are candidates.
        low: Lower bound; clip_cov only.
        high: Upper bound; clip_cov only.
        seed: Of the draw; clip_cov only.
        ranks: That hold the other tokens of the batch; None: there are no others.
    """
    ranks = ranks or BatchRanks()
    at = torch.nonzero(loss_mask.bool())[:, 0]
    chosen = torch.zeros(loss_mask.shape, dtype=torch.uint8, device=loss_mask.device)
    x, y = logprobs[at].double(), advantages[at].double()
    num, mean_x, mean_y = ranks.sum(torch.stack([x.new_tensor(float(at.numel())), x.sum(), y.sum()])).tolist()
    if num == 0:
        return chosen
    covariance = (x - mean_x / num) * (y - mean_y / num)
    count = max(1, int(share * num))
    if loss == "kl_cov":  # of the largest of every rank, the largest of all
        values, places = covariance.topk(min(count, at.numel()))
        largest = ranks.gather(torch.cat([values, values.new_full((count - values.numel(),), -torch.inf)]))
        ours = largest.flatten().topk(count).indices - ranks.rank * count
        chosen[at[places[ours[(ours >= 0) & (ours < places.numel())]]]] = 1
        return chosen
    candidates = at[(covariance >= low) & (covariance <= high)]
    nums = ranks.gather(x.new_tensor(float(candidates.numel()))).long()
    order = torch.randperm(int(nums.sum()), generator=torch.Generator().manual_seed(seed)).to(candidates.device)
    ours = order[:count] - int(nums[: ranks.rank].sum())
    chosen[candidates[ours[(ours >= 0) & (ours < candidates.numel())]]] = 1
    return chosen


_NO_CLIP = 1e9
"""An upper bound of the importance ratio that nothing reaches."""

_SELECTION = ("share", "low", "high")
"""Options of a loss that `select_tokens` reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What rollout correction leaves of a micro-batch."""

    weights: Tensor | None
    """(T,) weights of the policy loss; None: 1 each."""
    mask: Tensor
    """(T,) bool, the tokens that are learned from: all terms of the loss are theirs alone."""
    row_counts: Tensor | None
    """(B,) tokens per row before rejection; None where nothing was rejected."""
    metrics: dict[str, Tensor]
    """How far the trainer is from the sampler, and what was done about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossFunction:
    """An rl-engine loss function: policy loss, KL to the reference and entropy bonus, as shares of the global batch.

    A token that rollout correction rejects has none of these terms, nor a teacher's or KL-Cov's. The means divide by
    the counts before rejection, unless `rejection_counts=after`. KL-Cov's penalty has the correction's weights, as all
    of that objective's expectation over samples (arXiv 2505.22617; verl does the same).

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
        if config.old_logprobs == "rollout":  # what corrects and rejects is then compared with the policy under update
            for name in ("correction", "rejection"):
                if getattr(config, name).startswith("sequence"):
                    return f"algorithm.{name} is {getattr(config, name)}"
        return None

    def __call__(self, output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss share and metric shares of one micro-batch."""
        config, spec = self.config, loss_named(self.config.loss)
        options = {**spec.options, **config.loss_options}
        old = rows["old_logprobs"].values() if self.has_old_logprobs else output.logprobs.detach()
        advantages = rows["advantages"].values()
        kept = self._correct(output, rows, old)
        mask, weights = kept.mask, kept.weights
        num_tokens = max(output.counts.tokens, 1.0)  # all of a batch may be rejected
        counted: dict[str, Any] = {
            "aggregation": config.aggregation,
            "num_tokens": num_tokens,
            "num_sequences": max(output.counts.sequences, 1.0),
            "norm_constant": self.max_new_tokens if config.aggregation.endswith("norm") else None,
            "sequence_counts": kept.row_counts,
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
                    loss_mask=mask,
                    cu_seqlens=output.cu_seqlens,
                    options=options,
                    rollout_logprobs=rows["old_logprobs" if config.old_logprobs == "rollout" else _SAMPLER].values(),
                    entropy=output.entropy,
                    columns={name: _values(rows[name]) for name in spec.reads},
                )
            )
            extra = self._share(per_token, output, kept)
            name, advantages, bounds = "reinforce", torch.zeros_like(old), {}  # KL, entropy and metrics are left to it
        elif name == distillation.ALONE:
            name, advantages = "reinforce", torch.zeros_like(old)
        elif name == "clip_cov":  # ppo, but for the chosen tokens, which get no gradient
            free = (~rows["selected"].values().bool()).float()
            name, weights = "ppo", free if weights is None else weights * free
        elif name == "kl_cov":  # the plain ratio; the chosen tokens pay for leaving the old policy
            name, bounds = "ppo", {"clip_low": 1.0, "clip_high": _NO_CLIP, "clip_dual": None}
            distance = torch.where(rows["selected"].values().bool(), (output.logprobs - old).abs(), 0.0)
            extra = self._share(options["kl_coef"] * distance, output, kept)
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
        metrics = {name: sums[name] / num_tokens for name in self._measured(bounds)}
        if config.loss != distillation.ALONE:
            metrics["policy_loss"] = sums["policy_loss"] + extra.detach()
        if has_reference:
            metrics["kl"] = sums["kl_loss"]
        if output.entropy is not None:
            metrics["entropy"] = sums["entropy"]
        if self.teacher is not None:
            pull, taught = distillation.teacher_loss(output, rows, mask, self.teacher, counted)
            extra, metrics = extra + pull, metrics | taught
        return result.loss + extra, metrics | kept.metrics

    def _measured(self, bounds: Mapping[str, Any]) -> Iterator[str]:
        """Names of the token metrics that this loss computes: of the ratio, where there is one, and of clips."""
        if not self.has_old_logprobs:
            return
        yield from ("log_ratio", "k3", "ratio")
        if "clip_high" in bounds and bounds["clip_high"] != _NO_CLIP:
            yield from ("clipped_high", "clipped_low")
        if bounds.get("clip_dual") is not None:
            yield "clipped_dual"

    def _correct(self, output: ModelOutput, rows: TensorDict, old: Tensor) -> _Kept:
        """Weights and rejection for the sampler's difference, and how large it is.

        Where the sampler's log-probs are the old ones (bypass), the difference is that to the policy under update.
        """
        config, num_tokens = self.config, max(output.counts.tokens, 1.0)
        mask = rows["loss_mask"].values().bool()
        is_bypass = config.old_logprobs == "rollout"
        trained, rollout = (output.logprobs.detach(), old) if is_bypass else (old, rows["rollout_logprobs"].values())
        compared = (trained, rollout, mask, output.cu_seqlens)
        weights, kept, row_counts = configured_weights(config, *compared), mask, None
        metrics = mismatch_metrics(trained, rollout, mask, weights, output.counts.tokens)
        # The mean of -log p over tokens drawn from p: an unbiased estimate of the sampler's entropy, for nothing.
        metrics["entropy_estimate"] = -torch.where(mask, rollout, 0.0).sum() / num_tokens
        if weights is not None:
            bound = correction_bounds(config)[1]
            clipped = (weights >= bound) if config.correction.endswith("tis") else (weights == 0)
            metrics["correction_clipped"] = (clipped & mask).sum().float() / num_tokens
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
