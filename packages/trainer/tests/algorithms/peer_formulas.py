"""Every estimator, loss, correction and aggregation beside independent implementations, on random ragged batches.

Needs the peers (each is optional; only their formulas are called): pip install verl trl torchrl openrlhf skyrl.
Formulas of peers that no small package has, and of papers, are restated in `restated_formulas.py`. It prints the table
of ALGORITHMS.md, the largest absolute difference of each row over all seeds, of values and of gradients:
python peer_formulas.py [--seeds 20].
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import restated_formulas as restated
import torch
from tensordict import TensorDict

from rl_csrc import METRIC_NAMES  # noqa: F401 - a kernel that cannot be loaded is told before the peers are
from rl_csrc.reference.logprobs import coarse_kl
from rl_engine.types import BatchCounts, ModelOutput
from rl_trainer.algorithms import AdvantageInput, Aggregation, PolicyLossFunction, ValueLossFunction, compute_advantages
from rl_trainer.algorithms.advantages import reward_to_go, value_scan
from rl_trainer.algorithms.distillation import coarse_jsd
from rl_trainer.algorithms.kl_controller import estimate_kl
from rl_trainer.algorithms.rollout_correction import correction_weights, rejection_mask
from rl_trainer.algorithms.selection import beyond_moment, high_entropy, select_tokens
from rl_trainer.config.schema import AlgorithmConfig, TeacherSection

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LONGEST, GAMMA, LAMBDA = 9, 0.97, 0.9
PACKAGES = ("OpenRLHF", "SkyRL", "TRL", "torchrl", "verl")
"""Peers that can be installed; all others are restated."""
ROWS = {}
"""By (what, peer), a function of a seed that gives pairs of our tensor and the peer's."""


def row(what, peer):
    """Register a comparison."""

    def add(function):
        ROWS[what, peer] = function
        return function

    return add


def peer(module):
    """A module of a peer; raises ImportError where it is not installed."""
    return importlib.import_module(module)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A ragged batch, packed; `pad` and `unpad` lead to the peers' matrices and back."""

    lengths: list[int]
    groups: torch.Tensor
    mask: torch.Tensor
    rewards: torch.Tensor
    values: torch.Tensor
    old: torch.Tensor
    logprobs: torch.Tensor
    rollout: torch.Tensor
    ref: torch.Tensor
    advantages: torch.Tensor
    entropy: torch.Tensor
    components: torch.Tensor
    sum_pi_squared: torch.Tensor

    @property
    def cu_seqlens(self):
        return torch.nn.functional.pad(torch.tensor(self.lengths).cumsum(0), (1, 0))

    def pad(self, packed):
        return torch.nn.utils.rnn.pad_sequence(list(packed.split(self.lengths)), batch_first=True)

    def unpad(self, padded):
        """(T,) values, 0 where the model did not write the token."""
        return torch.cat([line[:n] for line, n in zip(padded, self.lengths, strict=True)]) * self.mask

    def inputs(self, **more):
        given = {"gamma": 1.0, "lam": 1.0} | more
        return AdvantageInput(
            rewards=self.rewards, loss_mask=self.mask, cu_seqlens=self.cu_seqlens, group_ids=self.groups, **given
        )

    @property
    def uid(self):
        return np.array([str(int(g)) for g in self.groups], dtype=object)


