import dataclasses
import math
import runpy
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rl_engine.types import BatchCounts, ModelOutput
from rl_trainer.algorithms import (
    ADVANTAGES,
    POLICY_LOSSES,
    AdvantageInput,
    Estimator,
    PolicyLoss,
    PolicyLossFunction,
    compute_advantages,
    loss_named,
)
from rl_trainer.config import load_config
from rl_trainer.config.schema import AlgorithmConfig
from rl_trainer.errors import ConfigError
from rl_trainer.planning.plan import make_plan


def two_groups():
    """Four completions: group 7 has rewards 1, 0 and group 9 has 0.5, 0.5; the second completion has a tool token."""
    return AdvantageInput(
        rewards=torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.5, 0.5]),
        loss_mask=torch.tensor([1, 1, 1, 0, 1, 1, 1]),
        cu_seqlens=torch.tensor([0, 2, 5, 6, 7]),
        group_ids=torch.tensor([7, 7, 9, 9]),
    )


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("dr_grpo", 0.5, -0.5), ("rloo", 1.0, -1.0), ("grpo", 0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6))],
)
def test_group_relative_by_hand(name, first, second):
    advantages = compute_advantages(name, two_groups())
    torch.testing.assert_close(advantages, torch.tensor([first, first, second, 0.0, second, 0.0, 0.0]))


def test_groups_of_one_by_hand():
    data = AdvantageInput(
        rewards=torch.tensor([0.0, 2.0, 3.0, 1.0]),
        loss_mask=torch.ones(4),
        cu_seqlens=torch.tensor([0, 2, 3, 4]),
        group_ids=torch.tensor([0, 1, 1]),
    )
    one = 1 / (2**0.5 + 1e-6)  # of 3 and 1: mean 2, deviation 2 ** 0.5
    torch.testing.assert_close(compute_advantages("grpo", data), torch.tensor([2.0, 2.0, one, -one]))
    with pytest.warns(UserWarning, match="1 of 2 groups have one completion, with which rloo can compare nothing"):
        rloo = compute_advantages("rloo", data)
    assert rloo.tolist() == [0.0, 0.0, 2.0, -2.0]


def test_reinforce_plus_plus_by_hand():
    data = AdvantageInput(
        rewards=torch.tensor([1.0, 2.0, 0.0, 5.0]),
        loss_mask=torch.tensor([1, 1, 1, 1]),
        cu_seqlens=torch.tensor([0, 2, 4]),
        group_ids=torch.tensor([0, 1]),
    )
    to_go = torch.tensor([3.0, 2.0, 5.0, 5.0])
    got = compute_advantages("reinforce_pp", data)
    torch.testing.assert_close(got, (to_go - to_go.mean()) / to_go.std(), atol=1e-4, rtol=1e-4)


def three_groups():
    """Rewards 1 0 0 | 1 1 | 0.5 with 1 2 3 | 1 1 | 1 tokens, groups in no order."""
    lengths, rewards = [3, 1, 1, 1, 1, 2], [0.0, 1.0, 1.0, 0.5, 1.0, 0.0]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    per_token = torch.zeros(9)
    per_token[offsets[1:] - 1] = torch.tensor(rewards)
    return AdvantageInput(
        rewards=per_token,
        loss_mask=torch.ones(9, dtype=torch.int64),
        cu_seqlens=offsets,
        group_ids=torch.tensor([5, 5, 8, 2, 8, 5]),
    )


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("grpo_passk", [0, 1 / (3**-0.5 + 1e-6), 0, 0, 0, 0]),
        ("opo", [-1 / 6, 5 / 6, 0, 0, 0, -1 / 6]),
        ("gpg", [-2 / 3, 4 / 3, 0, 0, 0, -2 / 3]),
    ],
)
def test_more_group_relative_by_hand(name, rows):
    data = three_groups()
    torch.testing.assert_close(compute_advantages(name, data), data.broadcast(torch.tensor(rows)))


