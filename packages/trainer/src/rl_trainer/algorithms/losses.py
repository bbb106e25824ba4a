"""The registry of policy losses. Formulas are in `rl_csrc.policy_loss`, of some in `selection` and `distillation`.

One of your own is a `PolicyLoss` with a `compute`, named in the entry point group `rl_trainer.policy_losses`. Legend:
`T` tokens (packed), `B` rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rl_trainer.algorithms.distillation import ALONE
from rl_trainer.algorithms.plugins import named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

GROUP = "rl_trainer.policy_losses"
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
"""The importance ratio is clipped at 1 - clip_low and 1 + clip_high; of gmpo its logarithm, of dppo the divergence."""
CLIP_DUAL, NO_CLIP_DUAL = {"clip_dual": 3.0}, {"clip_dual": 0.0}
"""Bound on the ratio for negative advantages; 0 turns it off, as it is for losses whose papers have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossInput:
    """What a policy loss of one's own is given."""

    logprobs: Tensor
    """(T,) of the policy that is being updated, with gradient."""
    old_logprobs: Tensor
    """(T,) of the policy before the update."""
    advantages: Tensor
    """(T,)."""
    loss_mask: Tensor
    """(T,) bool, true where the model wrote the token; nothing else is aggregated."""
    cu_seqlens: Tensor
    """(B + 1,) int64 row offsets into T."""
    options: Mapping[str, float]
    """`algorithm.loss_options` over the loss's own defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A registered policy loss and what has to be known before a run starts."""

    source: str
    """arXiv number or other reference."""
    options: Mapping[str, float] = field(default_factory=dict[str, float])
    """What `algorithm.loss_options` may hold, and the values it has otherwise."""
    selects_tokens: bool = False
    """Whether it treats some tokens apart that are chosen over the whole batch: see `selection`."""
    has_ratio: bool = True
    """Whether it weighs tokens by the policy's ratio to the old one. One that does not takes the weights of
    `algorithm.correction` where the sampler's log-probs are the old ones."""
    compute: Callable[[PolicyLossInput], Tensor] | None = None
    """(T,) loss of each token, to minimise; None: `rl_csrc.policy_loss` has it. Aggregation, rollout correction, KL and
    entropy are added to it as to the others."""


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(source="1707.06347; clip-higher 2503.14476; dual clip 1912.09729", options=CLIP | CLIP_DUAL),
    "gspo": PolicyLoss(source="2507.18071", options={"clip_low": 3e-4, "clip_high": 4e-4} | NO_CLIP_DUAL),
    "cispo": PolicyLoss(source="2506.13585", options={"clip_low": 1.0, "clip_high": 0.28}),
    "sapo": PolicyLoss(source="2511.20347", options={"tau_pos": 1.0, "tau_neg": 1.05}),
    "gmpo": PolicyLoss(source="2507.20673", options={"clip_low": 0.4, "clip_high": 0.4}),
    "dppo_tv": PolicyLoss(source="2602.04879", options=CLIP | {"ratio_max": 20.0}),
    "dppo_kl": PolicyLoss(source="2602.04879", options=CLIP | {"ratio_max": 20.0}),
    "dro": PolicyLoss(source="2405.19107", options={"dro_beta": 0.1}),
    "reinforce": PolicyLoss(source="Williams 1992; GPG 2504.02546", has_ratio=False),
    "clip_cov": PolicyLoss(
        source="2505.22617",
        options=CLIP | NO_CLIP_DUAL | {"share": 0.0002, "low": 1.0, "high": 5.0},
        selects_tokens=True,
    ),
    ALONE: PolicyLoss(source="2306.13649; the teacher alone (`teacher`)"),
    "kl_cov": PolicyLoss(source="2505.22617", options={"share": 0.0002, "kl_coef": 1.0}, selects_tokens=True),
}


def loss_named(name: str) -> PolicyLoss:
    """A shipped or installed policy loss.

    Raises:
        ConfigError: there is none of that name; lists what there is.
    """
    return named(name, POLICY_LOSSES, group=GROUP, kind=PolicyLoss, key="algorithm.loss")