def draw(seed, *, tools=True, singles=True, scale=0.3, size=None, length=None):
    """A batch of 5 groups of 2 to 4 completions (or of `size`), some of one, of 1 to 9 tokens (or of `length`), some of
    them tools'."""
    g = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high + 1, (), generator=g))

    sizes = [size or integer(2, 4) for _ in range(5)] + ([1] if singles else [])
    groups = torch.tensor([i for i, n in enumerate(sizes) for _ in range(n)])
    lengths = [length or integer(1, LONGEST) for _ in groups]
    num = sum(lengths)

    def normal(*shape):
        return torch.randn(*(shape or (num,)), generator=g, dtype=torch.float64)

    mask = (torch.rand(num, generator=g) < 0.7).double() if tools else torch.ones(num, dtype=torch.float64)
    ends = torch.tensor(lengths).cumsum(0) - 1
    mask[ends] = 1.0
    outcome = normal(len(lengths))
    rewards = torch.zeros(num, dtype=torch.float64)
    rewards[ends] = outcome
    old = -normal().abs() - 0.05
    return Case(
        lengths=lengths,
        groups=groups,
        mask=mask,
        rewards=rewards,
        values=normal(),
        old=old,
        logprobs=(old + scale * normal()).clamp(max=-1e-3),
        rollout=(old + scale * normal()).clamp(max=-1e-3),
        ref=old + normal(),
        advantages=normal(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        entropy=normal().abs(),
        components=normal(len(lengths), 3),
        sum_pi_squared=old.exp() ** 2 + 0.3 * (1 - old.exp()) ** 2,
    )


# Advantage estimators.


def by_verl(name, ours=None, *, singles, tools=True, norm=True, data=None):
    """A row for an estimator of outcomes: ours, and verl's under its name."""

    def compare(seed):
        algos = peer("verl.trainer.ppo.core_algos")
        case = draw(seed, singles=singles, tools=tools)
        config = SimpleNamespace(
            gamma=GAMMA, get=lambda key, default=None: {"norm_adv_by_std_in_grpo": norm}.get(key, default)
        )
        function = algos.get_adv_estimator_fn(name)
        more = {"norm_adv_by_std_in_grpo": norm} if name == "grpo" else {}
        found, _ = function(
            token_level_rewards=case.pad(case.rewards),
            response_mask=case.pad(case.mask),
            index=case.uid,
            config=config,
            **more,
        )
        yield compute_advantages(ours or name, case.inputs(**(data or {}))), case.unpad(found)

    return compare


row("grpo", "verl")(by_verl("grpo", singles=True))
row("dr_grpo", "verl")(by_verl("grpo", "dr_grpo", singles=False, norm=False))
row("grpo_passk", "verl")(by_verl("grpo_passk", singles=False))
row("rloo", "verl")(by_verl("rloo_vectorized", "rloo", singles=True))
row("opo", "verl")(by_verl("opo", singles=False))
row("reinforce_pp", "verl")(by_verl("reinforce_plus_plus", "reinforce_pp", singles=True, data={"gamma": GAMMA}))
row("reinforce_pp_baseline", "verl")(by_verl("reinforce_plus_plus_baseline", "reinforce_pp_baseline", singles=False))


@row("gpg", "verl")
def _gpg(seed):
    """verl counts rewards that are not 0, we completions of groups whose rewards differ: here they are the same."""
    algos, case = peer("verl.trainer.ppo.core_algos"), draw(seed, singles=False)
    silent = (case.groups == 0).repeat_interleave(torch.tensor(case.lengths))
    case.rewards[silent] = 0.0
    found, _ = algos.compute_gpg_outcome_advantage(case.pad(case.rewards), case.pad(case.mask), case.uid)
    yield compute_advantages("gpg", case.inputs()), case.unpad(found)


@row("gae, and the critic's returns", "verl")
def _gae(seed):
    algos, case = peer("verl.trainer.ppo.core_algos"), draw(seed)
    found, returns = algos.compute_gae_advantage_return(
        case.pad(case.rewards), case.pad(case.values), case.pad(case.mask), GAMMA, LAMBDA
    )
    data = case.inputs(values=case.values, gamma=GAMMA, lam=LAMBDA)
    yield compute_advantages("gae", data), case.unpad(found)
    yield value_scan(data, "gae").returns * case.mask, case.unpad(returns)


@row("gae before whitening, returns", "OpenRLHF")
def _gae_openrlhf(seed):
    maker, case = peer("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker, draw(seed, tools=False)
    found = maker.get_advantages_and_returns(
        None, case.pad(case.values), case.pad(case.rewards), case.pad(case.mask), GAMMA, LAMBDA
    )
    scan = value_scan(case.inputs(values=case.values, gamma=GAMMA, lam=LAMBDA), "gae")
    yield scan.advantages, case.unpad(found[0])
    yield scan.returns, case.unpad(found[1])


@row("reinforce_pp before whitening", "OpenRLHF")
def _returns_openrlhf(seed):
    maker, case = peer("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker, draw(seed, tools=False)
    found = maker.get_cumulative_returns(None, case.pad(case.rewards), case.pad(case.mask), GAMMA)
    yield reward_to_go(case.inputs(gamma=GAMMA)), case.unpad(found)


def by_openrlhf(estimator, ours):
    """A row for an estimator that compares completions of one prompt, groups of one size."""

    def compare(seed):
        maker = peer("openrlhf.trainer.ppo_utils.experience_maker")
        case = draw(seed, singles=False, tools=False, size=4)
        mask = case.pad(case.mask)
        advantage = SimpleNamespace(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False)
        args = SimpleNamespace(
            rollout=SimpleNamespace(n_samples_per_prompt=4),
            algo=SimpleNamespace(advantage=advantage),
            reward=defaulted(clip_range=None),
        )
        batch = SimpleNamespace(
            rewards=case.inputs().sum_rewards(), index=list(range(len(case.lengths))), info={}, action_mask=mask,
            kl=torch.zeros_like(mask), values=None,
        )  # fmt: skip
        stub = SimpleNamespace(
            strategy=SimpleNamespace(args=args), kl_ctl=SimpleNamespace(value=0.0), advantage_estimator=estimator,
            get_cumulative_returns=lambda *given: maker.RemoteExperienceMaker.get_cumulative_returns(None, *given),
        )  # fmt: skip
        keep, maker.apply_length_penalties = maker.apply_length_penalties, lambda *_: None
        try:
            (found,) = maker.RemoteExperienceMaker.compute_advantages_and_returns(stub, [batch])
        finally:
            maker.apply_length_penalties = keep
        advantages = case.unpad(found.advantages)
        if estimator == "reinforce_baseline":  # it divides by the deviation of the batch, we by that of a sample
            advantages = advantages * ((case.mask.sum() - 1) / case.mask.sum()).sqrt()
        yield compute_advantages(ours, case.inputs()), advantages

    return compare


def defaulted(**values):
    """A namespace that has None for what is not set."""
    return defaultdict_namespace(values)


class defaultdict_namespace(SimpleNamespace):  # noqa: N801 - a helper
    def __init__(self, values):
        super().__init__(**values)

    def __getattr__(self, name):
        return None


for _estimator, _ours in (
    ("rloo", "rloo"),
    ("dr_grpo", "dr_grpo"),
    ("group_norm", "grpo"),
    ("reinforce_baseline", "reinforce_pp_baseline"),
):
    row(_ours, "OpenRLHF")(by_openrlhf(_estimator, _ours))


@row("gae before whitening", "torchrl")
def _gae_torchrl(seed):
    functional, case = peer("torchrl.objectives.value.functional"), draw(seed, tools=False)
    scan = value_scan(case.inputs(values=case.values, gamma=GAMMA, lam=LAMBDA), "gae")
    found = [functional.generalized_advantage_estimate(GAMMA, LAMBDA, **states(line)) for line in trajectories(case)]
    yield scan.advantages, torch.cat([x[0].flatten() for x in found])
    yield scan.returns, torch.cat([x[1].flatten() for x in found])


@row("vtrace, and the critic's returns", "torchrl")
def _vtrace_torchrl(seed):
    functional, case = peer("torchrl.objectives.value.functional"), draw(seed, tools=False)
    data = case.inputs(values=case.values, gamma=GAMMA, ratio=(case.old - case.rollout).exp())
    scan, found = value_scan(data, "vtrace"), []
    for line, old, rollout in zip(
        trajectories(case), *(x.split(case.lengths) for x in (case.old, case.rollout)), strict=True
    ):
        found.append(functional.vtrace_advantage_estimate(GAMMA, old[:, None], rollout[:, None], **states(line)))
    yield compute_advantages("vtrace", data), torch.cat([x[0].flatten() for x in found])
    yield scan.returns, torch.cat([x[1].flatten() for x in found])


def trajectories(case):
    return zip(case.rewards.split(case.lengths), case.values.split(case.lengths), strict=True)


def states(line):
    """A trajectory as torchrl takes it, time along the second to last dimension."""
    reward, value = (x[:, None] for x in line)
    done = torch.zeros_like(reward, dtype=torch.bool)
    done[-1] = True
    following = torch.cat([value[1:], torch.zeros_like(value[:1])])
    return {"state_value": value, "next_state_value": following, "reward": reward, "done": done}


# Estimators beside what is restated.


def tokens(lines):
    """(T,) float64 of a list per completion."""
    return torch.tensor([value for line in lines for value in line], dtype=torch.float64)


def rowwise(case, values):
    """(T,) float64: a completion's value at each of its model tokens."""
    return torch.tensor(values, dtype=torch.float64).repeat_interleave(torch.tensor(case.lengths)) * case.mask


def listed(case, packed):
    """A list per completion of a packed tensor."""
    return [line.tolist() for line in packed.split(case.lengths)]


def outcomes(case):
    """Reward, prompt, and number of model tokens of each completion."""
    rewards = [line.sum().item() for line in case.rewards.split(case.lengths)]
    return rewards, case.groups.tolist(), [int(line.sum()) for line in case.mask.split(case.lengths)]


@row("gpg", "its authors")
def _gpg_authors(seed):
    """Prompts of one size: they count prompts, we completions."""
    case = draw(seed, singles=False, size=3)
    case.rewards[(case.groups == 0).repeat_interleave(torch.tensor(case.lengths))] = 0.0
    rewards, groups, _ = outcomes(case)
    yield compute_advantages("gpg", case.inputs()), rowwise(case, restated.gpg(rewards, groups))


@row("maxrl", "its authors")
def _maxrl_authors(seed):
    """Rewards of 0 or more: in groups whose mean is near 0 both divide by next to nothing."""
    case = draw(seed, singles=False)
    case.rewards.abs_()
    rewards, groups, _ = outcomes(case)
    yield compute_advantages("maxrl", case.inputs()), rowwise(case, restated.maxrl(rewards, groups))


@row("grpo_batch_std", "TRL")
def _batch_std_trl(seed):
    """Its lines on `scale_rewards=batch`, with our epsilon: the rest of that method generates."""
    nanstd, case = peer("trl.trainer.utils").nanstd, draw(seed, singles=False)
    rewards, groups, _ = outcomes(case)
    found = torch.tensor(restated.less_mean(rewards, groups)) / (nanstd(torch.tensor(rewards)) + 1e-6)
    yield compute_advantages("grpo_batch_std", case.inputs()), rowwise(case, found.tolist())


@row("gigpo", "paper")
def _gigpo_paper(seed):
    """Turns of some tokens, observations of one token between them; few states, so that many turns share one."""
    case, g = draw(seed, singles=False), torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 2, case.mask.shape, generator=g)
    prompts = torch.randint(5, 7, (len(case.lengths),), generator=g)
    case.rewards[:] = torch.randn(case.rewards.shape, generator=g, dtype=torch.float64) * case.mask
    turns, places = [], []
    for own, prompt, mask, rewards in zip(
        listed(case, ids), prompts.tolist(), listed(case, case.mask), listed(case, case.rewards), strict=True
    ):
        line, place, state = [], [], (prompt,)
        for is_model, run in itertools.groupby(range(len(mask)), key=lambda t, mask=mask: mask[t]):
            at = list(run)
            if is_model:
                line.append((state, sum(rewards[t] for t in at)))
                place.append(at)
            else:
                state = tuple(own[t] for t in at)
        turns.append(line)
        places.append(place)
    found = [[0.0] * n for n in case.lengths]
    for i, values in enumerate(restated.gigpo(turns, case.groups.tolist(), GAMMA)):
        for value, at in zip(values, places[i], strict=True):
            for t in at:
                found[i][t] = value
    jagged = torch.nested.nested_tensor_from_jagged(prompts, torch.arange(len(prompts) + 1))
    columns = {"prompt_token_ids": jagged, "completion_token_ids": ids}
    yield compute_advantages("gigpo", case.inputs(gamma=GAMMA, columns=columns)), tokens(found)


@row("remax", "its authors")
def _remax_authors(seed):
    case = draw(seed)
    rewards, _, _ = outcomes(case)
    greedy = case.components[:, 0]
    found = restated.remax(rewards, greedy.tolist(), listed(case, case.mask), GAMMA)
    yield compute_advantages("remax", case.inputs(greedy_rewards=greedy, gamma=GAMMA)), tokens(found)


@row("opo", "paper")
def _opo_paper(seed):
    case = draw(seed, singles=False)
    yield compute_advantages("opo", case.inputs()), rowwise(case, restated.opo(*outcomes(case)))


@row("grpo_passk", "paper")
def _passk_paper(seed):
    case = draw(seed, singles=False)
    rewards, groups, _ = outcomes(case)
    best = restated.passk(rewards, groups)
    yield compute_advantages("grpo_passk", case.inputs()), rowwise(case, best)


@row("gdpo, completions of one length", "NeMo-RL")
def _gdpo_nemo(seed):
    """It whitens over completions, we over tokens: the deviations of the two samples differ by their counts alone."""
    case, weights = draw(seed, singles=False, tools=False, length=5), [1.0, 0.5, 2.0]
    found = restated.gdpo(case.components.T.tolist(), weights, case.groups.tolist())
    n, m = case.mask.sum(), len(case.lengths)
    more = {"components": case.components, "component_weights": torch.tensor(weights)}
    ours = compute_advantages("gdpo", case.inputs(**more))
    yield ours, rowwise(case, found) * ((n - 1) / n * m / (m - 1)).sqrt()


@row("vtrace, and the critic's returns", "paper")
def _vtrace_paper(seed):
    case = draw(seed, tools=False)
    ratio = (case.old - case.rollout).exp()
    data = case.inputs(values=case.values, gamma=GAMMA, lam=LAMBDA, ratio=ratio)
    lines = [listed(case, x) for x in (case.rewards, case.values, ratio)]
    found = [restated.vtrace(*line, GAMMA, LAMBDA) for line in zip(*lines, strict=True)]
    yield compute_advantages("vtrace", data), tokens(line for _, line in found)
    yield value_scan(data, "vtrace").returns, tokens(line for line, _ in found)


def optimal_paper(name, *, tools):
    """A row for an optimal token baseline: of positions among all tokens, or among the model's alone."""

    def compare(seed):
        case = draw(seed, tools=tools)
        weights = (case.old - case.rollout).exp().clamp(max=2.0) * case.mask
        rewards, groups, _ = outcomes(case)
        kept = [line.bool() for line in case.mask.split(case.lengths)]

        def squeezed(packed):
            return [line[mask].tolist() for line, mask in zip(packed.split(case.lengths), kept, strict=True)]

        given = [squeezed(x) for x in (case.old, case.sum_pi_squared, weights)]
        found = torch.zeros_like(case.mask)
        found[case.mask.bool()] = tokens(restated.token_baseline(rewards, groups, *given))
        data = case.inputs(logprobs=case.old, sum_pi_squared=case.sum_pi_squared, weights=weights)
        yield compute_advantages(name, data), found

    return compare


row("optimal_token_baseline, without tools", "paper")(optimal_paper("optimal_token_baseline", tools=False))
row("tir_optimal_token_baseline", "paper")(optimal_paper("tir_optimal_token_baseline", tools=True))


@row("remax", "verl")
def _remax(seed):
    algos, case = peer("verl.trainer.ppo.core_algos"), draw(seed)
    greedy = case.components[:, 0]
    found, _ = algos.compute_remax_outcome_advantage(case.pad(case.rewards), greedy, case.pad(case.mask))
    yield compute_advantages("remax", case.inputs(greedy_rewards=greedy)), case.unpad(found)


@row("gdpo", "verl")
def _gdpo(seed):
    algos, case = peer("verl.trainer.ppo.core_algos"), draw(seed)
    weights, keys = torch.tensor([1.0, 0.5, 2.0]), ("a", "b", "c")
    mask = case.pad(case.mask)
    attention = torch.cat([torch.ones(len(case.lengths), 1), case.pad(torch.ones_like(case.mask))], 1).long()
    config = {"gdpo_reward_keys": keys, "gdpo_reward_weights": weights.tolist()}
    scores = {key: column.numpy() for key, column in zip(keys, case.components.T, strict=True)}
    batch = {"prompts": torch.ones(len(case.lengths), 1), "attention_mask": attention}
    found, _ = algos.compute_gdpo_outcome_advantage(
        case.pad(case.rewards), mask, case.uid, config=config, non_tensor_batch=scores, batch=batch
    )
    ours = compute_advantages("gdpo", case.inputs(components=case.components, component_weights=weights))
    yield ours, case.unpad(found)


def optimal(name, function, *, tools):
    """A row for an optimal token baseline, with the weights of rollout correction."""

    def compare(seed):
        algos, case = peer("verl.trainer.ppo.core_algos"), draw(seed, tools=tools)
        weights = (case.old - case.rollout).exp().clamp(max=2.0) * case.mask
        found, _ = getattr(algos, function)(
            case.pad(case.rewards), case.pad(case.mask), case.uid, case.pad(case.old), case.pad(case.sum_pi_squared),
            rollout_is_weights=case.pad(weights), handle_zero_tail=True,
        )  # fmt: skip
        data = case.inputs(logprobs=case.old, sum_pi_squared=case.sum_pi_squared, weights=weights)
        yield compute_advantages(name, data), case.unpad(found)

    return compare


row("optimal_token_baseline, without tools", "verl")(
    optimal("optimal_token_baseline", "compute_optimal_token_baseline_advantage", tools=False)
)
row("tir_optimal_token_baseline", "verl")(
    optimal("tir_optimal_token_baseline", "compute_multi_turn_optimal_token_baseline_advantage", tools=True)
)


# Losses, with their gradients.


def learn(case, config, *, selected=None, advantages=None, per_row=None, **more):
    """Our loss, and its gradient, (T,); of further columns, by token and by completion."""
    leaf = case.logprobs.clone().requires_grad_()
    columns = {
        "old_logprobs": case.old,
        "rollout_logprobs": case.rollout,
        "ref_logprobs": case.ref,
        "advantages": case.advantages if advantages is None else advantages,
        "loss_mask": case.mask,
    }
    columns |= more if selected is None else {"selected": selected}
    rows = {name: torch.nested.nested_tensor_from_jagged(x, case.cu_seqlens) for name, x in columns.items()}
    rows |= per_row or {}
    counts = BatchCounts(tokens=float(case.mask.sum()), sequences=float(len(case.lengths)))
    output = ModelOutput(
        token_logprobs=leaf,
        entropy=case.entropy if config.entropy_coef else None,
        cu_seqlens=case.cu_seqlens,
        counts=counts,
    )
    batch = TensorDict(rows, batch_size=[len(case.lengths)])
    loss, _ = PolicyLossFunction(config=config, max_new_tokens=LONGEST)(output, batch)
    loss.backward()
    return loss.detach(), leaf.grad


def verl_config(**options):
    config = peer("verl.workers.config")
    policy = {
        name: options.pop(name) for name in [*options] if name.startswith(("clip_cov", "kl_cov", "ppo_kl", "dro"))
    }
    return config.ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, policy_loss=config.PolicyLossConfig(**policy),
        global_batch_info={"loss_scale_factor": LONGEST}, **options,
    )  # fmt: skip


def verl_learn(case, name, config, aggregation, *, weights=None):
    algos = peer("verl.trainer.ppo.core_algos")
    leaf = case.logprobs.clone().requires_grad_()
    padded = case.pad(leaf)
    function = algos.get_policy_loss_fn(name)
    loss, _ = function(
        old_log_prob=case.pad(case.old), log_prob=padded, advantages=case.pad(case.advantages),
        response_mask=case.pad(case.mask), loss_agg_mode=aggregation, config=config,
        rollout_is_weights=None if weights is None else case.pad(weights),
    )  # fmt: skip
    loss.backward()
    return loss.detach(), leaf.grad


BOUNDS = {"clip_low": 0.15, "clip_high": 0.25}
VERL_BOUNDS = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.25}


