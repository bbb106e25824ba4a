"""Policy losses: their registry, and those that are plain torch, each a `compute` as a user's would be.

One of your own is a `PolicyLoss` with a `compute`, named in the entry point group `rl_trainer.policy_losses`; those
without are formulas of `rl_csrc.policy_loss`. Legend: `T` tokens (packed), `B` rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rl_trainer.algorithms import distillation
from rl_trainer.algorithms.aggregation import LOG_MAX, row_of, row_sums
from rl_trainer.errors import ConfigError, PlanError
from rl_trainer.plugins import named, reads_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from rl_trainer.config.schema import AlgorithmConfig

GROUP = "rl_trainer.policy_losses"
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
"""The importance ratio is clipped at 1 - clip_low and 1 + clip_high; of gmpo its logarithm, of dppo the divergence."""
CLIP_DUAL, NO_CLIP_DUAL = {"clip_dual": 3.0}, {"clip_dual": 0.0}
"""Bound on the ratio for negative advantages; 0 turns it off, as it is for losses whose papers have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossInput:
    """Input of a policy loss: log-probs, advantages, masks and columns of a micro-batch."""

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
    rollout_logprobs: Tensor
    """(T,) of the sampler."""
    entropy: Tensor | None = None
    """(T,) of the policy, with gradient; None unless `algorithm.entropy_coef` has it computed."""
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    """Columns of this micro-batch that `reads` names: (T,) of ragged ones such as `ref_logprobs` and `values`, (B, ...)
    of others such as `group_id`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A registered policy loss and what has to be known before a run starts."""

    source: str
    """arXiv number or other reference."""
    options: Mapping[str, float] = field(default_factory=dict[str, float])
    """Keys of `algorithm.loss_options` with their defaults."""
    selects_tokens: bool = False
    """Whether it treats some tokens apart that are chosen over the whole batch: see `selection.select_tokens`."""
    has_ratio: bool = True
    """Whether it weighs tokens by the policy's ratio to the old one. One that does not takes the weights of
    `algorithm.correction` where the sampler's log-probs are the old ones."""
    is_to_sampler: bool = False
    """Whether its ratio is that to the sampler whatever `algorithm.old_logprobs`, so that it may learn from tokens of
    older weights as it is, and has no use for `algorithm.correction`."""
    is_token_local: bool = False
    """Whether its gradient at a token depends on that token's log-prob (and entropy) alone: the engine may then make it
    in one pass over the logits. See `rl_engine.base.LossFunction`."""
    scales_with_advantage: bool = False
    """Whether a token's loss is its advantage times something, so that a row without advantages has no gradient, and
    needs no backward pass."""
    compute: Callable[[PolicyLossInput], Tensor] | None = None
    """(T,) loss of each token, to minimise; None: `rl_csrc.policy_loss` has it. Aggregation, rollout correction, KL and
    entropy are added to it as to the others."""
    reads: tuple[str, ...] = ()
    """Columns of the queue that `compute` reads in addition to those it always has: of the rollouts, of stages, and
    of the reference and the critic if there are any."""


def ratio_to_sampler(loss: PolicyLossInput) -> Tensor:
    """(T,) probability of a token's whole completion under the policy over that under the sampler, without gradient."""
    rows = row_of(loss.cu_seqlens, loss.loss_mask.numel())
    delta = torch.where(loss.loss_mask, loss.logprobs.detach() - loss.rollout_logprobs, 0.0)
    return row_sums(delta, rows, loss.cu_seqlens)[rows].clamp(max=LOG_MAX).exp()


def vespo(loss: PolicyLossInput) -> Tensor:
    """-phi(W) A logprob, phi(W) = W^k exp(lambda (1 - W)) of the completion's ratio W: arXiv 2602.10693, appendix I.

    k and lambda are `k_pos` and `lambda_pos` where the advantage is 0 or more, else `k_neg` and `lambda_neg`.
    """
    ratio, is_positive = ratio_to_sampler(loss), loss.advantages >= 0
    k, lam = (
        torch.where(is_positive, loss.options[f"{name}_pos"], loss.options[f"{name}_neg"]) for name in ("k", "lambda")
    )
    return -(lam + k * ratio.log() - lam * ratio).exp() * loss.advantages * loss.logprobs


