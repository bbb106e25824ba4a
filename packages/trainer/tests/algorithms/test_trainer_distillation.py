"""On-policy distillation: the divergence by hand, and a policy that comes nearer to its teacher."""

import json
import math
import shutil

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from rl_csrc.reference.logprobs import coarse_kl
from rl_engine.types import BatchCounts, ModelOutput
from rl_trainer.algorithms import PolicyLossFunction
from rl_trainer.algorithms.distillation import coarse_jsd
from rl_trainer.config import load_config
from rl_trainer.config.schema import AlgorithmConfig, TeacherSection
from rl_trainer.errors import InputError, PlanError
from rl_trainer.planning.plan import make_plan
from rl_trainer.planning.preflight import check_teacher
from rl_trainer.run import run

OFFSETS = torch.tensor([0, 2, 3])
MASK = torch.tensor([1, 0, 1])
STUDENT, TEACHER = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-0.5, -9.0, -1.5])
THEIRS = torch.tensor([[0.5, 0.3], [0.9, 0.05], [0.6, 0.2]]).log()
MINE = torch.tensor([[0.25, 0.25], [0.1, 0.1], [0.6, 0.2]]).log()
FORWARD = 0.5 * torch.tensor(2.0).log() + 0.3 * torch.tensor(1.2).log() + 0.2 * torch.tensor(0.4).log()
"""KL of the first token: its candidates, and the 0.2 of the teacher against 0.5 of the policy on all others."""


def learned(**teacher):
    """Loss, gradients of sampled and of candidate log-probs, and metrics, of two rows with two model tokens."""
    columns = {"old_logprobs": STUDENT, "rollout_logprobs": STUDENT, "advantages": torch.ones(3), "loss_mask": MASK}
    columns |= {"teacher_logprobs": TEACHER, "teacher_candidate_logprobs": THEIRS}
    jagged = {name: torch.nested.nested_tensor_from_jagged(values, OFFSETS) for name, values in columns.items()}
    mine, candidates = STUDENT.clone().requires_grad_(), MINE.clone().requires_grad_()
    counts = BatchCounts(tokens=4.0, sequences=2.0)  # two more are in another micro-batch
    output = ModelOutput(
        token_logprobs=mine, token_candidate_logprobs=candidates, entropy=None, cu_seqlens=OFFSETS, counts=counts
    )
    loss = PolicyLossFunction(config=AlgorithmConfig(loss="distill"), teacher=TeacherSection(path="t", **teacher))
    total, metrics = loss(output, TensorDict(jagged, batch_size=[2]))
    total.backward()
    return total.detach(), mine.grad, candidates.grad, metrics


def test_reverse_by_hand():
    total, gradient, _, metrics = learned(coef=2.0)
    torch.testing.assert_close(total, torch.tensor(2.0 * (0.5**2 + 1.0**2) / 2 / 4))
    torch.testing.assert_close(gradient, torch.tensor([2.0 * -0.5 / 4, 0.0, 2.0 * 1.0 / 4]))
    torch.testing.assert_close(metrics["teacher_kl"], torch.tensor((-0.5 + 1.0) / 4))
    assert "policy_loss" not in metrics  # there is none


def test_forward_by_hand():
    total, gradient, candidates, metrics = learned(divergence="forward")
    torch.testing.assert_close(total, FORWARD / 4)
    torch.testing.assert_close(metrics["teacher_forward_kl"], FORWARD / 4)
    assert gradient.abs().sum() == 0
    # Of -(p log q + rest_p log rest_q) by log q: -p + rest_p q / rest_q.
    torch.testing.assert_close(candidates[0], torch.tensor([-0.5 + 0.2 * 0.25 / 0.5, -0.3 + 0.2 * 0.25 / 0.5]) / 4)
    assert candidates[1].abs().sum() == 0  # the model did not write it
    torch.testing.assert_close(candidates[2], torch.zeros(2), atol=1e-6, rtol=0)  # it is the teacher's already


def test_mixed_is_both():
    reverse, forward = learned()[0], learned(divergence="forward")[0]
    torch.testing.assert_close(learned(divergence="mixed", forward_weight=0.25)[0], 0.75 * reverse + 0.25 * forward)


