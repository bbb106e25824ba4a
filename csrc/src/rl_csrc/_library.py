"""The ops as torch.library sees them: schemas, fake implementations and autograd, for torch.compile and export.

Optional results are empty tensors here, because a schema cannot return None. The eager path does not come through here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.library import custom_op

from rl_csrc._dispatch import copier, kernel
from rl_csrc._types import METRIC_NAMES, NUM_STATS, LogProbs, LossSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SCORING = "Tensor? temperature, float scalar_temperature, float? softcap, int? ignore_index, Tensor? row_index"
_HEAD = "Tensor? temperature, float scalar_temperature, float? softcap, int? ignore_index"
_FUSED = "Tensor? temperature, float scalar_temperature, float? softcap"
_HOW = "int? chunk_rows, bool batch_invariant"
_POLICY = (
    "Tensor old_logprobs, Tensor advantages, Tensor loss_mask, Tensor cu_seqlens, str loss, str kl, str aggregation, "
    "float? clip_dual, float[] numbers, Tensor? denominator, float scalar_denominator, "
    "Tensor? ref_logprobs, Tensor? weights"
)
_SPEC_NUMBERS = ("clip_low", "clip_high", "ratio_max", "tau_pos", "tau_neg", "dro_beta", "kl_coef", "entropy_coef")


def _op(name: str, schema: str, mutates: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    return cast("Callable[[Any], Any]", custom_op(f"rl_csrc::{name}", mutates_args=mutates, schema=schema))


def _filled(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def _number(tensor: Tensor | None, scalar: float) -> float | Tensor:
    return scalar if tensor is None else tensor


def _float_type(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def split(value: float | Tensor) -> tuple[Tensor | None, float]:
    """A number or tensor as the two arguments a schema has for it."""
    return (value, 1.0) if isinstance(value, Tensor) else (None, float(value))


# --- log-probs of logits -------------------------------------------------------------------------------------------


@_op(
    "logprobs",
    f"(Tensor logits, Tensor labels, {_SCORING}, bool entropy, bool sum_pi_squared)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _logprobs(
    logits: Tensor,
    labels: Tensor,
    temperature: Tensor | None,
    scalar_temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    entropy: bool,
    sum_pi_squared: bool,
) -> tuple[Tensor, ...]:
    options = (_number(temperature, scalar_temperature), softcap, ignore_index, row_index)
    scored, entropies, squares, lse = kernel("logprobs_forward", logits)(
        logits, labels, *options, entropy, sum_pi_squared
    )
    return scored, _filled(entropies, scored), _filled(squares, scored), lse


@_logprobs.register_fake
def _(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    num, dtype = labels.shape[0], _float_type(logits)
    entropy, squares = rest[-2:]
    sizes = (num, num if entropy else 0, num if squares else 0, num)
    return tuple(logits.new_empty(n, dtype=dtype) for n in sizes)


@_op(
    "logprobs_backward",
    "(Tensor logits, Tensor labels, Tensor logprobs, Tensor lse, Tensor grad_logprobs, Tensor? entropy, "
    f"Tensor? grad_entropy, {_SCORING}) -> Tensor",
)
def _logprobs_backward(
    logits: Tensor,
    labels: Tensor,
    logprobs: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: Tensor | None,
    scalar_temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
) -> Tensor:
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    grads = (grad_logprobs.contiguous(), entropy, None if grad_entropy is None else grad_entropy.contiguous())
    options = (_number(temperature, scalar_temperature), softcap, ignore_index, row_index)
    kernel("logprobs_backward", logits)(logits, labels, logprobs, lse, *grads, *options, 0, out)
    return out


@_logprobs_backward.register_fake
def _(logits: Tensor, *_rest: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _logprobs_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, labels, temperature, scalar, softcap, ignore_index, row_index, _, _ = inputs
    scored, entropies, squares, lse = output
    ctx.mark_non_differentiable(squares, lse)
    ctx.save_for_backward(logits, labels, temperature, row_index, scored, entropies, lse)
    ctx.options = (scalar, softcap, ignore_index)


def _logprobs_autograd(ctx: Any, grad: Tensor, grad_entropy: Tensor, *_unused: Any) -> tuple[Any, ...]:
    logits, labels, temperature, row_index, scored, entropies, lse = ctx.saved_tensors
    has_entropy = entropies.numel() > 0
    out = torch.ops.rl_csrc.logprobs_backward(
        logits,
        labels,
        scored,
        lse,
        grad,
        entropies if has_entropy else None,
        grad_entropy if has_entropy else None,
        temperature,
        *ctx.options,
        row_index,
    )
    return out, *(None,) * 8


_logprobs.register_autograd(_logprobs_autograd, setup_context=_logprobs_context)


def logprobs(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    entropy: bool,
    sum_pi_squared: bool,
) -> LogProbs:
    """Score labels through the dispatcher."""
    options = (*split(temperature), softcap, ignore_index, row_index, entropy, sum_pi_squared)
    found = torch.ops.rl_csrc.logprobs(logits, labels, *options)
    return LogProbs(found[0], found[1] if entropy else None, found[2] if sum_pi_squared else None)


@_op("logprob_stats", f"(Tensor logits, Tensor labels, {_SCORING}, int vocab_start) -> Tensor")
def _logprob_stats(
    logits: Tensor,
    labels: Tensor,
    temperature: Tensor | None,
    scalar_temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    vocab_start: int,
) -> Tensor:
    options = (_number(temperature, scalar_temperature), softcap, ignore_index, row_index, vocab_start)
    return kernel("logprob_stats", logits)(logits, labels, *options)


@_logprob_stats.register_fake
def _(logits: Tensor, labels: Tensor, *_rest: Any) -> Tensor:
    return logits.new_empty((labels.shape[0], NUM_STATS), dtype=_float_type(logits))


def logprob_stats(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    vocab_start: int,
) -> Tensor:
    """Statistics of a vocabulary shard through the dispatcher."""
    options = (*split(temperature), softcap, ignore_index, row_index, vocab_start)
    return torch.ops.rl_csrc.logprob_stats(logits, labels, *options)


@_op("stats_merge", "(Tensor stats) -> (Tensor, Tensor, Tensor, Tensor)")
def _stats_merge(stats: Tensor) -> tuple[Tensor, ...]:
    return kernel("stats_merge", stats)(stats)


@_stats_merge.register_fake
def _(stats: Tensor) -> tuple[Tensor, ...]:
    return tuple(stats.new_empty(stats.shape[1]) for _ in range(4))


# --- the LM head ----------------------------------------------------------------------------------------------------


@_op(
    "linear_logprobs",
    f"(Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, {_HEAD}, bool entropy, {_HOW})"
    " -> (Tensor, Tensor, Tensor)",
)
def _linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    scalar_temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    entropy: bool,
    chunk_rows: int | None,
    batch_invariant: bool,
) -> tuple[Tensor, ...]:
    options = (_number(temperature, scalar_temperature), softcap, ignore_index, entropy, chunk_rows, batch_invariant)
    scored, entropies, lse = kernel("linear_logprobs_forward", hidden)(hidden, weight, labels, bias, *options)
    return scored, _filled(entropies, scored), lse


@_linear_logprobs.register_fake
def _(hidden: Tensor, weight: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    num, entropy = labels.shape[0], rest[-3]
    return tuple(hidden.new_empty(n, dtype=_float_type(hidden)) for n in (num, num if entropy else 0, num))


@_op(
    "linear_logprobs_backward",
    "(Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, Tensor logprobs, Tensor lse, Tensor grad_logprobs, "
    f"Tensor? entropy, Tensor? grad_entropy, {_HEAD}, {_HOW}, bool[] need) -> (Tensor, Tensor, Tensor)",
)
def _linear_logprobs_backward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    logprobs: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: Tensor | None,
    scalar_temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    chunk_rows: int | None,
    batch_invariant: bool,
    need: Sequence[bool],
) -> tuple[Tensor, ...]:
    grads = (grad_logprobs.contiguous(), entropy, None if grad_entropy is None else grad_entropy.contiguous())
    options = (_number(temperature, scalar_temperature), softcap, ignore_index, chunk_rows, batch_invariant)
    run = kernel("linear_logprobs_backward", hidden)
    found = run(hidden, weight, labels, bias, logprobs, lse, *grads, *options, tuple(need))
    return tuple(_filled(x, hidden) for x in found)


@_linear_logprobs_backward.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    need = rest[-1]
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    return tuple(hidden.new_empty(shape if n else (0,)) for shape, n in zip(shapes, need, strict=True))


def _linear_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, labels, bias, temperature, scalar, softcap, ignore_index, _, chunk_rows, invariant = inputs
    scored, entropies, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(hidden, weight, labels, bias, temperature, scored, entropies, lse)
    ctx.options = (scalar, softcap, ignore_index, chunk_rows, invariant)


def _linear_autograd(ctx: Any, grad: Tensor, grad_entropy: Tensor, *_unused: Any) -> tuple[Any, ...]:
    hidden, weight, labels, bias, temperature, scored, entropies, lse = ctx.saved_tensors
    has_entropy = entropies.numel() > 0
    need = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[3]]
    found = torch.ops.rl_csrc.linear_logprobs_backward(
        hidden,
        weight,
        labels,
        bias,
        scored,
        lse,
        grad,
        entropies if has_entropy else None,
        grad_entropy if has_entropy else None,
        temperature,
        *ctx.options,
        need,
    )
    d_hidden, d_weight, d_bias = (x if n else None for x, n in zip(found, need, strict=True))
    return d_hidden, d_weight, None, d_bias, *(None,) * 7


_linear_logprobs.register_autograd(_linear_autograd, setup_context=_linear_context)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    entropy: bool,
    chunk_rows: int | None,
    batch_invariant: bool,
) -> LogProbs:
    """Score labels under an LM head through the dispatcher."""
    options = (*split(temperature), softcap, ignore_index, entropy, chunk_rows, batch_invariant)
    found = torch.ops.rl_csrc.linear_logprobs(hidden, weight, labels, bias, *options)
    return LogProbs(found[0], found[1] if entropy else None, None)


# --- policy losses --------------------------------------------------------------------------------------------------


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
    return (*tokens, spec, _number(denominator, scalar), ref_logprobs, weights)


@_op("policy_loss", f"(Tensor logprobs, {_POLICY}, Tensor? entropy) -> (Tensor, Tensor, Tensor, Tensor)")
def _policy_loss(logprobs: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *tokens, spec, denominator, ref_logprobs, weights = _policy_tuple(rest[:-1])
    run = kernel("policy_loss", logprobs)
    loss, metrics, grad, grad_entropy = run(logprobs, *tokens, spec, denominator, rest[-1], ref_logprobs, weights)
    return loss, metrics, grad, _filled(grad_entropy, grad)


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


@_op(
    "policy_loss_from_logits",
    f"(Tensor logits, Tensor labels, {_POLICY}, {_FUSED}, Tensor? row_index, bool entropy)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _policy_loss_from_logits(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    temperature, scalar, softcap, row_index, entropy = rest[-5:]
    options = (_number(temperature, scalar), softcap, row_index, entropy)
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    run = kernel("policy_loss_from_logits", logits)
    loss, metrics, scored, entropies = run(logits, labels, *_policy_tuple(rest[:-5]), *options, out)
    return loss, metrics, scored, _filled(entropies, scored), out


@_policy_loss_from_logits.register_fake
def _(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    num, dtype = labels.shape[0], _float_type(logits)
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


@_op(
    "policy_loss_from_hidden",
    f"(Tensor hidden, Tensor weight, Tensor labels, {_POLICY}, {_FUSED}, "
    "bool entropy, int? chunk_rows, bool[] need) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _policy_loss_from_hidden(hidden: Tensor, weight: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    temperature, scalar, softcap, entropy, chunk_rows, need = rest[-6:]
    options = (_number(temperature, scalar), softcap, entropy, chunk_rows, tuple(need))
    run = kernel("policy_loss_from_hidden", hidden)
    loss, metrics, scored, entropies, d_hidden, d_weight = run(
        hidden, weight, labels, *_policy_tuple(rest[:-6]), *options
    )
    return loss, metrics, scored, _filled(entropies, scored), _filled(d_hidden, hidden), _filled(d_weight, hidden)


@_policy_loss_from_hidden.register_fake
def _(hidden: Tensor, weight: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    num, dtype, need = labels.shape[0], _float_type(hidden), rest[-1]
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


# --- recurrences, statistics, copies: no gradient -------------------------------------------------------------------


@_op(
    "scan_reverse",
    "(Tensor rewards, Tensor? values, Tensor cu_seqlens, Tensor? loss_mask, str kind, float gamma, Tensor? lam, "
    "float scalar_lam, Tensor? bootstrap_values, str mask_mode, Tensor? rho, float rho_clip, "
    "float c_clip) -> (Tensor, Tensor)",
)
def _scan_reverse(
    rewards: Tensor,
    values: Tensor | None,
    cu_seqlens: Tensor,
    loss_mask: Tensor | None,
    kind: str,
    gamma: float,
    lam: Tensor | None,
    scalar_lam: float,
    bootstrap_values: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    run = kernel("scan_reverse", rewards)
    return run(rewards, values, cu_seqlens, loss_mask, kind, gamma, _number(lam, scalar_lam), bootstrap_values, *rest)


@_scan_reverse.register_fake
def _(rewards: Tensor, *_rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(rewards), torch.empty_like(rewards)


@_op("group_norm", "(Tensor rewards, Tensor? group_ids, Tensor? cu_groups, str mode, float eps) -> Tensor")
def _group_norm(rewards: Tensor, *rest: Any) -> Tensor:
    return kernel("group_norm", rewards)(rewards, *rest)


@_group_norm.register_fake
def _(rewards: Tensor, *_rest: Any) -> Tensor:
    return torch.empty_like(rewards)


@_op("masked_moments", "(Tensor x, Tensor? mask) -> (Tensor, Tensor, Tensor)")
def _masked_moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(m.clone() for m in kernel("masked_moments", x)(x, mask))


@_masked_moments.register_fake
def _(x: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(x.new_empty((), dtype=torch.float64) for _ in range(3))


@_op("whiten", "(Tensor x, Tensor? mask, bool shift_mean, float eps, Tensor[] moments) -> Tensor")
def _whiten(x: Tensor, mask: Tensor | None, shift_mean: bool, eps: float, moments: Sequence[Tensor]) -> Tensor:
    return kernel("whiten", x)(x, mask, shift_mean, eps, tuple(moments) or None)


@_whiten.register_fake
def _(x: Tensor, *_rest: Any) -> Tensor:
    return torch.empty_like(x)


@_op("pack", "(Tensor padded, Tensor lengths, Tensor? starts, SymInt? total) -> (Tensor, Tensor)")
def _pack(padded: Tensor, lengths: Tensor, starts: Tensor | None, total: int | None) -> tuple[Tensor, ...]:
    return copier("pack", padded)(padded, lengths, starts, total)


@_pack.register_fake
def _(padded: Tensor, lengths: Tensor, starts: Tensor | None, total: int | None) -> tuple[Tensor, ...]:
    total = torch.library.get_ctx().new_dynamic_size() if total is None else total
    return padded.new_empty((total, *padded.shape[2:])), lengths.new_empty(lengths.shape[0] + 1)


@_op("unpack", "(Tensor values, Tensor cu_seqlens, SymInt length, float padding_value, bool left) -> Tensor")
def _unpack(values: Tensor, cu_seqlens: Tensor, length: int, padding_value: float, left: bool) -> Tensor:
    return copier("unpack", values)(values, cu_seqlens, length, padding_value, left)


@_unpack.register_fake
def _(values: Tensor, cu_seqlens: Tensor, length: int, *_rest: Any) -> Tensor:
    return values.new_empty((cu_seqlens.shape[0] - 1, length, *values.shape[1:]))


@_op("bucket_copy", "(Tensor[] sources, Tensor(a!)[] destinations) -> ()", ("destinations",))
def _bucket_copy(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    if sources:
        copier("bucket_copy", sources[0])(sources, destinations)


@_op("roll_labels", "(Tensor token_ids, Tensor cu_seqlens, Tensor? loss_mask, int ignore_index) -> Tensor")
def _roll_labels(token_ids: Tensor, *rest: Any) -> Tensor:
    return kernel("roll_labels", token_ids)(token_ids, *rest)


@_roll_labels.register_fake
def _(token_ids: Tensor, *_rest: Any) -> Tensor:
    return torch.empty_like(token_ids)


@_op("cp_slice", "(Tensor x, Tensor cu_seqlens, int cp_rank, int cp_size) -> (Tensor, Tensor)")
def _cp_slice(x: Tensor, cu_seqlens: Tensor, cp_rank: int, cp_size: int) -> tuple[Tensor, ...]:
    return copier("cp_slice", x)(x, cu_seqlens, cp_rank, cp_size)


@_cp_slice.register_fake
def _(x: Tensor, cu_seqlens: Tensor, cp_rank: int, cp_size: int) -> tuple[Tensor, ...]:
    return x.new_empty((x.shape[0] // cp_size, *x.shape[1:])), torch.empty_like(cu_seqlens)