def test_the_deviation_of_the_batch_by_hand():
    # Rewards 1 0 0 | 1 1 | 0.5: their mean is 3.5 / 6, the sum of squares about it 3.25 - 3.5^2 / 6.
    std = ((3.25 - 3.5**2 / 6) / 5) ** 0.5 + 1e-6
    rows = torch.tensor([-1 / 3, 2 / 3, 0, 0, 0, -1 / 3]) / std
    data = three_groups()
    torch.testing.assert_close(compute_advantages("grpo_batch_std", data), data.broadcast(rows))


def test_maxrl_by_hand():
    # Over the group's mean of 1 / 3: -1, 2, -1. Groups whose rewards are equal, or that are of one, teach nothing.
    data = three_groups()
    rows = torch.tensor([-1.0, 2.0, 0, 0, 0, -1.0])
    torch.testing.assert_close(compute_advantages("maxrl", data), data.broadcast(rows), atol=1e-5, rtol=1e-5)
    none = dataclasses.replace(data, rewards=torch.zeros(9))
    assert compute_advantages("maxrl", none).tolist() == [0.0] * 9


def two_episodes(**rest):
    """Two rollouts of one prompt, [turn] observation [turn]: the second turns begin in one state, 7 8.

    Rewards of the turns: 0 and 1; 0.5 and 0. A third rollout has one turn, of another state, and reward 0.
    """
    offsets = torch.tensor([0, 5, 10, 12])
    prompts = torch.tensor([1, 2, 1, 2, 3])
    return AdvantageInput(
        rewards=torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]),
        loss_mask=torch.tensor([1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1]),
        cu_seqlens=offsets,
        group_ids=torch.tensor([4, 4, 4]),
        gamma=0.9,
        columns={
            "prompt_token_ids": torch.nested.nested_tensor_from_jagged(prompts, torch.tensor([0, 2, 4, 5])),
            "completion_token_ids": torch.tensor([5, 5, 7, 8, 6, 5, 6, 7, 8, 5, 9, 9]),
        },
        **rest,
    )


def test_gigpo_by_hand():
    # Episodes: 1, 0.5, 0 less 0.5. Steps: the first turns of two rollouts, from one prompt: returns 0.9 and 0.5, less
    # 0.7; their second turns, from 7 8: 1 and 0, less 0.5. The third rollout's prompt is another: alone, 0.
    got = compute_advantages("gigpo", two_episodes())
    first, second, third = [0.5 + 0.2] * 2 + [0, 0] + [0.5 + 0.5], [-0.2] * 2 + [0, 0] + [-0.5], [-0.5] * 2
    torch.testing.assert_close(got, torch.tensor([*first, *second, *third]))
    half = compute_advantages("gigpo", two_episodes(options={"step_weight": 0.5}))
    torch.testing.assert_close(half[[0, 4, 5]], torch.tensor([0.6, 0.75, -0.1]))
    # Over their deviations: 0.5 of the episodes, sqrt(2 * 0.2^2) and sqrt(2 * 0.5^2) of the steps.
    scaled = compute_advantages("gigpo", two_episodes(options={"scales": 1.0}))
    torch.testing.assert_close(
        scaled[[0, 4, 5, 9, 10]], torch.tensor([1 + 0.5**0.5] * 2 + [-(0.5**0.5)] * 2 + [-1.0]), atol=1e-4, rtol=1e-4
    )


def test_gigpo_without_steps_is_its_episodes():
    none = compute_advantages("gigpo", two_episodes(options={"step_weight": 0.0}))
    torch.testing.assert_close(none, compute_advantages("dr_grpo", two_episodes()))


