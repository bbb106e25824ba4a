from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rl_engine.types import BatchCounts, ModelOutput
from rl_trainer.algorithms import (
    ADVANTAGES,
    POLICY_LOSSES,
    AdvantageInput,
    PolicyLossFunction,
    compute_advantages,
    register_advantage,
    table,
)
from rl_trainer.config import AlgorithmConfig
from rl_trainer.errors import ConfigError


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


def test_reinforce_pp_baseline_by_hand():
    centered = three_groups().broadcast(torch.tensor([-1 / 3, 2 / 3, 0, 0, 0, -1 / 3]))
    got = compute_advantages("reinforce_pp_baseline", three_groups())
    torch.testing.assert_close(got, (centered - centered.mean()) / centered.std(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "grpo_passk", "opo", "gpg"])
def test_a_group_s_advantage_does_not_depend_on_where_its_rows_stand(name):
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
    monkeypatch.setattr("rl_trainer.algorithms.advantages.ADVANTAGES", dict(ADVANTAGES))
    register_advantage("ones", lambda data: data.loss_mask.float())
    assert compute_advantages("ones", two_groups()).sum() == 6
    with pytest.raises(ConfigError, match=r"there is no advantage estimator 'twos'; there are .*ones"):
        compute_advantages("twos", two_groups())


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
        config = AlgorithmConfig(kl_coef=0.1, aggregation=kind, correction="tis", correction_level="sequence")
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
    written = (Path(__file__).parent.parent / "ALGORITHMS.md").read_text()
    assert written == table.render(), "run python -m rl_trainer.algorithms.table > ALGORITHMS.md"
    assert all(f"| `{name}` |" in written for name in (*ADVANTAGES, *POLICY_LOSSES))
