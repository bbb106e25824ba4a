"""Units and meanings of verl's keys: what its workers do with a value is what the recipe asks for.

The right values follow from verl 0.9.1's `trainer/config` and the code that reads each key.
"""

import re
from fnmatch import fnmatch

import pytest

from rl_trainer import equivalents
from rl_trainer.config.explain import names_elsewhere
from rl_trainer.config.load import settings
from rl_trainer.recipes.from_verl import convert

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
C = "algorithm.rollout_correction"
TOOLS = f"{R}.multi_turn.enable=True"
BATCH = ["data.train_batch_size=64", f"{A}.ppo_mini_batch_size=16"]
GROUP = ["algorithm.adv_estimator=grpo", f"{R}.n=4"]
ASYNC = ["trainer.v1.trainer_mode=separate_async", f"{R}.nnodes=1"]

# name: (overrides, values by our key, part of a note by verl's key)
MEANINGS = {
    # batches: prompts, of all GPUs together; n completions of each
    "mini-batches are prompts": ([*BATCH, *GROUP], {"batch.batch_size": 64, "batch.mini_batch_size": 16}, {}),
    "a mini-batch that does not divide": (
        ["data.train_batch_size=60", f"{A}.ppo_mini_batch_size=16"],
        {"batch.mini_batch_size": 15},
        {f"{A}.ppo_mini_batch_size": "15 is the nearest below"},
    ),
    "micro-batches are rows of a GPU": (
        [f"{A}.ppo_micro_batch_size_per_gpu=4", "data.max_prompt_length=100", "data.max_response_length=200"],
        {"engine.max_tokens_per_gpu": 1200},
        {},
    ),
    "micro-batches by tokens": (
        [f"{A}.use_dynamic_bsz=True", f"{A}.ppo_max_token_len_per_gpu=9000", f"{A}.ppo_micro_batch_size_per_gpu=4"],
        {"engine.max_tokens_per_gpu": 9000},
        {},
    ),
    "tokens of a GPU hold one row": (
        [f"{A}.use_dynamic_bsz=True", f"{A}.ppo_max_token_len_per_gpu=100"],
        {"engine.max_tokens_per_gpu": 1024},
        {},
    ),
    "tokens are read with use_dynamic_bsz alone": (
        [f"{A}.ppo_max_token_len_per_gpu=9000"],
        {"engine.max_tokens_per_gpu": 1024},
        {f"{A}.ppo_max_token_len_per_gpu": "use_dynamic_bsz is false"},
    ),
    "log-prob passes": (
        [f"{R}.log_prob_micro_batch_size_per_gpu=32"],
        {},
        {f"{R}.log_prob_micro_batch_size_per_gpu": "packed by tokens"},
    ),
    "epochs over a mini-batch": ([f"{A}.ppo_epochs=2"], {}, {f"{A}.ppo_epochs": "learned from once"}),
    "a batch for each refill": (
        ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=10"],
        {"batch.dynamic_sampling": True, "batch.max_refills": 10},
        {},
    ),
    "refills without a limit": (
        ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=0"],
        {"batch.max_refills": 1000},
        {},
    ),
    "refills without a limit by default": (["algorithm.filter_groups.enable=True"], {"batch.max_refills": 1000}, {}),
    "groups that are not filtered": (
        ["algorithm.filter_groups.max_num_gen_batches=10"],
        {"batch.max_refills": None, "batch.dynamic_sampling": None},
        {"algorithm.filter_groups.max_num_gen_batches": "filter_groups.enable is not set"},
    ),
    # steps and epochs
    "steps before epochs": (
        ["trainer.total_training_steps=7", "trainer.total_epochs=3"],
        {"steps": 7, "epochs": None},
        {},
    ),
    "epochs": (["trainer.total_epochs=3"], {"epochs": 3, "steps": None}, {}),
    "epochs by default": ([], {"epochs": 30}, {}),
    "no evaluation and no checkpoint": (
        ["trainer.test_freq=-1", "trainer.save_freq=-1"],
        {"eval_every": 0, "save_every": 0},
        {},
    ),
    "evaluation and checkpoints by steps": (
        ["trainer.test_freq=5", "trainer.save_freq=20"],
        {"eval_every": 5, "save_every": 20},
        {},
    ),
    "no evaluation before": (
        ["trainer.val_before_train=False"],
        {},
        {"trainer.val_before_train": "always evaluated once"},
    ),
    "all checkpoints are left": (["trainer.max_actor_ckpt_to_keep=null"], {"keep_checkpoints": None}, {}),
    "warm-up counts training steps": (
        [*BATCH, f"{A}.optim.lr_warmup_steps=10"],
        {"engine.optimizer.warmup_steps": 40},
        {},
    ),
    "warm-up as a share of the steps": (
        [*BATCH, f"{A}.optim.lr_warmup_steps_ratio=0.1", "trainer.total_training_steps=50"],
        {"engine.optimizer.warmup_steps": 20},
        {},
    ),
    "warm-up of 0 steps counts before its share": (
        [
            *BATCH,
            f"{A}.optim.lr_warmup_steps=-1",
            f"{A}.optim.lr_warmup_steps_ratio=0.1",
            "trainer.total_training_steps=50",
        ],
        {"engine.optimizer.warmup_steps": 20},
        {},
    ),
    "a share of steps that nobody knows": (
        [*BATCH, f"{A}.optim.lr_warmup_steps_ratio=0.1"],
        {"engine.optimizer.warmup_steps": None},
        {f"{A}.optim.lr_warmup_steps_ratio": "0.1 x steps x 4"},
    ),
    # losses
    "a half-open clip": (
        [f"{A}.clip_ratio_low=0.2", f"{A}.clip_ratio_high=0.28"],
        {"algorithm.loss_options.clip_low": 0.2, "algorithm.loss_options.clip_high": 0.28},
        {},
    ),
    "the bound of negative advantages": ([f"{A}.clip_ratio_c=10"], {"algorithm.loss_options.clip_dual": 10.0}, {}),
    "the bound of another loss": (
        [f"{A}.policy_loss.loss_mode=gspo", f"{A}.clip_ratio_c=10"],
        {"algorithm.loss": "gspo", "algorithm.loss_options.clip_dual": None},
        {f"{A}.clip_ratio_c": "the loss does not read it"},
    ),
    "the entropy is a bonus": ([f"{A}.entropy_coeff=0.01"], {"algorithm.entropy_coef": 0.01}, {}),
    "no entropy": ([f"{A}.entropy_coeff=0"], {"algorithm.entropy_coef": None}, {}),
    **{
        f"aggregation {mode}": ([f"{A}.loss_agg_mode={mode}"], {"algorithm.aggregation": mode}, {})
        for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    },
    "a divisor of its own": (
        [f"{A}.loss_agg_mode=seq-mean-token-sum-norm", f"{A}.loss_scale_factor=100"],
        {},
        {f"{A}.loss_scale_factor": "divided by rollout.max_new_tokens, and not by 100"},
    ),
    "a divisor that is not read": (
        [f"{A}.loss_scale_factor=100"],
        {},
        {f"{A}.loss_scale_factor": "divides by no constant"},
    ),
    "one aggregation of a loss": (
        [f"{A}.policy_loss.loss_mode=geo_mean", f"{A}.loss_agg_mode=token-mean"],
        {"algorithm.aggregation": "seq-mean-token-mean"},
        {f"{A}.loss_agg_mode": "always takes the mean over sequences"},
    ),
    # KL
    **{
        f"KL {kind}": (
            [*GROUP, f"{A}.use_kl_loss=True", f"{A}.kl_loss_coef=0.01", f"{A}.kl_loss_type={kind}"],
            {"algorithm.kl_coef": 0.01, "algorithm.kl_estimator": ours, "algorithm.kl_in_reward": None},
            {},
        )
        for kind, ours in (
            ("kl", "k1"),
            ("k1", "k1"),
            ("mse", "k2"),
            ("low_var_kl", "k3"),
            ("k3+", "k3+"),
            ("abs", "abs"),
        )
    },
    "KL in the reward": (
        ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.02"],
        {"algorithm.kl_coef": 0.02, "algorithm.kl_in_reward": True, "algorithm.kl_estimator": "k1"},
        {},
    ),
    "an adaptive coefficient": (
        ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.05"],
        {"algorithm.kl_target": 0.05},
        {},
    ),
    "KL twice": (
        ["algorithm.use_kl_in_reward=True", f"{A}.use_kl_loss=True", f"{A}.kl_loss_coef=0.01"],
        {"algorithm.kl_coef": 0.01, "algorithm.kl_in_reward": None},
        {"algorithm.use_kl_in_reward": "that of the loss is taken"},
    ),
    "KL of the loss with coefficient 0": (
        ["algorithm.use_kl_in_reward=True", f"{A}.use_kl_loss=True", f"{A}.kl_loss_coef=0"],
        {"algorithm.kl_coef": 0.001, "algorithm.kl_in_reward": True},
        {},
    ),
    "a coefficient that is not used": (
        [f"{A}.kl_loss_coef=0.01"],
        {"algorithm.kl_coef": None},
        {f"{A}.kl_loss_coef": "use_kl_loss is false"},
    ),
    # advantages
    **{
        f"estimator {theirs}": ([f"algorithm.adv_estimator={theirs}", f"{R}.n=4"], {"algorithm.advantage": ours}, {})
        for theirs, ours in equivalents.tables()["verl"]["algorithm.adv_estimator"]["choices"].items()
    },
    "groups that are not divided by their deviation": (
        [*GROUP, "algorithm.norm_adv_by_std_in_grpo=False"],
        {"algorithm.advantage": "dr_grpo"},
        {},
    ),
    "groups of another estimator": (
        ["algorithm.adv_estimator=rloo", f"{R}.n=4", "algorithm.norm_adv_by_std_in_grpo=False"],
        {"algorithm.advantage": "rloo"},
        {"algorithm.norm_adv_by_std_in_grpo": "the estimator is another one"},
    ),
    "gamma and lambda of GAE": (
        ["algorithm.adv_estimator=gae", "algorithm.gamma=0.9", "algorithm.lam=0.8"],
        {"algorithm.gamma": 0.9, "algorithm.lam": 0.8},
        {},
    ),
    # correction
    "weights of tokens": (
        [f"{C}.rollout_is=token", f"{C}.rollout_is_threshold=2.0"],
        {"algorithm.correction": "tis", "algorithm.correction_bounds": [0.0, 2.0]},
        {},
    ),
    "weights of sequences with two bounds": (
        [f"{C}.rollout_is=sequence", f"{C}.rollout_is_threshold=0.5_5.0"],
        {"algorithm.correction": "sequence_icepop", "algorithm.correction_bounds": [0.5, 5.0]},
        {},
    ),
    "a rejection by the ratio": (
        [f"{C}.rollout_rs=token_k1", f"{C}.rollout_rs_threshold=0.5_2.0"],
        {"algorithm.rejection": "token_k1", "algorithm.rejection_bounds": [0.5, 2.0]},
        {},
    ),
    "a rejection by a divergence": (
        [f"{C}.rollout_rs=seq_mean_k3", f"{C}.rollout_rs_threshold=0.01"],
        {"algorithm.rejection": "sequence_mean_k3", "algorithm.rejection_bounds": [0.0, 0.01]},
        {},
    ),
    "the sampler's log-probs": ([f"{C}.bypass_mode=True"], {"algorithm.old_logprobs": "rollout"}, {}),
    # servers
    "held-out rows are greedy": ([], {"rollout.eval_temperature": None, "rollout.eval_samples": None}, {}),
    "the temperature alone says so": (
        [f"{R}.val_kwargs.temperature=0.6", f"{R}.val_kwargs.n=4", f"{R}.val_kwargs.do_sample=False"],
        {"rollout.eval_temperature": 0.6, "rollout.eval_samples": 4},
        {},
    ),
    "several greedy completions": (
        [f"{R}.val_kwargs.n=4"],
        {"rollout.eval_samples": None},
        {f"{R}.val_kwargs.n": "all the same"},
    ),
    "a share of a GPU's memory": (
        [f"{R}.gpu_memory_utilization=0.4", f"{R}.enforce_eager=True"],
        {"rollout.options.args": ["--enable-sleep-mode", "--gpu-memory-utilization", "0.4", "--enforce-eager"]},
        {},
    ),
    "the same of another server": (
        [f"{R}.name=sglang", f"{R}.gpu_memory_utilization=0.4", f"{R}.enforce_eager=True"],
        {"rollout.options.args": ["--enable-memory-saver", "--mem-fraction-static", "0.4", "--disable-cuda-graph"]},
        {},
    ),
    "options of another server": (
        [f"{R}.name=trtllm", f"{R}.quantization=fp8"],
        {"rollout.backend": "tensorrt_llm", "rollout.options.args": None},
        {f"{R}.quantization": "rollout.options.args"},
    ),
    "an option that is 0": (
        [f"{R}.engine_kwargs.vllm.mm_processor_cache_gb=0"],
        {
            "rollout.options.args": [
                "--enable-sleep-mode",
                "--gpu-memory-utilization",
                "0.5",
                "--mm-processor-cache-gb",
                "0",
            ]
        },
        {},
    ),
    "replicas of GPUs": (
        [f"{R}.tensor_model_parallel_size=4", "trainer.nnodes=2"],
        {"rollout.num_replicas": 4, "rollout.parallel.tp": 4},
        {},
    ),
    "GPUs of servers are as many a node as the trainer's": (
        ["trainer.v1.trainer_mode=separate_async", f"{R}.nnodes=2", "trainer.n_gpus_per_node=4"],
        {"rollout.num_replicas": 4, "engine.world_size": 4},
        {},
    ),
    "one sequence holds prompt and completion": (
        ["data.max_prompt_length=100", "data.max_response_length=200", f"{R}.max_model_len=150"],
        {"rollout.max_model_len": 300},
        {},
    ),
    "memory that is not given back": (
        [f"{R}.free_cache_engine=False"],
        {},
        {f"{R}.free_cache_engine": "give their memory back"},
    ),
    "batched tokens": ([f"{R}.max_num_batched_tokens=32768"], {}, {f"{R}.max_num_batched_tokens": "servers' default"}),
    # layouts
    "sequence parallel ranks": ([f"{A}.ulysses_sequence_parallel_size=2"], {"engine.parallel.sp": 2}, {}),
    "shards of a group of GPUs": ([f"{A}.fsdp_config.fsdp_size=4"], {"engine.parallel.dp_replicate": 2}, {}),
    "shards of all GPUs": ([f"{A}.fsdp_config.fsdp_size=-1"], {"engine.parallel": None}, {}),
    "colocated weights go to the host anyway": (
        [f"{A}.fsdp_config.optimizer_offload=True"],
        {"engine.optimizer_offload": None},
        {f"{A}.fsdp_config.optimizer_offload": "gives its memory back"},
    ),
    "weights of an engine apart": (
        [*ASYNC, f"{A}.fsdp_config.optimizer_offload=True"],
        {"engine.optimizer_offload": True},
        {},
    ),
    # tools
    "answers of tools by default": (
        [TOOLS],
        {"agent.loop": "tool", "agent.options.max_tool_tokens": 64, "agent.options.max_turns": 512},
        {f"{R}.multi_turn.max_tool_response_length": "256 characters", f"{R}.multi_turn.max_parallel_calls": "not 1"},
    ),
    "characters of a tool's answer": (
        [TOOLS, f"{R}.multi_turn.max_tool_response_length=1000"],
        {"agent.options.max_tool_tokens": 250},
        {},
    ),
    "turns of the model": ([TOOLS, f"{R}.multi_turn.max_assistant_turns=5"], {"agent.options.max_turns": 5}, {}),
    "turns without tools": (
        [f"{R}.multi_turn.max_assistant_turns=5"],
        {"agent.loop": None},
        {f"{R}.multi_turn.max_assistant_turns": "no tools"},
    ),
    # rewards
    "long completions lose": (
        ["reward.reward_kwargs.overlong_buffer_cfg.enable=True", "reward.reward_kwargs.overlong_buffer_cfg.len=128"],
        {"reward.overlong_buffer": 128},
        {},
    ),
    "long completions by DAPO's first names": (
        [
            "reward_model.overlong_buffer.enable=True",
            "reward_model.overlong_buffer.len=128",
            "reward_model.overlong_buffer.penalty_factor=2.0",
        ],
        {"reward.overlong_buffer": 128},
        {"reward_model.overlong_buffer.penalty_factor": "the longest completion loses 1"},
    ),
    "long completions that lose nothing": (
        ["reward_model.overlong_buffer.enable=False", "reward_model.overlong_buffer.len=128"],
        {"reward.overlong_buffer": None},
        {"reward_model.overlong_buffer.len": "overlong_buffer_cfg.enable is false"},
    ),
    "verl's scorer by data_source": ([], {"reward.parts.rule.rule": "verl/default"}, {}),
    "a scorer of its own": (
        ["custom_reward_function.path=/x/score.py", "custom_reward_function.name=f"],
        {"reward.path": "/x/score.py:f", "reward.parts": None},
        {},
    ),
    "code that is run elsewhere": (
        ["reward_model.sandbox_fusion.url=http://x"],
        {},
        {"reward_model.sandbox_fusion.url": "sandbox of this machine"},
    ),
    # asynchronous modes
    "one-step-off": (
        [*ASYNC],
        {"pipeline": "fully_async", "staleness.max_staleness": 8, "algorithm.old_logprobs": "rollout"},
        {},
    ),
    "a cosine to a share of the rate": (
        [f"{A}.optim.lr_scheduler_type=cosine", f"{A}.optim.min_lr_ratio=0.1"],
        {"engine.lr_schedule": "cosine", "engine.min_lr_ratio": 0.1},
        {},
    ),
    "a cosine to a rate": (
        [f"{A}.optim.lr_decay_style=cosine", f"{A}.optim.min_lr=1e-7", f"{A}.optim.lr=1e-6"],
        {"engine.min_lr_ratio": pytest.approx(0.1)},
        {},
    ),
    "LoRA": (
        [f"{M}.lora_rank=32", f"{M}.target_modules=all-linear"],
        {"engine.lora.rank": 32, "engine.lora.alpha": 16.0, "engine.lora.target_modules": None},
        {},
    ),
    "no LoRA": (
        [f"{M}.lora_rank=0", f"{M}.lora_alpha=32"],
        {"engine.lora": None},
        {f"{M}.lora_alpha": "lora_rank is 0"},
    ),
}