def policy(ours, theirs, options, verl_options, aggregations=AGGREGATIONS, corrections=("none", "tis")):
    """A row for a policy loss: all aggregations, with and without the weights of rollout correction."""

    def compare(seed):
        for correction in corrections:
            case = draw(seed, scale=0.5)
            bounds = None if correction == "none" else (0.0, 1.5)
            weights = None if correction == "none" else (case.old - case.rollout).exp().clamp(max=1.5) * case.mask
            for aggregation in aggregations:
                config = AlgorithmConfig(
                    loss=ours,
                    loss_options=options,
                    aggregation=aggregation,
                    correction=correction,
                    correction_bounds=bounds,
                )
                found = verl_learn(case, theirs, verl_config(**verl_options), aggregation, weights=weights)
                yield from zip(learn(case, config), found, strict=True)

    return compare


row("ppo with dual clip", "verl")(
    policy("ppo", "vanilla", {**BOUNDS, "clip_dual": 1.8}, {**VERL_BOUNDS, "clip_ratio_c": 1.8})
)
row("gspo", "verl")(policy("gspo", "gspo", BOUNDS, VERL_BOUNDS))
row("cispo", "verl")(policy("cispo", "cispo", BOUNDS, VERL_BOUNDS))
row("sapo", "verl")(
    policy("sapo", "sapo", {"tau_pos": 1.0, "tau_neg": 1.3}, {"tau_pos": 1.0, "tau_neg": 1.3}, ["seq-mean-token-mean"])
)
row("gmpo", "verl")(policy("gmpo", "geo_mean", BOUNDS, VERL_BOUNDS, ["seq-mean-token-mean"], ["none"]))
DPPO, VERL_DPPO = {"clip_low": 0.05, "clip_high": 0.08}, {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}
row("dppo_tv", "verl")(policy("dppo_tv", "dppo_tv", {**DPPO, "ratio_max": 1.4}, {**VERL_DPPO, "clip_ratio_c": 1.4}))
row("dppo_kl", "verl")(policy("dppo_kl", "dppo_kl", {**DPPO, "ratio_max": 1.4}, {**VERL_DPPO, "clip_ratio_c": 1.4}))
row("dro", "verl")(policy("dro", "dro", {"dro_beta": 0.3}, {"dro_beta": 0.3}))
row("reinforce (gpg)", "verl")(policy("reinforce", "gpg", {}, {}))


