"""PRIME: a process reward model that learns outcomes beside the policy."""

import json
import math

import pytest
import torch
from rich.console import Console
from tensordict import TensorDict

from rl_engine.types import BatchCounts, ModelOutput
from rl_trainer.algorithms.critic_losses import ProcessRewardLoss
from rl_trainer.config import load_config
from rl_trainer.errors import PlanError, TrainerError
from rl_trainer.planning.plan import make_plan
from rl_trainer.run import run
from rl_trainer.workers.columns import rows_of

PRIME = ["algorithm.advantage=prime", "critic.lr=1e-2"]


def test_the_loss_by_hand():
    """Two completions and one without a model token; of the logical batch, another two are in another micro-batch."""
    offsets = torch.tensor([0, 3, 5, 6])
    columns = {
        "ref_logprobs": torch.tensor([-1.0, -9.0, -2.0, -1.0, -1.0, -1.0]),
        "rewards": torch.tensor([0.0, 0.0, 1.0, 0.0, 0.25, 0.0]),
        "loss_mask": torch.tensor([1, 0, 1, 1, 0, 0]),
    }
    jagged = {name: torch.nested.nested_tensor_from_jagged(values, offsets) for name, values in columns.items()}
    logprobs = torch.tensor([-0.5, -1.0, -1.0, -2.0, -1.5, -3.0], requires_grad=True)
    counts = BatchCounts(tokens=5.0, sequences=4.0)
    output = ModelOutput(token_logprobs=logprobs, entropy=None, cu_seqlens=offsets, counts=counts)
    loss, metrics = ProcessRewardLoss(beta=2.0)(output, TensorDict(jagged, batch_size=[3]))
    loss.backward()
    first, second = (1 / (1 + math.exp(-2.0 * ratio)) for ratio in (0.5 + 1.0, -1.0))
    want = -(math.log(first) + 0.25 * math.log(second) + 0.75 * math.log(1 - second)) / 4
    assert float(loss.detach()) == pytest.approx(want, rel=1e-6)
    g1, g2 = 2.0 * (first - 1) / 4, 2.0 * (second - 0.25) / 4
    torch.testing.assert_close(logprobs.grad, torch.tensor([g1, 0.0, g1, g2, 0.0, 0.0]))
    assert float(metrics["process_accuracy"]) == 2 / 4


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["critic.lr=1e-3"], "critic do nothing with algorithm.advantage=grpo; .* one of gae, prime, vtrace"),
        ([*PRIME, "critic.clip=0.1"], "critic.clip is a value function's"),
        ([*PRIME, "algorithm.kl_coef=0.1", "algorithm.ref_ema.decay=0.5"], "which algorithm.ref_ema moves away"),
        ([*PRIME, "reward.overlong_buffer=2"], "learns outcomes from 0 to 1"),
    ],
)
def test_what_cannot_work_is_refused(overrides, words):
    with pytest.raises(PlanError, match=words):
        make_plan(load_config("quickstart", overrides))
    make_plan(load_config("quickstart", PRIME))


def started(model, tmp_path, name, outcome, *overrides):
    """The metrics of a run, by step; real parts in this process."""
    reward, out = tmp_path / "rewards.py", tmp_path / name
    reward.write_text(f"def f(text, row):\n    return {outcome}\n")
    sizes = ["data.options.num_rows=200", "data.eval_size=4", "batch.batch_size=4", "batch.mini_batch_size=4"]
    sizes += ["batch.group_size=4", "steps=4", "eval_every=0", "save_every=2", "timeout_s=120", "runtime=inline"]
    where = [f"reward.path={reward}:f", f"model.path={model}", f"output_dir={out}"]
    run(load_config("quickstart", [*sizes, *PRIME, *where, *overrides]), Console(quiet=True))
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["metrics"] for record in records[1:]}


@pytest.mark.slow
def test_the_model_learns_the_outcome_and_resumes(model, tmp_path):
    even = "float(sum(map(ord, text)) % 2)"
    whole = started(model, tmp_path, "whole", even, "engine.optimizer.warmup_steps=0")
    losses = [metrics["process_loss"] for metrics in whole.values()]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5), "it starts as the reference, and knows nothing"
    assert losses[-1] != losses[0]
    assert all(metrics["critic_grad_norm"] > 0 for metrics in whole.values())
    resume = f"resume_from={tmp_path}/whole/checkpoint-2"
    resumed = started(model, tmp_path, "resumed", even, "engine.optimizer.warmup_steps=0", resume)
    assert {step: m["process_loss"] for step, m in resumed.items()} == {3: losses[2], 4: losses[3]}
    assert {step: m["policy_loss"] for step, m in resumed.items()} == {s: whole[s]["policy_loss"] for s in (3, 4)}


ROW = r"^training row \d+"


@pytest.mark.slow
def test_what_ends_a_run_while_it_scores_names_its_rows(model, tmp_path):
    """A reward that is no outcome, and a stage of the user's that raises."""
    with pytest.raises(TrainerError, match=ROW + ": a completion has the reward 2, and advantage=prime learns"):
        started(model, tmp_path, "two", "2.0")
    stage = tmp_path / "stage.py"
    stage.write_text("def f(rows):\n    raise KeyError('x')\n")
    with pytest.raises(TrainerError, match=f"{ROW}, .*row \\d+: algorithm.stages: {stage}:f raised KeyError: 'x'"):
        started(model, tmp_path, "stage", "0.5", f"algorithm.stages=[{stage}:f]")


def test_rows_of_samples_are_named_once_and_at_most_five():
    tags = [{"where": f"a.jsonl, row {n // 2}"} for n in range(14)]
    assert rows_of(tags[:3]) == "a.jsonl, row 0, a.jsonl, row 1: "
    assert rows_of(tags).endswith("a.jsonl, row 4 and 2 more: ")
    assert rows_of([{}]) == ""
