"""The CPU kernels behind the signature that all implementations share: tensors in, tensors out, torch allocates.

Arguments arrive checked: float32 and contiguous but for logits, hidden and weight; cu_seqlens int64; masks bool.
"""

from rl_csrc._impl_cpu.copies import bucket_copy, cp_slice, pack, roll_labels, unpack
from rl_csrc._impl_cpu.estimators import group_norm, masked_moments, scan_reverse, whiten
from rl_csrc._impl_cpu.head import (
    linear_logprobs_backward,
    linear_logprobs_forward,
    policy_loss_from_hidden,
)
from rl_csrc._impl_cpu.policy import policy_loss, policy_loss_from_logits
from rl_csrc._impl_cpu.softmax import logprob_stats, logprobs_backward, logprobs_forward, stats_merge

__all__ = [
    "bucket_copy",
    "cp_slice",
    "group_norm",
    "linear_logprobs_backward",
    "linear_logprobs_forward",
    "logprob_stats",
    "logprobs_backward",
    "logprobs_forward",
    "masked_moments",
    "pack",
    "policy_loss",
    "policy_loss_from_hidden",
    "policy_loss_from_logits",
    "roll_labels",
    "scan_reverse",
    "stats_merge",
    "unpack",
    "whiten",
]