@row("clip_cov, all candidates, ratio 1", "verl")
def _clip_cov(seed):
    case = draw(seed)
    case.logprobs[:] = case.old
    selected = select_tokens(case.old, case.advantages, case.mask, loss="clip_cov", share=1.0, low=0.1, high=1.0)
    options = {**BOUNDS, "share": 1.0, "low": 0.1, "high": 1.0}
    config = AlgorithmConfig(loss="clip_cov", loss_options=options)
    theirs = verl_config(**VERL_BOUNDS, clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=1.0)
    yield from zip(
        learn(case, config, selected=selected), verl_learn(case, "clip_cov", theirs, "token-mean"), strict=True
    )


@row("kl_cov, ratio e^0.1", "verl")
def _kl_cov(seed):
    case = draw(seed)
    case.logprobs[:] = case.old + 0.1  # the covariances are those of the old log-probs, from which we choose
    selected = select_tokens(case.old, case.advantages, case.mask, loss="kl_cov", share=0.3)
    weights = (case.old - case.rollout).exp().clamp(max=1.5) * case.mask
    options = {"share": 0.3, "kl_coef": 0.7}
    config = AlgorithmConfig(loss="kl_cov", loss_options=options, correction="tis", correction_bounds=(0.0, 1.5))
    theirs = verl_learn(case, "kl_cov", verl_config(kl_cov_ratio=0.3, ppo_kl_coef=0.7), "token-mean", weights=weights)
    yield from zip(learn(case, config, selected=selected), theirs, strict=True)


@row("reinforce with weights in bypass mode", "verl")
def _bypass(seed):
    algos, case = peer("verl.trainer.ppo.core_algos"), draw(seed, scale=0.5)
    leaf = case.logprobs.clone().requires_grad_()
    weights = (case.logprobs - case.old).exp().clamp(max=1.5) * case.mask
    loss, _ = algos.compute_policy_loss_reinforce(
        case.pad(case.old), case.pad(leaf), case.pad(case.advantages), case.pad(case.mask), "token-mean",
        verl_config(), case.pad(weights),
    )  # fmt: skip
    loss.backward()
    bounds = {"correction": "tis", "correction_bounds": (0.0, 1.5)}
    ours = learn(case, AlgorithmConfig(loss="reinforce", old_logprobs="rollout", **bounds))
    yield from zip(ours, (loss.detach(), leaf.grad), strict=True)


