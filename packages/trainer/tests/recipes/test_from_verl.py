"""verl's settings become recipes that run; names of other libraries are understood in errors."""

import asyncio
import contextlib
import datetime
import re
import shlex
from pathlib import Path

import pytest
import yaml

from rl_agent.sandbox.launches import ScriptReader
from rl_trainer import cli, equivalents, load_config
from rl_trainer.algorithms import ADVANTAGES, POLICY_LOSSES
from rl_trainer.config.load import settings
from rl_trainer.config.schema import RewardSection
from rl_trainer.errors import ConfigError
from rl_trainer.planning.plan import make_plan
from rl_trainer.recipes.from_verl import convert
from rl_trainer.rewards import Scorer

LINES = yaml.safe_load((Path(__file__).parent / "verl_command_lines.yaml").read_text())
COMMON = {"algorithm.loss": "ppo", "algorithm.loss_options.clip_high": 0.2, "rollout.backend": "vllm"}
EXPECTED = {
    "grpo_trainer/run_qwen2-7b": COMMON
    | {"batch.batch_size": 1024, "batch.group_size": 5, "batch.mini_batch_size": 256, "algorithm.kl_coef": 0.001}
    | {"algorithm.kl_estimator": "k3", "rollout.parallel.tp": 2, "rollout.num_replicas": 4, "eval_every": 5},
    "grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora": {"engine.lora.rank": 64, "engine.lora.alpha": 32.0}
    | {"engine.world_size": 2, "engine.optimizer.lr": 3e-6},
    "grpo_trainer/run_qwen2_5_vl-7b": {"algorithm.kl_coef": 0.01, "rollout.max_new_tokens": 2048}
    | {"rollout.max_model_len": 3072, "data.max_prompt_tokens": 1024},
    "grpo_trainer/run_qwen2-7b_math_megatron": {"engine.backend": "megatron", "engine.parallel.tp": 2}
    | {"engine.parallel.pp": 2, "data.path": None},
    "grpo_trainer/run_qwen3-8b": {"engine.max_tokens_per_gpu": 49152, "rollout.num_replicas": 4},
    "ppo_trainer/run_deepseek7b_llm": {"algorithm.advantage": "gae", "critic.lr": 1e-5, "critic.clip": 0.5}
    | {"eval_every": 1, "engine.max_tokens_per_gpu": 16384},
    "ppo_trainer/run_qwen2-7b_rm": {"reward.parts.model.kind": "classifier", "rollout.num_replicas": 8},
    "ppo_trainer/run_deepseek7b_llm_sp2": {"engine.parallel.sp": 2, "engine.max_tokens_per_gpu": 32768},
    "ppo_trainer/run_gemma": {"engine.world_size": 2, "batch.batch_size": 512, "critic.path": "google/gemma-2-2b-it"},
    "rloo_trainer/run_qwen2-7b": {"algorithm.advantage": "rloo", "algorithm.kl_in_reward": True}
    | {"algorithm.kl_estimator": "k1", "save_every": 0},
    "remax_trainer/run_qwen2.5-3b_seq_balance": {"algorithm.advantage": "remax", "engine.max_tokens_per_gpu": 30000},
    "reinforce_plus_plus_trainer/run_qwen2-7b_math_rf": {"algorithm.advantage": "reinforce_pp"}
    | {"engine.world_size": 16, "algorithm.kl_in_reward": True, "batch.mini_batch_size": 1024},
    "reinforce_plus_plus_trainer/run_qwen2-7b_math_rf_baseline": {"algorithm.advantage": "reinforce_pp_baseline"},
    "gspo_trainer/test_gspo_3b_math": {"algorithm.loss": "gspo", "algorithm.loss_options.clip_high": 4e-4}
    | {"algorithm.aggregation": "seq-mean-token-mean", "steps": 500, "engine.optimizer.warmup_steps": 100},
    "sapo_trainer/run_qwen30b_sapo": {"algorithm.loss": "sapo", "algorithm.loss_options.tau_neg": 1.05}
    | {"algorithm.aggregation": "seq-mean-token-mean", "engine.parallel.sp": 4, "reward.overlong_buffer": 4096},
    "gpg_trainer/run_qwen2-7b_math": {"algorithm.loss": "reinforce", "algorithm.advantage": "gpg"},
    "cispo_trainer/run_cispo_qwen2_5_0_5b_gsm8k": {"algorithm.loss": "cispo", "algorithm.loss_options.clip_low": 10.0}
    | {"engine.world_size": 1, "rollout.num_replicas": 1},
    "otb_trainer/run_qwen2_5-7b": {"algorithm.advantage": "optimal_token_baseline", "batch.batch_size": 128},
    "rollout_correction/run_with_rollout_corr": {"algorithm.loss": "reinforce", "algorithm.old_logprobs": "rollout"}
    | {"algorithm.correction": "sequence_tis", "algorithm.correction_bounds": (0.0, 2.0)},
    "rollout_correction/run_with_rollout_corr_multi_rs": {"algorithm.rejection": "token_k1"}
    | {"algorithm.rejection_bounds": (1 / 1.6, 1 / 0.6), "algorithm.correction": "none"},
    "sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn": {"rollout.backend": "sglang", "agent.loop": "tool"}
    | {"batch.over_sampling": 0.1, "algorithm.old_logprobs": "rollout"},
    "router_replay/run_qwen30_a3b_megatron_vllm": {
        "engine.backend": "megatron",
        "engine.parallel.ep": 8,
        "steps": 50000,
    },
}


