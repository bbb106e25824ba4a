"""Plain-torch reference of every op: the fallback without a kernel, and the oracle of kernel tests.

Runs on any device, in float32 or (where the input is float64) float64. Functions have the signatures of `rl_csrc.cpu`
and `rl_csrc.cuda`, and take checked arguments; `logprobs`, `linear_logprobs` and `differentiable_policy_loss` are
differentiable by torch's own autograd.
"""

from rl_csrc.reference.advantages import group_norm, masked_moments, scan_reverse, whiten
from rl_csrc.reference.logprobs import (
    Gather,
    TokenLoss,
    check_labels,
    coarse_kl,
    linear_logprobs,
    linear_logprobs_backward,
    linear_logprobs_forward,
    linear_loss,
    logprob_stats,
    logprobs,
    logprobs_backward,
    logprobs_forward,
    stats_merge,
)
from rl_csrc.reference.policy_loss import differentiable_policy_loss, policy_loss

__all__ = [
    "Gather",
    "TokenLoss",
    "check_labels",
    "coarse_kl",
    "differentiable_policy_loss",
    "group_norm",
    "linear_logprobs",
    "linear_logprobs_backward",
    "linear_logprobs_forward",
    "linear_loss",
    "logprob_stats",
    "logprobs",
    "logprobs_backward",
    "logprobs_forward",
    "masked_moments",
    "policy_loss",
    "scan_reverse",
    "stats_merge",
    "whiten",
]
