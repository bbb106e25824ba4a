"""Log-probs of logits, of vocabulary shards and of an LM head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_csrc._dispatch import kernel
from rl_csrc._library._schema import filled, float_type, number, op, split
from rl_csrc.cpu.memory import in_huge_pages
from rl_csrc.types import NUM_STATS, LogProbs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_HEAD = "Tensor? temperature, float scalar_temperature, float? softcap, int? ignore_index"
_SCORING = f"{_HEAD}, Tensor? row_index"
_HOW = "int? chunk_rows, bool batch_invariant"


@op(
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
    options = (number(temperature, scalar_temperature), softcap, ignore_index, row_index)
    scored, entropies, squares, lse = kernel("logprobs_forward", logits)(
        logits, labels, *options, entropy, sum_pi_squared
    )
    return scored, filled(entropies, scored), filled(squares, scored), lse


@_logprobs.register_fake
def _(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    num, dtype = labels.shape[0], float_type(logits)
    entropy, squares = rest[-2:]
    sizes = (num, num if entropy else 0, num if squares else 0, num)
    return tuple(logits.new_empty(n, dtype=dtype) for n in sizes)


@op(
    "logprobs_backward",
    "(Tensor logits, Tensor labels, Tensor logprobs, Tensor lse, Tensor grad_logprobs, Tensor? entropy, "
    f"Tensor? grad_entropy, {_SCORING}, int vocab_start) -> Tensor",
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
    vocab_start: int,
) -> Tensor:
    out = in_huge_pages(torch.empty_like(logits, memory_format=torch.contiguous_format))
    grads = (grad_logprobs.contiguous(), entropy, None if grad_entropy is None else grad_entropy.contiguous())
    options = (number(temperature, scalar_temperature), softcap, ignore_index, row_index)
    kernel("logprobs_backward", logits)(logits, labels, logprobs, lse, *grads, *options, vocab_start, out)
    return out


@_logprobs_backward.register_fake
def _(logits: Tensor, *_rest: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _logprobs_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, labels, temperature, scalar, softcap, ignore_index, row_index, _, _ = inputs
    _keep(ctx, (logits, labels, temperature, row_index), output, (scalar, softcap, ignore_index), 0)


def _keep(ctx: Any, given: tuple[Any, ...], output: tuple[Tensor, ...], options: tuple[Any, ...], start: int) -> None:
    scored, entropies, squares, lse = output
    ctx.mark_non_differentiable(squares, lse)
    ctx.save_for_backward(*given, scored, entropies, lse)
    ctx.options, ctx.vocab_start = options, start


def _logits_gradient(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> Tensor:
    logits, labels, temperature, row_index, scored, entropies, lse = ctx.saved_tensors
    has_entropy = entropies.numel() > 0
    return torch.ops.rl_csrc.logprobs_backward(
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
        ctx.vocab_start,
    )


def _logprobs_autograd(ctx: Any, grad: Tensor, grad_entropy: Tensor, *_unused: Any) -> tuple[Any, ...]:
    return _logits_gradient(ctx, grad, grad_entropy), *(None,) * 8


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


@op("logprob_stats", f"(Tensor logits, Tensor labels, {_SCORING}, int vocab_start) -> Tensor")
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
    options = (number(temperature, scalar_temperature), softcap, ignore_index, row_index, vocab_start)
    return kernel("logprob_stats", logits)(logits, labels, *options)


@_logprob_stats.register_fake
def _(logits: Tensor, labels: Tensor, *_rest: Any) -> Tensor:
    return logits.new_empty((labels.shape[0], NUM_STATS), dtype=float_type(logits))


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


@op("stats_merge", "(Tensor stats) -> (Tensor, Tensor, Tensor, Tensor)")
def _stats_merge(stats: Tensor) -> tuple[Tensor, ...]:
    return kernel("stats_merge", stats)(stats)


@_stats_merge.register_fake
def _(stats: Tensor) -> tuple[Tensor, ...]:
    return tuple(stats.new_empty(stats.shape[1]) for _ in range(4))


@op(
    "parallel_logprobs",
    f"(Tensor logits, Tensor labels, Tensor stats, {_SCORING}, int vocab_start) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _parallel_logprobs(logits: Tensor, labels: Tensor, stats: Tensor, *_rest: Any) -> tuple[Tensor, ...]:
    return kernel("stats_merge", stats)(stats)


@_parallel_logprobs.register_fake
def _(logits: Tensor, labels: Tensor, stats: Tensor, *_rest: Any) -> tuple[Tensor, ...]:
    return tuple(stats.new_empty(stats.shape[1]) for _ in range(4))


def _parallel_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, labels, _, temperature, scalar, softcap, ignore_index, row_index, vocab_start = inputs
    _keep(ctx, (logits, labels, temperature, row_index), output, (scalar, softcap, ignore_index), vocab_start)


def _parallel_autograd(ctx: Any, grad: Tensor, grad_entropy: Tensor, *_unused: Any) -> tuple[Any, ...]:
    return _logits_gradient(ctx, grad, grad_entropy), *(None,) * 8


_parallel_logprobs.register_autograd(_parallel_autograd, setup_context=_parallel_context)


def parallel_logprobs(
    logits: Tensor,
    labels: Tensor,
    gather: Callable[[Tensor], Tensor],
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    vocab_start: int,
) -> LogProbs:
    """Score labels over vocabulary shards through the dispatcher."""
    stats = gather(logprob_stats(logits.detach(), labels, temperature, softcap, ignore_index, row_index, vocab_start))
    options = (*split(temperature), softcap, ignore_index, row_index, vocab_start)
    return LogProbs(*torch.ops.rl_csrc.parallel_logprobs(logits, labels, stats, *options)[:3])


@op(
    "linear_logprobs",
    f"(Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, {_HEAD}, bool entropy, bool sum_pi_squared, "
    f"{_HOW}) -> (Tensor, Tensor, Tensor, Tensor)",
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
    sum_pi_squared: bool,
    chunk_rows: int | None,
    batch_invariant: bool,
) -> tuple[Tensor, ...]:
    options = (number(temperature, scalar_temperature), softcap, ignore_index, entropy, sum_pi_squared)
    scored, entropies, squares, lse = kernel("linear_logprobs_forward", hidden)(
        hidden, weight, labels, bias, *options, chunk_rows, batch_invariant
    )
    return scored, filled(entropies, scored), filled(squares, scored), lse


@_linear_logprobs.register_fake
def _(hidden: Tensor, weight: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    num, (entropy, squares) = labels.shape[0], rest[-4:-2]
    sizes = (num, num if entropy else 0, num if squares else 0, num)
    return tuple(hidden.new_empty(n, dtype=float_type(hidden)) for n in sizes)


@op(
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
    options = (number(temperature, scalar_temperature), softcap, ignore_index, chunk_rows, batch_invariant)
    run = kernel("linear_logprobs_backward", hidden)
    found = run(hidden, weight, labels, bias, logprobs, lse, *grads, *options, tuple(need))
    return tuple(filled(x, hidden) for x in found)


@_linear_logprobs_backward.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    need = rest[-1]
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    return tuple(hidden.new_empty(shape if n else (0,)) for shape, n in zip(shapes, need, strict=True))


def _linear_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, labels, bias, temperature, scalar, softcap, ignore_index, _, _, chunk_rows, invariant = inputs
    scored, entropies, squares, lse = output
    ctx.mark_non_differentiable(squares, lse)
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
    return d_hidden, d_weight, None, d_bias, *(None,) * 8


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
    sum_pi_squared: bool,
    chunk_rows: int | None,
    batch_invariant: bool,
) -> LogProbs:
    """Score labels under an LM head through the dispatcher."""
    options = (*split(temperature), softcap, ignore_index, entropy, sum_pi_squared, chunk_rows, batch_invariant)
    found = torch.ops.rl_csrc.linear_logprobs(hidden, weight, labels, bias, *options)
    return LogProbs(found[0], found[1] if entropy else None, found[2] if sum_pi_squared else None)
