"""Public ops: log-probs, policy losses, advantages. Each module has the checks, schema, gradient and documentation."""

from rl_csrc.ops.advantages import group_norm, masked_moments, scan_reverse, whiten
from rl_csrc.ops.linear_logprobs import linear_logprobs, linear_loss
from rl_csrc.ops.logprobs import logprob_stats, logprobs, parallel_logprobs, stats_merge
from rl_csrc.ops.policy_loss import policy_loss

__all__ = [
    "group_norm",
    "linear_logprobs",
    "linear_loss",
    "logprob_stats",
    "logprobs",
    "masked_moments",
    "parallel_logprobs",
    "policy_loss",
    "scan_reverse",
    "stats_merge",
    "whiten",
]
