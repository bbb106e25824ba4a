"""Keys of `algorithm` and `staleness`: what is optimised, and on how old samples."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - pydantic reads the annotations
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from rl_trainer.config._types import AggregationName, Bounds, Positive  # noqa: TC001 - so it does these

Correction = Literal["none", "tis", "icepop", "sequence_tis", "sequence_icepop"]
Rejection = Literal[
    "none",
    "token_k1", "token_k2", "token_k3",
    "sequence_k1", "sequence_k2", "sequence_k3",
    "sequence_mean_k1", "sequence_mean_k2", "sequence_mean_k3",
    "sequence_max_k1", "sequence_max_k2", "sequence_max_k3",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaSection:
    """How fast the reference of the KL follows the policy."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Of its weights that the reference keeps each time; the rest becomes the policy's. 0 sets it to the policy."""
    every: Positive = 1
    """Training steps between two times; each writes and reads the model once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """What is optimised."""

    advantage: str = "grpo"
    """Registered advantage estimator."""
    loss: str = "ppo"
    """Registered policy loss."""
    loss_options: Mapping[str, float] = field(default_factory=dict)
    """What that loss reads, such as {clip_low: 0.2, clip_high: 0.28, clip_dual: 3.0} with loss=ppo; ALGORITHMS.md lists
    them with the values that they have otherwise."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per model token, of the estimators that look ahead."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Lambda of advantage=gae and vtrace."""
    aggregation: AggregationName = "token-mean"
    """How token losses become one number, the critic's too; seq-mean-token-sum-norm divides by
    rollout.max_new_tokens."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty against the frozen start policy; 0 starts no reference."""
    kl_in_reward: bool = False
    """Take the penalty off the rewards, token by token, instead of adding it to the loss."""
    kl_target: Annotated[float, Field(ge=0)] = 0.0
    """KL per token that the coefficient is steered to (arXiv 1909.08593); only with kl_in_reward; 0 keeps the
    coefficient."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    """Estimator of that KL; in the loss `+` takes the gradient of k2."""
    ref_ema: EmaSection | None = None
    """The reference follows the policy; None keeps the start policy."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """`recompute`: by the engine before the update, in a pass of its own unless there is one mini-batch, whose update
    tells them; `rollout`: take the sampler's."""
    correction: Correction = "none"
    """Weight of a token for the sampler's differing probabilities: `tis` truncates the ratio engine / sampler at the
    upper bound, `icepop` drops what is outside the bounds; the ratio is the token's own, or its whole completion's
    (`sequence_tis`, `sequence_icepop`). With old_logprobs=rollout the engine's side is the policy under update, and the
    loss one without a ratio of its own, such as reinforce."""
    correction_bounds: Bounds | None = None
    """Of that ratio, [low, high]; None: [0.5, 2], for tis [0, 2]."""
    rejection: Rejection = "none"
    """Leave out tokens, or whole completions (by the sum, mean or largest of their tokens), whose probabilities differ
    too much between engine and sampler: LEVEL_DIVERGENCE, such as token_k1 or sequence_mean_k3. k1 bounds the ratio
    engine / sampler on both sides, k2 and k3 are distances. They lose every term of the loss: policy, KL, entropy,
    teacher. With old_logprobs=rollout the engine's side is the policy under update."""
    rejection_bounds: Bounds | None = None
    """Of the ratio or the distance, [low, high]; None: [0.5, 2], for distances [0, 2]."""
    rejection_counts: Literal["before", "after"] = "before"
    """Which tokens and completions the aggregation's means divide by: those of the mini-batch `before` rejection, so
    that a token's weight does not depend on what else was rejected, or those left `after` it (with
    old_logprobs=recompute, in a pass of its own)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessSection:
    """How far generation may run ahead, with `pipeline=fully_async`."""

    policy: str = "admission"
    """What staleness means: `admission`, `oldest_token`, `group_age`, `batch_ratio`, `queue_length`,
    `threshold_fraction`, or one that is installed."""
    max_staleness: Annotated[float, Field(ge=0)] = 1
    """In weight versions; with batch_ratio and queue_length in batches; with threshold_fraction a share of a batch."""
