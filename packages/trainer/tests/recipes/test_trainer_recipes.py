"""Every recipe for real models takes a step with the real parts, on a tiny model; and recipes build on one another."""

import json

import pytest
from rich.console import Console

from rl_trainer.config import RECIPES, load_config
from rl_trainer.errors import ConfigError
from rl_trainer.run import run

SMALL = [
    "runtime=inline", "steps=2", "eval_every=0", "save_every=0", "timeout_s=120", "data.eval_size=4",
    "batch.batch_size=4", "batch.mini_batch_size=2", "batch.dynamic_sampling=false", "rollout.max_new_tokens=16",
]  # fmt: skip
ON_GSM8K = sorted(p.stem for p in RECIPES.glob("*.yaml") if p.stem == "gsm8k" or "extends: gsm8k" in p.read_text())
ON_GSM8K = [name for name in ON_GSM8K if name not in {"moe", "vlm", "qwen2.5-7b"}]  # models of their own
BY_DEFAULT = ["ppo"]  # the base with a critic; `.ci/run gsm8k` has the base, test_trainer_distillation a teacher
RECIPES_OF_STEPS = [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in ON_GSM8K]


@pytest.mark.promise("Every shipped recipe takes a step")
@pytest.mark.process
@pytest.mark.parametrize("recipe", RECIPES_OF_STEPS)
def test_a_recipe_takes_a_step(recipe, model, tmp_path):
    data = tmp_path / "data.jsonl"
    lines = [{"question": f"{a} + {b} =", "answer": f"add them #### {a + b}"} for a in range(10, 14) for b in range(4)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    group = [] if recipe == "ppo" else ["batch.group_size=2"]
    own = ["reward.overlong_buffer=8"] if recipe == "dapo" else []
    own += ["data.format=gsm8k"] if recipe == "grpo" else []  # which asks for rows of one's own
    settings = [*SMALL, *group, *own, "data.max_prompt_tokens=128", f"data.path={data}", f"model.path={model}"]
    critic = ["critic.warmup_steps=1"] if recipe == "ppo" else []
    teacher = [f"teacher.path={model}"] if recipe == "distill" else []
    config = load_config(recipe, [*settings, *critic, *teacher, f"output_dir={tmp_path / 'out'}"])
    summary = run(config, Console(quiet=True))
    assert summary["steps"] == 2
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    learned = "teacher_kl" if recipe == "distill" else "policy_loss"  # whose policy learns from the teacher alone
    assert all(learned in r["metrics"] for r in records[2:])
    if recipe == "ppo":  # at first the critic learns alone
        assert "policy_loss" not in records[1]["metrics"]
        assert all("value_loss" in r["metrics"] for r in records[1:])
        assert (tmp_path / "out" / "checkpoint-2" / "critic").is_dir()


def test_a_recipe_lies_over_the_one_it_extends(tmp_path):
    (tmp_path / "base.yaml").write_text("steps: 3\nbatch: {batch_size: 8, group_size: 4}\n")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\nbatch: {group_size: 2}\n")
    config = load_config(str(tmp_path / "mine.yaml"), ["steps=5"])
    assert (config.steps, config.batch.batch_size, config.batch.group_size) == (5, 8, 2)
    (tmp_path / "lost.yaml").write_text("extends: nowhere\n")
    with pytest.raises(ConfigError, match="there is no recipe 'nowhere'"):
        load_config(str(tmp_path / "lost.yaml"))