@row("value loss", "verl")
def _value(seed):
    algos, case = peer("verl.trainer.ppo.core_algos"), draw(seed, scale=0.5)
    for aggregation in AGGREGATIONS:
        leaf = case.logprobs.clone().requires_grad_()
        theirs, _ = algos.compute_value_loss(
            case.pad(leaf), case.pad(case.ref), case.pad(case.old), case.pad(case.mask), 0.3, aggregation,
            loss_scale_factor=LONGEST,
        )  # fmt: skip
        theirs.backward()
        ours, gradient, _ = value_learn(case, aggregation)
        yield ours, theirs.detach()
        yield gradient, leaf.grad


def value_learn(case, aggregation):
    leaf = case.logprobs.clone().requires_grad_()
    columns = {"values": case.old, "returns": case.ref, "loss_mask": case.mask}
    rows = {name: torch.nested.nested_tensor_from_jagged(x, case.cu_seqlens) for name, x in columns.items()}
    counts = BatchCounts(tokens=float(case.mask.sum()), sequences=float(len(case.lengths)))
    output = ModelOutput(
        token_logprobs=None, token_values=leaf, entropy=None, cu_seqlens=case.cu_seqlens, counts=counts
    )
    function = ValueLossFunction(clip=0.3, aggregation=Aggregation(name=aggregation, norm_constant=LONGEST))
    loss, metrics = function(output, TensorDict(rows, batch_size=[len(case.lengths)]))
    loss.backward()
    return loss.detach(), leaf.grad, metrics


@row("value loss", "OpenRLHF")
def _value_openrlhf(seed):
    losses, case = peer("openrlhf.models.loss"), draw(seed, scale=0.5)
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        leaf = case.logprobs.clone().requires_grad_()
        function = losses.ValueLoss(0.3, token_level_loss=aggregation == "token-mean")
        theirs = function(case.pad(leaf), case.pad(case.old), case.pad(case.ref), case.pad(case.mask))
        theirs.backward()
        ours, gradient, _ = value_learn(case, aggregation)
        yield ours, theirs.detach()
        yield gradient, leaf.grad


@row("ppo with dual clip, tis and icepop", "OpenRLHF")
def _ppo_openrlhf(seed):
    losses, case = peer("openrlhf.models.loss"), draw(seed, scale=0.5)
    for correction, mode in (("none", None), ("tis", "clip"), ("icepop", "mask")):
        low = 0.0 if correction == "tis" else 0.6
        for aggregation in ("token-mean", "seq-mean-token-mean"):
            leaf = case.logprobs.clone().requires_grad_()
            gate = {} if mode is None else {"is_correction_level": "token", "is_correction_mode": mode}
            function = losses.PolicyLoss(
                0.15, 0.25, 1.8, aggregation == "token-mean", is_correction_threshold=[low, 1.5], **gate
            )
            theirs, *_ = function(
                case.pad(leaf),
                case.pad(case.old),
                case.pad(case.advantages),
                case.pad(case.mask),
                case.pad(case.rollout),
            )
            theirs.backward()
            config = AlgorithmConfig(
                loss_options={**BOUNDS, "clip_dual": 1.8}, aggregation=aggregation, correction=correction,
                correction_bounds=None if mode is None else (low, 1.5),
            )  # fmt: skip
            yield from zip(learn(case, config), (theirs.detach(), leaf.grad), strict=True)


ALONE = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, sync_gradients=True)
"""What TRL asks of an accelerator, of one process."""


def by_trl(
    what, ours, loss_type, aggregation, *, options, level="token", beta=0.0, entropy=0.0, weighted=False,
    keys=None, off=None, share=1.0, **args,
):  # fmt: skip
    """A row for a loss of TRL's GRPOTrainer, called with what it asks of a trainer."""

    @row(what, "TRL")
    def compare(seed):
        trainer, case = peer("trl.trainer.grpo_trainer").GRPOTrainer, draw(seed, scale=0.5)
        case.ref[:] = case.logprobs + 0.5 * (case.ref - case.old).clamp(-3, 3)
        leaf = case.logprobs.clone().requires_grad_()
        weights = (case.old - case.rollout).exp().clamp(max=1.5) * case.mask
        ratio = case.pad(weights)
        if loss_type == "vespo":  # its ratio to the sampler; it adds up the logs of all entries
            ratio = case.pad((case.old - case.rollout) * case.mask).exp()
        high = high_entropy(case.entropy.float(), case.mask, share=share)
        grpo = trainer
        stub = SimpleNamespace(
            get_off_policy_mask=grpo.get_off_policy_mask, get_gamma_weights=grpo.get_gamma_weights,
            get_high_entropy_mask=lambda *_: case.pad(high.double()),
            _get_per_token_logps_and_entropies=lambda *_, **__: (case.pad(leaf), case.pad(case.entropy), None),
            aux_loss_enabled=False, top_entropy_quantile=share, off_policy_mask_threshold=off,
            importance_sampling_level=level, beta=beta, loss_type=loss_type, epsilon_low=BOUNDS["clip_low"],
            epsilon_high=1 + BOUNDS["clip_high"] if loss_type == "cispo" else BOUNDS["clip_high"],
            use_vllm=weighted, vllm_importance_sampling_correction=weighted, model=SimpleNamespace(training=True),
            current_gradient_accumulation_steps=1, max_completion_length=LONGEST, use_adaptive_entropy=False,
            _entropy_bonus_enabled=entropy > 0, entropy_coef=entropy, _metrics={"train": defaultdict(list)},
            args=defaulted(steps_per_generation=1, **args),
            accelerator=ALONE,
        )  # fmt: skip
        mask = case.pad(case.mask)
        ids = torch.zeros_like(mask, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask,
            "advantages": case.pad(case.advantages), "old_per_token_logps": case.pad(case.old),
            "ref_per_token_logps": case.pad(case.ref), "importance_sampling_ratio": ratio,
            "sampling_per_token_logps": case.pad(case.rollout), "num_items_in_batch": mask.sum(),
        }  # fmt: skip
        loss = trainer._compute_loss(stub, None, inputs)
        loss.backward()
        correction = {"correction": "tis", "correction_bounds": (0.0, 1.5)} if weighted else {}
        config = AlgorithmConfig(
            loss=ours, loss_options=options, aggregation=aggregation, kl_coef=beta, entropy_coef=entropy,
            off_policy_mask=off or 0.0, top_entropy=share, **correction, **(keys or {}),
        )  # fmt: skip
        yield from zip(learn(case, config, is_high_entropy=high), (loss.detach(), leaf.grad), strict=True)

    return compare


NO_DUAL = {**BOUNDS, "clip_dual": 0.0}
by_trl("ppo, token-mean (bnpo), tis", "ppo", "bnpo", "token-mean", options=NO_DUAL, weighted=True)
by_trl("ppo, seq-mean-token-mean (grpo)", "ppo", "grpo", "seq-mean-token-mean", options=NO_DUAL)
by_trl("ppo, seq-mean-token-sum-norm (dr_grpo)", "ppo", "dr_grpo", "seq-mean-token-sum-norm", options=NO_DUAL)
by_trl("ppo, token-mean (dapo), entropy bonus", "ppo", "dapo", "token-mean", options=NO_DUAL, entropy=0.1)
by_trl("ppo, seq-mean-token-sum (luspo)", "ppo", "luspo", "seq-mean-token-sum", options=NO_DUAL)
by_trl("ppo with KL k3, below the cap", "ppo", "bnpo", "token-mean", options=NO_DUAL, beta=0.04)
by_trl("sapo", "sapo", "sapo", "seq-mean-token-mean", options={"tau_pos": 1.0, "tau_neg": 1.3},
       sapo_temperature_pos=1.0, sapo_temperature_neg=1.3)  # fmt: skip
