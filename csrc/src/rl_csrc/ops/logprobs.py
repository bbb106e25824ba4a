"""Log-probability ops: labels under logits, or under vocabulary shards of logits.

Legend: `T` labels, `R` logit rows, `V` vocabulary, `W` shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_csrc.errors import ArgumentError
from rl_csrc.native import in_huge_pages
from rl_csrc.ops.operator import (
    Operator,
    check_rows,
    emptied,
    float_type,
    integers,
    kernel,
    like_first,
    optional_integers,
    per_token,
)
from rl_csrc.types import NUM_STATS, LogProbs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_SCORING = "Tensor? temperature, float scalar_temperature, float? softcap, int? ignore_index, Tensor? row_index"


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
        ignore_index: rows with this label give 0 and no gradient, and their logits are not read. None: off.
        row_index: `[T]` int64, label i scores row `row_index[i]`. No row may be named twice where a gradient is wanted.
        inplace: backward overwrites `logits` with their gradient, without allocating memory. Nothing else may use the
            logits afterwards; a second backward raises. Ignored under torch.compile.

    Raises:
        ArgumentError: a shape, dtype, stride or device that the op does not take.
        LabelError: a label outside the vocabulary (CPU; on CUDA such a row gives NaN).
    """
    scoring = _checked(logits, labels, temperature, softcap, ignore_index, row_index)
    inplace = inplace and not torch.compiler.is_compiling()
    found = _LOGPROBS(logits, *scoring, entropy, sum_pi_squared, inplace)
    return LogProbs(found[0], found[1] if entropy else None, found[2] if sum_pi_squared else None)


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
    """Softmax statistics of one vocabulary shard, `[T, 5]` float32, to be gathered and merged. No gradient.

    Per token, with z the scaled logit and e = exp(z - max): max z, sum e, sum e (z - max), sum e^2, and the label's z
    (-inf: the label lies in another shard; +inf: ignored). `vocab_start` is the global index of column 0.
    """
    scoring = _checked(logits_shard, labels, temperature, softcap, ignore_index, row_index)
    return _STATS(logits_shard.detach(), *scoring, vocab_start)


def stats_merge(stats: Tensor) -> LogProbs:
    """Merge the statistics of all shards, `[W, T, 5]`, in rank order: every rank gets the same bits. No gradient."""
    if stats.dim() != 3 or stats.shape[-1] != NUM_STATS:
        raise ArgumentError(f"stats has shape {list(stats.shape)}; wanted [shards, tokens, {NUM_STATS}].")
    return LogProbs(*_MERGE(stats.detach())[:3])


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

    Forward makes one collective, backward none. All fields are filled. `logits_shard` is `[R, V / W]`, this rank's
    columns from the global index `vocab_start` on; `labels` are global ids, the same on all ranks; `gather` turns this
    rank's `[T, 5]` into `[W, T, 5]` in rank order (an all-gather over the group). The rest is as in `logprobs`.
    """
    scoring = _checked(logits_shard, labels, temperature, softcap, ignore_index, row_index)
    stats = gather(_STATS(logits_shard.detach(), *scoring, vocab_start))
    inplace = inplace and not torch.compiler.is_compiling()
    return LogProbs(*_PARALLEL(logits_shard, *scoring, vocab_start, stats, inplace)[:3])


def _checked(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
) -> tuple[Any, ...]:
    """Labels and scoring options, checked and in the order of the operators' schemas."""
    check_rows(logits, labels, row_index)
    labels = integers(labels)
    per_row = per_token(temperature, labels.size(0), "temperature")
    return (labels, *per_row, softcap, ignore_index, optional_integers(row_index))


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
    inplace: bool,
) -> tuple[Tensor | None, ...]:
    per_row = scalar_temperature if temperature is None else temperature
    run = kernel("logprobs_forward", logits)
    return run(logits, labels, per_row, softcap, ignore_index, row_index, entropy, sum_pi_squared)


