"""Any token-local loss under an LM head, with its gradient from one pass over the logits.

Legend: `T` tokens, `V` vocabulary, `H` hidden, `W` shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rl_csrc.errors import ArgumentError
from rl_csrc.ops.linear_logprobs import check_linear
from rl_csrc.ops.operator import integers, kernel
from rl_csrc.types import LinearLoss

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
    """A token-local loss of log-probs under the LM head `hidden @ weight.T`: three matrix products, not four.

    As `loss(*linear_logprobs(...)[:2])`, for which backward would make the logits again. Forward computes a chunk's
    logits, asks `loss` for the gradient at its tokens and turns the logits into theirs; backward only scales. The
    logits of one chunk are held, never more. Differentiable in `hidden` and `weight`. Not for torch.compile.

    Args:
        hidden: `[T, H]` float32, bfloat16, float16 or float64.
        weight: `[V, H]`, the same dtype; with `gather` this rank's `[V / W, H]`.
        labels: `[T]` int64.
        loss: from `[T]` log-probs and entropies (None unless asked for) to a scalar, by torch's autograd. The gradient
            at a token may depend on that token's log-prob and entropy alone: the function is called once for each
            chunk, where later tokens still have 0. The last call sees all of them.
        temperature: the log-probs are of softmax(logits / temperature).
        softcap: as in `logprobs`.
        entropy: also give `loss` the entropies, with gradient.
        chunk_rows: tokens whose logits are held at once; None: chosen by the op.
        vocab_start: global index of this rank's first row of `weight`.
        gather: as in `parallel_logprobs`; the gradient of `hidden` is then this rank's share of a sum. The head may be
            cut unevenly; `chunk_rows` must be the same on all ranks.

    Raises:
        ArgumentError: a shape or dtype that the op does not take.
        LabelError: a label outside the vocabulary (CPU).
    """
    check_linear(hidden, weight, labels, None)
    labels = integers(labels)

    def run(need: tuple[bool, bool]) -> Any:
        options = (float(temperature), softcap, None, entropy, entropy, chunk_rows, need, vocab_start, gather)
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
        grads, ctx.grads = ctx.grads, None  # let go of: autograd then takes them as they are
        if grad_loss is None:
            return None, None, None
        if grads is None:
            raise RuntimeError("linear_loss keeps its gradients for one backward pass; call it again for another.")
        is_one = grad_loss.device.type == "cpu" and float(grad_loss) == 1.0
        for grad in grads:
            if grad is not None and not is_one:
                grad.mul_(grad_loss.to(grad.dtype))
        return grads.pop(0), grads.pop(0), None