def test_reinforce_pp_baseline_by_hand():
    centered = three_groups().broadcast(torch.tensor([-1 / 3, 2 / 3, 0, 0, 0, -1 / 3]))
    got = compute_advantages("reinforce_pp_baseline", three_groups())
    torch.testing.assert_close(got, (centered - centered.mean()) / centered.std(), atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:1 of 3 groups have one completion")
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "grpo_passk", "opo", "gpg", "maxrl", "grpo_batch_std"])
def test_a_group_advantage_is_independent_of_row_order(name):
    data = three_groups()
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    rows = [slice(int(data.cu_seqlens[i]), int(data.cu_seqlens[i + 1])) for i in order]
    moved = AdvantageInput(
        rewards=torch.cat([data.rewards[r] for r in rows]),
        loss_mask=torch.cat([data.loss_mask[r] for r in rows]),
        cu_seqlens=torch.tensor([0, *[r.stop - r.start for r in rows]]).cumsum(0),
        group_ids=data.group_ids[order],
    )
    whole = compute_advantages(name, data)
    torch.testing.assert_close(compute_advantages(name, moved), torch.cat([whole[r] for r in rows]))


def test_an_estimator_from_outside(monkeypatch):
    monkeypatch.setitem(ADVANTAGES, "ones", Estimator(compute=lambda data: data.loss_mask.float()))
    assert compute_advantages("ones", two_groups()).sum() == 6
    with pytest.raises(ConfigError, match=r"algorithm.advantage='twos' is not known; there are .*ones"):
        compute_advantages("twos", two_groups())


GROUPED = [name for name, estimator in ADVANTAGES.items() if estimator.compares_group]


@pytest.mark.parametrize("name", GROUPED)
def test_a_rollout_of_several_trajectories_enters_its_group_once(name):
    """Three rollouts; the second made two trajectories of the same reward. As if it had made one, for the others."""
    torch.manual_seed(0)

    def made(rows, rollouts):
        lengths = [2 if row in {"b", "b'"} else 3 if row == "c" else 4 for row in rows]
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        rewards = torch.zeros(sum(lengths))
        rewards[offsets[1:] - 1] = torch.tensor([{"a": 1.0, "b": 0.0, "b'": 0.0, "c": 0.5}[row] for row in rows])
        halves = torch.full((sum(lengths),), 0.5)
        return AdvantageInput(
            rewards=rewards,
            loss_mask=torch.ones(sum(lengths), dtype=torch.int64),
            cu_seqlens=offsets,
            group_ids=torch.zeros(len(rows), dtype=torch.int64),
            rollout_ids=torch.tensor(rollouts),
            logprobs=halves.log(),
            sum_pi_squared=halves,
            process_rewards=halves,
            components=torch.stack([rewards[offsets[1:] - 1], torch.tensor([float(row == "c") for row in rows])], 1),
            columns={  # no two rows begin in one state
                "prompt_token_ids": torch.nested.nested_tensor_from_jagged(
                    torch.tensor([ord(row[-1]) for row in rows]), torch.arange(len(rows) + 1)
                ),
                "completion_token_ids": torch.ones(sum(lengths), dtype=torch.int64),
            },
        )

    split, whole = made(["a", "b", "b'", "c"], [0, 1, 1, 2]), made(["a", "b", "c"], [0, 1, 2])
    apart = made(["a", "b", "b'", "c"], [0, 1, 2, 3])
    got, wanted, other = (compute_advantages(name, data) for data in (split, whole, apart))
    if name in {"reinforce_pp_baseline", "gdpo"}:  # whitened over tokens, of which there are two more
        signs = torch.cat([wanted[:4], wanted[4:6], wanted[4:6], wanted[6:]])
        torch.testing.assert_close((got[0] - got[4]) / (got[8] - got[4]), (signs[0] - signs[4]) / (signs[8] - signs[4]))
        return
    if name == "opo":  # weighs lengths, and the rollout has twice as many tokens: baseline (4 * 1 + 3 * 0.5) / 11
        torch.testing.assert_close(got[[0, 4, 8]], torch.tensor([1.0, 0.0, 0.5]) - 0.5)
        return
    torch.testing.assert_close(got, torch.cat([wanted[:4], wanted[4:6], wanted[4:6], wanted[6:]]))
    if name != "grpo_passk":
        assert not torch.allclose(other, got), "the test would not see it"


