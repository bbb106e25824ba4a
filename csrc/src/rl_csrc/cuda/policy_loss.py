"""Policy losses, of log-probs and of rows of logits with their gradient in the same pass."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from rl_csrc.cuda.launch import DTYPES, counter_on, native, new_floats, on_its_device, row_stride_of, stream_of
from rl_csrc.cuda.logprobs import logits_arguments
from rl_csrc.types import METRIC_NAMES

if TYPE_CHECKING:
    from torch import Tensor

    from rl_csrc.reference import LossSpec


@lru_cache(maxsize=64)
def _spec(spec: LossSpec) -> Any:
    """The struct `rl_loss_spec`: made once for each set of options."""
    return native.LossSpec(**spec.fields())


def token_arguments(
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref: Tensor | None,
    weights: Tensor | None,
    denominator: float | Tensor,
) -> tuple[Any, Tensor | None]:
    """The per-token inputs, and the denominators on the device they point to, which must outlive the launch call."""
    counts = None
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
    return tokens, counts


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
    options = _spec(spec)
    tokens, _scalar = token_arguments(old, advantages, mask, ref, weights, denominator)
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


def token_scale(spec: LossSpec, mask: Tensor, cu_seqlens: Tensor) -> Tensor | None:
    """`[T]` weight of a token within its sequence, for the aggregation that has one."""
    if spec.aggregation != "seq-mean-token-mean":
        return None
    running = torch.zeros(mask.shape[0] + 1, dtype=torch.int64, device=mask.device)
    torch.cumsum(mask, 0, out=running[1:])
    counts = running[cu_seqlens].diff().clamp(min=1)
    sequence = torch.repeat_interleave(cu_seqlens.diff(), output_size=mask.shape[0])
    return 1.0 / counts[sequence].float()


def fused_rows(
    logits: Tensor,
    labels: Tensor,
    spec: LossSpec,
    tokens: Any,
    temperature: float | Tensor,
    softcap: float | None,
    row_index: Tensor | None,
    token_scale: Tensor | None,
    scored: Tensor,
    entropies: Tensor | None,
    out: Tensor,
) -> bool:
    """Fill `scored`, `entropies` and `out`; False, and nothing done, where a row does not fit on the chip."""
    return native.policy_loss_from_logits(
        logits_arguments(logits, labels, temperature, softcap, -100, row_index),
        _spec(spec),
        tokens,
        scored,
        entropies,
        out,
        row_stride_of(out),
        DTYPES[out.dtype],
        token_scale,
        stream_of(logits),
    )
