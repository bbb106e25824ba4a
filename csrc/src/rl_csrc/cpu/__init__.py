"""The CPU kernels behind the signature that all implementations share: tensors in, tensors out, torch allocates.

Arguments arrive checked: float32 and contiguous but for logits, hidden and weight; cu_seqlens int64; masks bool.
"""

from rl_csrc.cpu.kernels import (
    group_norm,
    logprob_stats,
    logprobs_backward,
    logprobs_forward,
    masked_moments,
    policy_loss,
    scan_reverse,
    stats_merge,
    whiten,
)
from rl_csrc.cpu.linear_logprobs import (
    linear_logprobs_backward,
    linear_logprobs_forward,
    linear_loss,
)

__all__ = [
    "group_norm",
    "linear_logprobs_backward",
    "linear_logprobs_forward",
    "linear_loss",
    "logprob_stats",
    "logprobs_backward",
    "logprobs_forward",
    "masked_moments",
    "policy_loss",
    "scan_reverse",
    "stats_merge",
    "whiten",
]