def test_a_rollout_reward_is_the_mean_of_its_trajectories():
    data = AdvantageInput(
        rewards=torch.tensor([1.0, 0.0, 0.2]),
        loss_mask=torch.ones(3, dtype=torch.int64),
        cu_seqlens=torch.arange(4),
        group_ids=torch.tensor([5, 5, 5]),
        rollout_ids=torch.tensor([3, 3, 0]),
    )
    torch.testing.assert_close(compute_advantages("rloo", data), torch.tensor([0.3, 0.3, -0.3]))


class Point:
    """An entry point."""

    def __init__(self, name, value):
        self.name, self.load = name, lambda: value


@pytest.mark.promise("Algorithms of other distributions are found by entry point")
def test_third_party_algorithms_are_found_by_entry_point(monkeypatch):
    ones = Estimator(compute=lambda data: data.loss_mask.float())
    double = PolicyLoss(source="none", compute=lambda data: -2 * data.advantages * data.logprobs)
    points = {"rl_trainer.advantages": [Point("ones", ones)], "rl_trainer.policy_losses": [Point("double", double)]}
    monkeypatch.setattr("rl_trainer.plugins.entry_points", lambda group: points[group])
    assert compute_advantages("ones", two_groups()).sum() == 6
    assert loss_named("double") is double
    make_plan(load_config("quickstart", [*PLAIN, "algorithm.advantage=ones", "algorithm.loss=double"]))
    with pytest.raises(ConfigError, match="clip_dual is not read by algorithm.loss=double; its options are: none"):
        make_plan(load_config("quickstart", [*PLAIN, "algorithm.loss=double", "algorithm.loss_options.clip_dual=2"]))
    with pytest.raises(ConfigError, match="algorithm.loss='triple' is not known; there are ce_gppo, cispo, .*, double"):
        loss_named("triple")
    points["rl_trainer.policy_losses"] = [Point("ones", ones)]
    with pytest.raises(
        ConfigError, match="'ones' of rl_trainer.policy_losses leads to a Estimator; it has to be a Poli"
    ):
        loss_named("ones")


PLAIN = ["algorithm.loss_options={}"]


def one_row_batch(mask, offsets, **columns):
    data = {name: jagged(values, offsets) for name, values in {**columns, "loss_mask": mask}.items()}
    return TensorDict(data, batch_size=[len(offsets) - 1])


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_a_custom_loss_is_aggregated_corrected_and_penalised(monkeypatch, aggregation):
    """-A logprob from outside has loss, gradient and metrics of `reinforce`."""
    own = PolicyLoss(source="none", compute=lambda data: -data.advantages * data.logprobs)
    monkeypatch.setitem(POLICY_LOSSES, "own", own)
    torch.manual_seed(0)
    offsets, mask = torch.tensor([0, 3, 4, 8]), torch.tensor([1, 1, 0, 1, 1, 0, 1, 1])
    names = ("old_logprobs", "rollout_logprobs", "advantages", "ref_logprobs")
    rows = one_row_batch(mask, offsets, **{name: torch.randn(8) * 0.3 for name in names})
    start = torch.randn(8) * 0.1
    found = {}
    for name in ("reinforce", "own"):
        config = AlgorithmConfig(loss=name, kl_coef=0.1, correction="tis", aggregation=aggregation)
        logprobs = start.clone().requires_grad_()
        counts = BatchCounts(tokens=6.0, sequences=3.0)
        output = ModelOutput(token_logprobs=logprobs, entropy=None, cu_seqlens=offsets, counts=counts)
        loss, metrics = PolicyLossFunction(config=config, max_new_tokens=7)(output, rows)
        loss.backward()
        found[name] = (loss.detach(), logprobs.grad, metrics)
    torch.testing.assert_close(found["own"], found["reinforce"])


