"""Advantage estimators: what they read, their registry, and all that ship. Legend: `T` tokens (packed), `B` rows.

Each is a pure function from `AdvantageInput` to one value per token; positions with loss_mask 0 get 0 and are skipped
by every recurrence. Where completions of one prompt are compared, a rollout of several trajectories is one of them: its
reward is their mean, its length their sum, and each of them has its advantage.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

import rl_csrc
from rl_trainer.errors import ConfigError
from rl_trainer.plugins import named, reads_of

if TYPE_CHECKING:
    from torch import Tensor

GROUP = "rl_trainer.advantages"

Need = Literal["values", "components", "greedy_rewards", "logprobs", "sum_pi_squared", "ratio", "process_rewards"]
"""An optional field of `AdvantageInput` that an estimator cannot do without."""
FIELDS: tuple[Need, ...] = get_args(Need)
"""Names in `Estimator.reads` that are fields; the others are columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRanks:
    """The ranks that share a batch, each with some of its groups. Collective: all of them call alike."""

    rank: int = 0
    """Number of this rank."""
    size: int = 1
    """Number of ranks."""
    all_reduce: Callable[[Tensor], Tensor] | None = None
    """Sum of a float64 tensor over the ranks; None with one rank."""

    def sum(self, values: Tensor) -> Tensor:
        """Sum of `values`, float64 of one shape on all ranks."""
        return values if self.all_reduce is None else self.all_reduce(values)

    def gather(self, values: Tensor) -> Tensor:
        """(ranks, ...) float64: the `values` of every rank, of one shape."""
        all_values = values.new_zeros(self.size, *values.shape)
        all_values[self.rank] = values
        return self.sum(all_values)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInput:
    """Completions, packed: a batch's, or the groups of it that a rank holds. Estimators register what they read."""

    rewards: Tensor
    """(T,) float32, a completion's reward on its last model token, turn rewards on the last token of their turn."""
    loss_mask: Tensor
    """(T,) 1 where the model wrote the token."""
    cu_seqlens: Tensor
    """(B + 1,) int64 row offsets into T."""
    group_ids: Tensor
    """(B,) int64, equal for the completions of one prompt."""
    rollout_ids: Tensor | None = None
    """(B,) int64, equal for the trajectories of one rollout within a group; None: a rollout is one trajectory."""
    gamma: float = 1.0
    """Discount of rewards per model token."""
    lam: float = 1.0
    """Lambda of GAE and V-trace."""
    options: Mapping[str, float] = field(default_factory=dict[str, float])
    """`algorithm.advantage_options` over the estimator's own defaults."""
    values: Tensor | None = None
    """(T,) float32, the critic's value of the state before each token."""
    components: Tensor | None = None
    """(B, K) float32, the parts that a completion's reward is made of."""
    component_weights: Tensor | None = None
    """(K,) float32; None: 1 each."""
    greedy_rewards: Tensor | None = None
    """(B,) float32, reward of the greedy completion of each row's prompt."""
    logprobs: Tensor | None = None
    """(T,) float32, by the trainer before the update."""
    sum_pi_squared: Tensor | None = None
    """(T,) float32, sum over the vocabulary of the squared probabilities that each token was chosen from."""
    ratio: Tensor | None = None
    """(T,) float32, trainer's probability over the sampler's."""
    weights: Tensor | None = None
    """(T,) float32, the weights that rollout correction gives the policy loss; None: 1 each."""
    process_rewards: Tensor | None = None
    """(T,) float32, beta times the log-ratio of the process reward model to its reference."""
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    """Columns that `Estimator.reads` names: (T,) of ragged columns, (B, ...) of others; `prompt_token_ids` jagged."""
    ranks: BatchRanks = field(default_factory=BatchRanks)
    """Ranks that hold the other groups of the batch."""

    def whiten(self, per_token: Tensor) -> Tensor:
        """(T,) float32, less the mean over the whole batch's model tokens, over their deviation; 0 elsewhere."""
        if self.ranks.size == 1:
            return rl_csrc.whiten(per_token, self.loss_mask) * self.loss_mask
        own = rl_csrc.masked_moments(per_token, self.loss_mask)
        nums, means, m2s = self.ranks.gather(torch.stack([*own])).unbind(1)
        num = nums.sum()
        mean = (nums * means).sum() / num.clamp(min=1)
        moments = rl_csrc.Moments(num, mean, (m2s + nums * (means - mean).square()).sum())
        return rl_csrc.whiten(per_token, self.loss_mask, moments=moments) * self.loss_mask

    def sum_rewards(self) -> Tensor:
        """(B,) float32, the reward of each completion."""
        return self.sum_rows(self.rewards)

    def sum_rows(self, per_token: Tensor) -> Tensor:
        """(B,) float32, the sum over each row's tokens."""
        return torch.segment_reduce(per_token.float(), "sum", offsets=self.cu_seqlens)

    def rollouts(self) -> Rollouts:
        """Rollouts that the rows belong to: each enters its group once, however many trajectories it has."""
        if self.rollout_ids is None:
            return Rollouts(
                of_row=torch.arange(self.group_ids.numel(), device=self.group_ids.device), group_ids=self.group_ids
            )
        pairs = torch.stack([self.group_ids, self.rollout_ids], dim=1)
        found, of_row = torch.unique(pairs, dim=0, return_inverse=True)
        return Rollouts(of_row=of_row, group_ids=found[:, 0])

    def broadcast(self, per_row: Tensor) -> Tensor:
        """(T,) float32: a row's value at each of its model tokens, 0 elsewhere."""
        lengths = self.cu_seqlens.diff()
        return torch.repeat_interleave(per_row.float(), lengths) * self.loss_mask

    def needed(self, name: Need) -> Tensor:
        """An optional field that has to be there.

        Raises:
            ConfigError: it is not.
        """
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ConfigError(f"this advantage estimator reads {name}, which the batch has not got")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The rollouts of a batch. Legend: `S` rollouts."""

    of_row: Tensor
    """(B,) int64, the rollout of each row."""
    group_ids: Tensor
    """(S,) int64, equal for the rollouts of one prompt."""

    def sum(self, per_row: Tensor) -> Tensor:
        """(S,) float32 sum over the trajectories of each rollout."""
        return per_row.new_zeros(self.group_ids.numel(), dtype=torch.float32).index_add(0, self.of_row, per_row.float())

    def mean(self, per_row: Tensor) -> Tensor:
        """(S,) float32 mean over the trajectories of each rollout."""
        return self.sum(per_row) / self.sum(torch.ones_like(per_row))

    def to_rows(self, per_rollout: Tensor) -> Tensor:
        """(B,) a rollout's value for each of its trajectories."""
        return per_rollout[self.of_row]


