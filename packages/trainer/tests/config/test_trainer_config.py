import json
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from rl_engine.types import EngineConfig
from rl_rollout.types import ServerConfig
from rl_trainer.config import RECIPES, as_tree, load_config
from rl_trainer.data import load_datasets
from rl_trainer.errors import ConfigError, PlanError
from rl_trainer.pipeline.roles import server_config
from rl_trainer.planning.plan import make_plan
from rl_trainer.planning.prepare import counted


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_shipped_recipe_loads_and_divides(recipe):
    plan = make_plan(load_config(recipe, ["teacher.path=folder"] if recipe == "distill" else []))
    assert plan.optimizer_steps * plan.completions_per_optimizer_step == plan.completions


def test_overrides_reach_nested_keys_with_their_types():
    config = load_config(
        "quickstart",
        ["seed=3", "engine.optimizer.lr=1e-4", "batch.group_size=4", "data.options.task_config={min_terms: 3}"],
    )
    assert (config.seed, config.engine.optimizer.lr, config.batch.group_size) == (3, 1e-4, 4)
    assert config.data.options["task_config"] == {"min_terms": 3}


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("engine.optimizer.learningrate=1", "engine.optimizer"),
        ("stepz=3", "steps"),
        ("batch.groupsize=3", "batch.group_size"),
        ("model.warmup.hiden_size=3", "model.warmup.hidden_size"),
    ],
)
def test_an_unknown_key_names_the_nearest(override, nearest):
    with pytest.raises(
        ConfigError, match=f"unknown configuration key {override.split('=')[0]}; the nearest one is {nearest}"
    ):
        load_config("quickstart", [override])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("steps=many", "steps: .*got 'many'"),
        ("steps=0", "greater than 0, got 0"),
        ("runtime=slurm", "'ray', 'inline' or 'auto', got 'slurm'"),
        ("rollout.temperature=0", "greater than or equal to 0.01"),
        ("steps", "not of the form key=value"),
        ("steps.more=1", "is a value, not a section"),
        ("algorithm.loss=[", r"algorithm.loss=\[' is not valid YAML"),
        ("agent.options={1: 2}", r"agent.options.*valid string, got 1"),
        ("tracking.trackers=[[console]]", r"tracking.trackers: .*got \[\['console'\]\]"),
        ("engine.parallel.tp=0", "parallel.tp is 0; it must be 1 or more"),
        ("batch={group_size: 4, group_size: 8}", "found the key 'group_size' a second time"),
        ("reward.parts.a={kind: rule, prompt: {x}", "reward.parts.a={kind: rule, prompt: {x}' is not valid YAML"),
    ],
)
def test_a_wrong_value_is_told_with_what_was_seen(override, words):
    with pytest.raises(ConfigError, match=words):
        load_config("quickstart", [override])


def test_an_unknown_recipe_lists_the_shipped_ones():
    with pytest.raises(ConfigError, match="no recipe 'quikstart': give one of .*gsm8k, .*quickstart"):
        load_config("quikstart")


def test_a_section_as_a_mapping_keeps_earlier_overrides():
    before = load_config("quickstart").engine
    keys = ["engine.optimizer.lr=1e-4", "engine={backend: torchtitan}", "data.options={task: x}"]
    config = load_config("quickstart", keys)
    assert (config.engine.backend, config.engine.optimizer.lr) == ("torchtitan", 1e-4)
    assert config.engine.max_tokens_per_gpu == before.max_tokens_per_gpu, "the recipe's"
    assert config.data.options == {"task": "x"}, "options are a value, and replaced"
    keys = ["reward.parts.a.kind=loop", "reward.parts={b: {kind: loop}}", "reward.parts.b={weight: 2.0}"]
    parts = load_config("quickstart", keys).reward.parts
    assert {name: (part.kind, part.weight) for name, part in parts.items()} == {"b": ("loop", 2.0)}


def test_epochs_say_how_many_steps_there_are(tmp_path):
    file = tmp_path / "rows.jsonl"
    row = {"prompt": "1 + 1 =", "answer": "2"}
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(50)))
    keys = ["data.format=rows", "data.options={}", f"data.path={file}", "data.eval_size=5", "batch.batch_size=20"]
    config = load_config("quickstart", [*keys, "epochs=2", "batch.mini_batch_size=20"])
    config = counted(config, load_datasets(config.data, seed=config.seed))
    assert (config.steps, config.epochs) == (5, 0), "twice 45 rows, 20 a step"
    with pytest.raises(ConfigError, match="steps and epochs both say how long the run is; leave one out"):
        load_config("quickstart", ["epochs=2", "steps=3"])


