"""pass@k, maj@n and their intervals by hand; and a whole evaluation with a real server in a process of its own."""

import asyncio
import json
import math
from dataclasses import replace

import pytest

import rl_rollout
from rl_rollout.types import ServerConfig
from rl_trainer.cli import main, main_eval, main_sample
from rl_trainer.errors import RolloutFailedError
from rl_trainer.evaluation import Estimate, Problem, maj_at_n, pass_at_k, summarise
from rl_trainer.rewards import answer_of


def problem(rewards, answers, *, num_failed):
    right = tuple(reward >= 1 for reward in rewards)
    return Problem(
        prompt="?", completions=answers, answers=answers, rewards=rewards, right=right, num_failed=num_failed
    )


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 1) == pytest.approx(0.25)
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)
    assert pass_at_k(4, 3, 2) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0


def test_the_majority_s_reward_counts_and_ties_share():
    assert maj_at_n(["5", "7", "7"], [True, False, False]) == 0.0
    assert maj_at_n(["5", "7", "5"], [True, False, True]) == 1.0
    assert maj_at_n(["5", "7"], [True, False]) == 0.5


def test_answers_that_are_counted_as_equal():
    assert answer_of(r"so \boxed{1} no, \boxed{ 42 }.") == "42"
    assert answer_of("it is 1,234 apples") == "1234"
    assert answer_of(r"\boxed{\frac{1}{2}}") == answer_of("0.5") == "1/2" != answer_of(r"\boxed{\frac{3}{2}}")
    assert answer_of(r"\boxed{x^{2}} and \boxed{3") == "x^{2}"
    assert answer_of("  none\n") == "none"


def test_an_interval_is_between_problems():
    estimate = Estimate.of([1.0, 0.0, 1.0, 0.0])
    assert estimate.mean == 0.5
    assert estimate.half_width == pytest.approx(1.96 * (1 / 3) ** 0.5 / 2)
    assert math.isnan(Estimate.of([1.0]).half_width)


def test_failed_completions_are_in_no_estimate():
    problems = [
        problem((1.0, 0.0), ("a", "b"), num_failed=0),
        problem((1.0,), ("a",), num_failed=1),
        problem((), (), num_failed=2),
    ]
    found = summarise(problems, [1, 2])
    assert found["accuracy"].mean == found["reward"].mean == pytest.approx(0.75)
    assert found["pass@1"].mean == pytest.approx(0.75)
    assert found["pass@2"].mean == 1.0  # of the one problem with two
    assert found["maj@2"].mean == pytest.approx(0.75)
    with pytest.raises(RolloutFailedError, match="all completions failed"):
        summarise(problems[2:], [1])


def test_the_failure_of_all_completions_names_a_row():
    failed = replace(problem((), (), num_failed=2), failure="test.jsonl, row 7: KeyError: 'x'")
    with pytest.raises(RolloutFailedError, match=r"judged; for example test.jsonl, row 7: KeyError: 'x'"):
        summarise([failed], [1])


BROKEN = """
import rl_agent

class Loop(rl_agent.AgentLoop):
    async def run(self, sampling_params, row):
        if row["answer"] == "3":
            raise KeyError("no such page")
        return await rl_agent.create_loop("single_turn", self.server, self.tokenizer).run(sampling_params, row)
"""


@pytest.mark.slow
def test_rl_eval_names_the_rows_that_failed(model, tmp_path, capsys):
    (tmp_path / "broken.py").write_text(BROKEN)
    rows = "".join(json.dumps({"prompt": "1 + 1", "answer": str(i)}) + "\n" for i in range(8))
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(rows)
    settings = [f"data.path={tmp_path}", "data.format=rows", "data.options={}", f"model.path={model}"]
    output = tmp_path / "rows.jsonl"
    settings += [f"agent.loop={tmp_path}/broken.py:Loop", "reward.parts={right: {kind: rule, rule: math}}"]
    assert main_eval(["quickstart", *settings, "--output", str(output)]) == 0
    said, wanted = capsys.readouterr().out, f"{tmp_path}/test.jsonl, row 4: KeyError: 'no such page'"
    assert "8, 1 of 8 completions failed" in said
    assert f"failed       1 of {wanted}" in said
    assert [json.loads(line)["failure"] for line in output.read_text().splitlines()][3] == wanted


def test_accuracy_is_the_share_that_is_right_and_not_the_reward():
    made = problem((0.5, 1.5), ("a", "b"), num_failed=0)
    found = summarise([made], [1])
    assert (found["reward"].mean, found["accuracy"].mean, found["maj@2"].mean) == (1.0, 0.5, 0.5)
    assert [*summarise([made, replace(made, right=None)], [1])] == ["reward"], "nothing says what is right"


@pytest.mark.process
def test_rl_eval_measures_a_policy_through_a_server(model, tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    settings = ["data.options.num_rows=2000", "data.eval_size=8", f"model.path={model}"]
    assert main_eval(["quickstart", *settings, "--samples", "4", "--k", "1,4", "--output", str(output)]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in ("accuracy", "pass@1", "pass@4", "maj@4", "8, 0 of 32 completions failed"))
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [len(row["rewards"]) for row in rows] == [4] * 8


@pytest.mark.process
def test_what_rl_eval_cannot_do_is_told(model, capsys):
    assert main_eval(["quickstart", "--k", "4", f"model.path={model}"]) == 2
    assert "--k=4 must be between 1 and --samples=1" in capsys.readouterr().err
    assert main_eval(["quickstart"]) == 2
    assert "model.path is not set" in capsys.readouterr().err


@pytest.mark.promise("`--dry-run` tells the plan and starts nothing")
@pytest.mark.process
def test_a_dry_run_tells_the_plan_and_starts_nothing(model, tmp_path, capsys):
    output_dir = tmp_path / "out"
    assert main(["quickstart", "--dry-run", f"model.path={model}", f"output_dir={output_dir}"]) == 0
    told = capsys.readouterr().out
    assert "completions per step" in told
    assert "a GPU at its fullest" in told
    assert not output_dir.exists()


@pytest.mark.slow
def test_a_server_that_runs_already_is_asked(model, tmp_path, capsys):
    settings = ["quickstart", "data.options.num_rows=2000", "data.eval_size=4", f"model.path={model}", "timeout_s=60"]
    server = rl_rollout.launch_server("embedded", ServerConfig(model_path=str(model), max_model_len=64))
    with asyncio.Runner() as runner:
        url = runner.run(server.start()).url
        assert main_eval([*settings, "--samples", "2", "--url", url]) == 0
        assert "4, 0 of 8 completions failed" in capsys.readouterr().out
        assert main_sample([*settings, "--count", "2", "--url", url]) == 0
        assert "row 2, sample 1" in capsys.readouterr().out
        runner.run(server.stop())
    for command in (main_eval, main_sample):
        assert command([*settings, "--url", url]) == 1
        assert url in capsys.readouterr().err
