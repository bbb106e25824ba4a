"""CUDA kernels of the ops: checked tensors in, new tensors out, launched on torch's current stream.

Functions have the signatures of `rl_csrc.cpu`. torch allocates all memory. Unless a docstring says otherwise, no call
synchronizes with the device, and every call may be captured in a CUDA graph. Legend: `T` tokens, `R` logit
rows, `V` vocabulary, `H` hidden, `B` sequences.
"""

from rl_csrc.cuda.digest_delta import bucket_copy, delta_apply, delta_encode, digest_many, digest_sum, digest_sum_async
from rl_csrc.cuda.inference import add_norm, draw, gated, paged_attention, rotate_to_pages
from rl_csrc.cuda.kernels import (
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
from rl_csrc.cuda.linear_logprobs import linear_logprobs_backward, linear_logprobs_forward, linear_loss

__all__ = [
    "add_norm",
    "bucket_copy",
    "delta_apply",
    "delta_encode",
    "digest_many",
    "digest_sum",
    "digest_sum_async",
    "draw",
    "gated",
    "group_norm",
    "linear_logprobs_backward",
    "linear_logprobs_forward",
    "linear_loss",
    "logprob_stats",
    "logprobs_backward",
    "logprobs_forward",
    "masked_moments",
    "paged_attention",
    "policy_loss",
    "rotate_to_pages",
    "scan_reverse",
    "stats_merge",
    "whiten",
]