def overrides(settings):
    return [f"{key}={yaml.safe_dump(value, default_flow_style=True).strip().removesuffix('...').strip()}"
            for key, value in settings.items()]  # fmt: skip


def at(config, key):
    for name in key.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


def recipe_of(arguments, folder):
    file = folder / "recipe.yaml"
    file.write_text(convert(arguments).text())
    return load_config(str(file))


@pytest.mark.promise("A verl command line becomes a recipe with a plan, and nothing of it is dropped in silence")
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_command_line_becomes_a_recipe_with_a_plan(name, tmp_path):
    config = recipe_of(overrides(LINES[name]), tmp_path)
    make_plan(config)
    assert {key: at(config, key) for key in EXPECTED[name]} == EXPECTED[name]


def test_every_stored_command_line_is_looked_at():
    assert set(LINES) == set(EXPECTED)
    assert len(LINES) >= 20


def test_every_key_is_converted_or_told():
    settings = LINES["sapo_trainer/run_qwen30b_sapo"] | {"trainer.of_tomorrow": 3, "data.shuffle": False}
    made = convert(overrides(settings))
    assert made.missing["trainer.of_tomorrow"] == "nothing here does that"
    assert "shuffled" in made.missing["data.shuffle"]
    assert "sapo" in made.ignored.get("actor_rollout_ref.actor.loss_agg_mode", "sapo")