def changes_of_the_other_gradients(loss):
    """How much the gradient at two of eight tokens, of rows of three, one and four, moves with those of the others."""
    g = torch.Generator().manual_seed(0)
    offsets, mask = torch.tensor([0, 3, 4, 8]), torch.tensor([1, 1, 0, 1, 1, 1, 1, 1])
    names = ("old_logprobs", "rollout_logprobs", "advantages", "ref_logprobs", "teacher_logprobs")
    columns = {name: torch.randn(8, generator=g) * 0.3 - 1 for name in names}
    chosen = {name: torch.tensor([0, 1, 0, 0, 0, 1, 0, 0]) for name in ("selected", "is_high_entropy")}
    rows = one_row_batch(mask, offsets, **chosen, **columns)
    rows["advantages"].values().add_(1)
    rows["is_given"] = torch.tensor([True, False, False])
    scored, entropies = torch.randn(8, generator=g) * 0.3 - 1, torch.rand(8, generator=g)
    found = []
    for hidden in (0, 1):
        logprobs, entropy = scored.clone(), entropies.clone()
        if hidden:  # as for an engine that has not scored them yet
            logprobs[2:], entropy[2:] = 0, 0
        logprobs, entropy = logprobs.requires_grad_(), entropy.requires_grad_()
        counts = BatchCounts(tokens=7.0, sequences=3.0)
        output = ModelOutput(token_logprobs=logprobs, entropy=entropy, cu_seqlens=offsets, counts=counts)
        loss(output, rows)[0].backward()
        found.append(torch.cat([logprobs.grad[:2], torch.zeros(2) if entropy.grad is None else entropy.grad[:2]]))
    return float((found[0] - found[1]).abs().max())


COEFS = {"kl_coef": 0.1, "entropy_coef": 0.01}
BYPASS = {"old_logprobs": "rollout"}


@pytest.mark.parametrize(
    "keys",
    [
        *({"loss": name, **COEFS} for name in POLICY_LOSSES if name != "distill"),
        *({"loss": "ppo", "aggregation": name} for name in ("token-sum", "seq-mean-token-mean")),
        *({"correction": name, **more} for name in ("tis", "sequence_tis") for more in ({}, BYPASS)),
        *({"rejection": name, **more} for name in ("token_k1", "sequence_mean_k3") for more in ({}, BYPASS)),
        {"off_policy_mask": 0.01},
        {"top_entropy": 0.5},
        {"kl_coef": 0.1, "kl_estimator": "k3*"},
    ],
    ids=str,
)
def test_a_loss_that_says_it_is_token_local_is(keys):
    loss = PolicyLossFunction(config=AlgorithmConfig(**keys), max_new_tokens=4)
    is_local = changes_of_the_other_gradients(loss) == 0
    assert loss.is_token_local <= is_local
    by_row = (
        keys.get("loss") in ("gspo", "gmpo", "topr", "vespo")
        or "off_policy_mask" in keys
        or ("old_logprobs" in keys and "sequence" in keys.get("correction", "") + keys.get("rejection", ""))
    )
    assert loss.is_token_local == (not by_row)
    assert (loss.row_term is None) == loss.is_token_local


def test_options_of_a_loss_reach_it():
    rows = one_row_batch(
        torch.ones(2), torch.tensor([0, 2]),
        old_logprobs=torch.tensor([-1.0, -1.0]), rollout_logprobs=torch.tensor([-1.0, -1.0]),
        advantages=torch.tensor([1.0, -1.0]),
    )  # fmt: skip
    counts = BatchCounts(tokens=2.0, sequences=1.0)
    logprobs = torch.tensor([-0.5, -0.5])
    output = ModelOutput(token_logprobs=logprobs, entropy=None, cu_seqlens=torch.tensor([0, 2]), counts=counts)
    config = AlgorithmConfig(loss="sapo", loss_options={"tau_neg": 2.0})
    rho = math.exp(0.5)
    positive, negative = (4 / tau / (1 + math.exp(-tau * (rho - 1))) for tau in (1.0, 2.0))
    loss, _ = PolicyLossFunction(config=config)(output, rows)
    assert loss.item() == pytest.approx((-positive + negative) / 2, rel=1e-5)


