"""Policy-loss op on packed tokens, from their log-probs. Legend: `T` tokens (packed), `B` sequences, `M` metrics."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_csrc.errors import ArgumentError
from rl_csrc.ops.operator import (
    Operator,
    booleans,
    check_one_of,
    check_same_length,
    float_type,
    floats,
    integers,
    kernel,
    optional_floats,
    split,
)
from rl_csrc.types import AGGREGATIONS, KLS, LOSSES, METRIC_NAMES, LossSpec, PolicyLoss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_csrc.types import Aggregation


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    spec: LossSpec | None = None,
    *,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    weights: Tensor | None = None,
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    norm_constant: float | None = None,
    sequence_counts: Tensor | None = None,
    **options: Any,
) -> PolicyLoss:
    """Loss, gradient and metrics of a policy update on packed tokens, in one pass.

    Differentiable in `logprobs` and `entropy`. The sum of per-token losses over a count that the caller supplies, so
    that micro-batches and ranks add up to the loss of the global batch.

    Args:
        logprobs: `[T]`, the current policy's.
        old_logprobs: `[T]`, the policy's before the update.
        advantages: `[T]`.
        loss_mask: `[T]` bool or 0/1; values at masked-out positions are never read, NaN included.
        cu_seqlens: `[B + 1]` int64 or int32, where each sequence starts; the last entry is T.
        spec: Formula, clip bounds, KL, entropy bonus and aggregation; None: `LossSpec()`, which is PPO's.
        ref_logprobs: `[T]`, the reference policy's; needed with `spec.kl`.
        entropy: `[T]`, for the bonus and its metric.
        weights: `[T]`, rollout-correction weights of the policy term.
        num_tokens: masked tokens of the *global* batch (number or 0-d tensor); None: those of this call.
        num_sequences: sequences of the *global* batch that have a masked token; None: those of this call.
        norm_constant: what seq-mean-token-sum-norm divides by.
        sequence_counts: `[B]`, number of tokens that seq-mean-token-mean divides each sequence by; None: those in
            `loss_mask`. For a mask from which rejected tokens were removed while the mean is over all tokens.
        options: Deprecated: fields of the spec, which 0.1 took one by one.

    Raises:
        ArgumentError: a shape or option that the op does not take.
    """
    spec = spec or LossSpec()
    if options:
        warnings.warn("options of policy_loss are given as LossSpec(...)", DeprecationWarning, stacklevel=2)
        options["clip_dual"] = options.get("clip_dual") or math.inf
        spec = replace(spec, **options)
    _check_spec(spec)
    kl, aggregation = spec.kl, spec.aggregation
    num, like = old_logprobs.shape[0], logprobs
    named = {"advantages": advantages, "loss_mask": loss_mask, "ref_logprobs": ref_logprobs, "weights": weights}
    for name, x in {"old_logprobs": old_logprobs, **named, "entropy": entropy}.items():
        check_same_length(name, x, num)
    if kl != "none" and ref_logprobs is None:
        raise ArgumentError(f"kl is {kl!r} and there are no ref_logprobs; give them, or kl='none'.")
    mask, offsets = booleans(loss_mask), integers(cu_seqlens)
    denominator = _denominator(aggregation, mask, offsets, num_tokens, num_sequences, norm_constant)
    if sequence_counts is not None and aggregation == "seq-mean-token-mean":
        check_same_length("sequence_counts", sequence_counts, offsets.shape[0] - 1)
        denominator = floats(sequence_counts, like).clamp(min=1) * denominator
    if isinstance(denominator, Tensor):
        denominator = floats(denominator, like)
    arguments = (
        floats(old_logprobs, like),
        floats(advantages, like),
        mask,
        offsets,
        spec.numbers() if torch.compiler.is_compiling() else spec,
        *split(denominator),
        optional_floats(ref_logprobs, like),
        optional_floats(weights, like),
    )
    if torch.compiler.is_compiling():
        dtype = float_type(logprobs)
        entropy = None if entropy is None else entropy.to(dtype).contiguous()
        return PolicyLoss(*_POLICY(logprobs.to(dtype).contiguous(), *arguments, entropy)[:2])
    return PolicyLoss(*_POLICY(logprobs, *arguments, entropy)[:2])


def _check_spec(spec: LossSpec) -> None:
    check_one_of("loss", spec.loss, LOSSES)
    check_one_of("kl", spec.kl, KLS)
    check_one_of("aggregation", spec.aggregation, AGGREGATIONS)
    if spec.clip_low < 0 or spec.clip_high < 0:
        raise ArgumentError(
            f"clip_low is {spec.clip_low} and clip_high {spec.clip_high}; they are distances, 0 or more."
        )
    if spec.k3_max <= 0:
        raise ArgumentError(f"k3_max is {spec.k3_max}; wanted more than 0 (10 is usual), or infinity to switch it off.")
    if spec.clip_dual <= 1:
        raise ArgumentError(
            f"clip_dual is {spec.clip_dual}; wanted more than 1 (3 is usual), or infinity to switch it off."
        )


def _denominator(
    aggregation: Aggregation,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    num_tokens: float | Tensor | None,
    num_sequences: float | Tensor | None,
    norm_constant: float | None,
) -> float | Tensor:
    """Denominator of the aggregation; counted from this call where the caller gave no count."""
    if aggregation == "token-sum":
        return 1.0
    if aggregation == "token-mean":
        return loss_mask.sum().clamp(min=1) if num_tokens is None else num_tokens
    if num_sequences is None:
        running = loss_mask.new_zeros(loss_mask.shape[0] + 1, dtype=cu_seqlens.dtype)
        running[1:] = loss_mask.cumsum(0)
        num_sequences = (running[cu_seqlens.long()].diff() > 0).sum().clamp(min=1)
    if aggregation != "seq-mean-token-sum-norm":
        return num_sequences
    if norm_constant is None:
        raise ArgumentError(
            "seq-mean-token-sum-norm divides by a constant; give norm_constant (the longest completion)."
        )
    return num_sequences * norm_constant


def _policy(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    spec: LossSpec | Sequence[float],
    denominator: Tensor | None,
    scalar_denominator: float,
    ref_logprobs: Tensor | None,
    weights: Tensor | None,
    entropy: Tensor | None,
) -> tuple[Tensor | None, ...]:
    first, second = floats(logprobs), optional_floats(entropy, logprobs)
    tokens = (old_logprobs, advantages, loss_mask, cu_seqlens, LossSpec.of(spec))
    run = kernel("policy_loss", first)
    count = scalar_denominator if denominator is None else denominator
    return run(first, *tokens, count, second, ref_logprobs, weights)


def _policy_fake(logprobs: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    num, num_entropy = logprobs.shape[0], 0 if rest[-1] is None else logprobs.shape[0]
    metrics = logprobs.new_empty(len(METRIC_NAMES))
    return logprobs.new_empty(()), metrics, logprobs.new_empty(num), logprobs.new_empty(num_entropy)


def _policy_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*output[2:])
    ctx.dtypes = (inputs[0].dtype, None if inputs[-1] is None else inputs[-1].dtype)


def _policy_backward(
    ctx: Any, needs: Sequence[bool], grad_loss: Tensor | None, *_unused: Any
) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return None, None
    pairs = zip(ctx.saved_tensors, needs, ctx.dtypes, strict=True)
    return tuple((g * grad_loss).to(dtype) if need else None for g, need, dtype in pairs)


_POLICY = Operator(
    "policy_loss",
    "(Tensor logprobs, Tensor old_logprobs, Tensor advantages, Tensor loss_mask, Tensor cu_seqlens, float[] spec, "
    "Tensor? denominator, float scalar_denominator, Tensor? ref_logprobs, Tensor? weights, Tensor? entropy)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _policy,
    _policy_fake,
    save=_policy_save,
    backward=_policy_backward,
    differentiable=(0, 10),
    num_outputs=2,
)
