"""Plain-torch path of every op: the fallback where there is no kernel, and the oracle of the tests.

Runs on any device, in float32 or (where the input is float64) float64, and is differentiable by torch's own autograd.
Arguments are taken as checked: the public ops in `rl_csrc` check them first.
"""

from rl_csrc.reference.advantages import group_norm, masked_moments, scan_reverse, whiten
from rl_csrc.reference.logprobs import (
    check_labels,
    compute_dtype,
    linear_logprobs,
    logprob_stats,
    logprobs,
    logprobs_backward,
    stats_merge,
)
from rl_csrc.reference.policy_loss import policy_loss
from rl_csrc.reference.ragged import bucket_copy, cp_slice, pack, roll_labels, unpack

__all__ = [
    "bucket_copy",
    "check_labels",
    "compute_dtype",
    "cp_slice",
    "group_norm",
    "linear_logprobs",
    "logprob_stats",
    "logprobs",
    "logprobs_backward",
    "masked_moments",
    "pack",
    "policy_loss",
    "roll_labels",
    "scan_reverse",
    "stats_merge",
    "unpack",
    "whiten",
]
