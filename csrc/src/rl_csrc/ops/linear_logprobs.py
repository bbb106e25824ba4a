"""LM-head ops: log-probabilities of labels and losses from hidden states, without materializing all logits.

Legend: `T` labels, `V` vocabulary, `H` hidden, `W` shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rl_csrc.errors import ArgumentError
from rl_csrc.ops.operator import Operator, emptied, filled, float_type, integers, kernel, per_token
from rl_csrc.types import LinearLoss, LogProbs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_HOW = (
    "Tensor? temperature, float scalar_temperature, float? softcap, int? ignore_index, int? chunk_rows, "
    "bool batch_invariant"
)


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
    """Log-probs of labels under the LM head `hidden @ weight.T`, without materializing all logits.

    Differentiable in `hidden`, `weight` and `bias`; backward recomputes the logits.

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
        chunk_rows: tokens whose logits are in memory at once, where the kernel works in chunks; None: automatic.
        batch_invariant: the bits of a token do not depend on its batch (fixed tile shapes; may be slower).

    Raises:
        ArgumentError: a shape or dtype that the op does not take.
        LabelError: a label outside the vocabulary (CPU; on CUDA such a row gives NaN).
    """
    _check_linear(hidden, weight, labels, bias)
    labels = integers(labels)
    per_row = per_token(temperature, labels.size(0), "temperature")
    how = (*per_row, softcap, ignore_index, chunk_rows, batch_invariant)
    found = _LINEAR(hidden, weight, bias, labels, *how, entropy, sum_pi_squared)
    return LogProbs(found[0], found[1] if entropy else None, found[2] if sum_pi_squared else None)


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss: Callable[[Tensor, Tensor | None], Tensor],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    chunk_rows: int | None = None,
    vocab_start: int = 0,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> LinearLoss:
    """Token-local loss of log-probs under the LM head `hidden @ weight.T`, with three matrix products instead of four.

    Equals `loss(*linear_logprobs(...)[:2])`, whose backward would recompute the logits. Forward computes the logits of
    a chunk, asks `loss` for the gradient at its tokens and turns the logits into their gradient; backward only scales.
    At most one chunk of logits is in memory. Differentiable in `hidden` and `weight`. Not for torch.compile.

    Args:
        hidden: `[T, H]` float32, bfloat16, float16 or float64.
        weight: `[V, H]`, the same dtype; with `gather` this rank's `[V / W, H]`.
        labels: `[T]` int64.
        loss: maps `[T]` log-probs and entropies (None unless `entropy`) to a scalar, differentiable by torch's
            autograd. The gradient at a token may depend only on that token's log-prob and entropy: the function is
            called once per chunk, with 0 for later tokens. The last call sees all of them.
        temperature: the log-probs are of softmax(logits / temperature).
        softcap: as in `logprobs`.
        entropy: also give `loss` the entropies, with gradient.
        chunk_rows: tokens whose logits are in memory at once; None: automatic.
        vocab_start: global index of this rank's first row of `weight`.
        gather: as in `parallel_logprobs`; the gradient of `hidden` is then this rank's share of a sum. The head may be
            cut unevenly; `chunk_rows` must be the same on all ranks.

    Raises:
        ArgumentError: a shape or dtype that the op does not take.
        LabelError: a label outside the vocabulary (CPU).
    """
    _check_linear(hidden, weight, labels, None)
    labels = integers(labels)

    def run(need: tuple[bool, bool]) -> Any:
        options = (float(temperature), softcap, None, entropy, chunk_rows, need, vocab_start, gather)
        return kernel("linear_loss", hidden)(hidden.detach(), weight.detach(), labels, differentiated, *options)

    def differentiated(scored: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The loss and its gradients, detached."""
        with torch.enable_grad():
            given = [x.detach().requires_grad_() for x in (scored, entropies) if x is not None]
            value = loss(given[0], given[1] if entropies is not None else None)
        if value.dim():
            raise ArgumentError(f"the loss has shape {list(value.shape)}; wanted a scalar.")
        if not value.requires_grad:
            return value, torch.zeros_like(scored), None
        grads = cast("Sequence[Tensor | None]", torch.autograd.grad(value, given, allow_unused=True))
        first = torch.zeros_like(scored) if grads[0] is None else grads[0].contiguous()
        second = grads[1].contiguous() if len(grads) > 1 and grads[1] is not None else None
        return value.detach(), first, second

    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        found = cast("Any", _LinearLoss).apply(hidden, weight, run)
    else:
        found = run((False, False))[:3]
    return LinearLoss(found[0], found[1], found[2] if entropy else None)


