"""Public log-probability ops. Legend: `T` labels, `R` logit rows, `V` vocabulary, `H` hidden, `W` shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_csrc import _library
from rl_csrc._arguments import check_rows, integers, optional_integers, per_token, wants_grad
from rl_csrc._dispatch import kernel
from rl_csrc.cpu.memory import in_huge_pages
from rl_csrc.errors import ArgumentError
from rl_csrc.types import NUM_STATS, LogProbs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    sum_pi_squared: bool = False,
    softcap: float | None = None,
    ignore_index: int | None = -100,
    row_index: Tensor | None = None,
    inplace: bool = False,
) -> LogProbs:
    """Log-probability of each label under softmax(softcap(logits) / temperature), in one read of the logits.

    Differentiable in `logits`, through `logprobs` and `entropy`.

    Args:
        logits: `[R, V]` float32, bfloat16, float16 (kernels) or float64 (plain torch). Rows may lie apart.
        labels: `[T]` int64; T = R unless `row_index` is given.
        temperature: one number, or float `[T]`.
        entropy: also return the entropy in nats.
        sum_pi_squared: also return the sum of squared probabilities (carries no gradient).
        softcap: `c * tanh(logits / c)` before the temperature; None: off.
        ignore_index: rows with this label give 0 and no gradient, and their logits are not looked at. None: off.
        row_index: `[T]` int64, label i scores row `row_index[i]`. No row may be named twice where a gradient is wanted.
        inplace: backward overwrites `logits` with their gradient (no other memory is allocated). The logits must be
            needed by nobody else; a second backward raises. Under torch.compile it has no effect.

    Raises:
        ArgumentError: a shape, dtype, stride or device that the op does not take.
        LabelError: a label outside the vocabulary (CPU; on CUDA such a row gives NaN).
    """
    check_rows(logits, labels, row_index)
    labels, row_index = integers(labels), optional_integers(row_index)
    temperature = per_token(temperature, labels.shape[0], "temperature")
    options = (temperature, softcap, ignore_index, row_index)
    if torch.compiler.is_compiling():
        return _library.logprobs(logits, labels, *options, entropy, sum_pi_squared)
    if wants_grad(logits):
        return LogProbs(*_LogProbs.apply(logits, labels, options, entropy, sum_pi_squared, inplace))
    found = kernel("logprobs_forward", logits)(logits, labels, *options, entropy, sum_pi_squared)
    return LogProbs(*found[:3])


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        options: tuple[Any, ...],
        entropy: bool,
        sum_pi_squared: bool,
        inplace: bool,
    ) -> tuple[Tensor | None, ...]:
        run = kernel("logprobs_forward", logits)
        scored, entropies, squares, lse = run(logits, labels, *options, entropy, sum_pi_squared)
        ctx.save_for_backward(logits, labels, scored, lse, entropies)
        ctx.options, ctx.inplace = options, inplace
        ctx.set_materialize_grads(False)
        if squares is not None:
            ctx.mark_non_differentiable(squares)
        return scored, entropies, squares

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides its names
        logits, labels, scored, lse, entropies = ctx.saved_tensors
        grad = _logits_gradient(logits, labels, scored, lse, grads[0], entropies, grads[1], ctx.options, 0, ctx.inplace)
        return grad, None, None, None, None, None


def _logits_gradient(
    logits: Tensor,
    labels: Tensor,
    scored: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor | None,
    entropies: Tensor | None,
    grad_entropy: Tensor | None,
    options: tuple[Any, ...],
    vocab_start: int,
    inplace: bool,
) -> Tensor:
    out = logits.detach() if inplace else in_huge_pages(torch.empty_like(logits, memory_format=torch.contiguous_format))
    if inplace and logits.stride(1) != 1:
        raise ArgumentError("inplace wants logits whose columns are adjacent; call contiguous() where they are made.")
    first = None if grad_logprobs is None else grad_logprobs.contiguous()
    second = None if grad_entropy is None else grad_entropy.contiguous()
    run = kernel("logprobs_backward", logits)
    run(logits.detach(), labels, scored, lse, first, entropies, second, *options, vocab_start, out)
    if inplace:
        torch.autograd.graph.increment_version(logits)
    return out


def logprob_stats(
    logits_shard: Tensor,
    labels: Tensor,
    *,
    vocab_start: int,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int | None = -100,
    row_index: Tensor | None = None,
) -> Tensor:
    """Statistics of one vocabulary shard, to be gathered once and merged: `[T, 5]` float32, no gradient.

    Per token, with z the scaled logit and e = exp(z - max): max z, sum e, sum e (z - max), sum e^2, and the label's z
    (-inf: the label lies in another shard; +inf: ignored). `vocab_start` is the global index of column 0.
    """
    check_rows(logits_shard, labels, row_index)
    labels, row_index = integers(labels), optional_integers(row_index)
    temperature = per_token(temperature, labels.shape[0], "temperature")
    options = (temperature, softcap, ignore_index, row_index)
    if torch.compiler.is_compiling():
        return _library.logprob_stats(logits_shard.detach(), labels, *options, vocab_start)
    return kernel("logprob_stats", logits_shard)(logits_shard.detach(), labels, *options, vocab_start)


def stats_merge(stats: Tensor) -> LogProbs:
    """Merge the statistics of all shards, `[W, T, 5]`, in rank order: every rank gets the same bits. No gradient."""
    if stats.dim() != 3 or stats.shape[-1] != NUM_STATS:
        raise ArgumentError(f"stats has shape {list(stats.shape)}; wanted [shards, tokens, {NUM_STATS}].")
    if torch.compiler.is_compiling():
        return LogProbs(*torch.ops.rl_csrc.stats_merge(stats.detach())[:3])
    return LogProbs(*kernel("stats_merge", stats)(stats.detach())[:3])


def parallel_logprobs(
    logits_shard: Tensor,
    labels: Tensor,
    *,
    vocab_start: int,
    gather: Callable[[Tensor], Tensor],
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int | None = -100,
    row_index: Tensor | None = None,
    inplace: bool = False,
) -> LogProbs:
    """Vocab-parallel log-probs, entropy and sum of squared probabilities, differentiable in this rank's shard.

    Forward makes one collective, backward none. All fields are filled.

    Args:
        logits_shard: `[R, V / W]`, this rank's columns.
        labels: `[T]` int64, global ids, the same on all ranks.
        vocab_start: global index of column 0.
        gather: turns this rank's `[T, 5]` into `[W, T, 5]` in rank order (an all-gather over the group).
        temperature: as in `logprobs`, like the arguments that follow.
        softcap: as in `logprobs`.
        ignore_index: as in `logprobs`.
        row_index: as in `logprobs`.
        inplace: as in `logprobs`.
    """
    check_rows(logits_shard, labels, row_index)
    labels, row_index = integers(labels), optional_integers(row_index)
    temperature = per_token(temperature, labels.shape[0], "temperature")
    options = (temperature, softcap, ignore_index, row_index)
    if torch.compiler.is_compiling():
        return _library.parallel_logprobs(logits_shard, labels, gather, *options, vocab_start)
    return LogProbs(*_ParallelLogProbs.apply(logits_shard, labels, gather, options, vocab_start, inplace))


class _ParallelLogProbs(torch.autograd.Function):
    """Statistics, one gather, merge; backward from the merged log-sum-exp, without a collective."""

    @staticmethod
    def forward(
        ctx: Any,
        shard: Tensor,
        labels: Tensor,
        gather: Callable[[Tensor], Tensor],
        options: tuple[Any, ...],
        vocab_start: int,
        inplace: bool,
    ) -> tuple[Tensor, ...]:
        stats = kernel("logprob_stats", shard)(shard.detach(), labels, *options, vocab_start)
        scored, entropies, squares, lse = kernel("stats_merge", stats)(gather(stats))
        ctx.save_for_backward(shard, labels, scored, lse, entropies)
        ctx.options, ctx.vocab_start, ctx.inplace = options, vocab_start, inplace
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(squares)
        return scored, entropies, squares

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides its names
        shard, labels, scored, lse, entropies = ctx.saved_tensors
        grad = _logits_gradient(
            shard, labels, scored, lse, grads[0], entropies, grads[1], ctx.options, ctx.vocab_start, ctx.inplace
        )
        return grad, None, None, None, None, None


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    sum_pi_squared: bool = False,
    softcap: float | None = None,
    ignore_index: int | None = -100,
    chunk_rows: int | None = None,
    batch_invariant: bool = False,
) -> LogProbs:
    """Log-probs of labels under the LM head `hidden @ weight.T`, the logits never held whole.

    Differentiable in `hidden`, `weight` and `bias`; backward computes the logits again.

    Args:
        hidden: `[T, H]` float32, bfloat16, float16 or float64.
        weight: `[V, H]`, the same dtype.
        labels: `[T]` int64.
        bias: `[V]`, the same dtype.
        temperature: one number, or float `[T]`.
        entropy: also return the entropy in nats.
        sum_pi_squared: also return the sum of squared probabilities (carries no gradient), from the same products.
        softcap: as in `logprobs`.
        ignore_index: as in `logprobs`.
        chunk_rows: tokens whose logits are held at once, where the path is chunked; None: chosen by the op.
        batch_invariant: the same bits for a token whatever stands beside it (fixed tile shapes; may be slower).
    """
    check_linear(hidden, weight, labels, bias)
    labels = integers(labels)
    temperature = per_token(temperature, labels.shape[0], "temperature")
    options, wanted = (temperature, softcap, ignore_index), (entropy, sum_pi_squared)
    if torch.compiler.is_compiling():
        return _library.linear_logprobs(hidden, weight, labels, bias, *options, *wanted, chunk_rows, batch_invariant)
    how = (chunk_rows, batch_invariant)
    if wants_grad(hidden, weight, bias):
        return LogProbs(*_LinearLogProbs.apply(hidden, weight, bias, labels, options, wanted, how))
    found = kernel("linear_logprobs_forward", hidden)(hidden, weight, labels, bias, *options, *wanted, *how)
    return LogProbs(*found[:3])


def check_linear(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    """Refuse operands of an LM head that do not fit."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ArgumentError(
            f"hidden has shape {list(hidden.shape)} and weight {list(weight.shape)}; "
            "wanted [tokens, hidden] and [vocabulary, hidden]."
        )
    if labels.shape != hidden.shape[:1]:
        raise ArgumentError(f"labels has shape {list(labels.shape)}; wanted [{hidden.shape[0]}], one per token.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(f"bias has shape {list(bias.shape)}; wanted [{weight.shape[0]}].")
    if weight.dtype != hidden.dtype or (bias is not None and bias.dtype != hidden.dtype):
        raise ArgumentError(f"hidden is {hidden.dtype} and weight {weight.dtype}; wanted one dtype for all operands.")


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        options: tuple[Any, ...],
        wanted: tuple[bool, bool],
        how: tuple[Any, ...],
    ) -> tuple[Tensor | None, ...]:
        run = kernel("linear_logprobs_forward", hidden)
        scored, entropies, squares, lse = run(hidden, weight, labels, bias, *options, *wanted, *how)
        ctx.save_for_backward(hidden, weight, bias, labels, scored, lse, entropies)
        ctx.options, ctx.how = options, how
        ctx.set_materialize_grads(False)
        if squares is not None:
            ctx.mark_non_differentiable(squares)
        return scored, entropies, squares

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides its names
        hidden, weight, bias, labels, scored, lse, entropies = ctx.saved_tensors
        first, second = (None if g is None else g.contiguous() for g in grads[:2])
        run = kernel("linear_logprobs_backward", hidden)
        found = run(
            hidden.detach(),
            weight.detach(),
            labels,
            None if bias is None else bias.detach(),
            scored,
            lse,
            first,
            entropies,
            second,
            *ctx.options,
            *ctx.how,
            tuple(ctx.needs_input_grad[:3]),
        )
        return *found, None, None, None, None
