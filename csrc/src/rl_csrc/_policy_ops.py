"""Public policy-loss ops. Legend: `T` tokens (packed), `B` sequences, `V` vocabulary, `H` hidden, `M` metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_csrc import _library
from rl_csrc._arguments import check_rows, check_same_length, floats, optional_floats, optional_integers, wants_grad
from rl_csrc._dispatch import kernel
from rl_csrc._policy_arguments import PolicyTokens, checked_spec, fused_arguments
from rl_csrc._softmax_ops import check_linear
from rl_csrc.cpu.memory import in_huge_pages
from rl_csrc.errors import ArgumentError
from rl_csrc.types import PolicyLoss, PolicyLossFromLogits

if TYPE_CHECKING:
    from typing import Unpack

    from torch import Tensor

    from rl_csrc._policy_arguments import PolicyOptions
    from rl_csrc.types import Aggregation, Kl, Loss, LossSpec


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    loss: Loss = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
    ratio_max: float = 20.0,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    dro_beta: float = 0.1,
    kl: Kl = "none",
    kl_coef: float = 0.0,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    weights: Tensor | None = None,
    aggregation: Aggregation = "token-mean",
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    norm_constant: float | None = None,
    sequence_counts: Tensor | None = None,
) -> PolicyLoss:
    """Loss, gradient and metrics of a policy update on packed tokens, in one pass.

    Differentiable in `logprobs` and `entropy`. The sum of per-token losses over a count that the caller supplies, so
    that micro-batches and ranks add up to the loss of the global batch.

    Args:
        logprobs: `[T]`, the current policy's.
        old_logprobs: `[T]`, the policy's before the update.
        advantages: `[T]`.
        loss_mask: `[T]` bool or 0/1; what stands at masked-out positions is never looked at, NaN included.
        cu_seqlens: `[B + 1]` int64 or int32, where each sequence starts; the last entry is T.
        loss: ppo (1707.06347; clip-higher 2503.14476; dual 1912.09729), gspo (2507.18071), cispo (2506.13585),
            sapo (2511.20347), gmpo (2507.20673), dppo_tv and dppo_kl (2602.04879), dro, reinforce.
        clip_low: lower bound: ratio 1 - clip_low; for gmpo of the log ratio; for dppo of the divergence.
        clip_high: upper bound, the same units.
        clip_dual: bound c > 1 of the ratio where the advantage is negative (ppo, gspo); None: off.
        ratio_max: dppo, cap of the detached ratio.
        tau_pos: sapo, temperature where the advantage is positive.
        tau_neg: sapo, temperature elsewhere.
        dro_beta: dro, weight of the squared log ratio.
        kl: estimator of the KL to `ref_logprobs` added to the loss; k3 is capped at 10, and has no gradient beyond;
            `+` has the gradient of k2.
        kl_coef: its coefficient.
        ref_logprobs: `[T]`, the reference policy's.
        entropy: `[T]`, for the bonus and its metric.
        entropy_coef: coefficient of the entropy bonus.
        weights: `[T]`, rollout-correction weights of the policy term.
        aggregation: token-mean and token-sum count tokens; seq-mean-* divides by `num_sequences`; -norm also by
            `norm_constant`. A sequence without a masked token counts nowhere.
        num_tokens: masked tokens of the *global* batch (number or 0-d tensor); None: those of this call.
        num_sequences: sequences of the *global* batch that have a masked token; None: those of this call.
        norm_constant: what seq-mean-token-sum-norm divides by.
        sequence_counts: `[B]`, the tokens that seq-mean-token-mean divides each sequence by; None: those in
            `loss_mask`. For a mask that some tokens were taken out of, while the mean goes over all.

    Raises:
        ArgumentError: a shape or option that the op does not take.
    """
    spec = checked_spec(
        loss=loss,
        clip_low=clip_low,
        clip_high=clip_high,
        clip_dual=clip_dual,
        ratio_max=ratio_max,
        tau_pos=tau_pos,
        tau_neg=tau_neg,
        dro_beta=dro_beta,
        kl=kl,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        aggregation=aggregation,
    )
    counts = (num_tokens, num_sequences, norm_constant)
    tokens = PolicyTokens.of(
        logprobs, old_logprobs, advantages, loss_mask, cu_seqlens, spec, counts, ref_logprobs, weights, sequence_counts
    )
    check_same_length("entropy", entropy, tokens.num)
    if torch.compiler.is_compiling():
        first = logprobs.to(tokens.dtype).contiguous()
        second = None if entropy is None else entropy.to(tokens.dtype).contiguous()
        return PolicyLoss(*torch.ops.rl_csrc.policy_loss(first, *tokens.for_library(spec), second)[:2])
    if wants_grad(logprobs, entropy):
        return PolicyLoss(*_PolicyLoss.apply(logprobs, entropy, tokens, spec))
    run = kernel("policy_loss", tokens.old_logprobs)
    second = optional_floats(entropy, tokens.old_logprobs)
    found = run(floats(logprobs), *tokens.head(spec), second, tokens.ref_logprobs, tokens.weights)
    return PolicyLoss(*found[:2])


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logprobs: Tensor, entropy: Tensor | None, tokens: PolicyTokens, spec: LossSpec
    ) -> tuple[Tensor, Tensor]:
        first, second = floats(logprobs), optional_floats(entropy, logprobs)
        run = kernel("policy_loss", first)
        loss, metrics, *grads = run(first, *tokens.head(spec), second, tokens.ref_logprobs, tokens.weights)
        ctx.save_for_backward(*grads)
        ctx.dtypes = (logprobs.dtype, None if entropy is None else entropy.dtype)
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides its names
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        scaled = (None if g is None else (g * grads[0]).to(dtype) for g, dtype in saved)
        return *scaled, None, None


def policy_loss_from_logits(
    logits: Tensor,
    labels: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    row_index: Tensor | None = None,
    entropy: bool = False,
    inplace: bool = False,
    **options: Unpack[PolicyOptions],
) -> PolicyLossFromLogits:
    """Log-probs, a token-local loss and the gradient of the logits in one pass over the logits.

    As `logprobs` followed by `policy_loss`, differentiable in `logits`. The losses that need the whole sequence first
    (gspo, gmpo) are refused. Positions outside `loss_mask` are not scored and give 0. With `inplace` the logits hold
    their gradient when the call returns.

    Args:
        logits: `[R, V]` float32, bfloat16 or float16.
        labels: `[T]` int64.
        old_logprobs: as in `policy_loss`; the arguments that follow too.
        advantages: as in `policy_loss`.
        loss_mask: as in `policy_loss`.
        cu_seqlens: as in `policy_loss`.
        temperature: one number, or float `[T]`.
        softcap: as in `logprobs`.
        row_index: as in `logprobs`.
        entropy: also return the entropy; implied by `entropy_coef`.
        inplace: overwrite `logits` with their gradient.
        options: as in `policy_loss`, without `entropy`.
    """
    check_rows(logits, labels, row_index)
    spec, tokens, labels, temperature = fused_arguments(
        logits, labels, old_logprobs, advantages, loss_mask, cu_seqlens, temperature, options
    )
    entropy = entropy or spec.entropy_coef != 0
    scoring = (temperature, softcap, optional_integers(row_index), entropy)
    if torch.compiler.is_compiling():
        behind = (*_library.split(temperature), *scoring[1:])
        found = torch.ops.rl_csrc.policy_loss_from_logits(logits, labels, *tokens.for_library(spec), *behind)
        return PolicyLossFromLogits(found[0], found[2], found[3] if entropy else None, found[1])
    found = _PolicyLossFromLogits.apply(logits, labels, tokens, spec, scoring, inplace)
    return PolicyLossFromLogits(found[0], found[2], found[3], found[1])


class _PolicyLossFromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        tokens: PolicyTokens,
        spec: LossSpec,
        scoring: tuple[Any, ...],
        inplace: bool,
    ) -> tuple[Any, ...]:
        run = kernel("policy_loss_from_logits", logits)
        out = None
        if inplace:
            out = logits.detach()
        elif ctx.needs_input_grad[0]:
            out = in_huge_pages(torch.empty_like(logits, memory_format=torch.contiguous_format))
        if inplace and logits.stride(1) != 1:
            raise ArgumentError(
                "inplace wants logits whose columns are adjacent; call contiguous() where they are made."
            )
        head = (*tokens.head(spec), tokens.ref_logprobs, tokens.weights)
        loss, metrics, scored, entropies = run(logits.detach(), labels, *head, *scoring, out)
        if inplace:
            torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(out)
        ctx.mark_non_differentiable(*(x for x in (metrics, scored, entropies) if x is not None))
        return loss, metrics, scored, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides its names
        (grad,) = ctx.saved_tensors
        return _scaled_in_place(grad, grads[0]), None, None, None, None, None


def _scaled_in_place(grad: Tensor, by: Tensor) -> Tensor:
    """The saved gradient times that of the loss, which is nearly always 1."""
    if by.device.type == "cpu" and float(by) == 1.0:
        return grad
    return grad.mul_(by.to(grad.dtype))  # saved for this one use; a second backward sees the new version and raises


def policy_loss_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    chunk_rows: int | None = None,
    **options: Unpack[PolicyOptions],
) -> PolicyLossFromLogits:
    """As `policy_loss_from_logits`, from `hidden [T, H] @ weight [V, H].T`: three matrix products, not four.

    Forward computes each chunk's logits, loss and both gradients; backward only scales them. Differentiable in
    `hidden` and `weight`; the gradient of `weight` is accumulated in float32.
    """
    check_linear(hidden, weight, labels, None)
    spec, tokens, labels, temperature = fused_arguments(
        hidden, labels, old_logprobs, advantages, loss_mask, cu_seqlens, temperature, options
    )
    entropy = entropy or spec.entropy_coef != 0
    scoring = (temperature, softcap, entropy, chunk_rows)
    if torch.compiler.is_compiling():
        behind = (*_library.split(temperature), *scoring[1:], [hidden.requires_grad, weight.requires_grad])
        found = torch.ops.rl_csrc.policy_loss_from_hidden(hidden, weight, labels, *tokens.for_library(spec), *behind)
        return PolicyLossFromLogits(found[0], found[2], found[3] if entropy else None, found[1])
    found = _PolicyLossFromHidden.apply(hidden, weight, labels, tokens, spec, scoring)
    return PolicyLossFromLogits(found[0], found[2], found[3], found[1])


class _PolicyLossFromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        tokens: PolicyTokens,
        spec: LossSpec,
        scoring: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        run = kernel("policy_loss_from_hidden", hidden)
        head = (*tokens.head(spec), tokens.ref_logprobs, tokens.weights)
        need = tuple(ctx.needs_input_grad[:2])
        loss, metrics, scored, entropies, *grads = run(hidden.detach(), weight.detach(), labels, *head, *scoring, need)
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(*(x for x in (metrics, scored, entropies) if x is not None))
        return loss, metrics, scored, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides its names
        scaled = (None if g is None else _scaled_in_place(g, grads[0]) for g in ctx.saved_tensors)
        return *scaled, None, None, None, None