def topr(loss: PolicyLossInput) -> Tensor:
    """-A logprob, times min(W, 1) where A < 0, of the completion's ratio W: tapered REINFORCE, arXiv 2503.14286."""
    weight = torch.where(loss.advantages < 0, ratio_to_sampler(loss).clamp(max=1.0), 1.0)
    return -weight * loss.advantages * loss.logprobs


def ce_gppo(loss: PolicyLossInput) -> Tensor:
    """-A rho, and beyond the clip bound that ends ppo's gradient -A beta bound rho / sg(rho): arXiv 2509.20712.

    A token that ppo would clip keeps a gradient: `beta_low` (1 - clip_low) of it where the ratio fell with A < 0,
    `beta_high` (1 + clip_high) where it rose with A > 0.
    """
    options = loss.options
    ratio = (loss.logprobs - loss.old_logprobs).clamp(-LOG_MAX, LOG_MAX).exp()
    low, high = 1 - options["clip_low"], 1 + options["clip_high"]
    alone = ratio / ratio.detach()  # 1, with the gradient of the log-prob
    kept = torch.where((ratio < low) & (loss.advantages < 0), options["beta_low"] * low * alone, ratio)
    kept = torch.where((ratio > high) & (loss.advantages > 0), options["beta_high"] * high * alone, kept)
    return -loss.advantages * kept


def m2po(loss: PolicyLossInput) -> Tensor:
    """-A rho of the ratio to the sampler, but for the selected tokens, which get no gradient: arXiv 2510.01161.

    Left out are the tokens by which the second moment of the log ratio exceeds `m2_max`: `selection.beyond_moment`.
    """
    ratio = (loss.logprobs - loss.rollout_logprobs).clamp(max=LOG_MAX).exp()
    return torch.where(loss.columns["selected"].bool(), 0.0, -loss.advantages * ratio)


def luffy(loss: PolicyLossInput) -> Tensor:
    """Ppo for what was sampled; -A p / (p + gamma) of the probability p for what was given: LUFFY, arXiv 2504.14945.

    Given completions are those of `batch.given`; as in the paper their own policy is taken as sure of them.
    """
    options, p = loss.options, loss.logprobs.exp()
    is_given = loss.columns["is_given"].bool()[row_of(loss.cu_seqlens, p.numel())]
    ratio = (loss.logprobs - loss.old_logprobs).clamp(-LOG_MAX, LOG_MAX).exp()
    clipped = ratio.clamp(1 - options["clip_low"], 1 + options["clip_high"])
    sampled = -torch.minimum(loss.advantages * ratio, loss.advantages * clipped)
    return torch.where(is_given, -loss.advantages * p / (p + options["gamma"]), sampled)


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(
        source="1707.06347; clip-higher 2503.14476; dual clip 1912.09729",
        is_token_local=True,
        scales_with_advantage=True,
        options=CLIP | CLIP_DUAL,
    ),
    "gspo": PolicyLoss(
        source="2507.18071", scales_with_advantage=True, options={"clip_low": 3e-4, "clip_high": 4e-4} | NO_CLIP_DUAL
    ),
    "cispo": PolicyLoss(
        source="2506.13585",
        is_token_local=True,
        scales_with_advantage=True,
        options={"clip_low": 1.0, "clip_high": 0.28},
    ),
    "sapo": PolicyLoss(
        source="2511.20347", is_token_local=True, scales_with_advantage=True, options={"tau_pos": 1.0, "tau_neg": 1.05}
    ),
    "gmpo": PolicyLoss(source="2507.20673", scales_with_advantage=True, options={"clip_low": 0.4, "clip_high": 0.4}),
    **{
        name: PolicyLoss(
            source="2602.04879", is_token_local=True, scales_with_advantage=True, options=CLIP | {"ratio_max": 20.0}
        )
        for name in ("dppo_tv", "dppo_kl")
    },
    "dro": PolicyLoss(source="2405.19107", is_token_local=True, options={"dro_beta": 0.1}),
    "reinforce": PolicyLoss(
        source="Williams 1992; GPG 2504.02546", is_token_local=True, scales_with_advantage=True, has_ratio=False
    ),
    "clip_cov": PolicyLoss(
        source="2505.22617",
        is_token_local=True,
        scales_with_advantage=True,
        options=CLIP | NO_CLIP_DUAL | {"share": 0.0002, "low": 1.0, "high": 5.0},
        selects_tokens=True,
    ),
    distillation.ALONE: PolicyLoss(source="2306.13649; the teacher alone (`teacher`)", is_token_local=True),
    "kl_cov": PolicyLoss(
        source="2505.22617", is_token_local=True, options={"share": 0.0002, "kl_coef": 1.0}, selects_tokens=True
    ),
    "ce_gppo": PolicyLoss(
        source="2509.20712",
        is_token_local=True,
        options={"clip_low": 0.2, "clip_high": 0.28, "beta_low": 0.75, "beta_high": 1.0},
        scales_with_advantage=True,
        compute=ce_gppo,
    ),
    "luffy": PolicyLoss(
        source="2504.14945; with `batch.given`",
        is_token_local=True,
        options=CLIP | {"gamma": 0.1},
        scales_with_advantage=True,
        compute=luffy,
        reads=("is_given",),
    ),
    "m2po": PolicyLoss(
        source="2510.01161",
        is_token_local=True,
        options={"m2_max": 0.04},
        selects_tokens=True,
        is_to_sampler=True,
        scales_with_advantage=True,
        compute=m2po,
        reads=("selected",),
    ),
    "topr": PolicyLoss(source="2503.14286", is_to_sampler=True, scales_with_advantage=True, compute=topr),
    "vespo": PolicyLoss(
        source="2602.10693",
        options={"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
        is_to_sampler=True,
        scales_with_advantage=True,
        compute=vespo,
    ),
}