@pytest.mark.promise("Epochs, checkpoints to keep, offloads, Muon and a reference's layout have verl's names")
def test_keys_of_late_have_verl_s_names(tmp_path):
    megatron, ref = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron"
    settings = {
        "trainer.max_actor_ckpt_to_keep": 2,
        "trainer.total_epochs": 3,
        "trainer.n_gpus_per_node": 8,
        "actor_rollout_ref.model.path": "Qwen/Qwen3-30B-A3B",
        "actor_rollout_ref.model.enable_activation_offload": True,
        "actor_rollout_ref.actor.optim.optimizer": "Muon",
        "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
        "actor_rollout_ref.actor.optim.min_lr_ratio": 0.1,
        "actor_rollout_ref.actor.strategy": "megatron",
        f"{megatron}.tensor_model_parallel_size": 4,
        f"{megatron}.expert_model_parallel_size": 4,
        f"{megatron}.optimizer_offload": True,
        f"{megatron}.use_dist_checkpointing": True,
        f"{megatron}.dist_checkpointing_path": "/weights/megatron",
        f"{ref}.tensor_model_parallel_size": 2,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 0.6,
        "actor_rollout_ref.rollout.val_kwargs.n": 4,
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.rollout.nnodes": 1,
        "reward_model.enable": True,
        "reward_model.model.path": "models/judge",
        "reward.reward_model.enable_resource_pool": True,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 8,
    }
    config = recipe_of(overrides(settings), tmp_path)
    expected = {
        "keep_checkpoints": 2,
        "epochs": 3,
        "model.path": "Qwen/Qwen3-30B-A3B",
        "engine.activation_offload": True,
        "engine.optimizer_offload": True,
        "engine.dist_checkpoint": "/weights/megatron",
        "engine.optimizer.kind": "muon",
        "engine.min_lr_ratio": 0.1,
        "engine.parallel.ep": 4,
        "engine.parallel.tp": 4,
        "placement.reference.engine.parallel.tp": 2,
        "placement.reference.engine.parallel.ep": 4,
        "placement.reward.pool": "reward",
        "rollout.eval_samples": 4,
    }
    assert {key: at(config, key) for key in expected} == expected
    made = convert(overrides(settings | {"actor_rollout_ref.actor.optim.optimizer": "soap"}))
    assert "there are adamw, muon" in made.missing["actor_rollout_ref.actor.optim.optimizer"]
    same = convert(
        overrides(settings | {f"{ref}.tensor_model_parallel_size": 4, "actor_rollout_ref.hybrid_engine": True})
    )
    assert "reference" not in same.recipe["placement"]
    assert "optimizer_offload" not in same.recipe["engine"], "a colocated engine gives its memory back"


def test_what_verl_ignores_is_told():
    made = convert(["actor_rollout_ref.actor.clip_ratio=0.3", "algorithm.adv_estimator=grpo", "critic.optim.lr=1e-5"])
    assert made.recipe["algorithm"]["loss_options"]["clip_high"] == 0.2  # as in verl 0.9.1, whose own default wins
    assert "stand above it" in made.ignored["actor_rollout_ref.actor.clip_ratio"]
    assert "has no critic" in made.ignored["critic.optim.lr"]


@pytest.mark.process
def test_a_script_is_read_and_not_run(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        f"set -x\ntouch {tmp_path}/ran\nN=${{N:-4}}\nlength=$((1024 * (1 + 1)))\nfiles=\"['a.parquet', 'b.parquet']\"\n"
        'python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\\n  data.train_files="$files" \\\n'
        "  data.max_response_length=$length actor_rollout_ref.rollout.n=$N trainer.n_gpus_per_node=2 $@\n"
    )
    made = convert([str(script), "data.max_prompt_length=100"]).recipe
    assert (made["batch"]["group_size"], made["rollout"]["max_new_tokens"]) == (4, 2048)
    assert made["data"]["max_prompt_tokens"] == 100
    assert not (tmp_path / "ran").exists()


def test_a_whole_configuration_is_read_with_its_references(tmp_path):
    file = tmp_path / "verl.yaml"
    actor = {"_target_": "verl.Actor", "ppo_mini_batch_size": "${data.train_batch_size}"}
    tree = {"data": {"train_batch_size": 32}, "actor_rollout_ref": {"actor": actor, "rollout": {"n": 8}}}
    file.write_text(yaml.safe_dump(tree | {"algorithm": {"adv_estimator": "rloo"}}))
    assert convert([str(file)]).recipe["batch"] == {"batch_size": 32, "group_size": 8, "mini_batch_size": 32}