def _logprobs_fake(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    num, (entropy, squares) = labels.shape[0], rest[-3:-1]
    return tuple(logits.new_empty(n, dtype=float_type(logits)) for n in (num, num * entropy, num * squares, num))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    logits, labels, temperature, scalar, softcap, ignore_index, row_index = inputs[:7]
    scored, entropies, _, lse = output
    ctx.save_for_backward(logits, labels, temperature, row_index, scored, entropies, lse)
    ctx.options = (scalar, softcap, ignore_index)
    ctx.vocab_start, ctx.inplace = 0, inputs[-1]


def _backward(
    ctx: Any, _needs: Sequence[bool], grad: Tensor | None, grad_entropy: Tensor | None, *_unused: Any
) -> tuple[Tensor]:
    logits, labels, temperature, row_index, scored, entropies, lse = ctx.saved_tensors
    known = emptied(entropies)
    grads = (grad, known, None if known is None else grad_entropy)
    options = (temperature, *ctx.options, row_index, ctx.vocab_start, ctx.inplace)
    return (_LOGITS_GRADIENT(logits, labels, scored, lse, *grads, *options),)


def _gradient_of_logits(
    logits: Tensor,
    labels: Tensor,
    logprobs: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor | None,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: Tensor | None,
    scalar_temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    vocab_start: int,
    inplace: bool,
) -> Tensor:
    if inplace and logits.stride(1) != 1:
        raise ArgumentError("inplace needs logits with unit column stride; call contiguous() where they are computed.")
    new = None if inplace else in_huge_pages(torch.empty_like(logits, memory_format=torch.contiguous_format))
    out = logits.detach() if new is None else new
    first = None if grad_logprobs is None else grad_logprobs.contiguous()
    second = None if grad_entropy is None else grad_entropy.contiguous()
    per_row = scalar_temperature if temperature is None else temperature
    options = (per_row, softcap, ignore_index, row_index, vocab_start)
    run = kernel("logprobs_backward", logits)
    run(logits.detach(), labels, logprobs, lse, first, entropy, second, *options, out)
    if inplace:
        torch.autograd.graph.increment_version(logits)
    return out


def _stats(
    logits: Tensor,
    labels: Tensor,
    temperature: Tensor | None,
    scalar_temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    vocab_start: int,
) -> Tensor:
    per_row = scalar_temperature if temperature is None else temperature
    options = (per_row, softcap, ignore_index, row_index, vocab_start)
    return kernel("logprob_stats", logits)(logits, labels, *options)


def _stats_fake(logits: Tensor, labels: Tensor, *_rest: Any) -> Tensor:
    return logits.new_empty((labels.shape[0], NUM_STATS), dtype=float_type(logits))


def _merge(stats: Tensor) -> tuple[Tensor, ...]:
    return tuple(kernel("stats_merge", stats)(stats))


def _merge_fake(stats: Tensor) -> tuple[Tensor, ...]:
    return tuple(stats.new_empty(stats.shape[1]) for _ in range(4))


def _parallel(*arguments: Any) -> tuple[Tensor, ...]:
    return _merge(arguments[-2])


def _parallel_fake(*arguments: Any) -> tuple[Tensor, ...]:
    return _merge_fake(arguments[-2])


def _parallel_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _save(ctx, inputs, output)
    ctx.vocab_start = inputs[7]


_LOGITS_GRADIENT = Operator(
    "logprobs_backward",
    "(Tensor logits, Tensor labels, Tensor logprobs, Tensor lse, Tensor? grad_logprobs, Tensor? entropy, "
    f"Tensor? grad_entropy, {_SCORING}, int vocab_start, bool inplace) -> Tensor",
    _gradient_of_logits,
    like_first,
)
_LOGPROBS = Operator(
    "logprobs",
    f"(Tensor logits, Tensor labels, {_SCORING}, bool entropy, bool sum_pi_squared, bool inplace)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _logprobs,
    _logprobs_fake,
    save=_save,
    backward=_backward,
    differentiable_results=(0, 1),
    num_outputs=3,
)
_STATS = Operator(
    "logprob_stats", f"(Tensor logits, Tensor labels, {_SCORING}, int vocab_start) -> Tensor", _stats, _stats_fake
)
_MERGE = Operator("stats_merge", "(Tensor stats) -> (Tensor, Tensor, Tensor, Tensor)", _merge, _merge_fake)
_PARALLEL = Operator(
    "parallel_logprobs",
    f"(Tensor logits, Tensor labels, {_SCORING}, int vocab_start, Tensor stats, bool inplace)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _parallel,
    _parallel_fake,
    save=_parallel_save,
    backward=_backward,
    differentiable_results=(0, 1),
    num_outputs=3,
)