def at(recipe, key):
    for name in key.split("."):
        recipe = recipe.get(name) if isinstance(recipe, dict) else None
    return recipe


@pytest.mark.promise("Units and meanings of verl's keys are verl's")
@pytest.mark.parametrize("name", MEANINGS)
def test_a_value_means_here_what_it_means_to_verl(name):
    words, expected, notes = MEANINGS[name]
    made = convert(words)
    assert {key: at(made.recipe, key) for key in expected} == expected
    listed = made.missing | made.ignored | made.needless
    assert {key: part for key, part in notes.items() if part not in listed.get(key, "")} == {}, listed


FIELDS = {"ours", "trl", "prime_rl", "usual", "default", "like", "as", "drop", "set", "if", "unless", "or", "missing",
          "ignored", "needless", "choices", "else", "none", "scale", "zero", "flags", "several"}  # fmt: skip
KINDS = {"int", "float", "bool", "str", "path", "floats", "names", "choice", "count", "size", "file", "flag"}
NAMED = {"mode", "several", "apart", "engine", "bypass", "critic", "reads", "option", "tools"}


def all_rows(table):
    for key, row in equivalents.tables()[table].items():
        while row:
            yield key, row
            row = row.get("or")


@pytest.mark.parametrize("table", ["verl", "sft"])
def test_every_row_of_the_table_is_well_formed(table):
    for key, row in all_rows(table):
        assert set(row) <= FIELDS, (key, set(row) - FIELDS)
        assert row.get("as") in {None, *KINDS}, key
        assert ("choices" in row and "else" in row) == (row.get("as") == "choice") or row.get("as") == "names", key
        assert "as" not in row or "ours" in row, key
        assert "missing" not in row or "usual" in row, key
        assert "several" in row or row.get("as") != "file", key
        for condition in [*wanted(row, "if"), *wanted(row, "unless")]:
            named = re.fullmatch(r"@(\w+)( \S+)?", condition)
            assert named is None or named[1] in NAMED, (key, condition)