by_trl("cispo, no lower bound", "cispo", "cispo", "token-mean", options={"clip_low": 1.0, "clip_high": 0.25})


by_trl("gspo", "gspo", "grpo", "seq-mean-token-mean", options=BOUNDS, level="sequence")
by_trl("gspo, seq-mean-token-sum (luspo)", "gspo", "luspo", "seq-mean-token-sum", options=BOUNDS, level="sequence")
by_trl("ppo with KL k3*", "ppo", "bnpo", "token-mean", options=NO_DUAL, beta=0.04, keys={"kl_estimator": "k3*"},
       use_bias_correction_kl=True)  # fmt: skip
by_trl("ppo, off-policy mask", "ppo", "bnpo", "token-mean", options=NO_DUAL, off=0.05)
by_trl("ppo, top entropy: what is left out", "ppo", "dapo", "token-mean", options=NO_DUAL, share=0.2)
VESPO = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
by_trl("vespo", "vespo", "vespo", "token-mean", options={}, **{f"vespo_{name}": x for name, x in VESPO.items()})


@row("ce_gppo", "its authors")
def _ce_gppo_authors(seed):
    case, options = draw(seed, scale=0.5), {**BOUNDS, "beta_low": 0.5, "beta_high": 0.9}
    ratios = (case.logprobs - case.old).exp().tolist()
    found = [
        restated.ce_gppo(*token, *options.values()) for token in zip(ratios, case.advantages.tolist(), strict=True)
    ]
    values, slopes = (torch.tensor(x, dtype=torch.float64) * case.mask for x in zip(*found, strict=True))
    config = AlgorithmConfig(loss="ce_gppo", loss_options=options, aggregation="token-sum")
    yield from zip(learn(case, config), (values.sum(), slopes), strict=True)


@row("topr: gradient", "paper")
def _topr_paper(seed):
    case = draw(seed, tools=False)
    logs, advantages = listed(case, case.logprobs - case.rollout), listed(case, case.advantages)
    found = tokens([restated.topr(line, own[0]) for line, own in zip(logs, advantages, strict=True)])
    yield learn(case, AlgorithmConfig(loss="topr", aggregation="token-sum"))[1], found


@row("m2po: tokens that are left out, gradient", "paper")
def _m2po_paper(seed):
    case = draw(seed)
    out = restated.m2po(((case.old - case.rollout) * case.mask).tolist(), case.advantages.tolist(), 0.04)
    wanted = torch.tensor([float(i in out) for i in range(len(case.mask))])
    selected = beyond_moment(case.old - case.rollout, case.advantages, case.mask, m2_max=0.04)
    yield selected, wanted
    slopes = -case.advantages * (case.logprobs - case.rollout).exp() * case.mask * (1 - wanted)
    yield learn(case, AlgorithmConfig(loss="m2po", aggregation="token-sum"), selected=selected)[1], slopes


@row("luffy, given completions", "its authors")
def _luffy_authors(seed):
    case = draw(seed)
    pairs = zip(case.logprobs.tolist(), case.advantages.tolist(), strict=True)
    found = [restated.luffy(*pair, 0.1) for pair in pairs]
    values, slopes = (torch.tensor(x, dtype=torch.float64) * case.mask for x in zip(*found, strict=True))
    config = AlgorithmConfig(loss="luffy", aggregation="token-sum")
    given = {"is_given": torch.ones(len(case.lengths), dtype=torch.bool)}
    yield from zip(learn(case, config, per_row=given), (values.sum(), slopes), strict=True)


@row("gspo", "OpenRLHF")
def _gspo_openrlhf(seed):
    losses, case = peer("openrlhf.models.loss"), draw(seed, scale=0.5)
    leaf = case.logprobs.clone().requires_grad_()
    function = losses.PolicyLoss(BOUNDS["clip_low"], BOUNDS["clip_high"], policy_loss_type="gspo")
    theirs, *_ = function(case.pad(leaf), case.pad(case.old), case.pad(case.advantages), case.pad(case.mask))
    theirs.backward()
    config = AlgorithmConfig(loss="gspo", loss_options=BOUNDS, aggregation="seq-mean-token-mean")
    yield from zip(learn(case, config), (theirs.detach(), leaf.grad), strict=True)


@row("gmpo", "TRL")
def _gmpo_trl(seed):
    trainer, case = peer("trl.experimental.gmpo.gmpo_trainer").GMPOTrainer, draw(seed, scale=0.5)
    leaf = case.logprobs.clone().requires_grad_()
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (case.pad(leaf), case.pad(case.entropy), None),
        top_entropy_quantile=1.0, beta=0.0, epsilon_low=BOUNDS["clip_low"], epsilon_high=BOUNDS["clip_high"],
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)}, accelerator=ALONE,
    )  # fmt: skip
    mask = case.pad(case.mask)
    ids = torch.zeros_like(mask, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask,
        "advantages": case.pad(case.advantages)[:, 0], "old_per_token_logps": case.pad(case.old),
    }  # fmt: skip
    loss = trainer._compute_loss(stub, None, inputs)
    loss.backward()
    config = AlgorithmConfig(loss="gmpo", loss_options=BOUNDS, aggregation="seq-mean-token-mean")
    yield from zip(learn(case, config), (loss.detach(), leaf.grad), strict=True)


UNCORRECTED = defaulted()


def skyrl_learn(case, name, **options):
    """SkyRL's loss and gradient, of the sum over tokens divided by their number."""
    losses = peer("skyrl.backends.skyrl_train.utils.ppo_utils")
    leaf = case.logprobs.clone().requires_grad_()
    config = SimpleNamespace(
        policy_loss_type=name, eps_clip_low=BOUNDS["clip_low"], eps_clip_high=BOUNDS["clip_high"],
        loss_reduction="sequence_mean", off_policy_correction=UNCORRECTED, **options,
    )  # fmt: skip
    function = losses.PolicyLossRegistry.get(name)
    loss, _ = function(
        case.pad(leaf), case.pad(case.old), case.pad(case.advantages), config=config, loss_mask=case.pad(case.mask),
        rollout_logprobs=case.pad(case.old) if name == "rollout_is" else None,
    )  # fmt: skip
    loss = loss / case.mask.sum()
    loss.backward()
    return loss.detach(), leaf.grad


def by_skyrl(what, ours, name, options, *, gradient_alone=False, **theirs):
    """A row for a loss of SkyRL that chooses no tokens, `token-mean`."""

    @row(what, "SkyRL")
    def compare(seed):
        case = draw(seed, scale=0.5)
        config = AlgorithmConfig(loss=ours, loss_options=options, aggregation="token-mean")
        found = list(zip(learn(case, config), skyrl_learn(case, name, **theirs), strict=True))
        yield from found[1:] if gradient_alone else found


