"""Policy losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_csrc._dispatch import kernel
from rl_csrc._library._schema import filled, float_type, number, op, split
from rl_csrc.cpu.memory import in_huge_pages
from rl_csrc.types import METRIC_NAMES, LossSpec

_FUSED = "Tensor? temperature, float scalar_temperature, float? softcap"
_POLICY = (
    "Tensor old_logprobs, Tensor advantages, Tensor loss_mask, Tensor cu_seqlens, str loss, str kl, str aggregation, "
    "float? clip_dual, float[] numbers, Tensor? denominator, float scalar_denominator, "
    "Tensor? ref_logprobs, Tensor? weights"
)
_SPEC_NUMBERS = ("clip_low", "clip_high", "ratio_max", "tau_pos", "tau_neg", "dro_beta", "kl_coef", "entropy_coef")


def policy_arguments(
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    spec: LossSpec,
    denominator: float | Tensor,
    ref_logprobs: Tensor | None,
    weights: Tensor | None,
) -> tuple[Any, ...]:
    """The arguments that the schemas of all policy losses share."""
    numbers = [float(getattr(spec, name)) for name in _SPEC_NUMBERS]
    names = (spec.loss, spec.kl, spec.aggregation, spec.clip_dual, numbers)
    return (old_logprobs, advantages, loss_mask, cu_seqlens, *names, *split(denominator), ref_logprobs, weights)


def _policy_tuple(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Back from the schema: old, advantages, mask, cu_seqlens, spec, denominator, ref, weights."""
    *tokens, loss, kl, aggregation, clip_dual, numbers, denominator, scalar, ref_logprobs, weights = arguments
    values = dict(zip(_SPEC_NUMBERS, numbers, strict=True))
    spec = LossSpec(loss=loss, kl=kl, aggregation=aggregation, clip_dual=clip_dual, **values)
    return (*tokens, spec, number(denominator, scalar), ref_logprobs, weights)


@op("policy_loss", f"(Tensor logprobs, {_POLICY}, Tensor? entropy) -> (Tensor, Tensor, Tensor, Tensor)")
def _policy_loss(logprobs: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *tokens, spec, denominator, ref_logprobs, weights = _policy_tuple(rest[:-1])
    run = kernel("policy_loss", logprobs)
    loss, metrics, grad, grad_entropy = run(logprobs, *tokens, spec, denominator, rest[-1], ref_logprobs, weights)
    return loss, metrics, grad, filled(grad_entropy, grad)


@_policy_loss.register_fake
def _(logprobs: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    num = logprobs.shape[0]
    num_entropy = num if rest[-1] is not None else 0
    metrics = logprobs.new_empty(len(METRIC_NAMES))
    return logprobs.new_empty(()), metrics, logprobs.new_empty(num), logprobs.new_empty(num_entropy)


def _policy_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, metrics, grad, grad_entropy = output
    ctx.mark_non_differentiable(metrics, grad, grad_entropy)
    ctx.save_for_backward(grad, grad_entropy)
    ctx.num_inputs = len(inputs)


def _policy_autograd(ctx: Any, grad_loss: Tensor, *_unused: Any) -> tuple[Any, ...]:
    grad, grad_entropy = ctx.saved_tensors
    second = grad_entropy * grad_loss if ctx.needs_input_grad[ctx.num_inputs - 1] else None
    return grad * grad_loss, *(None,) * (ctx.num_inputs - 2), second


_policy_loss.register_autograd(_policy_autograd, setup_context=_policy_context)


@op(
    "policy_loss_from_logits",
    f"(Tensor logits, Tensor labels, {_POLICY}, {_FUSED}, Tensor? row_index, bool entropy)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _policy_loss_from_logits(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    temperature, scalar, softcap, row_index, entropy = rest[-5:]
    options = (number(temperature, scalar), softcap, row_index, entropy)
    out = in_huge_pages(torch.empty_like(logits, memory_format=torch.contiguous_format))
    run = kernel("policy_loss_from_logits", logits)
    loss, metrics, scored, entropies = run(logits, labels, *_policy_tuple(rest[:-5]), *options, out)
    return loss, metrics, scored, filled(entropies, scored), out


@_policy_loss_from_logits.register_fake
def _(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    num, dtype = labels.shape[0], float_type(logits)
    sizes = ((), (len(METRIC_NAMES),), (num,), (num if rest[-1] else 0,))
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return *(logits.new_empty(s, dtype=dtype) for s in sizes), grad


def _from_logits_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(output[-1])
    ctx.num_inputs = len(inputs)


def _from_logits_autograd(ctx: Any, grad_loss: Tensor, *_unused: Any) -> tuple[Any, ...]:
    (grad,) = ctx.saved_tensors
    return grad * grad_loss.to(grad.dtype), *(None,) * (ctx.num_inputs - 1)


_policy_loss_from_logits.register_autograd(_from_logits_autograd, setup_context=_from_logits_context)


@op(
    "policy_loss_from_hidden",
    f"(Tensor hidden, Tensor weight, Tensor labels, {_POLICY}, {_FUSED}, "
    "bool entropy, int? chunk_rows, bool[] need) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _policy_loss_from_hidden(hidden: Tensor, weight: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    temperature, scalar, softcap, entropy, chunk_rows, need = rest[-6:]
    options = (number(temperature, scalar), softcap, entropy, chunk_rows, tuple(need))
    run = kernel("policy_loss_from_hidden", hidden)
    loss, metrics, scored, entropies, d_hidden, d_weight = run(
        hidden, weight, labels, *_policy_tuple(rest[:-6]), *options
    )
    return loss, metrics, scored, filled(entropies, scored), filled(d_hidden, hidden), filled(d_weight, hidden)


@_policy_loss_from_hidden.register_fake
def _(hidden: Tensor, weight: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    num, dtype, need = labels.shape[0], float_type(hidden), rest[-1]
    sizes = ((), (len(METRIC_NAMES),), (num,), (num if rest[-3] else 0,))
    grads = (hidden.new_empty(x.shape if n else (0,)) for x, n in zip((hidden, weight), need, strict=True))
    return *(hidden.new_empty(s, dtype=dtype) for s in sizes), *grads


def _from_hidden_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[-2:])
    ctx.num_inputs = len(inputs)


def _from_hidden_autograd(ctx: Any, grad_loss: Tensor, *_unused: Any) -> tuple[Any, ...]:
    grads = (g * grad_loss.to(g.dtype) if g.numel() else None for g in ctx.saved_tensors)
    return *grads, *(None,) * (ctx.num_inputs - 2)


_policy_loss_from_hidden.register_autograd(_from_hidden_autograd, setup_context=_from_hidden_context)
