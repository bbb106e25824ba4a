"""Estimators with values per token, the critic's loss, and the choices over a whole batch; all by hand."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rl_engine.types import BatchCounts, ModelOutput
from rl_trainer.algorithms import (
    ADVANTAGES,
    POLICY_LOSSES,
    AdvantageInput,
    Aggregation,
    PolicyLossFunction,
    ValueLossFunction,
    compute_advantages,
)
from rl_trainer.algorithms.advantages import FIELDS, value_scan
from rl_trainer.algorithms.kl_controller import AdaptiveKl, estimate_kl
from rl_trainer.algorithms.selection import select_tokens
from rl_trainer.config.schema import AlgorithmConfig
from rl_trainer.errors import ConfigError


def batch(**optional):
    """Two completions of one prompt, 3 and 2 model tokens; the first has a tool's token after its second."""
    return AdvantageInput(
        rewards=torch.tensor([0.0, 0.5, 0.0, 1.0, 0.0, 2.0]),
        loss_mask=torch.tensor([1, 1, 0, 1, 1, 1]),
        cu_seqlens=torch.tensor([0, 4, 6]),
        group_ids=torch.tensor([3, 3]),
        **optional,
    )


def whitened(values, mask):
    chosen = values[mask.bool()]
    return torch.where(mask.bool(), (values - chosen.mean()) / chosen.std(), 0.0)


def test_gae_by_hand_passes_over_a_tool_s_token():
    values = torch.tensor([0.1, 0.2, 99.0, 0.3, 0.4, 0.5])
    data = batch(values=values, gamma=0.9, lam=0.8)
    a3 = 1.0 - 0.3
    a1 = 0.5 + 0.9 * 0.3 - 0.2 + 0.72 * a3
    a0 = 0.9 * 0.2 - 0.1 + 0.72 * a1
    b1 = 2.0 - 0.5
    b0 = 0.9 * 0.5 - 0.4 + 0.72 * b1
    plain = torch.tensor([a0, a1, 0.0, a3, b0, b1])
    scan = value_scan(data, "gae")
    torch.testing.assert_close(scan.advantages, plain)
    torch.testing.assert_close(scan.returns[[0, 1, 3, 4, 5]], (plain + values)[[0, 1, 3, 4, 5]])
    torch.testing.assert_close(compute_advantages("gae", data), whitened(plain, data.loss_mask), atol=1e-4, rtol=1e-4)


def test_vtrace_without_mismatch_is_td_and_cuts_large_ratios():
    values = torch.tensor([0.1, 0.2, 99.0, 0.3, 0.4, 0.5])
    on_policy = compute_advantages("vtrace", batch(values=values, ratio=torch.ones(6)))
    # With ratio, gamma and lambda 1 the target of a state is the reward behind it: A = R_t + G_{t+1} - V_t.
    torch.testing.assert_close(on_policy, torch.tensor([1.4, 1.3, 0.0, 0.7, 1.6, 1.5]))
    large = compute_advantages("vtrace", batch(values=values, ratio=torch.full((6,), 7.0)))
    torch.testing.assert_close(large, on_policy)
    small = compute_advantages("vtrace", batch(values=values, ratio=torch.full((6,), 0.5)))
    torch.testing.assert_close(small[[3, 5]], on_policy[[3, 5]] / 2)


def test_remax_by_hand():
    got = compute_advantages("remax", batch(greedy_rewards=torch.tensor([1.0, 1.0])))
    torch.testing.assert_close(got, torch.tensor([0.5, 0.5, 0.0, 0.0, 1.0, 1.0]))


def otb_batch(**optional):
    logprobs = torch.log(torch.tensor([0.5, 0.25, 1.0, 0.5, 0.8, 0.5]))
    return batch(logprobs=logprobs, sum_pi_squared=torch.tensor([0.5, 0.4, 7.0, 0.5, 0.7, 0.5]), **optional)


def test_optimal_token_baseline_by_hand():
    # Energies 0.5, 0.9, -, 0.5 and 0.1, 0.5; summed 0.5, 1.4, -, 1.9 and 0.1, 0.6. Rewards to go 1.5, 1.5, -, 1; 2, 2.
    first = (1.5 * 0.5 + 2 * 0.1) / 0.6
    second = (1.5 * 1.4 + 2 * 0.6) / 2.0
    # The last token of the first completion has nothing to be compared with.
    want = torch.tensor([1.5 - first, 1.5 - second, 0.0, 1.0, 2 - first, 2 - second])
    torch.testing.assert_close(compute_advantages("optimal_token_baseline", otb_batch()), want)