def test_jsd_by_hand():
    """beta KL(teacher || M) + (1 - beta) KL(policy || M) over two candidates and the rest, M their mixture."""
    total, gradient, candidates, metrics = learned(divergence="jsd", jsd_beta=0.25)
    p, q = [0.5, 0.3, 0.2], [0.25, 0.25, 0.5]  # of the first token; those of the third are equal
    m = [0.25 * a + 0.75 * b for a, b in zip(p, q, strict=True)]
    forward, reverse = (sum(a * math.log(a / c) for a, c in zip(x, m, strict=True)) for x in (p, q))
    assert total.item() == pytest.approx((0.25 * forward + 0.75 * reverse) / 4, rel=1e-5)
    assert metrics["teacher_jsd"].item() == pytest.approx(total.item())
    assert gradient.abs().sum() == 0
    # By q_k: 0.75 log(q_k / m_k), as the other terms cancel; by log q_1: q_1 (that of q_1 less that of the rest).
    slope = [0.75 * math.log(b / c) for b, c in zip(q, m, strict=True)]
    assert candidates[0, 0].item() == pytest.approx(0.25 * (slope[0] - slope[2]) / 4, rel=1e-4)
    torch.testing.assert_close(candidates[2], torch.zeros(2), atol=1e-6, rtol=0)


def test_jsd_equals_forward_and_reverse_divergence_at_its_ends():
    random = torch.Generator().manual_seed(0)
    policy, teacher = (torch.randn(50, 9, generator=random).double().log_softmax(-1)[:, :4] for _ in range(2))
    for beta, wanted in ((1e-6, coarse_kl(teacher, policy)), (1 - 1e-6, coarse_kl(policy, teacher))):
        found = coarse_jsd(teacher, policy, beta) / min(beta, 1 - beta)
        torch.testing.assert_close(found, wanted.double(), rtol=1e-4, atol=1e-5)


def test_equal_distributions_have_no_divergence_and_others_do():
    random = torch.Generator().manual_seed(0)
    policy, teacher = (torch.randn(50, 9, generator=random).log_softmax(-1)[:, :4] for _ in range(2))
    assert (coarse_kl(teacher, policy) > 0).all()
    torch.testing.assert_close(coarse_kl(teacher, teacher), torch.zeros(50), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["algorithm.loss=distill"], "set teacher.path"),
        (["teacher.path=t", "teacher.num_candidates=4"], r"teacher.num_candidates=4 does nothing unless"),
        (["teacher.path=t", "teacher.divergence=forward", "teacher.forward_weight=0.1"], "is mixed; leave it out"),
        (["teacher.path=t", "algorithm.loss=distill", "algorithm.advantage=rloo"], "looks at no reward"),
    ],
)
def test_what_would_do_nothing_is_refused(settings, words):
    with pytest.raises(PlanError, match=words):
        make_plan(load_config("gsm8k", settings))


@pytest.mark.process
def test_a_policy_comes_nearer_to_its_teacher(model, tmp_path):
    teacher = shutil.copytree(model, tmp_path / "teacher")
    weights = load_file(teacher / "model.safetensors")
    random = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        weights[name] = tensor + 0.1 * torch.randn(tensor.shape, generator=random)
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    data = tmp_path / "data.jsonl"
    lines = [{"question": f"{a} + {b} =", "answer": f"add them #### {a + b}"} for a in range(10, 20) for b in range(4)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = ["steps=8", "eval_every=0", "data.eval_size=4", "data.max_prompt_tokens=128", "rollout.max_new_tokens=16"]
    sizes += ["batch.batch_size=8", "batch.mini_batch_size=8", "batch.group_size=2", "engine.precision=float32"]
    teaching = [
        f"teacher.path={teacher}",
        "teacher.divergence=mixed",
        "engine.optimizer.lr=1e-2",
        f"model.path={model}",
    ]
    where = [f"data.path={data}", f"output_dir={tmp_path / 'out'}", "save_every=0", "timeout_s=120"]
    config = load_config("distill", ["runtime=inline", *sizes, *teaching, *where])
    run(config, Console(quiet=True))
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()][1:]
    forward = [record["metrics"]["teacher_forward_kl"] for record in records]
    assert forward[-1] < 0.75 * forward[0]
    assert abs(records[-1]["metrics"]["teacher_kl"]) < abs(records[0]["metrics"]["teacher_kl"])


@pytest.mark.process
def test_a_teacher_with_other_tokens_is_refused(model, tmp_path):
    teacher = shutil.copytree(model, tmp_path / "teacher")
    check_teacher(TeacherSection(path=str(teacher)), str(model))
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["another"] = len(tokenizer["model"]["vocab"])
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match="learns from a teacher with the same one"):
        check_teacher(TeacherSection(path=str(teacher)), str(model))