def test_greedy_completions_are_not_sampled_twice():
    with pytest.raises(PlanError, match=r"rollout.eval_samples=4 greedy completions of a row are all the same"):
        load_config("quickstart", ["rollout.eval_samples=4"])


def test_a_recipe_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nmodel: {path: /m}\n")
    assert load_config(str(path), ["steps=7"]).steps == 7
    path.write_text("- not a mapping\n")
    with pytest.raises(ConfigError, match="must hold a mapping"):
        load_config(str(path))


def test_a_key_that_a_recipe_has_twice_is_an_error(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: quickstart\nbatch: {group_size: 4}\nsteps: 3\nbatch: {batch_size: 64}\n")
    with pytest.raises(ConfigError, match=r"(?s)mine\.yaml .*the key 'batch' a second time.*line 4"):
        load_config(str(path))


def test_paths_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config("gsm8k", ["output_dir=~/run", "model.path=~/m", "reward.path=~/r.py:score", "data.path=a~/b"])
    assert (config.output_dir, config.model.path) == (f"{tmp_path}/run", f"{tmp_path}/m")
    assert (config.reward.path, config.data.path) == (f"{tmp_path}/r.py:score", "a~/b")


@pytest.mark.parametrize("text", ["off", "'off'", "false"])
def test_off_is_a_setting_although_yaml_reads_false(text):
    assert load_config("quickstart", [f"engine.fp8={text}"]).engine.fp8 == "off"


@pytest.mark.parametrize("text", ["1e-3", "1.e-3", "+1E-3", ".1e-2", "0.001"])
def test_options_read_a_number_with_an_exponent(text):
    config = load_config("quickstart", [f"agent.options={{weight: {text}}}", f"data.options.share={text}"])
    assert config.agent.options == {"weight": 0.001}
    assert config.data.options["share"] == 0.001


def test_settings_of_one_rollout_backend_reach_its_server():
    config = load_config("quickstart", ["rollout.backend=vllm", "rollout.options={args: --enforce-eager}"])
    assert server_config(config, Path("model")).options == {"args": "--enforce-eager"}
    assert config.engine.matmul_precision == "medium"
    assert server_config(config, Path("model")).dtype == "float32"
    quantised = load_config("quickstart", ["rollout.quantization=int8"])
    assert server_config(quantised, Path("model")).quantization == "int8"


def test_the_number_of_keys_does_not_grow_unnoticed():
    """PPO with critic, curriculum, replay and every option of its loss; keys of engine and server themselves apart."""

    def count(values):
        return sum(count(v) for v in values.values()) if isinstance(values, dict) and values else 1

    everything = ["data.curriculum.revisit=0.2", "batch.replay.share=0.5"]
    everything.append("algorithm.loss_options={clip_low: 0.2, clip_high: 0.3, clip_dual: 3}")
    tree = as_tree(load_config("ppo", everything))
    for section, component in (("engine", EngineConfig), ("rollout", ServerConfig)):
        for field in fields(component):
            tree[section].pop(field.name, None)
    assert count(tree) <= 116


@pytest.mark.promise("`config.yaml` is read again as it was written")
def test_the_tree_that_is_printed_is_read_again(tmp_path):
    config = load_config("ppo", ["engine.parallel.sp=2", "engine.lora.rank=8"])
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(as_tree(config)))
    assert load_config(str(tmp_path / "again.yaml")) == config


@pytest.mark.parametrize(
    ("overrides", "runtime"),
    [
        ([], "inline"),
        (["engine.lora.rank=4", "algorithm.kl_coef=0.1"], "inline"),
        (["runtime=ray"], "ray"),
        (["engine.world_size=2"], "ray"),
        (["rollout.num_replicas=2"], "ray"),
        (["agent.num_workers=2"], "ray"),
        (["pipeline=one_step_off"], "ray"),
        (["rollout.backend=vllm"], "ray"),
        (["rollout.colocated=false"], "ray"),
        (["engine.environment=elsewhere"], "ray"),
        (["placement.critic.pool=critic"], "ray"),
    ],
)
@pytest.mark.process
def test_the_quickstart_is_one_process_unless_more_are_asked_for(overrides, runtime, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert load_config("quickstart", overrides).runtime == runtime
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert load_config("quickstart", overrides).runtime == "ray", "a cluster that is named is used"


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["batch.batch_size=16"], (16, 8)),
        (["batch.batch_size=7"], (7, 7)),
        (["batch.batch_size=16", "batch.mini_batch_size=4"], (16, 4)),
        ([], (64, 32)),
    ],
)
def test_mini_batch_size_follows_a_changed_batch_size(overrides, wanted):
    batch = load_config("gsm8k", overrides).batch
    assert (batch.batch_size, batch.mini_batch_size) == wanted