@pytest.mark.parametrize(("keys", "kl_share"), [({}, 0.2), ({"kl_in_reward": True}, 0.0)])
def test_kl_and_entropy_enter_the_loss_with_their_weights(keys, kl_share):
    offsets = torch.tensor([0, 3])
    zeros, ref = torch.zeros(3), torch.tensor([-1.5, -1.0, -9.0])
    rows = one_row_batch(torch.tensor([1, 1, 0]), offsets, old_logprobs=zeros, advantages=zeros, ref_logprobs=ref)
    logprobs, entropy = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([0.5, 0.25, 9.0])
    counts = BatchCounts(tokens=2.0, sequences=1.0)
    output = ModelOutput(token_logprobs=logprobs, entropy=entropy, cu_seqlens=offsets, counts=counts)
    weights = {"kl_coef": 0.2, "kl_estimator": "k2", "entropy_coef": 0.1}
    config = AlgorithmConfig(loss="reinforce", loss_options={}, old_logprobs="rollout", **weights, **keys)
    loss, _ = PolicyLossFunction(config=config)(output, rows)
    assert loss.item() == pytest.approx(kl_share * (0.5**2 / 2 + 1 / 2) / 2 - 0.1 * (0.5 + 0.25) / 2)


def jagged(values, offsets):
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def test_loss_shares_add_up_whatever_the_cut():
    torch.manual_seed(0)
    offsets = torch.tensor([0, 3, 4, 8])
    columns = {n: torch.randn(8) * 0.1 for n in ("old_logprobs", "rollout_logprobs", "advantages", "ref_logprobs")}
    mask = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1])
    logprobs = torch.randn(8) * 0.1
    counts = BatchCounts(tokens=6.0, sequences=3.0)

    def loss_of(rows, offsets, kind):
        part = slice(rows[0], rows[1])
        values = logprobs[part].clone().requires_grad_()
        local = offsets - offsets[0]
        data = TensorDict(
            {n: jagged(c[part], local) for n, c in columns.items()} | {"loss_mask": jagged(mask[part], local)},
            batch_size=[len(local) - 1],
        )
        output = ModelOutput(token_logprobs=values, entropy=None, cu_seqlens=local, counts=counts)
        config = AlgorithmConfig(kl_coef=0.1, aggregation=kind, correction="sequence_tis")
        loss, metrics = PolicyLossFunction(config=config)(output, data)
        loss.backward()
        return loss.detach(), values.grad, torch.stack([metrics["kl"], metrics["mismatch_k3"]])

    for kind in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        whole, grad, kl = loss_of((0, 8), offsets, kind)
        parts = [loss_of((0, 4), offsets[:3], kind), loss_of((4, 8), offsets[2:], kind)]
        torch.testing.assert_close(parts[0][0] + parts[1][0], whole)
        torch.testing.assert_close(torch.cat([parts[0][1], parts[1][1]]), grad)
        torch.testing.assert_close(parts[0][2] + parts[1][2], kl)
        assert grad[2] == 0
        assert grad[0] != 0


def test_the_table_of_algorithms_is_that_of_the_registry():
    written = (Path(__file__).parents[2] / "ALGORITHMS.md").read_text()
    table = runpy.run_path(str(Path(__file__).with_name("algorithms_table.py")))
    assert written.startswith(table["render"]() + table["WRITTEN"]), (
        "run python tests/algorithms/algorithms_table.py ALGORITHMS.md"
    )
    assert all(f"| `{name}` |" in written for name in (*ADVANTAGES, *POLICY_LOSSES))