def constant_energy(lengths, rewards, groups, mask=None, rollouts=None):
    """Completions rewarded at their last tokens, every one of which has the same energy."""
    num, ends = sum(lengths), torch.tensor(lengths).cumsum(0)
    per_token = torch.zeros(num)
    per_token[ends - 1] = torch.tensor(rewards)
    return AdvantageInput(
        rewards=per_token,
        loss_mask=torch.ones(num) if mask is None else torch.tensor(mask),
        cu_seqlens=torch.nn.functional.pad(ends, (1, 0)),
        group_ids=torch.tensor(groups),
        rollout_ids=None if rollouts is None else torch.tensor(rollouts),
        logprobs=torch.full((num,), math.log(0.5)),
        sum_pi_squared=torch.full((num,), 0.5),
    )


OTB = ["optimal_token_baseline", "tir_optimal_token_baseline"]


@pytest.mark.parametrize("name", OTB)
def test_a_tail_of_one_completion_keeps_its_return(name):
    got = compute_advantages(name, constant_energy([2, 5], [0.0, 1.0], [0, 0]))
    assert got.tolist() == pytest.approx([-0.5, -0.5, 0.5, 0.5, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("name", OTB)
def test_a_group_of_one_keeps_its_return(name):
    got = compute_advantages(name, constant_energy([3, 2, 1], [2.0, 1.0, 3.0], [5, 6, 6]))
    assert got.tolist() == pytest.approx([2.0, 2.0, 2.0, 1.0 - 2.0, 1.0, 3.0 - 2.0])


@pytest.mark.parametrize("name", OTB)
def test_a_rollout_of_several_trajectories_is_not_its_baseline(name):
    """Two trajectories of one rollout reach positions that the other rollout does not."""
    got = compute_advantages(name, constant_energy([2, 2, 1], [1.0, 1.0, 3.0], [0, 0, 0], rollouts=[0, 0, 1]))
    assert got.tolist() == pytest.approx([1.0 - 2.0, 1.0, 1.0 - 2.0, 1.0, 3.0 - 2.0])


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        # Position 1 is a tool's in the first completion, position 2 beyond the end of the second.
        ("optimal_token_baseline", [1.0 - 2, 0.0, 1.0, 3.0 - 2, 3.0]),
        # The second model tokens stand beside each other, of equal weight.
        ("tir_optimal_token_baseline", [1.0 - 2, 0.0, 1.0 - 2, 3.0 - 2, 3.0 - 2]),
    ],
)
def test_only_the_baseline_with_tools_counts_other_positions(name, wanted):
    got = compute_advantages(name, constant_energy([3, 2], [1.0, 3.0], [0, 0], mask=[1.0, 0.0, 1.0, 1.0, 1.0]))
    assert got.tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("name", OTB)
def test_tokens_without_energy_have_no_baseline_by_rounding(name):
    """Where the policy is certain, 1 - 2 pi + sum pi^2 is 0 but for rounding, which must not weigh."""
    data = constant_energy([1, 1], [0.0, 1.0], [0, 0])
    sure = dataclasses.replace(data, logprobs=torch.zeros(2), sum_pi_squared=torch.tensor([1.0 - 1e-7, 1.0]))
    assert compute_advantages(name, sure).tolist() == [0.0, 1.0]


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=4), min_size=1, max_size=4),
    name=st.sampled_from(OTB),
    seed=st.integers(0, 2**16),
)
def test_optimal_baselines_are_between_returns_of_a_position(groups, name, seed):
    draw = torch.Generator().manual_seed(seed)
    lengths = [length for group in groups for length in group]
    ids = [index for index, group in enumerate(groups) for _ in group]
    data = constant_energy(lengths, torch.randn(len(lengths), generator=draw).tolist(), ids)
    logprobs = -3 * torch.rand(sum(lengths), generator=draw)
    data = dataclasses.replace(data, logprobs=logprobs, sum_pi_squared=logprobs.exp() ** 2)
    got, starts, rewards = compute_advantages(name, data), data.cu_seqlens.tolist(), data.sum_rewards().tolist()
    for row, length in enumerate(lengths):
        for position in range(length):
            beside = [rewards[r] for r in range(len(lengths)) if ids[r] == ids[row] and lengths[r] > position]
            baseline = rewards[row] - got[starts[row] + position].item()
            if len(beside) == 1:
                assert baseline == pytest.approx(0.0, abs=1e-6)
            else:
                assert min(beside) - 1e-5 <= baseline <= max(beside) + 1e-5


