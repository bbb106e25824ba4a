"""The arguments of the policy losses: checked, and converted to what the implementations take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from rl_csrc import _library
from rl_csrc._arguments import check_one_of, check_same_length, floats, integers, optional_floats, per_token
from rl_csrc.errors import ArgumentError
from rl_csrc.types import AGGREGATIONS, KLS, LOSSES, TOKEN_LOCAL_LOSSES, Aggregation, Kl, Loss, LossSpec

Counts = tuple["float | Tensor | None", "float | Tensor | None", "float | None"]


class PolicyOptions(TypedDict, total=False):
    """The options that `policy_loss` shares with its fused forms. See there for each."""

    loss: Loss
    clip_low: float
    clip_high: float
    clip_dual: float | None
    ratio_max: float
    tau_pos: float
    tau_neg: float
    dro_beta: float
    kl: Kl
    kl_coef: float
    ref_logprobs: Tensor | None
    entropy_coef: float
    weights: Tensor | None
    aggregation: Aggregation
    num_tokens: float | Tensor | None
    num_sequences: float | Tensor | None
    norm_constant: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """What a policy loss knows of its tokens besides their log-probs, checked and converted."""

    old_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor
    denominator: float | Tensor
    """A number, `[]`, or `[B]`: all that the tokens of each sequence are divided by."""
    ref_logprobs: Tensor | None
    weights: Tensor | None
    num: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        like: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
        cu_seqlens: Tensor,
        spec: LossSpec,
        counts: Counts,
        ref_logprobs: Tensor | None,
        weights: Tensor | None,
        sequence_counts: Tensor | None = None,
    ) -> PolicyTokens:
        num = old_logprobs.shape[0]
        named = {"advantages": advantages, "loss_mask": loss_mask, "ref_logprobs": ref_logprobs, "weights": weights}
        for name, x in {"old_logprobs": old_logprobs, **named}.items():
            check_same_length(name, x, num)
        if spec.kl != "none" and ref_logprobs is None:
            raise ArgumentError(f"kl is {spec.kl!r} and there are no ref_logprobs; give them, or kl='none'.")
        mask = loss_mask.to(torch.bool).contiguous()
        offsets = integers(cu_seqlens)
        denominator = _denominator(spec.aggregation, mask, offsets, *counts)
        if sequence_counts is not None and spec.aggregation == "seq-mean-token-mean":
            check_same_length("sequence_counts", sequence_counts, offsets.shape[0] - 1)
            denominator = floats(sequence_counts, like).clamp(min=1) * denominator
        if isinstance(denominator, Tensor):
            denominator = floats(denominator, like)
        return cls(
            old_logprobs=floats(old_logprobs, like),
            advantages=floats(advantages, like),
            loss_mask=mask,
            cu_seqlens=offsets,
            denominator=denominator,
            ref_logprobs=optional_floats(ref_logprobs, like),
            weights=optional_floats(weights, like),
            num=num,
            dtype=torch.float64 if like.dtype == torch.float64 else torch.float32,
        )

    def head(self, spec: LossSpec) -> tuple[Tensor, Tensor, Tensor, Tensor, LossSpec, float | Tensor]:
        """The arguments from old_logprobs to denominator, in the order of the implementations."""
        return (self.old_logprobs, self.advantages, self.loss_mask, self.cu_seqlens, spec, self.denominator)

    def for_library(self, spec: LossSpec) -> tuple[Any, ...]:
        """All arguments, in the order of the schemas."""
        return _library.policy_arguments(*self.head(spec), self.ref_logprobs, self.weights)


def fused_arguments(
    like: Tensor,
    labels: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    temperature: float | Tensor,
    options: PolicyOptions,
) -> tuple[LossSpec, PolicyTokens, Tensor, float | Tensor]:
    given = dict(options)
    counts = (given.pop("num_tokens", None), given.pop("num_sequences", None), given.pop("norm_constant", None))
    extra = (given.pop("ref_logprobs", None), given.pop("weights", None))
    spec = checked_spec(**given)
    check_one_of("loss", spec.loss, TOKEN_LOCAL_LOSSES)
    tokens = PolicyTokens.of(like, old_logprobs, advantages, loss_mask, cu_seqlens, spec, counts, *extra)  # pyright: ignore[reportArgumentType]
    check_same_length("labels", labels, tokens.num)
    labels = torch.where(tokens.loss_mask, integers(labels), -100)
    return spec, tokens, labels, per_token(temperature, tokens.num, "temperature")


def checked_spec(**options: Any) -> LossSpec:
    """Return the options of a loss, or raise ArgumentError."""
    spec = LossSpec(**options)
    check_one_of("loss", spec.loss, LOSSES)
    check_one_of("kl", spec.kl, KLS)
    check_one_of("aggregation", spec.aggregation, AGGREGATIONS)
    if spec.clip_low < 0 or spec.clip_high < 0:
        raise ArgumentError(
            f"clip_low is {spec.clip_low} and clip_high {spec.clip_high}; they are distances, 0 or more."
        )
    if spec.clip_dual is not None and spec.clip_dual <= 1:
        raise ArgumentError(
            f"clip_dual is {spec.clip_dual}; wanted more than 1 (3 is usual), or None to switch it off."
        )
    return spec


def _denominator(
    aggregation: Aggregation,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    num_tokens: float | Tensor | None,
    num_sequences: float | Tensor | None,
    norm_constant: float | None,
) -> float | Tensor:
    if aggregation == "token-sum":
        return 1.0
    if aggregation == "token-mean":
        return loss_mask.bool().sum().clamp(min=1) if num_tokens is None else num_tokens
    if num_sequences is None:
        running = loss_mask.new_zeros(loss_mask.shape[0] + 1, dtype=cu_seqlens.dtype)
        running[1:] = loss_mask.bool().cumsum(0)
        num_sequences = (running[cu_seqlens.long()].diff() > 0).sum().clamp(min=1)
    if aggregation != "seq-mean-token-sum-norm":
        return num_sequences
    if norm_constant is None:
        raise ArgumentError(
            "seq-mean-token-sum-norm divides by a constant; give norm_constant (the longest completion)."
        )
    return num_sequences * norm_constant