def loss_named(name: str) -> PolicyLoss:
    """The policy loss that `algorithm.loss` names: see `rl_trainer.plugins`.

    Raises:
        ConfigError: there is none of that name; lists what there is.
    """
    return named(
        name,
        POLICY_LOSSES,
        group=GROUP,
        kind=PolicyLoss,
        key="algorithm.loss",
        make=lambda compute: PolicyLoss(
            source=compute.__name__,
            compute=compute,
            reads=reads_of(compute),
            is_token_local=bool(getattr(compute, "is_token_local", False)),
        ),
    )


_NOT_NEGATIVE = ("clip_low", "clip_high", "kl_coef", "dro_beta", "beta_low", "beta_high", "k_pos", "k_neg")
_POSITIVE = ("tau_pos", "tau_neg", "ratio_max", "m2_max", "gamma", "lambda_pos", "lambda_neg")
_MEANT: dict[str, tuple[Callable[[float], bool], str]] = {
    **{name: (lambda value: value >= 0, "0 or more") for name in _NOT_NEGATIVE},
    **{name: (lambda value: value > 0, "above 0") for name in _POSITIVE},
    "clip_dual": (lambda value: value == 0 or value > 1, "0 (off), or above 1"),
}
"""Check of a value, and the values allowed, for each option of the losses that ship."""


def check_loss(algorithm: AlgorithmConfig) -> None:
    """Check the options of the chosen loss.

    Raises:
        ConfigError: the loss or an option of it does not exist.
        PlanError: a value that cannot be meant.
    """
    loss = loss_named(algorithm.loss)
    for name in algorithm.loss_options:
        if name not in loss.options:
            raise ConfigError(
                f"algorithm.loss_options.{name} is not read by algorithm.loss={algorithm.loss}; its options are: "
                f"{', '.join(loss.options) or 'none'}"
            )
    options = {**loss.options, **algorithm.loss_options}
    for name, (is_meant, wanted) in _MEANT.items() if algorithm.loss in POLICY_LOSSES else ():
        if name in options and not is_meant(value := options[name]):
            raise PlanError(f"algorithm.loss_options.{name}={value:g} cannot be meant; it has to be {wanted}")
    if "share" in options and algorithm.loss in POLICY_LOSSES and not 0 < options["share"] <= 1:
        raise PlanError(f"algorithm.loss_options.share={options['share']:g} is a share of the tokens; give 0 to 1")
