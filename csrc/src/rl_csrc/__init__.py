"""Fused RL kernels, zero-copy tensor frames and transfer buffers, shared by the packages of rl-stack."""

from rl_csrc import ipc, reference
from rl_csrc._copy_ops import bucket_copy, cp_slice, pack, roll_labels, unpack
from rl_csrc._estimator_ops import group_norm, masked_moments, scan_reverse, whiten
from rl_csrc._policy_ops import policy_loss, policy_loss_from_hidden, policy_loss_from_logits
from rl_csrc._softmax_ops import linear_logprobs, logprob_stats, logprobs, parallel_logprobs, stats_merge
from rl_csrc.buffers import bucket, delta, frames, rows
from rl_csrc.buffers.digest import digest, digest_finish, digest_many, digest_sum
from rl_csrc.build import BuildInfo, build_info
from rl_csrc.errors import (
    ArgumentError,
    DeadlineError,
    DeltaError,
    FrameError,
    LabelError,
    PeerDiedError,
    RlCsrcError,
)
from rl_csrc.inference import decoder, paged, sampling
from rl_csrc.types import METRIC_NAMES, LogProbs, Moments, Packed, PolicyLoss, PolicyLossFromLogits, Scan

__all__ = [
    "METRIC_NAMES",
    "ArgumentError",
    "BuildInfo",
    "DeadlineError",
    "DeltaError",
    "FrameError",
    "LabelError",
    "LogProbs",
    "Moments",
    "Packed",
    "PeerDiedError",
    "PolicyLoss",
    "PolicyLossFromLogits",
    "RlCsrcError",
    "Scan",
    "bucket",
    "bucket_copy",
    "build_info",
    "cp_slice",
    "decoder",
    "delta",
    "digest",
    "digest_finish",
    "digest_many",
    "digest_sum",
    "frames",
    "group_norm",
    "ipc",
    "linear_logprobs",
    "logprob_stats",
    "logprobs",
    "masked_moments",
    "pack",
    "paged",
    "parallel_logprobs",
    "policy_loss",
    "policy_loss_from_hidden",
    "policy_loss_from_logits",
    "reference",
    "roll_labels",
    "rows",
    "sampling",
    "scan_reverse",
    "stats_merge",
    "unpack",
    "whiten",
]
