"""CUDA kernels of one native call each: log-probs of logits or vocabulary shards, policy losses, advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_csrc.cuda.launch import DTYPES, counter_on, native, new_floats, on_its_device, row_stride_of, stream_of
from rl_csrc.native import native_spec
from rl_csrc.types import GROUP_MODES, MASK_MODES, METRIC_NAMES, NUM_STATS, SCAN_KINDS

if TYPE_CHECKING:
    from torch import Tensor

    from rl_csrc.types import LossSpec

MAX_SCATTERED = 1 << 15
"""Number of rewards above which group ids are sorted first: without order, finding members costs rewards x groups."""


def logits_arguments(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    vocab_start: int = 0,
) -> Any:
    """Native struct `rl_logits`: the logits, their labels and the options of scoring."""
    per_row = isinstance(temperature, torch.Tensor)
    return native.Logits(
        data=logits,
        row_stride=row_stride_of(logits),
        vocab=logits.shape[1],
        rows=labels.shape[0],
        dtype=DTYPES[logits.dtype],
        labels=labels,
        row_index=row_index,
        temperature=temperature if per_row else None,
        scalar_temperature=1.0 if per_row else float(temperature),
        softcap=softcap or 0.0,
        ignore_index=ignore_index,
        vocab_start=vocab_start,
    )


@on_its_device
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
    """Log-probs, entropy, sum of squared probabilities and log-sum-exp, `[T]` each, in one read of the logits."""
    num = labels.shape[0]
    scored, lse = new_floats(logits, num), new_floats(logits, num)
    entropies = new_floats(logits, num) if entropy else None
    squares = new_floats(logits, num) if sum_pi_squared else None
    arguments = logits_arguments(logits, labels, temperature, softcap, ignore_index, row_index)
    native.logprobs(arguments, scored, entropies, squares, lse, stream_of(logits))
    return scored, entropies, squares, lse


@on_its_device
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
    """Write the gradient of the logits to `out`: the logits themselves or, if they are float32, any tensor."""
    arguments = logits_arguments(logits, labels, temperature, softcap, ignore_index, row_index, vocab_start)
    if row_index is not None:  # rows that no label scores have no gradient
        is_scored = torch.zeros(out.shape[0], dtype=torch.bool, device=out.device)
        is_scored[row_index] = True
        native.zero_rows(out, DTYPES[out.dtype], row_stride_of(out), *out.shape, is_scored, stream_of(out))
    native.logprobs_backward(
        arguments,
        logprobs,
        lse,
        entropy,
        grad_logprobs,
        grad_entropy,
        out,
        row_stride_of(out),
        DTYPES[out.dtype],
        stream_of(logits),
    )


@on_its_device
def logprob_stats(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    vocab_start: int,
) -> Tensor:
    """Softmax statistics of a vocabulary shard, `[T, 5]`."""
    stats = new_floats(logits, labels.shape[0], NUM_STATS)
    arguments = logits_arguments(logits, labels, temperature, softcap, ignore_index, row_index, vocab_start)
    native.logprob_stats(arguments, stats, stream_of(logits))
    return stats


@on_its_device
def stats_merge(stats: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, entropy, sum of squared probabilities and log-sum-exp of `[W, T, 5]`, merged in rank order."""
    stats = stats.contiguous()
    scored, entropies, squares, lse = (new_floats(stats, stats.shape[1]) for _ in range(4))
    native.stats_merge(stats, *stats.shape[:2], scored, entropies, squares, lse, stream_of(stats))
    return scored, entropies, squares, lse


