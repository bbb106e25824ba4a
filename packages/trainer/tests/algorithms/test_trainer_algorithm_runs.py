"""Whole runs in this process, with every real part and a tiny model: a run per kind of mechanism."""

import json

import pytest
from rich.console import Console

from rl_trainer.config import load_config
from rl_trainer.errors import DataError
from rl_trainer.run import run

pytestmark = pytest.mark.process

SIZES = ["batch.batch_size=4", "batch.mini_batch_size=2", "batch.group_size=4", "steps=2", "eval_every=0"]
SIZES += ["data.eval_size=4", "data.max_prompt_tokens=128", "rollout.max_new_tokens=12", "engine.precision=float32"]
SIZES += ["save_every=0", "runtime=inline", "timeout_s=120", "engine.matmul_precision=highest"]


def records(model, tmp_path, lines, *settings, recipe="gsm8k"):
    """What each step of a run on these rows recorded."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    where = [f"data.path={data}", f"output_dir={tmp_path / 'out'}", f"model.path={model}"]
    run(load_config(recipe, [*SIZES, "algorithm.loss_options={}", *where, *settings]), Console(quiet=True))
    written = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    return [record["metrics"] for record in written if record["metrics"]]


def rows(**more):
    """Sums whose data source is a or b, as rows of our own format."""
    return [
        {"prompt": f"{n} + {n} =", "answer": str(2 * n), "data_source": "ab"[n % 2]}
        | {name: value(n) for name, value in more.items()}
        for n in range(10, 50)
    ]


RULE = ["data.format=rows", "data.options={}", "reward.parts.right={kind: rule, rule: exact_match}"]


def test_masks_selections_and_an_adaptive_coefficient_work(model, tmp_path):
    """One update sees what was cut off, the entropies and log-probs before it, and what was chosen by them."""
    masks = ["algorithm.mask_truncated=true", "algorithm.top_entropy=0.5", "algorithm.loss=m2po"]
    entropy = ["algorithm.entropy_target=9", "algorithm.entropy_step=0.25"]  # above that of the vocabulary
    more = ["algorithm.advantage=gigpo", "algorithm.off_policy_mask=0.5", "batch.mini_batch_size=4"]
    found = records(model, tmp_path, rows(), *RULE, *masks, *entropy, *more)
    assert len(found) == 2
    for step in found:
        assert 0 < step["truncated_share"] < 1
        assert step["token_entropy"] > 0
        assert step["off_policy_masked"] == 0  # on policy
    assert found[1]["grad_norm"] > 0  # of the bonus alone: no completion is right
    assert [step["entropy_coef"] for step in found] == [0.0, 0.25]


@pytest.mark.promise("A policy teaches itself what it is told")
@pytest.mark.parametrize("divergence", ["reverse", "jsd"])
def test_a_policy_teaches_itself_what_it_is_told(model, tmp_path, divergence):
    """The teacher is the policy, which reads the answer below the prompt: before its first update the two differ."""
    told = ["teacher.context='the answer is {ground_truth}, or {hint}'", f"teacher.divergence={divergence}"]
    lines = rows(extra_info=lambda n: {"hint": f"{n} {n}"})
    (first, _) = records(model, tmp_path, lines, *RULE, *told, "teacher.coef=0.5", recipe="distill")
    assert abs(first["teacher_kl"]) > 1e-6
    if divergence == "jsd":
        assert first["teacher_jsd"] > 0


def test_a_context_too_long_for_a_row_is_reported_before_start(model, tmp_path):
    with pytest.raises(DataError, match=r"teacher.context='see \{hint\}' cannot be filled for a row of '[ab]'"):
        records(model, tmp_path, rows(), *RULE, "teacher.context='see {hint}'", recipe="distill")


@pytest.mark.promise("Each row has the teacher of its source")
def test_each_row_has_the_teacher_of_its_source(model, tmp_path, monkeypatch):
    asked = []
    from rl_trainer.workers.teacher import Teachers

    known = Teachers.compute_teacher_log_prob

    def compute(self, batch):
        written = known(self, batch)
        asked.append(({tags["data_source"] for tags in batch.tags}, written.columns, len(self._by_source)))
        return written

    monkeypatch.setattr(Teachers, "compute_teacher_log_prob", compute)
    teachers = [f"teacher.path={model}", f"teacher.by_source={{a: {model}}}"]
    found = records(model, tmp_path, rows(), *RULE, *teachers, recipe="distill")
    assert abs(found[0]["teacher_kl"]) < 1e-5  # the policy, before it has learned
    assert any(sources == {"a", "b"} for sources, *_ in asked)
    assert all(columns == ("teacher_logprobs",) and count == 2 for _, columns, count in asked)


@pytest.mark.promise(
    "`batch.given` completions are learned from beside sampled ones, and are no sample of the server's"
)
def test_given_completions_are_learned_from_beside_sampled_ones(model, tmp_path):
    """Right by the rule, where the tiny model is not: only they have a positive advantage."""
    settings = ["algorithm.loss=luffy", "batch.given=1", "algorithm.advantage=dr_grpo", "engine.optimizer.lr=1e-2"]
    settings += ["steps=6", "engine.optimizer.warmup_steps=0", "tracking.keep_samples=true"]
    found = records(model, tmp_path, rows(given=lambda n: [str(2 * n), "unused"]), *RULE, *settings)
    assert all(step["reward/right"] < 1 for step in found)  # of what was sampled
    assert all(step["mismatch_abs"] < 1e-4 for step in found)  # what was given is no sample of the server's
    assert all(step["policy_loss"] != 0 for step in found)
    assert found[-1]["completion_tokens_mean"] < found[0]["completion_tokens_mean"] - 1  # it learns to end as they do


def test_rows_that_give_too_few_completions_are_refused(model, tmp_path):
    with pytest.raises(DataError, match=r"batch.given=2 takes completions from every row, and one of '[ab]' has g"):
        records(model, tmp_path, rows(given=lambda n: ["1"]), *RULE, "algorithm.loss=luffy", "batch.given=2")
