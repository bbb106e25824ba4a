"""Fused RL kernels, zero-copy tensor frames and transfer buffers, shared by the packages of rl-stack."""

from rl_csrc import ipc, reference
from rl_csrc.buffers import bucket, delta, frames, rows
from rl_csrc.buffers.bucket import bucket_copy
from rl_csrc.buffers.digest import digest, digest_finish, digest_many, digest_sum
from rl_csrc.errors import (
    ArgumentError,
    DeadlineError,
    DeltaError,
    FolderInUseError,
    FrameError,
    LabelError,
    PeerDiedError,
    RlCsrcError,
)
from rl_csrc.inference import decoder, paged, sampling
from rl_csrc.lock import hold_lock
from rl_csrc.ops import (
    group_norm,
    linear_logprobs,
    linear_loss,
    logprob_stats,
    logprobs,
    masked_moments,
    parallel_logprobs,
    policy_loss,
    scan_reverse,
    stats_merge,
    whiten,
)
from rl_csrc.reference import coarse_kl
from rl_csrc.types import METRIC_NAMES, LinearLoss, LogProbs, LossSpec, Moments, PolicyLoss, Scan

__all__ = [
    "METRIC_NAMES",
    "ArgumentError",
    "DeadlineError",
    "DeltaError",
    "FolderInUseError",
    "FrameError",
    "LabelError",
    "LinearLoss",
    "LogProbs",
    "LossSpec",
    "Moments",
    "PeerDiedError",
    "PolicyLoss",
    "RlCsrcError",
    "Scan",
    "bucket",
    "bucket_copy",
    "coarse_kl",
    "decoder",
    "delta",
    "digest",
    "digest_finish",
    "digest_many",
    "digest_sum",
    "frames",
    "group_norm",
    "hold_lock",
    "ipc",
    "linear_logprobs",
    "linear_loss",
    "logprob_stats",
    "logprobs",
    "masked_moments",
    "paged",
    "parallel_logprobs",
    "policy_loss",
    "reference",
    "rows",
    "sampling",
    "scan_reverse",
    "stats_merge",
    "whiten",
]
