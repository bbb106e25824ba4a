"""Loss functions that any backend takes. Each returns this micro-batch's share of the global value.

Legend: `C` completion tokens of the micro-batch, `B` its rows, `P` its pairs.

Preference losses take two rows per pair, distinguished by `is_chosen` ((B,) bool) and held together by `pair_id`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn import functional

from rl_csrc import LossSpec, coarse_kl, policy_loss
from rl_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.base import LossFunction
    from rl_engine.types import ModelOutput


_LOG_HALF = -0.6931471805599453
_Function = TypeVar("_Function")


def token_local(loss_function: _Function) -> _Function:
    """Declare that the gradient of a loss at a token depends on that token alone; see `rl_engine.base.LossFunction`."""
    setattr(loss_function, "is_token_local", True)  # noqa: B010 - a function has no such attribute for the type checker
    return loss_function


@token_local
def sft_loss(output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the completion tokens with `loss_mask` 1, averaged over those of the whole batch.

    Metrics: `accuracy`, the share of those tokens to which the model gives more than half of the probability, and
    `sequence_accuracy`, the share of rows in which it does so for every one of them: greedy decoding reproduces those.
    """
    mask = token_values(rows, "loss_mask", output.logprobs)
    loss = -token_mean(output.logprobs, mask, output)
    likely = (output.logprobs.detach() > _LOG_HALF).to(mask.dtype)
    counted, right = row_sum(mask, output), row_sum(mask * likely, output)
    is_exact = (counted > 0) & (counted == right)
    exact = is_exact.to(mask.dtype).sum() / max(output.counts.sequences, 1.0)
    return loss, {"accuracy": token_mean(likely, mask, output), "sequence_accuracy": exact}