def _check_linear(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    """Raise ArgumentError if the operands of an LM head do not fit each other."""
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


def _linear(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: Tensor | None,
    scalar_temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    chunk_rows: int | None,
    batch_invariant: bool,
    entropy: bool,
    sum_pi_squared: bool,
) -> tuple[Tensor | None, ...]:
    per_row = scalar_temperature if temperature is None else temperature
    options = (per_row, softcap, ignore_index, entropy, sum_pi_squared)
    run = kernel("linear_logprobs_forward", hidden)
    return run(hidden, weight, labels, bias, *options, chunk_rows, batch_invariant)


def _linear_fake(hidden: Tensor, _weight: Tensor, _bias: Tensor | None, labels: Tensor, *rest: Any) -> tuple[Any, ...]:
    num, (entropy, squares) = labels.shape[0], rest[-2:]
    return tuple(hidden.new_empty(n, dtype=float_type(hidden)) for n in (num, num * entropy, num * squares, num))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    hidden, weight, bias, labels, temperature, *how = inputs[:-2]
    scored, entropies, _, lse = output
    ctx.save_for_backward(hidden, weight, bias, labels, temperature, scored, entropies, lse)
    ctx.how = how


def _backward(
    ctx: Any, needs: Sequence[bool], grad: Tensor | None, grad_entropy: Tensor | None, *_unused: Any
) -> list[Tensor | None]:
    hidden, weight, bias, labels, temperature, scored, entropies, lse = ctx.saved_tensors
    known = emptied(entropies)
    grads = (grad, known, None if known is None else grad_entropy)
    need = [bool(n) for n in needs]
    found = _GRADIENT(hidden, weight, bias, labels, scored, lse, *grads, temperature, *ctx.how, need)
    return [x if n else None for x, n in zip(found, need, strict=True)]


def _gradient(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
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
    chunk_rows: int | None,
    batch_invariant: bool,
    need: Sequence[bool],
) -> tuple[Tensor, ...]:
    first, second = (None if grad is None else grad.contiguous() for grad in (grad_logprobs, grad_entropy))
    operands = (hidden.detach(), weight.detach(), labels, None if bias is None else bias.detach())
    per_row = scalar_temperature if temperature is None else temperature
    options = (per_row, softcap, ignore_index, chunk_rows, batch_invariant)
    run = kernel("linear_logprobs_backward", hidden)
    found = run(*operands, logprobs, lse, first, entropy, second, *options, tuple(need))
    return tuple(filled(x, hidden) for x in found)


def _gradient_fake(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    return tuple(hidden.new_empty(shape if n else (0,)) for shape, n in zip(shapes, rest[-1], strict=True))


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, run: Callable[[tuple[bool, bool]], Any]) -> Any:
        value, scored, entropies, *ctx.grads = run((hidden.requires_grad, weight.requires_grad))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in (scored, entropies) if x is not None))
        return value, scored, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_loss = grad_outputs[0]
        grads, ctx.grads = ctx.grads, None  # drop the reference, so that autograd takes the tensors without a copy
        if grad_loss is None:
            return None, None, None
        if grads is None:
            raise RuntimeError("linear_loss keeps its gradients for one backward pass; call it again for another.")
        is_one = grad_loss.device.type == "cpu" and float(grad_loss) == 1.0
        for grad in grads:
            if grad is not None and not is_one:
                grad.mul_(grad_loss.to(grad.dtype))
        return grads.pop(0), grads.pop(0), None


_GRADIENT = Operator(
    "linear_logprobs_backward",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor logprobs, Tensor lse, Tensor? grad_logprobs, "
    f"Tensor? entropy, Tensor? grad_entropy, {_HOW}, bool[] need) -> (Tensor, Tensor, Tensor)",
    _gradient,
    _gradient_fake,
)
_LINEAR = Operator(
    "linear_logprobs",
    f"(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, {_HOW}, bool entropy, bool sum_pi_squared)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _linear,
    _linear_fake,
    save=_save,
    backward=_backward,
    differentiable=(0, 1, 2),
    differentiable_results=(0, 1),
    num_outputs=3,
)
