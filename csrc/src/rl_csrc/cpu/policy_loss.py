"""Policy losses of log-probs, with their gradient."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_csrc.cpu.memory import native, new_floats
from rl_csrc.types import METRIC_NAMES

if TYPE_CHECKING:
    from rl_csrc.reference import LossSpec


@lru_cache(maxsize=64)
def _native_spec(spec: LossSpec) -> Any:
    """The struct `rl_loss_spec`: made once for each set of options."""
    return native.LossSpec(**spec.fields())


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
    """Loss `[]`, metrics `[M]`, and the gradients of logprobs and entropy `[T]`."""
    num = logprobs.shape[0]
    loss, metrics, grad = new_floats(), new_floats(len(METRIC_NAMES)), new_floats(num)
    grad_entropy = None if entropy is None else new_floats(num)
    native.policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        loss_mask,
        cu_seqlens,
        ref_logprobs,
        weights,
        entropy,
        denominator if isinstance(denominator, torch.Tensor) and denominator.dim() == 1 else float(denominator),
        _native_spec(spec),
        loss,
        metrics,
        grad,
        grad_entropy,
        torch.get_num_threads(),
    )
    return loss, metrics, grad, grad_entropy
