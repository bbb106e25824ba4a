"""CPU kernels of the ops: tensors in, new tensors out, with the signatures of `rl_csrc.cuda` and `rl_csrc.reference`.

Arguments arrive checked: float32 and contiguous except logits, hidden and weight; cu_seqlens int64; masks bool.
"""

from rl_csrc.cpu.kernels import (
    group_norm,
    linear_logprobs_backward,
    linear_logprobs_forward,
    linear_loss,
    logprob_stats,
    logprobs_backward,
    logprobs_forward,
    masked_moments,
    policy_loss,
    scan_reverse,
    stats_merge,
    whiten,
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
