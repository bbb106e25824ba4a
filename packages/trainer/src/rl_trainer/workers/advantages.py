"""Advantages of a batch: the columns that its estimator, loss and KL read, and those that are written.

Legend: `T` tokens (packed), `B` rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from rl_trainer.algorithms import AdvantageInput, compute_advantages, estimator_named, loss_named
from rl_trainer.algorithms.advantages import FIELDS, value_scan
from rl_trainer.algorithms.kl_controller import estimate_kl
from rl_trainer.algorithms.rollout_correction import configured_weights
from rl_trainer.algorithms.selection import beyond_moment, high_entropy, select_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensordict import TensorDict
    from torch import Tensor

    from rl_trainer.algorithms.advantages import BatchRanks
    from rl_trainer.config.schema import AlgorithmConfig

OLD_ENTROPY = "old_entropy"
"""Column of the entropy of the policy before the update."""
_OLD = {"recompute": "old_logprobs", "rollout": "rollout_logprobs"}
"""Column of the policy before the update, by `algorithm.old_logprobs`."""
_DERIVED = ("logprobs", "ratio")
"""Fields of `AdvantageInput` that are computed; the others are columns of their names."""


def _has_kl(config: AlgorithmConfig) -> bool:
    return config.kl_in_reward and config.kl_coef > 0


def _is_weighted(config: AlgorithmConfig) -> bool:
    uses = estimator_named(config.advantage).uses_weights
    return uses and config.correction != "none" and config.old_logprobs == "recompute"


def _reads_old(config: AlgorithmConfig) -> bool:
    """Whether something reads the log-probs of the policy before the update."""
    reads = estimator_named(config.advantage).reads
    return _has_kl(config) or not {*_DERIVED}.isdisjoint(reads) or loss_named(config.loss).selects_tokens


def advantage_columns(config: AlgorithmConfig) -> list[str]:
    """Columns that a batch's advantages are computed from."""
    reads, selects = estimator_named(config.advantage).reads, loss_named(config.loss).selects_tokens
    columns = ["rewards", "loss_mask", "group_id", "rollout_index", *(name for name in reads if name not in _DERIVED)]
    columns += [_OLD[config.old_logprobs]] if _reads_old(config) else []
    columns += ["rollout_logprobs"] if "ratio" in reads or _is_weighted(config) or selects else []
    columns += [OLD_ENTROPY] if config.top_entropy < 1 else []
    columns += ["ref_logprobs"] if _has_kl(config) else []
    return columns + (["component_weights"] if "components" in reads else [])


def batch_advantages(
    config: AlgorithmConfig, data: TensorDict, *, whole: Tensor | None, kl_coef: float, seed: int, ranks: BatchRanks
) -> tuple[dict[str, Tensor], float | None]:
    """Advantages, and the columns that critic or loss read along with them.

    Args:
        config: Estimator, loss, KL and correction.
        data: The columns of `advantage_columns`.
        whole: (T,) 1 at the tokens of rows that were not cut off; None: those that were are learned from too.
        kl_coef: Coefficient of the KL to the reference in the rewards; only with `algorithm.kl_in_reward`.
        seed: Seeds the choice of tokens of Clip-Cov and KL-Cov.
        ranks: Ranks that hold the other groups of the batch.

    Returns:
        Columns by name, and the mean KL per token of the whole batch; None with the KL elsewhere.
    """
    reads = estimator_named(config.advantage).reads
    offsets, mask, rewards = data["rewards"].offsets(), data["loss_mask"].values(), data["rewards"].values()
    old = data[_OLD[config.old_logprobs]].values() if _reads_old(config) else None
    reward_kl = None
    if _has_kl(config):
        assert old is not None
        kl = torch.where(mask.bool(), estimate_kl(old, data["ref_logprobs"].values(), config.kl_estimator), 0.0)
        total, num = ranks.sum(torch.stack([kl.double().sum(), mask.double().sum()])).tolist()
        reward_kl = total / max(num, 1)
        rewards = rewards - kl_coef * kl
    found = {name: _column(name, data[name]) for name in reads if name not in _DERIVED}
    fields: dict[str, Any] = {name: values for name, values in found.items() if name in FIELDS}
    if old is not None:
        fields["logprobs"] = old
        if "ratio" in reads:
            fields["ratio"] = (old - data["rollout_logprobs"].values()).exp()
        if _is_weighted(config):
            sampled = data["rollout_logprobs"].values()
            fields["weights"] = configured_weights(config, old, sampled, mask, offsets.to(torch.int64))
    if "components" in reads:
        fields["component_weights"] = data["component_weights"][0]
    inputs = AdvantageInput(
        rewards=rewards,
        loss_mask=mask,
        cu_seqlens=offsets.to(torch.int64),
        group_ids=data["group_id"],
        rollout_ids=data["rollout_index"],
        gamma=config.gamma,
        lam=config.lam,
        options=config.advantage_options,
        columns={name: values for name, values in found.items() if name not in FIELDS},
        ranks=ranks,
        **fields,
    )
    written = {"advantages": compute_advantages(config.advantage, inputs)}
    if "values" in reads:
        written["returns"] = value_scan(inputs, "vtrace" if "ratio" in reads else "gae").returns
    learned = mask if whole is None else mask * whole
    if loss_named(config.loss).selects_tokens:
        assert old is not None
        chosen: dict[str, Any] = {"advantages": written["advantages"], "loss_mask": learned, "ranks": ranks}
        written["selected"] = _selected(config, data, old, seed, chosen)
    if config.top_entropy < 1:
        entropy = data[OLD_ENTROPY].values()
        written["is_high_entropy"] = high_entropy(entropy, learned, share=config.top_entropy, ranks=ranks)
    jagged = {name: torch.nested.nested_tensor_from_jagged(x, offsets) for name, x in written.items()}
    return jagged, reward_kl


def _selected(config: AlgorithmConfig, data: TensorDict, old: Tensor, seed: int, chosen: Mapping[str, Any]) -> Tensor:
    """(T,) the tokens that the loss treats apart."""
    options = {**loss_named(config.loss).options, **config.loss_options}
    if "m2_max" in options:
        log_ratio = old - data["rollout_logprobs"].values()
        return beyond_moment(log_ratio, **chosen, m2_max=options["m2_max"])
    bounds: dict[str, Any] = {name: options[name] for name in ("share", "low", "high") if name in options}
    return select_tokens(old, **chosen, loss=cast("Any", config.loss), seed=seed, **bounds)


def _column(name: str, values: Tensor) -> Tensor:
    """Values of a column as estimators get them: (T,) where it is aligned with the completions."""
    return values.values() if values.is_nested and name != "prompt_token_ids" else values
