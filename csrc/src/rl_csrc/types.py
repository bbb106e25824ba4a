"""Types of the ops: option names, metric names and results.

Legend: `T` tokens, `R` logit rows, `V` vocabulary, `H` hidden, `B` sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Loss = Literal["ppo", "gspo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "dro", "reinforce"]
Kl = Literal["none", "k1", "abs", "k2", "k3", "k1+", "k3+"]
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
ScanKind = Literal["gae", "returns", "td_lambda", "vtrace"]
MaskMode = Literal["hold", "compress", "zero", "none"]
GroupMode = Literal["grpo", "dr_grpo", "rloo"]

# The order of each tuple is the code of its values in the C interface.
LOSSES: tuple[Loss, ...] = ("ppo", "gspo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "dro", "reinforce")
KLS: tuple[Kl, ...] = ("none", "k1", "abs", "k2", "k3", "k1+", "k3+")
AGGREGATIONS: tuple[Aggregation, ...] = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
SCAN_KINDS: tuple[ScanKind, ...] = ("gae", "returns", "td_lambda", "vtrace")
MASK_MODES: tuple[MaskMode, ...] = ("hold", "compress", "zero", "none")
GROUP_MODES: tuple[GroupMode, ...] = ("grpo", "dr_grpo", "rloo")

METRIC_NAMES: tuple[str, ...] = (
    "policy_loss",  # aggregated as the loss is; adds up over micro-batches and ranks
    "kl_loss",  # aggregated as the loss is, before kl_coef
    "entropy",  # aggregated as the loss is, before entropy_coef; 0 where no entropy was given
    "num_tokens",  # masked tokens of this call; the entries below are sums over them
    "num_sequences",  # sequences of this call with at least one masked token
    "log_ratio",  # logprobs - old_logprobs
    "k3",  # exp(d) - 1 - d of the same
    "clipped_high",  # 1 where the upper bound took the gradient away (cispo: capped the weight)
    "clipped_low",  # the same, lower bound
    "clipped_dual",  # the same, dual clip
    "ratio",  # the importance ratio the loss used (gspo, gmpo: the sequence's)
    "ratio_squared",
)
NUM_STATS = 5  # per token: max, sum e, sum e*(z - max), sum e^2, label's z (-inf: in another shard; +inf: ignored)
K3_MAX = 10.0  # the KL estimator k3 is capped here, and has no gradient beyond it
LOG_RATIO_MAX = 20.0  # |logprobs - old_logprobs| is clamped here before exp; beyond it the ratio has no gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """Options of a policy loss: its formula, KL, entropy bonus, and how tokens are added up.

    Native kernels take them by these names (`include/rl_csrc/loss_spec.h`).
    """

    loss: Loss = "ppo"
    """ppo (1707.06347; clip-higher 2503.14476; dual 1912.09729), gspo (2507.18071), cispo (2506.13585), sapo
    (2511.20347), gmpo (2507.20673), dppo_tv and dppo_kl (2602.04879), dro, reinforce."""
    clip_low: float = 0.2
    """Lower clip distance: ratio 1 - clip_low; for gmpo of the log ratio; for dppo of the divergence."""
    clip_high: float = 0.2
    """Upper clip distance, the same units."""
    clip_dual: float = math.inf
    """Dual-clip constant c > 1 for negative advantages (ppo, gspo); infinity: off."""
    ratio_max: float = 20.0
    """dppo: cap c of the detached ratio."""
    tau_pos: float = 1.0
    """sapo: temperature where the advantage is positive."""
    tau_neg: float = 1.05
    """sapo: temperature elsewhere."""
    dro_beta: float = 0.1
    """dro: weight of the squared log ratio."""
    k3_max: float = K3_MAX
    """Cap of the KL estimators k3 and k3+ (10 as in verl: one token that the reference finds impossible must not
    outweigh the batch); infinity: off. k3 has no gradient beyond it."""
    kl: Kl = "none"
    """Estimator of the KL to the reference that is added to the loss; `+` has the gradient of k2."""
    kl_coef: float = 0.0
    """Its coefficient in the loss."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus (subtracted from the loss)."""
    aggregation: Aggregation = "token-mean"
    """Aggregation of per-token losses: token-* count tokens; seq-mean-* divides by the number of sequences, -norm also
    by `norm_constant`. A sequence without a masked token counts nowhere."""

    def fields(self) -> dict[str, float | int]:
        """Options by name as native kernels take them: strings become positions in `LOSSES`, `KLS`, `AGGREGATIONS`."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: _NAMES[name].index(value) if name in _NAMES else float(value) for name, value in values.items()}

    def numbers(self) -> list[float]:
        """Options as a list of floats in field order, which a torch.library schema can carry."""
        return [float(x) for x in self.fields().values()]

    @classmethod
    def of(cls, numbers: LossSpec | Sequence[float]) -> LossSpec:
        """Inverse of `numbers`; a `LossSpec` is returned as it is."""
        if isinstance(numbers, LossSpec):
            return numbers
        named = zip(cls.__slots__, numbers, strict=True)
        values: dict[str, Any] = {name: _NAMES[name][int(x)] if name in _NAMES else x for name, x in named}
        return cls(**values)


_NAMES: dict[str, tuple[str, ...]] = {"loss": LOSSES, "kl": KLS, "aggregation": AGGREGATIONS}


class LogProbs(NamedTuple):
    """Per-token statistics of a softmax."""

    logprobs: Tensor
    """`[T]` float32, log-probability of the label; 0 where the label is ignored."""
    entropy: Tensor | None
    """`[T]` float32, entropy in nats; 0 where the label is ignored; None unless asked for."""
    sum_pi_squared: Tensor | None
    """`[T]` float32, sum of the squared probabilities; carries no gradient; None unless asked for."""


class LinearLoss(NamedTuple):
    """Loss under an LM head, with the log-probs and entropies of its tokens."""

    loss: Tensor
    """`[]`, the value of the loss function; differentiable in the head and the hidden states."""
    logprobs: Tensor
    """`[T]` float32, detached."""
    entropy: Tensor | None
    """`[T]` float32, detached; None unless asked for."""


class PolicyLoss(NamedTuple):
    """Policy loss with its metrics."""

    loss: Tensor
    """`[]` float32, to minimise."""
    metrics: Tensor
    """`[M]` float32 in the order of `METRIC_NAMES`; every entry adds up over micro-batches and ranks."""


class Scan(NamedTuple):
    """Advantages and returns of a backward recurrence over packed sequences."""

    advantages: Tensor
    """`[T]` float32."""
    returns: Tensor
    """`[T]` float32, the target of the value function."""


class Moments(NamedTuple):
    """Count, mean and centred second moment of the masked values; merges exactly over ranks."""

    num: Tensor
    """`[]` float64, number of masked values."""
    mean: Tensor
    """`[]` float64; 0 where there are none."""
    m2: Tensor
    """`[]` float64, sum of squared distances from the mean."""

    @property
    def variance(self) -> Tensor:
        """`[]` float64, unbiased variance; 0 for fewer than two values."""
        return self.m2 / (self.num - 1).clamp(min=1)