def test_epochs_are_counted_where_the_file_is_there(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table({"prompt": ["p"] * 100}), tmp_path / "train.parquet")
    made = convert([f"data.train_files={tmp_path}/train.parquet", "data.train_batch_size=16", "trainer.total_epochs=3",
                    "actor_rollout_ref.actor.ppo_mini_batch_size=16"])  # fmt: skip
    assert made.recipe["steps"] == 18
    assert "trainer.total_epochs" not in made.missing


def test_the_command_prints_a_recipe(capsys, tmp_path):
    assert cli.main(["--from-verl", *overrides(LINES["grpo_trainer/run_qwen2-7b"])]) == 0
    printed = capsys.readouterr().out
    assert "Ignored by verl too" in printed
    assert "\nepochs: 15\n" in printed
    assert yaml.safe_load(printed)["batch"]["group_size"] == 5
    assert cli.main(["--from-verl", "no_override"]) == 2
    assert "neither key=value nor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.adv_estimator=grpo", "here it is algorithm.advantage (verl)"),
        ("clip_ratio_high=0.28", "here it is algorithm.loss_options.clip_high (verl)"),
        ("algorithm.epsilon_high=0.28", "here it is algorithm.loss_options.clip_high (TRL)"),
        ("loss_agg_mode=token-mean", "here it is algorithm.aggregation (verl)"),
        ("algorithm.rollout_is=token", "here it is algorithm.correction (verl)"),
        ("num_generations=8", "here it is batch.group_size (TRL)"),
        ("rollouts_per_example=8", "here it is batch.group_size (prime-rl)"),
    ],
)
def test_an_error_knows_the_names_of_other_libraries(override, words):
    with pytest.raises(ConfigError) as error:
        load_config("quickstart", [override])
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.advantage=reinforce_plus_plus", "reinforce_plus_plus is reinforce_pp here"),
        ("algorithm.loss=vanilla", "vanilla is ppo here"),
        ("algorithm.loss=geo_mean", "geo_mean is gmpo here"),
    ],
)
def test_an_error_knows_the_values_of_other_libraries(override, words):
    with pytest.raises(ConfigError) as error:
        make_plan(load_config("quickstart", [override]))
    assert words in str(error.value)


def test_the_table_names_keys_and_algorithms_that_exist():
    keys = {each.name for each in settings()}
    for row in equivalents.rows():
        for key in row["ours"].split(", "):
            free = any(key.startswith(p) for p in ("algorithm.loss_options.", "agent.options.", "rollout.options."))
            assert free or key.replace("parts.model", "parts.NAME") in keys, key
    table = equivalents.tables()["verl"]
    assert {*table["algorithm.adv_estimator"]["choices"].values()} <= {*ADVANTAGES}
    assert {*table["actor_rollout_ref.actor.policy_loss.loss_mode"]["choices"].values()} <= {*POLICY_LOSSES}


COMPUTE_SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": float(solution_str == ground_truth) + extra_info["bonus"], "acc": True, "pred": solution_str}

def plain(data_source, solution_str, ground_truth):
    return data_source == "gsm8k"