def test_optimal_token_baseline_weighs_by_the_squared_correction():
    weights = torch.tensor([2.0, 2.0, 1.0, 2.0, 1.0, 1.0])
    first = (1.5 * 2.0 + 2 * 0.1) / 2.1
    got = compute_advantages("optimal_token_baseline", otb_batch(weights=weights))
    assert got[0].item() == pytest.approx(1.5 - first)


def test_gdpo_weighs_parts_of_different_scale_alike():
    components = torch.tensor([[0.0, 100.0], [1.0, 0.0]])
    weighted = compute_advantages("gdpo", batch(components=components, component_weights=torch.tensor([2.0, 1.0])))
    half = 0.5**0.5
    plain = torch.tensor([-half, -half, 0.0, -half, half, half])
    torch.testing.assert_close(weighted, whitened(plain, batch().loss_mask), atol=1e-4, rtol=1e-4)


def test_prime_by_hand():
    process = torch.tensor([0.3, 0.0, 50.0, 0.3, 0.1, 0.5])
    # Means per completion 0.2 and 0.3; outcomes 1.5 - 2 and 2 - 1.5.
    first = [0.0 - 0.3 * 2 + 0.6, -0.3 + 0.0, 0.0]
    want = torch.tensor([first[0] - 0.3 - 0.5, -0.3 + 0.0 - 0.5, 0.0, 0.0 - 0.5, 0.2 + 0.5, 0.3 + 0.5])
    torch.testing.assert_close(compute_advantages("prime", batch(process_rewards=process)), want)


def test_what_an_estimator_needs_is_told():
    for name, estimator in ADVANTAGES.items():
        if {*estimator.reads} & {*FIELDS}:
            with pytest.raises(ConfigError, match="which the batch has not got"):
                compute_advantages(name, batch())


def test_a_token_that_the_model_did_not_write_is_never_looked_at():
    optional = {
        "values": torch.rand(6),
        "ratio": torch.rand(6),
        "weights": torch.rand(6),
        "logprobs": -torch.rand(6),
        "sum_pi_squared": torch.rand(6),
        "process_rewards": torch.rand(6),
        "greedy_rewards": torch.rand(2),
        "components": torch.rand(2, 3),
        "columns": {
            "prompt_token_ids": torch.nested.nested_tensor_from_jagged(torch.tensor([5, 5]), torch.tensor([0, 1, 2])),
            "completion_token_ids": torch.arange(6),
        },
    }
    poisoned = {
        k: v.clone().index_fill_(0, torch.tensor([2]), math.nan) if getattr(v, "shape", None) == (6,) else v
        for k, v in optional.items()
    }
    for name in ADVANTAGES:
        clean, dirty = compute_advantages(name, batch(**optional)), compute_advantages(name, batch(**poisoned))
        torch.testing.assert_close(dirty, clean, msg=name)
        assert clean[2] == 0


def jagged(values):
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, values.shape[0]]))


def output_of(logprobs=None, values=None):
    num = (logprobs if logprobs is not None else values).shape[0]
    counts = BatchCounts(tokens=float(num), sequences=1.0)
    cu = torch.tensor([0, num])
    return ModelOutput(token_logprobs=logprobs, token_values=values, entropy=None, cu_seqlens=cu, counts=counts)


def test_value_loss_by_hand():
    values = torch.tensor([1.0, 0.0, 5.0, 0.0], requires_grad=True)
    columns = {
        "values": jagged(torch.tensor([0.9, 1.0, 0.0, 0.0])),
        "returns": jagged(torch.tensor([2.0, 0.0, 0.0, math.nan])),
        "loss_mask": jagged(torch.tensor([1, 1, 1, 0])),
    }
    loss, metrics = ValueLossFunction(clip=0.5)(output_of(values=values), TensorDict(columns, batch_size=[1]))
    # Near its old value: 1; clipped to 0.5, which is worse: 0.25; clipped to 0.5, which is better: 25.
    assert loss.item() == pytest.approx(0.5 * (1 + 0.25 + 25) / 4)
    assert metrics["value_clipped"] == pytest.approx(0.25)
    loss.backward()
    torch.testing.assert_close(values.grad, torch.tensor([-0.25, 0.0, 1.25, 0.0]))


