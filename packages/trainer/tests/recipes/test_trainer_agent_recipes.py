"""Recipes that train agents: their rows through the trainer, short runs, and what a whole run adds."""

import json
import shutil
import subprocess
import sys

import pytest

from rl_agent.recipes import kuhn
from rl_trainer.config import load_config
from rl_trainer.data import load_datasets
from rl_trainer.errors import DataError

pytestmark = pytest.mark.process

SMALL = ["model.warmup.steps=5", "model.warmup.batch_size=4", "model.warmup.num_rows=20", "steps=1", "eval_every=0"]
SMALL += ["batch.batch_size=2", "batch.group_size=2", "batch.mini_batch_size=2", "data.eval_size=2"]
HAS_BROWSER = shutil.which("chromium") is not None
NEEDS_BROWSER = [
    pytest.mark.integration,
    pytest.mark.skipif(not HAS_BROWSER, reason="there is no chromium on the path"),
]
RECIPES = ["gym", "search", "self_play", "harness"]
STEPPED = [RECIPES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES[1:])]
WITH_BROWSER = [*STEPPED, pytest.param("gui", marks=NEEDS_BROWSER)]


def run(folder, *words, timeout_s):
    command = [sys.executable, "-m", "rl_trainer.cli", *words, "runtime=inline", f"output_dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.process
@pytest.mark.parametrize("name", [*RECIPES, "gui", "two_policies"])
def test_a_recipe_makes_its_rows(name):
    config = load_config(name)
    data = load_datasets(config.data, seed=1, agent=config.agent)
    assert len(data.eval) == config.data.eval_size
    assert all(row["demonstrations"] for row in data.train)
    with pytest.raises(DataError, match=r"data.options has 'size'.*takes none"):
        load_datasets(load_config(name, ["data.options.size=3"]).data, seed=1)


@pytest.mark.process
@pytest.mark.parametrize("name", WITH_BROWSER)
def test_a_step_of_a_recipe(name, tmp_path):
    records = run(tmp_path / "out", name, *SMALL, timeout_s=280)
    assert [record["step"] for record in records] == [0, 1]
    assert all(not record["failures"] for record in records)
    assert records[1]["num_tokens"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", RECIPES)
def test_rl_adds_a_tenth_to_the_held_out_reward(name, tmp_path):
    """For self-play it takes a tenth of an ante away from the best opponent."""
    out = tmp_path / "out"
    records = run(out, name, "seed=1", timeout_s=2900)
    if name == "self_play":
        last = max(out.glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
        before, after = (kuhn.exploitability(kuhn.bets_of(str(folder))) for folder in (out / "model", last / "model"))
        assert before - after >= 0.1
        return
    rewards = [record["eval_reward"] for record in records if record.get("eval_reward") is not None]
    assert rewards[-1] - rewards[0] >= 0.1


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_both_of_two_policies_lose_less_to_the_best_opponent(tmp_path):
    out = tmp_path / "out"
    run(out, "two_policies", "seed=1", timeout_s=2900)
    before = kuhn.seat_exploitability(kuhn.bets_of(str(out / "model")))
    opener, replier = (
        kuhn.bets_of(str(out / "checkpoint-80" / "policies" / n / "model")) for n in ("opener", "replier")
    )
    after = kuhn.seat_exploitability(replier | {name: opener[name] for name in opener if name[1:] in ("", "pb")})
    assert before["first"] - after["first"] >= 0.1
    assert before["second"] - after["second"] >= 0.1