by_skyrl("ppo with dual clip", "ppo", "dual_clip", {**BOUNDS, "clip_dual": 1.8}, clip_ratio_c=1.8)
by_skyrl("gspo", "gspo", "gspo", BOUNDS)
by_skyrl("cispo", "cispo", "cispo", BOUNDS, cispo=SimpleNamespace(cispo_eps_clip_low=0.15, cispo_eps_clip_high=0.25))
by_skyrl("sapo", "sapo", "sapo", {"tau_pos": 1.0, "tau_neg": 1.3}, sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.3))
for _kind, _theirs in (("dppo_tv", "binary_tv"), ("dppo_kl", "binary_kl")):
    _delta = SimpleNamespace(dppo_type=_theirs, delta_low=DPPO["clip_low"], delta_high=DPPO["clip_high"])
    by_skyrl(
        f"{_kind}, ratio not truncated: gradient", _kind, "dppo", {**DPPO, "ratio_max": 1e6}, gradient_alone=True,
        dppo=_delta,
    )  # fmt: skip


@row("clip_cov, all candidates, ratio 1", "SkyRL")
def _clip_cov_skyrl(seed):
    case = draw(seed)
    case.logprobs[:] = case.old
    selected = select_tokens(case.old, case.advantages, case.mask, loss="clip_cov", share=1.0, low=0.1, high=1.0)
    config = AlgorithmConfig(loss="clip_cov", loss_options={**BOUNDS, "share": 1.0, "low": 0.1, "high": 1.0})
    theirs = SimpleNamespace(clip_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=1.0)
    found = skyrl_learn(case, "clip_cov", clip_cov=theirs)
    yield from zip(learn(case, config, selected=selected), found, strict=True)


@row("kl_cov, ratio e^0.1", "SkyRL")
def _kl_cov_skyrl(seed):
    case = draw(seed)
    case.logprobs[:] = case.old + 0.1  # the covariances are those of the old log-probs, from which we choose
    selected = select_tokens(case.old, case.advantages, case.mask, loss="kl_cov", share=0.3)
    config = AlgorithmConfig(loss="kl_cov", loss_options={"share": 0.3, "kl_coef": 0.7})
    found = skyrl_learn(case, "kl_cov", kl_cov=SimpleNamespace(kl_cov_frac=0.3, ppo_kl_coef=0.7))
    yield from zip(learn(case, config, selected=selected), found, strict=True)


@row("reinforce with weights in bypass mode, icepop", "SkyRL")
def _bypass_skyrl(seed):
    case = draw(seed, scale=0.5)
    config = AlgorithmConfig(
        loss="reinforce", old_logprobs="rollout", correction="icepop",
        correction_bounds=(1 - BOUNDS["clip_low"], 1 + BOUNDS["clip_high"]),
    )  # fmt: skip
    yield from zip(learn(case, config), skyrl_learn(case, "rollout_is"), strict=True)


@row("dro", "Tinker")
def _dro_tinker(seed):
    case = draw(seed, scale=0.5)
    leaf = case.logprobs.clone().requires_grad_()
    loss = restated.dro(leaf, case.old, case.advantages, case.mask, 0.3)
    loss.backward()
    config = AlgorithmConfig(loss="dro", loss_options={"dro_beta": 0.3}, aggregation="token-sum")
    yield from zip(learn(case, config), (loss.detach(), leaf.grad), strict=True)


@row("reinforce (gpg)", "its authors")
def _reinforce_authors(seed):
    """The loss of GPG's trainer: -log pi A, over all model tokens."""
    case = draw(seed)
    leaf = case.logprobs.clone().requires_grad_()
    loss = -(leaf * case.advantages * case.mask).sum() / case.mask.sum()
    loss.backward()
    yield from zip(learn(case, AlgorithmConfig(loss="reinforce")), (loss.detach(), leaf.grad), strict=True)


# Distillation: where all tokens but one are candidates, the rest of the vocabulary is that one.


