"""The plain-torch reference behind the internal signature: what runs where there is no kernel, float64 included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_csrc import reference
from rl_csrc.types import LossSpec, Moments

if TYPE_CHECKING:
    from collections.abc import Sequence


def logprobs_forward(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    entropy: bool,
    sum_pi_squared: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Log-probs, entropy, sum of squares and log-sum-exp, through one shard's statistics."""
    options: dict[str, Any] = {"temperature": temperature, "softcap": softcap, "ignore_index": ignore_index}
    reference.check_labels(labels, ignore_index, logits.shape[1])
    stats = reference.logprob_stats(logits, labels, vocab_start=0, row_index=row_index, **options)
    found, lse = reference.stats_merge(stats[None])
    return found.logprobs, found.entropy if entropy else None, found.sum_pi_squared if sum_pi_squared else None, lse


def logprobs_backward(
    logits: Tensor,
    labels: Tensor,
    logprobs: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor | None,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    vocab_start: int,
    out: Tensor,
) -> None:
    """Write the gradient of the logits to `out`."""
    grad = reference.logprobs_backward(
        logits,
        labels,
        logprobs,
        lse,
        torch.zeros_like(logprobs) if grad_logprobs is None else grad_logprobs,
        entropy=entropy,
        grad_entropy=grad_entropy,
        vocab_start=vocab_start,
        temperature=temperature,
        softcap=softcap,
        ignore_index=ignore_index,
        row_index=row_index,
    )
    out.copy_(grad)


def logprob_stats(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    vocab_start: int,
) -> Tensor:
    """Statistics of a vocabulary shard, `[T, 5]`."""
    return reference.logprob_stats(
        logits,
        labels,
        vocab_start=vocab_start,
        temperature=temperature,
        softcap=softcap,
        ignore_index=ignore_index,
        row_index=row_index,
    )