@pytest.mark.parametrize("seed", range(5))
def test_a_value_that_has_not_left_its_bounds_is_not_clipped(seed):
    """old + (value - old) is not the value, by rounding; that is no clipping."""
    draw = torch.Generator().manual_seed(seed)
    old, returns = 100 * torch.rand(1000, generator=draw), 100 * torch.rand(1000, generator=draw)
    values = old + 0.1 * torch.rand(1000, generator=draw)
    columns = {"values": jagged(old), "returns": jagged(returns), "loss_mask": jagged(torch.ones(1000))}
    loss, metrics = ValueLossFunction(clip=0.2)(output_of(values=values), TensorDict(columns, batch_size=[1]))
    assert metrics["value_clipped"] == 0
    torch.testing.assert_close(loss, 0.5 * (values - returns).square().mean())


def test_without_a_clip_there_is_no_share_of_clipped_values():
    columns = {name: jagged(torch.ones(2)) for name in ("values", "returns", "loss_mask")}
    _, metrics = ValueLossFunction(clip=0.0)(output_of(values=torch.zeros(2)), TensorDict(columns, batch_size=[1]))
    assert set(metrics) == {"value_loss", "value_mean"}


@pytest.mark.parametrize(
    ("aggregation", "wanted"),
    [
        ("token-mean", (1 + 4 + 9) / 3),
        ("token-sum", 14.0),
        ("seq-mean-token-sum", (5 + 9) / 2),
        ("seq-mean-token-mean", (2.5 + 9) / 2),
        ("seq-mean-token-sum-norm", (5 + 9) / 2 / 8),
    ],
)
def test_value_loss_supports_the_aggregations_of_policy_loss(aggregation, wanted):
    """Squared errors 1, 4, (masked) | 9 | (masked)."""
    offsets = torch.tensor([0, 3, 4, 5])
    values = torch.tensor([1.0, 2.0, 77.0, 3.0, 77.0])
    columns = {"values": values, "returns": torch.zeros(5), "loss_mask": torch.tensor([1, 1, 0, 1, 0])}
    rows = {name: torch.nested.nested_tensor_from_jagged(x, offsets) for name, x in columns.items()}
    counts = BatchCounts(tokens=3.0, sequences=2.0)
    output = ModelOutput(token_logprobs=None, token_values=values, entropy=None, cu_seqlens=offsets, counts=counts)
    function = ValueLossFunction(clip=0.5, aggregation=Aggregation(name=aggregation, norm_constant=8))
    loss, metrics = function(output, TensorDict(rows, batch_size=[3]))
    assert loss.item() == pytest.approx(wanted / 2)
    assert metrics["value_loss"] == pytest.approx(wanted / 2)
    assert metrics["value_mean"] == pytest.approx(2.0)


def test_tokens_are_chosen_by_covariance_over_model_tokens_alone():
    logprobs = torch.tensor([0.0, -1.0, -2.0, -3.0, 1000.0])
    advantages = torch.tensor([3.0, 1.0, -1.0, -3.0, 1000.0])
    mask = torch.tensor([1, 1, 1, 1, 0])
    # Covariances 4.5, 0.5, 0.5, 4.5.
    assert select_tokens(logprobs, advantages, mask, loss="kl_cov", share=0.5).tolist() == [1, 0, 0, 1, 0]
    by_bounds = select_tokens(logprobs, advantages, mask, loss="clip_cov", share=1.0, low=0.1, high=1.0)
    assert by_bounds.tolist() == [0, 1, 1, 0, 0]
    draws = {
        tuple(
            select_tokens(logprobs, advantages, mask, loss="clip_cov", share=0.25, low=0.1, high=1.0, seed=s).tolist()
        )
        for s in range(20)
    }
    assert draws == {(0, 1, 0, 0, 0), (0, 0, 1, 0, 0)}
    nothing = select_tokens(logprobs, advantages, torch.zeros(5), loss="clip_cov", share=1.0)
    assert nothing.sum() == 0


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_chosen_tokens_are_treated_apart(loss):
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -1.5, -1.5])
    columns = {
        "old_logprobs": jagged(old),
        "rollout_logprobs": jagged(old),
        "advantages": jagged(torch.tensor([1.0, -1.0, -1.0])),
        "loss_mask": jagged(torch.ones(3)),
        "selected": jagged(torch.tensor([0, 0, 1], dtype=torch.uint8)),
    }
    config = AlgorithmConfig(loss=loss, loss_options={"kl_coef": 0.5} if loss == "kl_cov" else {"clip_dual": 0.0})
    value, _ = PolicyLossFunction(config=config)(output_of(logprobs), TensorDict(columns, batch_size=[1]))
    value.backward()
    ratio = math.exp(0.5)
    if loss == "clip_cov":
        assert value.item() == pytest.approx((-1 + ratio) / 3)
        want = [-1 / 3, ratio / 3, 0.0]
    else:
        assert value.item() == pytest.approx((-1 + ratio + ratio + 0.5 * 0.5) / 3)
        want = [-1 / 3, ratio / 3, (ratio + 0.5) / 3]
    torch.testing.assert_close(logprobs.grad, torch.tensor(want))