def wanted(row, name):
    found = row.get(name, [])
    return found if isinstance(found, list) else [found]


def test_every_row_names_keys_that_are_ours():
    keys = {each.name for each in settings()}
    free = ("algorithm.loss_options.", "agent.options.", "rollout.options.", "reward.parts.")
    for key, row in all_rows("verl"):
        ours = [*row.get("ours", "").split(", "), *row.get("set", {})]
        ours += [
            each[5:].partition("=")[0] for each in [*wanted(row, "if"), *wanted(row, "unless")] if each[:5] == "ours."
        ]
        for each in filter(None, ours):
            known = each in keys or each.startswith(free) or any(k.startswith(f"{each}.") for k in keys)
            assert known, (key, each)


def test_every_old_name_is_one_that_the_table_has():
    tables = equivalents.tables()
    known = {*tables["verl"], *tables["sft"], *(pattern for _, pattern, *_ in tables["unread"])}
    for old, new in tables["old_names"].items():
        is_there = any(fnmatch(new, key) or (new[-1] == "." and key.startswith(new)) for key in known)
        assert is_there or new.startswith("optim."), (old, new)
        assert old not in tables["verl"], old


def test_every_reason_is_for_a_condition_of_the_table():
    used = {f"{mark}{each}" for table in ("verl", "sft") for _, row in all_rows(table)
            for name, mark in (("if", ""), ("unless", "not ")) for each in wanted(row, name)}  # fmt: skip
    used |= {each.partition(" ")[0] for each in used if each.startswith("@")}
    assert {*equivalents.tables()["conditions"]} <= used


def test_the_documentation_lists_what_has_no_equivalent():
    page = names_elsewhere()
    assert "| `algorithm.advantage` | `algorithm.adv_estimator` |" in page
    assert "| `actor_rollout_ref.actor.ppo_epochs` | each mini-batch is learned from once" in page
    assert "| `*use_remove_padding` | rows are never padded |" in page