AdvantageFunction = Callable[[AdvantageInput], "Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """A registered estimator and what has to be known before a run starts."""

    compute: AdvantageFunction
    """`AdvantageInput -> (T,) float32`."""
    compares_group: bool = False
    """Whether it compares completions of one prompt, so that groups of one teach nothing."""
    keys: tuple[str, ...] = ()
    """Keys of `algorithm` that it reads, of `gamma` and `lam`."""
    options: Mapping[str, float] = field(default_factory=dict[str, float])
    """Keys of `algorithm.advantage_options` with their defaults."""
    uses_weights: bool = False
    """Whether it looks at the weights of `algorithm.correction`, where there are any."""
    reads: tuple[str, ...] = ()
    """Optional fields of `AdvantageInput` that it reads, and further columns, such as those of stages."""
    scope: Literal["group", "batch", "whole"] = "whole"
    """Scope of what decides a completion's advantages. `group`: its own group alone, so that groups may come one by
    one. `batch`: also sums over the batch, taken by `AdvantageInput.ranks`. Both run on every rank, on the groups that
    it holds. `whole`: the whole batch, which one rank is given."""


def estimator_named(name: str) -> Estimator:
    """The estimator that `algorithm.advantage` names: see `rl_trainer.plugins`. A plain function needs no field.

    Raises:
        ConfigError: there is none of that name; lists what there is.
    """
    return named(
        name,
        ADVANTAGES,
        group=GROUP,
        kind=Estimator,
        key="algorithm.advantage",
        make=lambda compute: Estimator(compute=compute, reads=reads_of(compute)),
    )


def compute_advantages(name: str, data: AdvantageInput) -> Tensor:
    """(T,) float32 advantages by a registered or installed estimator.

    Raises:
        ConfigError: no such estimator (lists them), or a field that it needs is not there.
    """
    estimator = estimator_named(name)
    return estimator.compute(replace(data, options={**estimator.options, **data.options}))


def members_of(group_ids: Tensor) -> list[Tensor]:
    """Row numbers of each group."""
    order = torch.argsort(group_ids, stable=True)
    counts = torch.unique_consecutive(group_ids[order], return_counts=True)[1]
    return list(order.split(counts.tolist()))


# Whole completions of one prompt, compared; an advantage stands at each token.


def grpo(data: AdvantageInput) -> Tensor:
    """Reward less the group's mean, over its deviation + 1e-6: GRPO, arXiv 2402.03300. As it is in groups of one."""
    return _against_group(data, "grpo")


def dr_grpo(data: AdvantageInput) -> Tensor:
    """Reward less the group's mean: Dr. GRPO, arXiv 2503.20783."""
    return _against_group(data, "dr_grpo")


def rloo(data: AdvantageInput) -> Tensor:
    """Reward less the mean of the group's others: RLOO, arXiv 2402.14740. 0 in groups of one, with a warning."""
    rollouts = data.rollouts()
    if (count := sum(members.numel() == 1 for members in members_of(rollouts.group_ids))) > 0:
        warnings.warn(
            f"{count} of {rollouts.group_ids.unique().numel()} groups have one completion, with which rloo can compare "
            "nothing: their advantages are 0",
            stacklevel=2,
        )
    return _against_group(data, "rloo")


def group_whitened(data: AdvantageInput) -> Tensor:
    """Reward less its group's mean, whitened over the batch's model tokens: REINFORCE++-baseline, arXiv 2501.03262."""
    return data.whiten(dr_grpo(data))


def group_mean_batch_std(data: AdvantageInput) -> Tensor:
    """Reward less the group's mean, over the deviation of the batch's rewards + 1e-6: Lite PPO, arXiv 2508.08221.

    The deviation is that of all completions of the batch, so that easy and hard prompts keep their scale.
    """
    rollouts = data.rollouts()
    rewards = rollouts.mean(data.sum_rewards()).double()
    num, total = data.ranks.sum(torch.stack([torch.ones_like(rewards).sum(), rewards.sum()]))
    squares = data.ranks.sum((rewards - total / num.clamp(min=1)).square().sum()[None])[0]
    std = (squares / (num - 1).clamp(min=1)).sqrt()
    return dr_grpo(data) / (std.float() + 1e-6)


def max_likelihood(data: AdvantageInput) -> Tensor:
    """Reward less the group's mean, over that mean + 1e-6: MaxRL, arXiv 2602.02710. For rewards of 0 or more.

    With rewards 0 and 1 it estimates the gradient of log p(right), where grpo's is that of p: a prompt of which one in
    a hundred completions is right weighs a hundred times more. 0 in groups of which none is right, and of one.
    """
    return _by_group(data, lambda rewards, _: _less_mean(rewards) / (rewards.mean() + 1e-6))


def best_of_group(data: AdvantageInput) -> Tensor:
    """Only a group's best completion learns: (best - second best) / (std + 1e-6), arXiv 2503.19595 (pass@k).

    0 for the others, where the best is shared, and in groups of one.
    """

    def of_group(rewards: Tensor, _: Tensor) -> Tensor:
        advantages = torch.zeros_like(rewards)
        if rewards.numel() > 1:
            normed = rl_csrc.group_norm(rewards, torch.zeros_like(rewards, dtype=torch.int64), mode="grpo")
            best, second = rewards.topk(2).indices.tolist()
            advantages[best] = normed[best] - normed[second]
        return advantages

    return _by_group(data, of_group)


def length_weighted(data: AdvantageInput) -> Tensor:
    """Reward less the group's mean weighted by length in model tokens: OPO, arXiv 2505.23585. 0 in groups of one."""
    lengths = data.rollouts().sum(data.sum_rows(data.loss_mask))

    def of_group(rewards: Tensor, members: Tensor) -> Tensor:
        return _less_mean(rewards, lengths[members] / lengths[members].sum().clamp(min=1.0))

    return _by_group(data, of_group)


def gpg(data: AdvantageInput) -> Tensor:
    """Reward less its group's mean, scaled up for the completions without signal: GPG, arXiv 2504.02546.

    The scale is completions / completions of groups whose rewards differ; 0 everywhere if there are none.
    """
    rollouts = data.rollouts()
    rewards = rollouts.mean(data.sum_rewards())
    advantages = rl_csrc.group_norm(rewards, rollouts.group_ids, mode="dr_grpo")
    has_signal = torch.zeros_like(rewards)
    for members in members_of(rollouts.group_ids):
        has_signal[members] = float(rewards[members].min() != rewards[members].max())
    num, with_signal = data.ranks.sum(torch.stack([torch.ones_like(rewards).double().sum(), has_signal.double().sum()]))
    return data.broadcast(rollouts.to_rows(advantages * (num / with_signal.clamp(min=1.0)).float()))


def group_reward_decoupled(data: AdvantageInput) -> Tensor:
    """Each part of the reward normalised in its group (grpo), weighted, added, and whitened: GDPO, arXiv 2601.05242.

    Whitened over the batch's model tokens. Parts of different scale weigh the same, which one sum of them would not.
    """
    components = data.needed("components")
    weights = data.component_weights if data.component_weights is not None else components.new_ones(components.shape[1])
    rollouts = data.rollouts()
    total = torch.zeros(components.shape[0], dtype=torch.float32, device=components.device)
    for rewards, weight in zip(components.float().unbind(1), weights.tolist(), strict=True):
        normed = rl_csrc.group_norm(rollouts.mean(rewards), rollouts.group_ids, mode="grpo")
        total += weight * rollouts.to_rows(normed)
    return data.whiten(data.broadcast(total))


def _less_mean(rewards: Tensor, weights: Tensor | None = None) -> Tensor:
    """Rewards less their mean, or their mean by `weights` of sum 1; exactly 0 where all are equal."""
    rewards = rewards - rewards[:1]
    return rewards - (rewards.mean() if weights is None else (weights * rewards).sum())


def _by_group(data: AdvantageInput, of_group: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """(T,) float32 advantages, given those of a group's rollouts by their rewards and numbers."""
    rollouts = data.rollouts()
    rewards = rollouts.mean(data.sum_rewards())
    advantages = torch.zeros_like(rewards)
    for members in members_of(rollouts.group_ids):
        advantages[members] = of_group(rewards[members], members)
    return data.broadcast(rollouts.to_rows(advantages))


def _against_group(data: AdvantageInput, mode: Literal["grpo", "dr_grpo", "rloo"]) -> Tensor:
    rollouts = data.rollouts()
    normed = rl_csrc.group_norm(rollouts.mean(data.sum_rewards()), rollouts.group_ids, mode=mode)
    return data.broadcast(rollouts.to_rows(normed))


# A value of its own at each token: recurrences over a completion, and baselines per position.


def reward_to_go(data: AdvantageInput, rewards: Tensor | None = None) -> Tensor:
    """(T,) float32, G_t = R_t + gamma G_{t+1} at model tokens, 0 elsewhere; of `data.rewards` or of others."""
    rewards = data.rewards if rewards is None else rewards
    scan = rl_csrc.scan_reverse(
        rewards, None, data.cu_seqlens, loss_mask=data.loss_mask, kind="returns", gamma=data.gamma, mask_mode="compress"
    )
    return scan.returns


def value_scan(data: AdvantageInput, kind: str) -> rl_csrc.Scan:
    """Advantages (not whitened) and returns (what the critic learns), (T,) float32 each, by `gae` or `vtrace`."""
    return rl_csrc.scan_reverse(
        data.rewards,
        data.needed("values"),
        data.cu_seqlens,
        loss_mask=data.loss_mask,
        kind=kind,  # pyright: ignore[reportArgumentType] - one of the two
        gamma=data.gamma,
        lam=data.lam,
        rho=data.needed("ratio") if kind == "vtrace" else None,
        mask_mode="compress",
    )


def gae(data: AdvantageInput) -> Tensor:
    """Generalized advantage estimation over model tokens, whitened over those of the batch, arXiv 1506.02438."""
    return data.whiten(value_scan(data, "gae").advantages)


def vtrace(data: AdvantageInput) -> Tensor:
    """Off-policy corrected advantages: V-trace, arXiv 1802.01561, ratios truncated at 1."""
    return value_scan(data, "vtrace").advantages


def reinforce_plus_plus(data: AdvantageInput) -> Tensor:
    """Discounted reward-to-go, whitened over the batch's model tokens, arXiv 2501.03262."""
    return data.whiten(reward_to_go(data))


def remax(data: AdvantageInput) -> Tensor:
    """Reward-to-go less the reward of the prompt's greedy completion: ReMax, arXiv 2310.10505."""
    return (reward_to_go(data) - data.broadcast(data.needed("greedy_rewards"))) * data.loss_mask


def optimal_token_baseline(data: AdvantageInput) -> Tensor:
    """Reward-to-go less the baseline of least variance for its position in the completion, arXiv 2602.07078.

    With W_t = sum over the model tokens up to t of (1 - 2 pi + sum_v pi_v^2) [times the squared weight of rollout
    correction, where there is one] of a row, a position's baseline is sum_i G_i W_i / sum_i W_i over the group's rows
    with a model token there. It is 0 where fewer than two rollouts have one: none is its own baseline.
    """
    lengths = data.cu_seqlens.diff()
    return _less_baseline(data, _running(torch.ones_like(data.loss_mask).double(), data.cu_seqlens[:-1], lengths))


def optimal_token_baseline_with_tools(data: AdvantageInput) -> Tensor:
    """`optimal_token_baseline` by positions among the model's own tokens, so that tools' answers do not shift them."""
    return _less_baseline(data, _running(data.loss_mask.double(), data.cu_seqlens[:-1], data.cu_seqlens.diff()))


def _less_baseline(data: AdvantageInput, position: Tensor) -> Tensor:
    """(T,) float32 reward-to-go less the baseline of `position`, (T,) whole numbers."""
    mask = data.loss_mask.bool()
    to_go = reward_to_go(data).double()
    energy = 1 - 2 * data.needed("logprobs").double().exp() + data.needed("sum_pi_squared").double()
    if data.weights is not None:
        energy = energy * data.weights.double() ** 2
    rollouts, lengths = data.rollouts(), data.cu_seqlens.diff()
    share = rollouts.to_rows(1 / rollouts.sum(torch.ones_like(data.group_ids)))  # a rollout's trajectories share it
    energy = torch.where(mask, energy.clamp(min=0), 0.0) * share.repeat_interleave(lengths)  # below 0 by rounding alone
    weight = _running(energy, data.cu_seqlens[:-1], lengths)
    rows = torch.arange(lengths.numel(), device=mask.device).repeat_interleave(lengths)[mask]
    groups = data.group_ids.unique(return_inverse=True)[1]
    size = int(lengths.max()) + 1 if lengths.numel() else 1
    slot = groups[rows] * size + position[mask].long()
    nothing = torch.zeros((int(groups.max()) + 1 if groups.numel() else 0) * size, dtype=torch.float64).to(mask.device)
    weights = nothing.index_add(0, slot, weight[mask])
    weighted = nothing.index_add(0, slot, weight[mask] * to_go[mask])
    num_rollouts = rollouts.group_ids.numel()
    reached = torch.unique(slot * num_rollouts + rollouts.of_row[rows]) // num_rollouts
    is_shared = torch.bincount(reached, minlength=nothing.numel()) > 1
    baseline = torch.where(is_shared & (weights > 0), weighted / weights.clamp(min=1e-300), 0.0)
    advantages = torch.zeros_like(to_go)
    advantages[mask] = to_go[mask] - baseline[slot]
    return advantages.float()


def group_in_group(data: AdvantageInput) -> Tensor:
    """Episodes against their group, and turns against those from the same state: GiGPO, arXiv 2505.10978.

    A = A_episode + step_weight A_step (equation 8). A_episode is the reward less the group's mean (equation 3). A_step
    is a turn's discounted return, sum of gamma^(j - t) r_j over the turns from it on (equation 5, gamma per turn), less
    the mean over the turns of the group that began in the same state (equations 6, 7). With scales=1 both are over
    their deviation + 1e-6. A state is what the environment said last: the tokens of tools since the turn before, or the
    prompt before the first turn. A turn whose state no other has adds nothing; returns end with their trajectory.
    """
    scales, states = data.options["scales"] > 0, _states(data)
    rollouts = data.rollouts()
    rewards = rollouts.mean(data.sum_rewards())
    episodes = rl_csrc.group_norm(rewards, rollouts.group_ids, mode="grpo" if scales else "dr_grpo")
    steps = torch.zeros_like(data.rewards, dtype=torch.float32)
    peers: dict[tuple[int, ...], list[tuple[slice, float]]] = {}
    for row, turns in enumerate(states):
        to_go = 0.0
        for turn, state in reversed(turns):
            to_go = float(data.rewards[turn].sum()) + data.gamma * to_go
            peers.setdefault((int(data.group_ids[row]), *state), []).append((turn, to_go))
    for turns in peers.values():
        returns = torch.tensor([to_go for _, to_go in turns], dtype=torch.float64)
        centered = returns - returns.mean()
        if scales and len(turns) > 1:
            centered = centered / (returns.std() + 1e-6)
        for (turn, _), value in zip(turns, centered.tolist(), strict=True):
            steps[turn] = value
    weight = data.options["step_weight"]
    return data.broadcast(rollouts.to_rows(episodes)) + weight * steps * data.loss_mask


def _states(data: AdvantageInput) -> list[list[tuple[slice, tuple[int, ...]]]]:
    """Turns by row: their places among the packed tokens, and the tokens of the state that each began in."""
    found: list[list[tuple[slice, tuple[int, ...]]]] = []
    prompts, at = data.columns["prompt_token_ids"].unbind(), data.cu_seqlens.tolist()
    tokens, mask = data.columns["completion_token_ids"].tolist(), data.loss_mask.tolist()
    for row, prompt in enumerate(prompts):
        turns: list[tuple[slice, tuple[int, ...]]] = []
        state, start = tuple(prompt.tolist()), at[row]
        while start < at[row + 1]:
            end = next((i for i in range(start, at[row + 1]) if mask[i] != mask[start]), at[row + 1])
            if mask[start]:
                turns.append((slice(start, end), state))
            else:
                state = tuple(tokens[start:end])
            start = end
        found.append(turns)
    return found


def prime(data: AdvantageInput) -> Tensor:
    """Implicit process reward plus outcome, each against the group's other completions: PRIME, arXiv 2502.01456.

    The process part is the reward-to-go of (r_t - mean over the others of their mean r), the outcome part is that of
    rloo; both are added, and stand at every model token.
    """
    mask = data.loss_mask.bool()
    process = torch.where(mask, data.needed("process_rewards").float(), 0.0)
    rollouts = data.rollouts()
    counts = data.sum_rows(data.loss_mask).clamp(min=1.0)
    means = rollouts.mean(data.sum_rows(process) / counts)
    baseline = data.broadcast(rollouts.to_rows(_mean_of_others(means, rollouts.group_ids)))
    outcomes = rl_csrc.group_norm(rollouts.mean(data.sum_rewards()), rollouts.group_ids, mode="rloo")
    return (reward_to_go(data, process - baseline) + data.broadcast(rollouts.to_rows(outcomes))) * mask


def _mean_of_others(values: Tensor, group_ids: Tensor) -> Tensor:
    """(S,) mean over the other rollouts of each one's group; its own value without others."""
    means = values.clone()
    for members in members_of(group_ids):
        if (n := members.numel()) > 1:
            means[members] = (values[members].sum() - values[members]) / (n - 1)
    return means


def _running(per_token: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """(T,) sum from a row's first token up to each."""
    total = per_token.cumsum(0)
    before = torch.cat([total.new_zeros(1), total])[starts]
    return total - before.repeat_interleave(lengths)


_AHEAD, _LAMBDA = ("gamma",), ("gamma", "lam")
_BASELINE: dict[str, Any] = {
    "reads": ("logprobs", "sum_pi_squared"),
    "compares_group": True,
    "keys": _AHEAD,
    "uses_weights": True,
    "scope": "group",
}

ADVANTAGES: dict[str, Estimator] = {
    "grpo": Estimator(compute=grpo, scope="group"),
    "dr_grpo": Estimator(compute=dr_grpo, compares_group=True, scope="group"),
    "rloo": Estimator(compute=rloo, compares_group=True, scope="group"),
    "reinforce_pp_baseline": Estimator(compute=group_whitened, compares_group=True, scope="batch"),
    "grpo_batch_std": Estimator(compute=group_mean_batch_std, compares_group=True, scope="batch"),
    "maxrl": Estimator(compute=max_likelihood, compares_group=True, scope="group"),
    "gigpo": Estimator(
        compute=group_in_group,
        compares_group=True,
        keys=_AHEAD,
        options={"step_weight": 1.0, "scales": 0.0},
        reads=("prompt_token_ids", "completion_token_ids"),
        scope="group",
    ),
    "grpo_passk": Estimator(compute=best_of_group, compares_group=True, scope="group"),
    "opo": Estimator(compute=length_weighted, compares_group=True, scope="group"),
    "gpg": Estimator(compute=gpg, compares_group=True, scope="batch"),
    "gdpo": Estimator(compute=group_reward_decoupled, reads=("components",), scope="batch"),
    "gae": Estimator(compute=gae, reads=("values",), keys=_LAMBDA, scope="batch"),
    "vtrace": Estimator(compute=vtrace, reads=("values", "ratio"), keys=_LAMBDA, scope="group"),
    "reinforce_pp": Estimator(compute=reinforce_plus_plus, keys=_AHEAD, scope="batch"),
    "remax": Estimator(compute=remax, reads=("greedy_rewards",), keys=_AHEAD, scope="group"),
    "optimal_token_baseline": Estimator(compute=optimal_token_baseline, **_BASELINE),
    "tir_optimal_token_baseline": Estimator(compute=optimal_token_baseline_with_tools, **_BASELINE),
    "prime": Estimator(compute=prime, reads=("process_rewards",), compares_group=True, keys=_AHEAD, scope="group"),
}
"""Estimators by name, those that ship; one of a user's is found as `rl_trainer.plugins` says."""