def test_kl_estimators_by_hand():
    policy, reference = torch.tensor([-1.0]), torch.tensor([-1.5])
    got = {name: estimate_kl(policy, reference, name).item() for name in ("k1", "abs", "k2", "k3")}
    assert got == pytest.approx({"k1": 0.5, "abs": 0.5, "k2": 0.125, "k3": math.exp(-0.5) - 1 + 0.5})


@pytest.mark.parametrize("d", [-100.0, -3.0, -2.5, -0.1, 0.0, 3.0, 10.5, 11.5, 100.0])
def test_k3_is_capped_alike_in_the_reward_and_in_the_loss(d):
    policy, reference = torch.tensor([-1.0]), torch.tensor([-1.0 - d])
    in_reward = estimate_kl(policy, reference, "k3").item()
    assert in_reward == pytest.approx(min(math.exp(-d) - 1 + d, 10.0) if d > -50 else 10.0, rel=1e-5, abs=1e-6)
    columns = {"old_logprobs": policy, "ref_logprobs": reference, "advantages": torch.zeros(1)}
    rows = {name: jagged(x) for name, x in {**columns, "loss_mask": torch.ones(1)}.items()}
    config = AlgorithmConfig(kl_coef=1.0, kl_estimator="k3", old_logprobs="rollout")
    loss, _ = PolicyLossFunction(config=config)(output_of(policy), TensorDict(rows, batch_size=[1]))
    assert loss.item() == pytest.approx(in_reward, rel=1e-4, abs=1e-6)


PLAIN = {"mismatch_k1", "mismatch_k3", "mismatch_abs", "mismatch_chi2", "entropy_estimate"}
RATIO = {"log_ratio", "k3", "ratio"}
CLIPPED = {"clipped_high", "clipped_low"}


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("has_old", [True, False])
def test_what_was_not_computed_is_no_metric(loss, has_old):
    """Without a reference no KL, without entropies no entropy, without an old policy no ratio, without a clip none."""
    columns = {name: jagged(torch.full((3,), -1.0)) for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs")}
    columns |= {name: jagged(torch.ones(3)) for name in ("advantages", "loss_mask", "selected")}
    output = output_of(torch.full((3,), -1.0))
    rows = TensorDict(columns | {"is_given": torch.zeros(1)}, batch_size=[1])
    function = PolicyLossFunction(config=AlgorithmConfig(loss=loss), has_old_logprobs=has_old)
    clips = {"ppo", "gspo", "cispo", "gmpo", "dppo_tv", "dppo_kl", "clip_cov"}
    wanted = PLAIN | (RATIO if has_old else set()) | ({"policy_loss"} if loss != "distill" else set())
    wanted |= CLIPPED if has_old and loss in clips else set()
    wanted |= {"clipped_dual"} if has_old and loss == "ppo" else set()
    measured = function(output, rows)[1]
    assert set(measured) == wanted
    assert measured["entropy_estimate"] == pytest.approx(1.0), "of tokens whose log-prob is -1"
    more = AlgorithmConfig(loss=loss, kl_coef=0.1, entropy_coef=0.1)
    output = dataclasses.replace(output, entropy=torch.ones(3))
    found = PolicyLossFunction(config=more, has_old_logprobs=has_old)(output, rows)[1]
    assert set(found) == wanted | {"kl", "entropy"}
    in_reward = dataclasses.replace(more, kl_in_reward=True)
    assert "kl" not in PolicyLossFunction(config=in_reward, has_old_logprobs=has_old)(output, rows)[1]


def test_the_coefficient_follows_its_target():
    kl = AdaptiveKl(coef=0.1, target=0.5)
    kl.update(5.0)
    assert kl.coef == pytest.approx(0.1 * 1.02)
    kl.update(0.45)
    assert kl.coef == pytest.approx(0.1 * 1.02 * 0.99)
    fixed = AdaptiveKl(coef=0.1, target=0.0)
    fixed.update(5.0)
    assert fixed == dataclasses.replace(fixed, coef=0.1)