@on_its_device
def policy_loss(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    spec: LossSpec,
    denominator: float | Tensor,
    entropy: Tensor | None,
    ref: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loss `[]`, metrics `[M]`, and the gradients of the log-probs and the entropies, `[T]`; one launch."""
    num, num_sequences = logprobs.shape[0], cu_seqlens.shape[0] - 1
    ref = ref if spec.kl != "none" else None
    options = native_spec(native, spec)
    counts = None  # the denominators on the device: their memory must outlive the launch
    if isinstance(denominator, torch.Tensor):
        counts = denominator.to(old.device, torch.float32).contiguous()
    has_many = counts is not None and counts.dim() == 1
    tokens = native.LossTokens(
        old_logprobs=old,
        advantages=advantages,
        loss_mask=mask,
        ref_logprobs=ref,
        weights=weights,
        denominator=None if has_many else counts,
        scalar_denominator=1.0 if counts is not None else float(denominator),
        denominators=counts if has_many else None,
    )
    loss, metrics, grad = new_floats(logprobs), new_floats(logprobs, len(METRIC_NAMES)), new_floats(logprobs, num)
    grad_entropy = None if entropy is None else new_floats(logprobs, num)
    partials = new_floats(logprobs, native.policy_loss_partials(options, num, num_sequences))
    native.policy_loss(
        options,
        tokens,
        logprobs,
        entropy,
        cu_seqlens,
        num,
        num_sequences,
        loss,
        metrics,
        grad,
        grad_entropy,
        partials,
        counter_on(logprobs.device),
        stream_of(logprobs),
    )
    return loss, metrics, grad, grad_entropy


@on_its_device
def scan_reverse(
    rewards: Tensor,
    values: Tensor | None,
    cu_seqlens: Tensor,
    loss_mask: Tensor | None,
    kind: str,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None,
    mask_mode: str,
    rho: Tensor | None,
    rho_clip: float,
    c_clip: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns `[T]`; one block per sequence."""
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    per_sequence = isinstance(lam, torch.Tensor)
    native.scan_reverse(
        rewards,
        values,
        loss_mask,
        rho,
        lam if per_sequence else None,
        bootstrap,
        cu_seqlens,
        cu_seqlens.shape[0] - 1,
        1.0 if per_sequence else float(lam),
        gamma,
        rho_clip,
        c_clip,
        [*SCAN_KINDS].index(kind),
        [*MASK_MODES].index(mask_mode),
        advantages,
        returns,
        stream_of(rewards),
    )
    return advantages, returns


@on_its_device
def group_norm(rewards: Tensor, group_ids: Tensor | None, cu_groups: Tensor | None, mode: str, eps: float) -> Tensor:
    """Group advantages `[B]`; one warp per group."""
    num = rewards.shape[0]
    order = None
    if group_ids is not None and num > MAX_SCATTERED:  # synchronizes: the number of groups is a shape
        order = torch.argsort(group_ids, stable=True)
        counts = torch.unique_consecutive(group_ids[order], return_counts=True)[1]
        cu_groups = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        rewards, group_ids = rewards[order], None
    advantages = torch.empty_like(rewards)
    native.group_norm(
        rewards,
        group_ids,
        cu_groups,
        num,
        0 if cu_groups is None else cu_groups.shape[0] - 1,
        [*GROUP_MODES].index(mode),
        eps,
        advantages,
        stream_of(rewards),
    )
    return advantages if order is None else torch.empty_like(advantages).index_copy_(0, order, advantages)


@on_its_device
def masked_moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared distances, float64 scalars."""
    return tuple(_moments(x, mask))  # pyright: ignore[reportReturnType]  # three rows


def _moments(x: Tensor, mask: Tensor | None) -> Tensor:
    found = torch.empty(3, dtype=torch.float64, device=x.device)
    partials = torch.empty(3 * native.moments_blocks(x.numel()), dtype=torch.float64, device=x.device)
    native.masked_moments(x, mask, x.numel(), found, partials, counter_on(x.device), stream_of(x))
    return found


@on_its_device
def whiten(
    x: Tensor, mask: Tensor | None, shift_mean: bool, eps: float, moments: tuple[Tensor, Tensor, Tensor] | None
) -> Tensor:
    """Whitened values, float32 of x's shape; 0 outside the mask."""
    found = _moments(x, mask) if moments is None else torch.stack([*moments]).to(x.device, torch.float64)
    out = torch.empty_like(x, dtype=torch.float32)
    native.whiten(x, mask, x.numel(), found, shift_mean, eps, out, stream_of(x))
    return out