class DpoKind(StrEnum):
    """Kind of a DPO loss: of the margin between two completions."""

    SIGMOID = "sigmoid"
    """Direct preference optimisation (Rafailov et al., 2305.18290)."""
    IPO = "ipo"
    """Squared distance of the margin from 1 / (2 beta) (Azar et al., 2310.12036), log-ratios averaged over tokens."""
    HINGE = "hinge"
    """max(0, 1 - beta * margin), as in SLiC (Zhao et al., 2305.10425)."""
    KTO = "kto"
    """No pairs at all; see `KtoLoss`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoLoss:
    """Preference loss of a policy against the reference whose log-probs are in `ref_logprobs` (ragged, `[C]`).

    Metrics: `accuracy`, the share of pairs whose chosen completion has the larger implicit reward, `margin`, the mean
    difference of those rewards, and `chosen_reward` and `rejected_reward`.
    """

    kind: DpoKind = DpoKind.SIGMOID
    """Kind of the loss."""
    beta: float = 0.1
    """Weight of staying near the reference."""
    label_smoothing: float = 0.0
    """Probability that a label is the wrong way round (sigmoid only; conservative DPO)."""
    is_reference_free: bool = False
    """Leave the reference out: implicit rewards are beta times the policy's own log-probs."""

    def __post_init__(self) -> None:
        """Refuse the kind that has no pairs."""
        if self.kind == DpoKind.KTO:
            raise ConfigError("DpoLoss compares pairs; for kto use KtoLoss.")

    def __call__(self, output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the mean over pairs."""
        mask = token_values(rows, "loss_mask", output.logprobs)
        ratio = output.logprobs
        if not self.is_reference_free:
            ratio = ratio - token_values(rows, "ref_logprobs", output.logprobs)
        scores = row_sum(ratio * mask, output)
        if self.kind == DpoKind.IPO:
            scores = scores / row_sum(mask, output).clamp(min=1.0)
        chosen, rejected = pairs_of(scores, rows)
        margin = chosen - rejected
        if self.kind == DpoKind.IPO:
            losses = (margin - 1.0 / (2.0 * self.beta)).square()
        elif self.kind == DpoKind.HINGE:
            losses = functional.relu(1.0 - self.beta * margin)
        else:
            right, wrong = functional.logsigmoid(self.beta * margin), functional.logsigmoid(-self.beta * margin)
            losses = -(1.0 - self.label_smoothing) * right - self.label_smoothing * wrong
        rewards = {"chosen_reward": self.beta * chosen.detach(), "rejected_reward": self.beta * rejected.detach()}
        return pair_mean(losses, output), {
            "accuracy": pair_mean((margin > 0).to(losses.dtype), output),
            "margin": pair_mean(self.beta * margin.detach(), output),
            **{name: pair_mean(value, output) for name, value in rewards.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KtoLoss:
    """Kahneman-Tversky optimisation (Ethayarajh et al., 2402.01306): rows are good or bad by themselves.

    Reads `is_desirable` ((B,) bool), `ref_logprobs` (ragged) and `reference_point` ((B,) float): the estimate of
    KL(policy, reference), at least 0 and the same for the whole batch, that a row's log-ratio is compared with.
    Metrics: `accuracy`, the share of rows on their side of the reference point, `desirable_reward` and
    `undesirable_reward`, each a sum divided by all rows.
    """

    beta: float = 0.1
    """Weight of staying near the reference."""
    desirable_weight: float = 1.0
    """Weight of good rows."""
    undesirable_weight: float = 1.0
    """Weight of bad rows."""

    def __call__(self, output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the mean over rows."""
        is_good = rows.get("is_desirable").bool()
        ratio = row_log_ratio(output, rows)
        margin = self.beta * (ratio - rows.get("reference_point").to(ratio.dtype))
        margin = torch.where(is_good, margin, -margin)
        weight = torch.where(is_good, self.desirable_weight, self.undesirable_weight).to(ratio.dtype)
        reward = self.beta * ratio.detach()
        return row_mean(weight * (1.0 - margin.sigmoid()), output), {
            "accuracy": row_mean((margin > 0).to(ratio.dtype), output),
            "desirable_reward": row_mean(torch.where(is_good, reward, 0.0), output),
            "undesirable_reward": row_mean(torch.where(is_good, 0.0, reward), output),
        }


class DistillKind(StrEnum):
    """Direction of a distillation divergence."""

    FORWARD = "forward"
    """KL(teacher, student) over the teacher's likeliest tokens and the rest of the vocabulary as one (Hinton et al.,
    1503.02531)."""
    REVERSE = "reverse"
    """KL(student, teacher) on the completion tokens, which the student should have sampled (Gu et al., 2306.08543)."""
    MIXED = "mixed"
    """`forward_weight` of the first and the rest of the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillLoss:
    """Distillation, averaged over the tokens with `loss_mask` 1 of the whole batch.

    Forward reads `candidate_token_ids` and `teacher_candidate_logprobs` (ragged, K for each token); its rest of the
    vocabulary makes it 0 only where the student gives those tokens the teacher's probabilities. Reverse reads
    `teacher_logprobs` (ragged): half the squared log-ratio, whose gradient on sampled tokens is that of the divergence.
    Metrics: `forward_kl` and `reverse_kl`, those that are computed, and `teacher_gap`, the mean log-ratio of teacher
    and student on the completion, where reverse is.
    """

    kind: DistillKind = DistillKind.FORWARD
    """Direction of the divergence."""
    forward_weight: float = 0.5
    """Weight of the forward part, with `mixed`."""

    @property
    def is_token_local(self) -> bool:
        """See `rl_engine.base.LossFunction`: the other kinds read candidates."""
        return self.kind == DistillKind.REVERSE

    def __call__(self, output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the mean over tokens."""
        mask = token_values(rows, "loss_mask", output.logprobs)
        parts: list[Tensor] = []
        metrics: dict[str, Tensor] = {}
        if self.kind != DistillKind.REVERSE:
            teacher = token_values(rows, "teacher_candidate_logprobs", output.logprobs)
            forward = token_mean(coarse_kl(teacher, output.candidate_logprobs), mask, output)
            metrics["forward_kl"] = forward.detach()
            parts.append(forward if self.kind == DistillKind.FORWARD else self.forward_weight * forward)
        if self.kind != DistillKind.FORWARD:
            gap = token_values(rows, "teacher_logprobs", output.logprobs) - output.logprobs
            reverse = token_mean(0.5 * gap.square(), mask, output)
            metrics |= {"reverse_kl": reverse.detach(), "teacher_gap": token_mean(gap.detach(), mask, output)}
            parts.append(reverse if self.kind == DistillKind.REVERSE else (1.0 - self.forward_weight) * reverse)
        return torch.stack(parts).sum(), metrics


@token_local
@dataclass(frozen=True, slots=True)
class _CrossEntropy:
    """Negative sum of the targets' log-probs, times the column `weights`."""

    def __call__(self, output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum over this micro-batch's tokens."""
        weights = token_values(rows, "weights", output.logprobs)
        scored = output.logprobs if weights.ndim == 1 else output.candidate_logprobs
        return -(scored * weights).sum(), {}


@token_local
@dataclass(frozen=True, slots=True)
class _PolicySum:
    """Policy loss of rl-csrc summed over tokens: of the columns `logprobs` and `advantages`, times `weights` if any."""

    spec: LossSpec

    def __call__(self, output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum over this micro-batch's tokens."""
        old, advantages = (token_values(rows, name, output.logprobs) for name in ("logprobs", "advantages"))
        weights = token_values(rows, "weights", output.logprobs) if "weights" in rows.keys() else None  # noqa: SIM118 - a TensorDict iterates rows
        mask = torch.ones_like(old, dtype=torch.bool)
        found = policy_loss(output.logprobs, old, advantages, mask, output.cu_seqlens, self.spec, weights=weights)
        return found.loss, {}


_THRESHOLDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_TOKEN_LOSSES: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": _THRESHOLDS,
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
}
"""Losses that Tinker's clients name, with their settings' defaults."""


def token_loss(name: str, settings: Mapping[str, float]) -> LossFunction:
    """See `rl_engine.registry.create_loss`."""
    if name not in _TOKEN_LOSSES:
        raise ConfigError(f"There is no loss {name!r}; there are: {', '.join(_TOKEN_LOSSES)}.")
    known = _TOKEN_LOSSES[name]
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(f"The loss {name} has no setting {key!r}; it has: {', '.join(known) or 'none'}.")
        if not (isfinite(value) and value >= 0):
            raise ConfigError(f"{key} of the loss {name} is {value}; it is a finite number, 0 or more.")
    if name == "cross_entropy":
        return _CrossEntropy()
    chosen = {**known, **settings}
    low, high = chosen.get("clip_low_threshold", -inf), chosen.get("clip_high_threshold", inf)
    if low > 1.0 or high < 1.0:
        raise ConfigError(
            f"The loss {name} clips ratios to {low} and {high}; the lower is at most 1, the upper at least."
        )
    formula: Any = "ppo" if name == "importance_sampling" else name
    numbers: dict[str, Any] = {"clip_low": 1.0 - low, "clip_high": high - 1.0}
    if name == "dro":
        numbers = {"dro_beta": chosen["beta"]}
    return _PolicySum(LossSpec(loss=formula, aggregation="token-sum", **numbers))


def row_log_ratio(output: ModelOutput, rows: TensorDict) -> Tensor:
    """`[B]` log-ratio of policy and reference over each row's tokens with `loss_mask` 1."""
    mask = token_values(rows, "loss_mask", output.logprobs)
    return row_sum((output.logprobs - token_values(rows, "ref_logprobs", output.logprobs)) * mask, output)


def row_mean(values: Tensor, output: ModelOutput) -> Tensor:
    """This micro-batch's share of the mean of (B,) `values`; every row has a loss token."""
    return values.sum() / max(output.counts.sequences, 1.0)


def reward_loss(output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    """Bradley-Terry: -log sigmoid(chosen - rejected) of the rewards at each row's last token with `loss_mask` 1.

    Bradley and Terry (1952), as in 2203.02155. Metrics: `accuracy` and `margin`.
    """
    mask = token_values(rows, "loss_mask", output.values)
    chosen, rejected = pairs_of(row_sum(output.values * last_token(mask, output), output), rows)
    margin = chosen - rejected
    return pair_mean(-functional.logsigmoid(margin), output), {
        "accuracy": pair_mean((margin > 0).to(margin.dtype), output),
        "margin": pair_mean(margin.detach(), output),
    }


def process_reward_loss(output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    """Binary cross-entropy of the reward at every step's end with `step_labels` (ragged, 0 to 1, `[C]`).

    `loss_mask` is 1 where a step ends. Lightman et al., 2305.20050. Metrics: `accuracy` of the sign.
    """
    mask, labels = (token_values(rows, name, output.values) for name in ("loss_mask", "step_labels"))
    losses = functional.binary_cross_entropy_with_logits(output.values, labels, reduction="none")
    right = ((output.values.detach() > 0) == (labels > 0.5)).to(mask.dtype)
    return token_mean(losses, mask, output), {"accuracy": token_mean(right, mask, output)}


def token_mean(values: Tensor, mask: Tensor, output: ModelOutput) -> Tensor:
    """This micro-batch's share of the masked mean of (C,) `values`; 0 where nothing counts."""
    return (values * mask).sum() / max(output.counts.tokens, 1.0)


def token_values(rows: TensorDict, column: str, like: Tensor) -> Tensor:
    """A ragged column's (C,) values in the number format of `like`."""
    return rows.get(column).values().to(like.dtype)


def row_sum(values: Tensor, output: ModelOutput) -> Tensor:
    """Sum of (C,) `values` over each row, `[B]`."""
    lengths = output.cu_seqlens.diff()
    row_of = torch.arange(lengths.numel(), device=values.device)
    row_of = row_of.repeat_interleave(lengths, output_size=values.numel())  # a size that the device need not be asked
    return values.new_zeros(lengths.numel()).index_add(0, row_of, values)


def last_token(mask: Tensor, output: ModelOutput) -> Tensor:
    """(C,) 1 at each row's last masked token, 0 elsewhere."""
    lengths = output.cu_seqlens.diff()
    total = row_sum(mask, output).repeat_interleave(lengths, output_size=mask.numel())
    up_to = functional.pad(mask.cumsum(0), (1, 0))
    before = up_to[output.cu_seqlens[:-1]].repeat_interleave(lengths, output_size=mask.numel())
    return mask * (up_to[1:] - before == total)


def pairs_of(scores: Tensor, rows: TensorDict) -> tuple[Tensor, Tensor]:
    """(B,) row scores as those of the chosen and of the rejected rows, each `[P]`, in the order of their `pair_id`.

    Every pair has one of each: an engine refuses other batches. By sorting alone, which waits for no device.
    """
    order = torch.argsort(rows.get("is_chosen").to(torch.int8), descending=True, stable=True)
    order = order[torch.argsort(rows.get("pair_id")[order], stable=True)]
    return scores.index_select(0, order[0::2]), scores.index_select(0, order[1::2])


def pair_mean(values: Tensor, output: ModelOutput) -> Tensor:
    """This micro-batch's share of the mean of (P,) `values`; both rows of every pair have a loss token."""
    return values.sum() / max(output.counts.sequences / 2.0, 1.0)