def stats_merge(stats: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Merged log-probs, entropy, sum of squares and log-sum-exp."""
    found, lse = reference.stats_merge(stats)
    return found.logprobs, found.entropy, found.sum_pi_squared, lse


def linear_logprobs_forward(
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
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Log-probs, entropy, sum of squares and log-sum-exp; the logits are held whole."""
    logits = _logits(hidden, weight, bias)
    return logprobs_forward(logits, labels, temperature, softcap, ignore_index, None, entropy, sum_pi_squared)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = reference.compute_dtype(hidden)
    logits = hidden.to(dtype) @ weight.to(dtype).T
    return logits if bias is None else logits + bias.to(dtype)


def linear_logprobs_backward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    logprobs: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor | None,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    chunk_rows: int | None,
    batch_invariant: bool,
    need: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias where they are needed."""
    logits = _logits(hidden, weight, bias)
    options = (temperature, softcap, ignore_index, None, 0)
    logprobs_backward(
        logits,
        labels,
        logprobs,
        lse,
        grad_logprobs,
        entropy,
        grad_entropy,
        *options,
        out=(grad := torch.empty_like(logits)),
    )
    scored = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
    safe = torch.where(scored[:, None], hidden, torch.zeros_like(hidden)).to(grad.dtype)
    return (
        (grad @ weight.to(grad.dtype)).to(hidden.dtype) if need[0] else None,
        (grad.T @ safe).to(weight.dtype) if need[1] else None,
        grad.sum(0).to(weight.dtype) if need[2] else None,
    )


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    spec: LossSpec,
    denominator: float | Tensor,
    entropy: Tensor | None,
    ref_logprobs: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loss, metrics and the gradients of logprobs and entropy, by torch's autograd."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (logprobs, entropy) if x is not None]
        found = reference.policy_loss(
            inputs[0],
            old_logprobs,
            advantages,
            loss_mask,
            cu_seqlens,
            spec,
            denominator,
            entropy=inputs[1] if entropy is not None else None,
            ref_logprobs=ref_logprobs,
            weights=weights,
        )
    grads = torch.autograd.grad(found.loss, inputs, allow_unused=True, materialize_grads=True)
    return found.loss.detach(), found.metrics, grads[0], grads[1] if entropy is not None else None


def policy_loss_from_logits(
    logits: Tensor,
    labels: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    spec: LossSpec,
    denominator: float | Tensor,
    ref_logprobs: Tensor | None,
    weights: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    row_index: Tensor | None,
    entropy: bool,
    out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loss, metrics, log-probs and entropy; the gradient of the logits goes to `out`."""
    options = (temperature, softcap, -100, row_index)
    scored, entropies, _, lse = logprobs_forward(logits, labels, *options, entropy, False)
    loss, metrics, grad, grad_entropy = policy_loss(
        scored, old_logprobs, advantages, loss_mask, cu_seqlens, spec, denominator, entropies, ref_logprobs, weights
    )
    if out is not None:
        logprobs_backward(logits, labels, scored, lse, grad, entropies, grad_entropy, *options, 0, out)
    return loss, metrics, scored, entropies


def policy_loss_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    spec: LossSpec,
    denominator: float | Tensor,
    ref_logprobs: Tensor | None,
    weights: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    entropy: bool,
    chunk_rows: int | None,
    need: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Loss, metrics, log-probs, entropy, and the gradients of hidden and weight."""
    logits = _logits(hidden, weight, None)
    loss, metrics, scored, entropies = policy_loss_from_logits(
        logits,
        labels,
        old_logprobs,
        advantages,
        loss_mask,
        cu_seqlens,
        spec,
        denominator,
        ref_logprobs,
        weights,
        temperature,
        softcap,
        None,
        entropy,
        grad := torch.empty_like(logits),
    )
    safe = torch.where(loss_mask[:, None], hidden, torch.zeros_like(hidden)).to(grad.dtype)
    d_hidden = (grad @ weight.to(grad.dtype)).to(hidden.dtype) if need[0] else None
    d_weight = (grad.T @ safe).to(weight.dtype) if need[1] else None
    return loss, metrics, scored, entropies, d_hidden, d_weight


def scan_reverse(
    rewards: Tensor,
    values: Tensor | None,
    cu_seqlens: Tensor,
    loss_mask: Tensor | None,
    kind: Any,
    gamma: float,
    lam: float | Tensor,
    bootstrap_values: Tensor | None,
    mask_mode: Any,
    rho: Tensor | None,
    rho_clip: float,
    c_clip: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns."""
    found = reference.scan_reverse(
        rewards,
        values,
        cu_seqlens,
        loss_mask=loss_mask,
        kind=kind,
        gamma=gamma,
        lam=lam,
        bootstrap_values=bootstrap_values,
        mask_mode=mask_mode,
        rho=rho,
        rho_clip=rho_clip,
        c_clip=c_clip,
    )
    return found.advantages, found.returns


def group_norm(rewards: Tensor, group_ids: Tensor | None, cu_groups: Tensor | None, mode: Any, eps: float) -> Tensor:
    """Advantages."""
    return reference.group_norm(rewards, group_ids, cu_groups=cu_groups, mode=mode, eps=eps)


def masked_moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and centred second moment."""
    return reference.masked_moments(x, mask)


def whiten(
    x: Tensor,
    mask: Tensor | None,
    shift_mean: bool,
    eps: float,
    moments: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """Whitened x."""
    given = None if moments is None else Moments(*moments)
    return reference.whiten(x, mask, shift_mean=shift_mean, eps=eps, moments=given)


def pack(padded: Tensor, lengths: Tensor, starts: Tensor | None, total: int | None) -> tuple[Tensor, Tensor]:
    """Values and cu_seqlens."""
    return reference.pack(padded, lengths, starts=starts)


def unpack(values: Tensor, cu_seqlens: Tensor, length: int, padding_value: float, left: bool) -> Tensor:
    """Padded rows."""
    side = "left" if left else "right"
    return reference.unpack(values, cu_seqlens, length=length, padding_value=padding_value, side=side)


def bucket_copy(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Copy each source into its destination."""
    reference.bucket_copy([s.detach() for s in sources], [d.detach() for d in destinations])


def roll_labels(token_ids: Tensor, cu_seqlens: Tensor, loss_mask: Tensor | None, ignore_index: int) -> Tensor:
    """Next-token labels."""
    return reference.roll_labels(token_ids, cu_seqlens, loss_mask=loss_mask, ignore_index=ignore_index)


def cp_slice(x: Tensor, cu_seqlens: Tensor, cp_rank: int, cp_size: int) -> tuple[Tensor, Tensor]:
    """This rank's tokens and their cu_seqlens."""
    return reference.cp_slice(x, cu_seqlens, cp_rank=cp_rank, cp_size=cp_size)