"""


@pytest.mark.process
@pytest.mark.parametrize(("name", "wanted"), [("compute_score", 1.5), ("plain", 1.0)])
def test_a_reward_function_of_verl_runs_as_it_is(tmp_path, name, wanted):
    (tmp_path / "score.py").write_text(COMPUTE_SCORE)
    row = {"data_source": "gsm8k", "reward_model": {"ground_truth": "4"}, "extra_info": {"bonus": 0.5}}

    async def main():
        scorer = Scorer(RewardSection(path=f"{tmp_path}/score.py:{name}"))
        try:
            return await scorer.score("4", row)
        finally:
            await scorer.close()

    assert asyncio.run(main()).reward == wanted


SCRIPTS = yaml.safe_load((Path(__file__).parent / "verl_scripts.yaml").read_text())


def in_folder(case, tmp_path):
    folder = tmp_path / "scripts"
    for name, text in {"run.sh": case["script"], **case.get("files", {})}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return [str(folder / "run.sh"), *case.get("words", [])]


@pytest.mark.promise("A launch script of verl becomes a recipe, whatever it uses of the shell")
@pytest.mark.process
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_becomes_a_recipe(name, tmp_path, monkeypatch):
    case, found = SCRIPTS[name], []
    words = in_folder(case, tmp_path)
    read = ScriptReader.read
    monkeypatch.setattr(ScriptReader, "read", lambda *given: found.append(read(*given)) or found[0])
    if "error" in case:
        with pytest.raises(ConfigError) as error:
            convert(words)
        assert case["error"] in str(error.value)
        assert [*map(spelled(tmp_path), found)] == ([case["launches"]] if "launches" in case else [])
        return
    made = convert(words)
    assert made.values == case.get("values", made.values)
    assert spelled(tmp_path)(found[0]) == case.get("launches", spelled(tmp_path)(found[0]))
    for key, value in case.get("expected", {}).items():
        wanted = str(Path(value).expanduser()) if str(value).startswith("~") else value
        found = made.recipe.get(key) if made.program == "rl-sft" else key_of(made.recipe, key)
        assert found == wanted, (key, made.text())


def spelled(folder):
    """Function that spells launches as command lines, with what depends on machine and day as in the corpus."""

    def lines(found):
        given = [str(folder), str(Path.home()), str(datetime.datetime.now().astimezone().year)]
        made = []
        for launch in found.launches:
            words = [re.sub(r"@unknown(\d+)@", lambda m: f"$({found.unknown[m[1]]})", word) for word in launch.words]
            for value, name in zip(given, ("", "~", "YEAR"), strict=True):
                words = [word.replace(value, name) if name != "YEAR" or "run_" in word else word for word in words]
            made.append(shlex.join(words).replace("'\"'\"'", "'\\''"))
        return made

    return lines


def key_of(recipe, key):
    for name in key.split("."):
        recipe = recipe.get(name) if isinstance(recipe, dict) else None
    return recipe


def test_the_corpus_of_scripts_is_large():
    assert len(SCRIPTS) >= 60
    assert sum("error" not in case for case in SCRIPTS.values()) >= 60
    assert all(case.keys() & {"expected", "values", "error"} for case in SCRIPTS.values())
    complete = [case.keys() & {"launches", "values", "error"} for case in SCRIPTS.values()]
    assert all(complete), "every word of a launch is compared"
    assert sum("launches" in case for case in SCRIPTS.values()) >= 110


A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FULLY_ASYNC = "python3 -m verl.experimental.fully_async_policy.fully_async_main"


def settings_of(*words):
    made = convert(words)
    return made, lambda key: key_of(made.recipe, key)


@pytest.mark.parametrize(
    ("engine", "layout", "backend", "parallel", "missed"),
    [
        ("torchtitan", [f"{A}.torchtitan.data_parallel_replicate_size=2"], "torchtitan", {"dp_replicate": 2}, False),
        ("veomni", [], "veomni", None, "set engine.environment"),
        ("veomni", [f"{A}.veomni.ulysses_parallel_size=2"], "fsdp", {"sp": 2}, "no sp, ep or replicas here; fsdp has"),
        (
            "veomni",
            [f"{A}.veomni.expert_parallel_size=4", f"{A}.veomni.fsdp_size=4"],
            "fsdp",
            {"ep": 4, "dp_replicate": 2},
            "no sp, ep or replicas here; fsdp has",
        ),
        ("megatron", [f"{A}.megatron.context_parallel_size=2"], "megatron", {"cp": 2}, False),
        ("dp", [f"{A}.fsdp_config.ulysses_sequence_parallel_size=2"], "fsdp", {"sp": 2}, False),
        ("mlite", [], "fsdp", None, "no engine mlite; there are fsdp, megatron, torchtitan, veomni"),
    ],
)
def test_model_engines_become_backends(engine, layout, backend, parallel, missed):
    made, at_ = settings_of(f"model_engine={engine}", *layout)
    assert at_("engine.backend") == backend
    assert at_("engine.parallel") == parallel
    assert ("model_engine" in made.missing) == bool(missed)
    assert not missed or missed in made.missing["model_engine"]


@pytest.mark.parametrize(
    ("words", "whole_layers", "parts"),
    [
        (["recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1"], True, None),
        (["recompute_granularity=selective"], False, ["core_attn"]),
        (["recompute_granularity=selective", "recompute_modules=[core_attn,moe_act]"], False, ["core_attn", "moe_act"]),
        ([], True, None),
    ],
)
def test_megatron_recomputes_what_it_did(words, whole_layers, parts):
    override = f"+{A}.megatron.override_transformer_config"
    made, at_ = settings_of("model_engine=megatron", *(f"{override}.{word}" for word in words))
    assert (at_("engine.activation_checkpointing"), at_("engine.recompute")) == (whole_layers, parts)
    assert not any("recompute" in key for key in made.missing)


def test_a_tool_s_answer_is_counted_in_characters_by_verl():
    words = [f"{R}.multi_turn.enable=True", f"{R}.multi_turn.max_tool_response_length=1026"]
    made, at_ = settings_of(*words)
    assert at_("agent.options.max_tool_tokens") == 257  # 1026 characters, four to a token
    assert "characters there" in made.missing[f"{R}.multi_turn.max_tool_response_length"]


def test_a_reward_function_stays_next_to_a_reward_model():
    words = ["reward_model.enable=True", "reward_model.model.path=judge", "custom_reward_function.path=score.py"]
    made, at_ = settings_of(*words)
    assert at_("reward.path") == "score.py:compute_score"
    assert at_("reward.parts") is None
    assert "the function gives the reward" in made.missing["reward_model.enable"]


@pytest.mark.parametrize(
    ("words", "schedule", "least"),
    [
        (["lr_decay_style=cosine", "min_lr=1e-7"], "cosine", 0.1),
        (["lr_scheduler_type=cosine", "min_lr_ratio=0.2"], "cosine", 0.2),
        (["warmup_style=cosine"], "cosine", None),
        (["lr_decay_style=linear"], "constant", None),
        (["lr_decay_style=constant", "min_lr=1e-7"], "constant", None),
    ],
)
def test_schedules_of_every_engine_are_carried_over(words, schedule, least):
    made, at_ = settings_of(*(f"{A}.optim.{word}" for word in words))
    assert at_("engine.lr_schedule") == schedule
    assert at_("engine.min_lr_ratio") == (pytest.approx(least) if least else None)
    assert ("no linear here" in made.missing.get(f"{A}.optim.lr_decay_style", "")) == ("linear" in words[0])


@pytest.mark.parametrize(("engine", "schedule"), [("veomni", "cosine"), ("torchtitan", "constant"), ("dp", "constant")])
def test_engines_have_schedules_of_their_own(engine, schedule):
    made, at_ = settings_of(f"model_engine={engine}")
    assert at_("engine.lr_schedule") == schedule
    assert ("no linear here" in made.missing.get(f"{A}.optim.lr_decay_style", "")) == (engine == "torchtitan")
    assert (
        settings_of(
            f"model_engine={engine}", f"{A}.optim.lr_scheduler_type=constant", f"{A}.optim.lr_decay_style=constant"
        )[1]("engine.lr_schedule")
        == "constant"
    )


def test_options_of_servers_that_are_empty_add_no_flag():
    _, at_ = settings_of(f"{R}.engine_kwargs.vllm={{}}")
    assert at_("rollout.options.args") == ["--enable-sleep-mode", "--gpu-memory-utilization", "0.5"]


def test_several_teachers_are_told_apart_by_their_source():
    teachers = "distillation.teacher_models"
    words = [
        f"+{teachers}.{name}.{key}"
        for name, key in (("a", "key=gsm8k"), ("a", "model_path=math"), ("b", "model_path=geo"))
    ]
    _, at_ = settings_of("distillation.enabled=True", *words)
    assert at_("teacher.by_source") == {"gsm8k": "math", "b": "geo"}
    assert at_("teacher.path") == "math"


def test_servers_of_an_asynchronous_mode_have_nodes_of_their_own():
    words = ["trainer.v1.trainer_mode=separate_async", f"{R}.nnodes=2", f"{R}.n_gpus_per_node=4"]
    _, at_ = settings_of(*words, "trainer.n_gpus_per_node=6")
    assert (at_("rollout.num_replicas"), at_("engine.world_size")) == (4, 6)  # 8 GPUs, two to a replica
    assert at_("rollout.colocated") is False
    assert at_("pipeline") == "fully_async"


def test_what_a_mini_batch_divides_over_is_data_parallel():
    words = [
        f"{A}.megatron.tensor_model_parallel_size=4",
        f"{A}.ppo_mini_batch_size=2",
        f"{R}.n=3",
        "data.train_batch_size=4",
    ]
    assert "trainer.n_gpus_per_node" not in convert(words).missing  # 6 rows over 8 / 4 ranks
    assert "divide over 8 ranks" in convert(words[1:]).missing["trainer.n_gpus_per_node"]


@pytest.mark.parametrize("number", ["many", "[1]"])
def test_a_value_of_the_wrong_kind_is_listed_or_refused(number):
    made, at_ = settings_of(f"data.train_batch_size={number}")
    assert at_("batch.batch_size") == 1024
    assert "is not a number; 1024 is taken" in made.missing["data.train_batch_size"]
    with pytest.raises(ConfigError, match="data.val_max_samples=.* is not a number"):
        convert([f"data.val_max_samples={number}"])


@pytest.mark.process
@pytest.mark.parametrize("value", ["0", "-1", "abc", "[]", "{}", "null", "True", "1e400", "a_b_c", "nan"])
def test_odd_values_are_converted_listed_or_refused(value):
    for key in equivalents.tables()["verl"]:
        with contextlib.suppress(ConfigError):
            convert([f"{key}={value}", "algorithm.rollout_correction.rollout_is=token", "distillation.enabled=True"])


def test_half_precision_is_listed():
    made, at_ = settings_of(f"{A}.fsdp_config.dtype=float16")
    assert at_("engine.precision") == "bfloat16"
    assert "no float16 here; there are bfloat16, float32" in made.missing[f"{A}.fsdp_config.dtype"]


def test_no_key_of_the_table_is_given_twice():
    class Unique(yaml.SafeLoader):
        pass

    def mapping(loader, node):
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        assert len(keys) == len(set(keys)), sorted(key for key in keys if keys.count(key) > 1)
        loader.flatten_mapping(node)
        return {
            loader.construct_object(key, deep=True): loader.construct_object(value, deep=True)
            for key, value in node.value
        }

    Unique.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    yaml.load(Path(equivalents.__file__).with_suffix(".yaml").read_text(), Unique)


@pytest.mark.process
def test_every_word_is_converted_or_listed():
    """Each of many keys is in the recipe or in a list, whatever its value."""
    keys = [
        key
        for key, row in equivalents.tables()["verl"].items()
        if "choices" not in row and not key.endswith(("parallel_size", "fsdp_size"))
    ]
    keys.remove("model_engine")
    plain = convert([f"{R}.n=2"]).recipe
    for key in keys:
        made, usual = convert([f"{key}=5000", f"{R}.n=2"]), equivalents.tables()["verl"][key].get("usual")
        is_listed = key in {*made.missing, *made.ignored, *made.needless}
        assert is_listed or made.recipe != plain or usual in (1, True) or 1 in _list(usual), key


def _list(value):
    return value if isinstance(value, list) else [value]