@row("distill, forward: loss and gradient", "TRL")
def _distill_forward(seed):
    theirs = peer("trl.experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss
    draws = torch.Generator().manual_seed(seed)
    policy, teacher = torch.randn(2, 12, 7, generator=draws, dtype=torch.float64)
    ours, leaf = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    found = coarse_kl(teacher.log_softmax(-1)[:, 1:], ours.log_softmax(-1)[:, 1:]).mean()
    wanted = theirs(leaf[None], teacher[None], labels=torch.ones(1, 12, dtype=torch.long), beta=0.0)
    found.backward()
    wanted.backward()
    yield found.detach(), wanted.detach()
    yield ours.grad, leaf.grad


@row("distill, jsd: loss and gradient", "TRL")
def _distill_jsd(seed):
    theirs = peer("trl.experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss
    draws = torch.Generator().manual_seed(seed)
    policy, teacher = torch.randn(2, 12, 7, generator=draws, dtype=torch.float64)
    ours, leaf = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    found = coarse_jsd(teacher.log_softmax(-1)[:, 1:], ours.log_softmax(-1)[:, 1:], 0.3).mean()
    wanted = theirs(leaf[None], teacher[None], labels=torch.ones(1, 12, dtype=torch.long), beta=0.3)
    found.backward()
    wanted.backward()
    yield found.detach(), wanted.detach()
    yield ours.grad, leaf.grad


@row("distill, reverse: the gradient in expectation", "TRL")
def _distill_reverse(seed):
    theirs = peer("trl.experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss
    draws = torch.Generator().manual_seed(seed)
    policy, teacher = torch.randn(2, 6, generator=draws, dtype=torch.float64)
    leaf, ours = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    theirs(leaf[None, None], teacher[None, None], labels=torch.ones(1, 1, dtype=torch.long), beta=1.0).backward()
    for token in range(6):  # each sampled token's loss, weighed by how likely it is to be sampled
        sampled = ours.log_softmax(-1)[token]
        gap = sampled - teacher.log_softmax(-1)[token]
        rows = {"teacher_logprobs": (sampled - gap).detach()[None].float()}
        rows |= {name: sampled.detach()[None].float() for name in ("old_logprobs", "rollout_logprobs")}
        rows |= {name: torch.ones(1) for name in ("advantages", "loss_mask")}
        jagged = {k: torch.nested.nested_tensor_from_jagged(v, torch.tensor([0, 1])) for k, v in rows.items()}
        output = ModelOutput(
            token_logprobs=sampled[None].float(), entropy=None, cu_seqlens=torch.tensor([0, 1]),
            counts=BatchCounts(tokens=1.0, sequences=1.0),
        )  # fmt: skip
        learner = PolicyLossFunction(config=AlgorithmConfig(loss="distill"), teacher=TeacherSection(path="t"))
        loss, _ = learner(output, TensorDict(jagged, batch_size=[1]))
        (loss * sampled.detach().exp()).backward()
    yield ours.grad, leaf.grad


# Estimators of the KL, corrections and rejection.


@row("KL k1, abs, k2, k3, k1+, k3+: reward, loss and gradient", "verl")
def _kl(seed):
    algos, case = peer("verl.trainer.ppo.core_algos"), draw(seed)
    case.ref[:] = case.old + 3 * (case.ref - case.old)  # k3 is capped at some
    for kind in ("k1", "abs", "k2", "k3", "k1+", "k3+"):
        leaf = case.logprobs.clone().requires_grad_()
        padded = algos.kl_penalty(case.pad(leaf), case.pad(case.ref), kind)
        theirs = (padded * case.pad(case.mask)).sum() / case.mask.sum()
        theirs.backward()
        config = AlgorithmConfig(loss="reinforce", kl_coef=1.0, kl_estimator=kind)
        ours = learn(case, config, advantages=torch.zeros_like(case.advantages))
        yield from zip(ours, (theirs.detach(), leaf.grad), strict=True)
        if not kind.endswith("+"):
            yield estimate_kl(case.logprobs, case.ref, kind) * case.mask, case.unpad(padded.detach())


@row("KL k2, k3", "OpenRLHF")
def _kl_openrlhf(seed):
    utils, case = peer("openrlhf.models.utils"), draw(seed)
    for kind in ("k2", "k3"):
        theirs = utils.compute_approx_kl(case.logprobs, case.ref, kl_estimator=kind)
        yield estimate_kl(case.logprobs, case.ref, kind), theirs


@row("KL k1, abs, k2, k3: reward", "SkyRL")
def _kl_skyrl(seed):
    losses, case = peer("skyrl.backends.skyrl_train.utils.ppo_utils"), draw(seed)
    case.ref[:] = case.old + 3 * (case.ref - case.old)  # k3 is capped at some
    for kind in ("k1", "abs", "k2", "k3"):
        theirs = losses.compute_approx_kl(case.logprobs, case.ref, case.mask, kl_estimator_type=kind)
        yield estimate_kl(case.logprobs, case.ref, kind) * case.mask, theirs


def weigh(case, correction, level, low=0.7, high=1.3):
    return correction_weights(
        case.old, case.rollout, case.mask, case.cu_seqlens, correction=correction, level=level, low=low, high=high
    )


def keep(case, level, low, high):
    given = {"level": level, "divergence": "k1", "low": low, "high": high}
    return rejection_mask(case.old, case.rollout, case.mask, case.cu_seqlens, **given).double()


@row("tis weights, token and sequence", "SkyRL")
def _weights_skyrl(seed):
    utils, case = peer("skyrl.backends.skyrl_train.utils.off_policy_correction_utils"), draw(seed)
    bounds = SimpleNamespace(token_tis_ratio_clip_high=1.3, sequence_tis_ratio_clip_high=1.3)
    mask = case.pad(case.mask)
    for level in ("token", "sequence"):
        found, _ = utils.compute_tis_ratio(case.pad(case.old), case.pad(case.rollout), mask, level, bounds)
        yield weigh(case, "tis", level), case.unpad(found.expand_as(mask))


@row("rejection at all levels by k1", "SkyRL")
def _rejection_skyrl(seed):
    utils, case = peer("skyrl.backends.skyrl_train.utils.off_policy_correction_utils"), draw(seed)
    given = case.pad(case.old), case.pad(case.rollout), case.pad(case.mask)
    bounds = {
        "token": ("token_mask_is_threshold", 0.8, 1.3), "sequence": ("product_mask", 0.8, 1.3),
        "sequence_mean": ("geo_mask", 0.9, 1.1), "sequence_max": ("outlier_token_is_threshold", 1 / 1.5, 1.5),
    }  # fmt: skip
    for level, (name, low, high) in bounds.items():
        config = defaulted(**{f"{name}_low": low, f"{name}_high": high})
        config.sequence_mask_metric = {"sequence": "product", "sequence_mean": "geometric"}.get(level)
        _, _, found = utils.compute_off_policy_correction(*given, config)
        yield keep(case, level, low, high), case.unpad(found.double())


@row("tis and icepop weights, token and sequence", "slime")
def _weights_slime(seed):
    case = draw(seed)
    lines = list(zip(*(listed(case, x) for x in (case.old, case.rollout, case.mask)), strict=True))
    for level in ("token", "sequence"):
        for correction, mode in (("tis", "truncate"), ("icepop", "mask")):
            found = [restated.mis(*line, level=level, low=0.7, high=1.3, mode=mode) for line in lines]
            weights = tokens([w * m for w, m in zip(*pair, strict=True)] for pair in found)
            yield weigh(case, correction, level), weights * case.mask


@row("rejection at all levels by k1", "slime")
def _rejection_slime(seed):
    case = draw(seed)
    lines = list(zip(*(listed(case, x) for x in (case.old, case.rollout, case.mask)), strict=True))
    for level, theirs in {"token": "token", "sequence": "sequence", "sequence_mean": "geometric"}.items():
        found = [restated.mis(*line, level=theirs, low=0.8, high=1.3, mode="mask")[1] for line in lines]
        yield keep(case, level, 0.8, 1.3), tokens(found)


@row("tis and icepop weights, token and sequence", "verl")
def _weights(seed):
    helper, case = peer("verl.trainer.ppo.rollout_corr_helper"), draw(seed)
    for level in ("token", "sequence"):
        for correction, threshold in (("tis", 1.3), ("icepop", "0.7_1.3")):
            found, _ = helper.compute_rollout_correction_weights(
                case.pad(case.old - case.rollout), case.pad(case.mask), level, threshold
            )
            ours = correction_weights(
                case.old,
                case.rollout,
                case.mask,
                case.cu_seqlens,
                correction=correction,
                level=level,
                low=0.7,
                high=1.3,
            )
            yield ours, case.unpad(found)


@row("rejection at all levels by k1, k2, k3", "verl")
def _rejection(seed):
    """Bounds of k1 are of the ratio train / rollout with us, of its inverse with verl; it has no sequence_max_k1."""
    helper, case = peer("verl.trainer.ppo.rollout_corr_helper"), draw(seed)
    levels = {"token": "token", "sequence": "seq_sum", "sequence_mean": "seq_mean", "sequence_max": "seq_max"}
    for level, theirs in levels.items():
        for kind in ("k1", "k2", "k3"):
            if (level, kind) == ("sequence_max", "k1"):
                continue
            low, high = (0.8, 1.3) if kind == "k1" else (0.0, 0.04)
            threshold = f"{1 / high}_{1 / low}" if kind == "k1" else high
            found, _ = helper.compute_rollout_rejection_mask(
                case.pad(case.old - case.rollout), case.pad(case.mask), f"{theirs}_{kind}", threshold
            )
            ours = rejection_mask(
                case.old, case.rollout, case.mask, case.cu_seqlens, level=level, divergence=kind, low=low, high=high
            )
            yield ours.double(), case.unpad(found)


def difference(what, by, seeds):
    """The largest absolute difference over the seeds; raises ImportError where the peer is not installed."""
    found = 0.0
    for seed in seeds:
        for ours, theirs in ROWS[what, by](seed):
            assert ours.shape == theirs.shape, (what, by, ours.shape, theirs.shape)
            found = max(found, float((ours.double() - theirs.double()).abs().max()))
    return found


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="random batches per row")
    seeds = range(parser.parse_args().seeds)
    by_what = defaultdict(dict)
    for what, by in ROWS:
        try:
            by_what[what][by] = f"{difference(what, by, seeds):.0e}"
        except ImportError as error:
            print(f"{by}: {error}")
    print(f"| what | {' | '.join(PACKAGES)} | restated |\n|---|{'---|' * len(PACKAGES)}---|")
    for what, found in by_what.items():
        others = ", ".join(f"{number} ({by})" for by, number in found.items() if by not in PACKAGES) or "-"
        print(f"| {what} | {' | '.join(found.get(name, '-') for name in PACKAGES)} | {others} |")


if __name__ == "__main__":
    main()
