"""PRIME and distillation beside the equations of their papers, written plainly, on random ragged batches."""

import math
import random

import pytest
import torch
from tensordict import TensorDict
from torch.nn.functional import kl_div

from rl_csrc.reference.logprobs import coarse_kl
from rl_engine.types import BatchCounts, ModelOutput
from rl_trainer.algorithms import AdvantageInput, PolicyLossFunction, compute_advantages
from rl_trainer.algorithms.critic_losses import ProcessRewardLoss
from rl_trainer.config.schema import AlgorithmConfig, TeacherSection


def drawn(seed):
    """Groups of completions: for each its process rewards, its mask, and its outcome."""
    draw = random.Random(seed)
    groups = []
    for _ in range(draw.randint(1, 4)):
        group = []
        for _ in range(draw.randint(2, 5)):
            mask = [1, *(draw.randint(0, 3) > 0 for _ in range(draw.randint(0, 8)))]
            group.append(([draw.gauss(0, 1) for _ in mask], [int(m) for m in mask], draw.randint(0, 1)))
        groups.append(group)
    return groups


@pytest.mark.parametrize("seed", range(20))
def test_prime_is_the_advantage_of_its_paper(seed):
    """arXiv 2502.01456, equation 7: implicit process rewards against the others' means, and outcomes leave-one-out."""
    groups, gamma, want = drawn(seed), random.Random(seed).choice([1.0, 0.9]), []
    for group in groups:
        means = [sum(r for r, m in zip(rs, ms, strict=True) if m) / sum(ms) for rs, ms, _ in group]
        for i, (rewards, mask, outcome) in enumerate(group):
            others = [j for j in range(len(group)) if j != i]
            baseline = sum(means[j] for j in others) / len(others)
            outcome_part = outcome - sum(group[j][2] for j in others) / len(others)
            places = [t for t in range(len(mask)) if mask[t]]
            for t in range(len(mask)):
                ahead = [s for s in places if s >= t]
                process_part = sum(gamma**n * (rewards[s] - baseline) for n, s in enumerate(ahead))
                want.append((process_part + outcome_part) if mask[t] else 0.0)
    rows = [row for group in groups for row in group]
    lengths = torch.tensor([len(mask) for _, mask, _ in rows])
    last = [max(t for t in range(len(mask)) if mask[t]) for _, mask, _ in rows]
    given = AdvantageInput(
        rewards=torch.tensor(
            [
                float(outcome) if t == last[i] else 0.0
                for i, (_, mask, outcome) in enumerate(rows)
                for t in range(len(mask))
            ]
        ),
        loss_mask=torch.tensor([m for _, mask, _ in rows for m in mask]),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
        group_ids=torch.tensor([g for g, group in enumerate(groups) for _ in group]),
        process_rewards=torch.tensor([r for rewards, _, _ in rows for r in rewards]),
        gamma=gamma,
    )
    torch.testing.assert_close(compute_advantages("prime", given), torch.tensor(want), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(10))
def test_the_implicit_reward_model_has_the_loss_of_its_paper(seed):
    """arXiv 2502.01456, equation 5, over completions; beta log-ratio is the logit of the outcome."""
    draw, beta = random.Random(seed), 0.5
    rows = [
        (
            [(draw.gauss(-1, 1), draw.gauss(-1, 1), int(draw.random() < 0.8)) for _ in range(draw.randint(1, 7))],
            draw.random(),
        )
        for _ in range(draw.randint(1, 6))
    ]
    rows = [([*tokens, (-1.0, -1.5, 1)], outcome) for tokens, outcome in rows]  # each has one of the model's
    total = 0.0
    for tokens, outcome in rows:
        p = 1 / (1 + math.exp(-beta * sum(mine - ref for mine, ref, m in tokens if m)))
        total -= outcome * math.log(p) + (1 - outcome) * math.log(1 - p)
    flat = [token for tokens, _ in rows for token in tokens]
    offsets = torch.tensor([0, *torch.tensor([len(tokens) for tokens, _ in rows]).cumsum(0).tolist()])
    rewards = [outcome if t == len(tokens) - 1 else 0.0 for tokens, outcome in rows for t in range(len(tokens))]
    columns = {"ref_logprobs": [ref for _, ref, _ in flat], "rewards": rewards, "loss_mask": [m for *_, m in flat]}
    jagged = {k: torch.nested.nested_tensor_from_jagged(torch.tensor(v), offsets) for k, v in columns.items()}
    counts = BatchCounts(tokens=float(sum(columns["loss_mask"])), sequences=float(len(rows)))
    output = ModelOutput(
        token_logprobs=torch.tensor([mine for mine, *_ in flat]), entropy=None, cu_seqlens=offsets, counts=counts
    )
    loss, _ = ProcessRewardLoss(beta=beta)(output, TensorDict(jagged, batch_size=[len(rows)]))
    assert float(loss) == pytest.approx(total / len(rows), rel=1e-5)


@pytest.mark.parametrize("seed", range(10))
def test_forward_divergence_is_exact_over_the_vocabulary(seed):
    """arXiv 2306.13649: KL(teacher || policy). With all tokens but one as candidates nothing is coarse."""
    draw = torch.Generator().manual_seed(seed)
    size = 7
    teacher, policy = (torch.randn(5, size, generator=draw, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    mine = policy.clone().requires_grad_()
    whole = kl_div(mine, teacher, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(coarse_kl(teacher[:, 1:], policy[:, 1:]).double(), whole.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_reverse_divergence_has_the_gradient_of_kl_as_a_mean(seed):
    """arXiv 2306.13649: over all tokens that the policy may sample, weighed by their probability."""
    draw = torch.Generator().manual_seed(seed)
    size = 6
    logits, teacher = torch.randn(size, generator=draw), torch.randn(size, generator=draw).log_softmax(-1)
    exact = logits.double().requires_grad_()
    policy = exact.log_softmax(-1)
    (policy.exp() * (policy - teacher.double())).sum().backward()
    given = logits.clone().requires_grad_()
    learn = PolicyLossFunction(config=AlgorithmConfig(loss="distill"), teacher=TeacherSection(path="t"))
    offsets = torch.arange(2)
    for token in range(size):
        sampled = given.log_softmax(-1)[token : token + 1]
        columns = {name: sampled.detach() for name in ("old_logprobs", "rollout_logprobs")}
        columns |= {
            "teacher_logprobs": teacher[token : token + 1],
            "advantages": torch.ones(1),
            "loss_mask": torch.ones(1),
        }
        jagged = {k: torch.nested.nested_tensor_from_jagged(v, offsets) for k, v in columns.items()}
        output = ModelOutput(
            token_logprobs=sampled, entropy=None, cu_seqlens=offsets, counts=BatchCounts(tokens=1.0, sequences=1.0)
        )
        loss, _ = learn(output, TensorDict(jagged, batch_size=[1]))
        (loss * sampled.detach().exp()[0]).backward()
    torch.testing.assert_close(given.grad.double(), exact.grad, atol=1e-5, rtol=1e-4)
