"""Names of verl, TRL and prime-rl and what they are called here: one table for error hints, `--from-verl` and the docs.

Facts as of verl 0.9.1, TRL 1.16 and prime-rl 0.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalent:
    """One setting under its name here and in other libraries; an empty name says that there is none."""

    ours: str
    """Configuration key, or several with commas between them."""
    verl: str = ""
    """Hydra key."""
    trl: str = ""
    """Argument of `GRPOConfig`."""
    prime_rl: str = ""
    """TOML key."""


def _row(ours: str, verl: str = "", trl: str = "", prime_rl: str = "") -> Equivalent:
    return Equivalent(ours=ours, verl=verl, trl=trl, prime_rl=prime_rl)


_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

EQUIVALENTS: tuple[Equivalent, ...] = (
    _row("model.path", f"{_MODEL}.path", "model", "model.name"),
    _row("data.path", "data.train_files", "train_dataset", "orchestrator.train.env"),
    _row("data.eval_path", "data.val_files", "eval_dataset", "orchestrator.eval.env"),
    _row("data.max_prompt_tokens", "data.max_prompt_length", "max_prompt_length"),
    _row(
        "rollout.max_new_tokens",
        "data.max_response_length",
        "max_completion_length",
        "orchestrator.train.sampling.max_completion_tokens",
    ),
    _row("rollout.max_model_len", f"{_ROLLOUT}.max_model_len", "vllm_max_model_length", "seq_len"),
    _row("batch.batch_size", "data.train_batch_size", "generation_batch_size", "orchestrator.batch_size"),
    _row("batch.group_size", f"{_ROLLOUT}.n", "num_generations", "orchestrator.rollouts_per_example"),
    _row("batch.mini_batch_size", f"{_ACTOR}.ppo_mini_batch_size", "steps_per_generation"),
    _row("batch.dynamic_sampling", "algorithm.filter_groups.enable"),
    _row("batch.max_refills", "algorithm.filter_groups.max_num_gen_batches"),
    _row("batch.over_sampling", f"{_ROLLOUT}.over_sample_rate", "", "orchestrator.oversampling_factor"),
    _row("epochs", "trainer.total_epochs", "num_train_epochs"),
    _row("keep_checkpoints", "trainer.max_actor_ckpt_to_keep", "save_total_limit", "ckpt.keep_last"),
    _row("steps", "trainer.total_training_steps", "max_steps", "max_steps"),
    _row("eval_every", "trainer.test_freq", "eval_steps", "orchestrator.eval.interval"),
    _row("save_every", "trainer.save_freq", "save_steps", "ckpt.interval"),
    _row("output_dir", "trainer.default_local_dir", "output_dir", "output_dir"),
    _row("resume_from", "trainer.resume_from_path", "resume_from_checkpoint", "ckpt.resume_step"),
    _row("name", "trainer.experiment_name", "run_name", "wandb.name"),
    _row("seed", "data.seed", "seed", "seed"),
    _row("tracking.trackers", "trainer.logger", "report_to", "wandb.project"),
    _row("tracking.keep_samples", "trainer.rollout_data_dir", "log_completions"),
    _row("tracking.profile", "global_profiler.tool"),
    _row("algorithm.advantage", "algorithm.adv_estimator"),
    _row("algorithm.advantage", "algorithm.norm_adv_by_std_in_grpo", "scale_rewards"),
    _row("algorithm.mask_truncated", "", "mask_truncated_completions"),
    _row("algorithm.top_entropy", "", "top_entropy_quantile"),
    _row("algorithm.off_policy_mask", "", "off_policy_mask_threshold"),
    _row("algorithm.entropy_target", "", "entropy_target"),
    _row("algorithm.entropy_step", "", "entropy_coef_delta"),
    _row("algorithm.loss", f"{_ACTOR}.policy_loss.loss_mode", "loss_type", "trainer.loss.type"),
    _row("algorithm.loss", "", "importance_sampling_level"),
    _row("algorithm.loss_options.clip_low, algorithm.loss_options.clip_high", f"{_ACTOR}.clip_ratio"),
    _row("algorithm.loss_options.clip_low", f"{_ACTOR}.clip_ratio_low", "epsilon"),
    _row("algorithm.loss_options.clip_high", f"{_ACTOR}.clip_ratio_high", "epsilon_high"),
    _row("algorithm.loss_options.clip_dual", f"{_ACTOR}.clip_ratio_c", "delta"),
    _row("algorithm.loss_options.tau_pos", f"{_ACTOR}.tau_pos", "sapo_temperature_pos"),
    _row("algorithm.loss_options.tau_neg", f"{_ACTOR}.tau_neg", "sapo_temperature_neg"),
    _row("algorithm.loss_options.k_pos", "", "vespo_k_pos"),
    _row("algorithm.loss_options.lambda_pos", "", "vespo_lambda_pos"),
    _row("algorithm.loss_options.k_neg", "", "vespo_k_neg"),
    _row("algorithm.loss_options.lambda_neg", "", "vespo_lambda_neg"),
    _row("algorithm.loss_options.dro_beta", f"{_ACTOR}.policy_loss.dro_beta"),
    _row("algorithm.loss_options.low", f"{_ACTOR}.policy_loss.clip_cov_lb"),
    _row("algorithm.loss_options.high", f"{_ACTOR}.policy_loss.clip_cov_ub"),
    _row("algorithm.loss_options.share", f"{_ACTOR}.policy_loss.clip_cov_ratio"),
    _row("algorithm.loss_options.share", f"{_ACTOR}.policy_loss.kl_cov_ratio"),
    _row("algorithm.loss_options.kl_coef", f"{_ACTOR}.policy_loss.ppo_kl_coef"),
    _row("algorithm.aggregation", f"{_ACTOR}.loss_agg_mode"),
    _row("algorithm.entropy_coef", f"{_ACTOR}.entropy_coeff", "entropy_coef"),
    _row("algorithm.kl_coef", f"{_ACTOR}.kl_loss_coef", "beta"),
    _row("algorithm.kl_estimator", f"{_ACTOR}.kl_loss_type", "use_bias_correction_kl"),
    _row("algorithm.kl_in_reward", "algorithm.use_kl_in_reward"),
    _row("algorithm.kl_target", "algorithm.kl_ctrl.target_kl"),
    _row("algorithm.ref_ema.decay", "", "ref_model_mixup_alpha"),
    _row("algorithm.ref_ema.every", "", "ref_model_sync_steps"),
    _row("algorithm.gamma", "algorithm.gamma"),
    _row("algorithm.lam", "algorithm.lam"),
    _row("algorithm.correction", "algorithm.rollout_correction.rollout_is", "vllm_importance_sampling_correction"),
    _row(
        "algorithm.correction_bounds",
        "algorithm.rollout_correction.rollout_is_threshold",
        "vllm_importance_sampling_cap",
    ),
    _row("algorithm.rejection", "algorithm.rollout_correction.rollout_rs"),
    _row("algorithm.rejection_bounds", "algorithm.rollout_correction.rollout_rs_threshold"),
    _row("algorithm.old_logprobs", "algorithm.rollout_correction.bypass_mode"),
    _row("engine.backend", f"{_ACTOR}.strategy", "", "trainer.model.impl"),
    _row("engine.world_size", "trainer.n_gpus_per_node", "", "deployment.num_train_gpus"),
    _row("engine.world_size", "trainer.nnodes", "", "deployment.num_train_nodes"),
    _row("engine.optimizer.lr", f"{_ACTOR}.optim.lr", "learning_rate", "trainer.optim.lr"),
    _row("engine.optimizer.weight_decay", f"{_ACTOR}.optim.weight_decay", "weight_decay", "trainer.optim.weight_decay"),
    _row("engine.optimizer.betas", f"{_ACTOR}.optim.betas", "adam_beta1", "trainer.optim.betas1"),
    _row("engine.optimizer.max_grad_norm", f"{_ACTOR}.grad_clip", "max_grad_norm", "trainer.optim.max_norm"),
    _row(
        "engine.optimizer.warmup_steps",
        f"{_ACTOR}.optim.lr_warmup_steps",
        "warmup_steps",
        "trainer.scheduler.warmup_steps",
    ),
    _row("engine.min_lr_ratio", f"{_ACTOR}.optim.min_lr_ratio", "", "trainer.scheduler.min_lr"),
    _row("engine.lr_schedule", f"{_ACTOR}.optim.lr_scheduler_type", "lr_scheduler_type", "trainer.scheduler.type"),
    _row("engine.precision", f"{_ACTOR}.fsdp_config.dtype", "bf16", "trainer.model.optimization_dtype"),
    _row(
        "engine.activation_checkpointing",
        f"{_MODEL}.enable_gradient_checkpointing",
        "gradient_checkpointing",
        "trainer.model.ac",
    ),
    _row("engine.cpu_offload", f"{_ACTOR}.fsdp_config.offload_policy", "", "trainer.model.fsdp_cpu_offload"),
    _row("engine.activation_offload", f"{_MODEL}.enable_activation_offload", "", "trainer.model.ac_offloading"),
    _row("engine.optimizer.kind", f"{_ACTOR}.optim.optimizer", "optim", "trainer.optim.type"),
    _row("engine.torch_compile", f"{_ACTOR}.use_torch_compile", "torch_compile", "trainer.model.compile"),
    _row("engine.max_tokens_per_gpu", f"{_ACTOR}.ppo_max_token_len_per_gpu", "per_device_train_batch_size", "seq_len"),
    _row("engine.parallel.sp", f"{_ACTOR}.ulysses_sequence_parallel_size"),
    _row("engine.parallel.tp", f"{_ACTOR}.megatron.tensor_model_parallel_size", "", "trainer.model.tp"),
    _row("engine.parallel.pp", f"{_ACTOR}.megatron.pipeline_model_parallel_size"),
    _row("engine.parallel.vpp", f"{_ACTOR}.megatron.virtual_pipeline_model_parallel_size"),
    _row("engine.parallel.cp", f"{_ACTOR}.megatron.context_parallel_size", "", "trainer.model.cp"),
    _row("engine.parallel.ep", f"{_ACTOR}.megatron.expert_model_parallel_size", "", "trainer.model.ep"),
    _row("engine.parallel.dp_replicate", f"{_ACTOR}.fsdp_config.fsdp_size", "", "trainer.model.dp_replicate"),
    _row("engine.lora.rank", f"{_MODEL}.lora_rank", "peft_config.r", "trainer.model.lora.rank"),
    _row("engine.lora.alpha", f"{_MODEL}.lora_alpha", "peft_config.lora_alpha", "trainer.model.lora.alpha"),
    _row(
        "engine.lora.target_modules",
        f"{_MODEL}.target_modules",
        "peft_config.target_modules",
        "trainer.model.lora.target_modules",
    ),
    _row("engine.router_replay", f"{_ROLLOUT}.enable_rollout_routing_replay"),
    _row("rollout.backend", f"{_ROLLOUT}.name", "use_vllm"),
    _row("rollout.colocated", "actor_rollout_ref.hybrid_engine", "vllm_mode"),
    _row("rollout.sleep", f"{_ROLLOUT}.free_cache_engine", "vllm_enable_sleep_mode"),
    _row("rollout.temperature", f"{_ROLLOUT}.temperature", "temperature", "orchestrator.train.sampling.temperature"),
    _row("rollout.top_p", f"{_ROLLOUT}.top_p", "top_p"),
    _row(
        "rollout.eval_temperature", f"{_ROLLOUT}.val_kwargs.temperature", "", "orchestrator.eval.sampling.temperature"
    ),
    _row("rollout.eval_samples", f"{_ROLLOUT}.val_kwargs.n", "", "orchestrator.eval.rollouts_per_example"),
    _row("rollout.max_num_seqs", f"{_ROLLOUT}.max_num_seqs", "", "inference.max_num_seqs"),
    _row(
        "rollout.parallel.tp",
        f"{_ROLLOUT}.tensor_model_parallel_size",
        "vllm_tensor_parallel_size",
        "inference.parallel.tp",
    ),
    _row("rollout.parallel.pp", f"{_ROLLOUT}.pipeline_model_parallel_size"),
    _row("rollout.parallel.dp", f"{_ROLLOUT}.data_parallel_size", "", "inference.parallel.dp"),
    _row("rollout.parallel.ep", f"{_ROLLOUT}.expert_parallel_size", "", "inference.enable_expert_parallel"),
    _row(
        "rollout.options.args",
        f"{_ROLLOUT}.gpu_memory_utilization",
        "vllm_gpu_memory_utilization",
        "inference.gpu_memory_utilization",
    ),
    _row("agent.loop", f"{_ROLLOUT}.agent.default_agent_loop", "environment_factory"),
    _row("agent.num_workers", f"{_ROLLOUT}.agent.num_workers"),
    _row("agent.options.max_turns", f"{_ROLLOUT}.multi_turn.max_assistant_turns", "max_tool_calling_iterations"),
    _row("agent.options.tools", f"{_ROLLOUT}.multi_turn.tool_config_path", "tools"),
    _row("agent.options.parser", f"{_ROLLOUT}.multi_turn.format"),
    _row("agent.options.max_tool_tokens", f"{_ROLLOUT}.multi_turn.max_tool_response_length"),
    _row("reward.path", "reward.custom_reward_function.path", "reward_funcs"),
    _row("reward.overlong_buffer", "reward.reward_kwargs.overlong_buffer_cfg.len"),
    _row("reward.parts.model.path", "reward.reward_model.model_path"),
    _row("placement.reference.engine.parallel", "actor_rollout_ref.ref.megatron"),
    _row("placement.reward.pool", "reward.reward_model.enable_resource_pool"),
    _row("critic.path", "critic.model.path"),
    _row("critic.lr", "critic.optim.lr"),
    _row("critic.clip", "critic.cliprange_value"),
    _row("critic.warmup_steps", "trainer.critic_warmup"),
    _row("teacher.path", "distillation.teacher_models.teacher_model.model_path", "teacher_model_name_or_path"),
    _row("teacher.coef", "distillation.distillation_loss.distillation_loss_coef"),
    _row("pipeline", "trainer.v1.trainer_mode"),
    _row(
        "staleness.max_staleness",
        "trainer.v1.sampler.max_off_policy_threshold",
        "",
        "orchestrator.max_off_policy_steps",
    ),
)

ADVANTAGES: Mapping[str, str] = {
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "rloo_vectorized": "rloo",
    "grpo_vectorized": "grpo",
    **{
        name: name
        for name in (
            *("gae", "grpo", "dr_grpo", "remax", "rloo", "opo", "grpo_passk", "gpg", "gdpo"),
            *("optimal_token_baseline", "tir_optimal_token_baseline"),
        )
    },
}
"""Estimators by verl's `adv_estimator`."""

LOSSES: Mapping[str, str] = {
    "vanilla": "ppo",
    "geo_mean": "gmpo",
    "gpg": "reinforce",
    **{name: name for name in ("gspo", "sapo", "clip_cov", "kl_cov", "cispo", "dppo_tv", "dppo_kl", "dro")},
}
"""Losses by verl's `loss_mode`."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "algorithm.advantage": {name: ours for name, ours in ADVANTAGES.items() if name != ours},
    "algorithm.loss": {name: ours for name, ours in LOSSES.items() if name not in ("gpg",) and name != ours}
    | {"gpg": "reinforce", "grpo": "ppo", "dapo": "ppo", "bnpo": "ppo", "dr_grpo": "ppo"},
    "rollout.backend": {"hf": "embedded", "trtllm": "tensorrt_llm"},
    "engine.backend": {"fsdp2": "fsdp"},
    "agent.loop": {"single_turn_agent": "single_turn", "tool_agent": "tool"},
}
"""Values by key: what one of verl or TRL is called here."""


def keys_named(name: str) -> dict[str, str]:
    """Libraries by our key that use this name, its last part or the whole."""
    found: dict[str, str] = {}
    last = name.rpartition(".")[2]
    for row in EQUIVALENTS:
        for library, theirs in (("verl", row.verl), ("TRL", row.trl), ("prime-rl", row.prime_rl)):
            if theirs and last == theirs.rpartition(".")[2] and library not in found.get(row.ours, ""):
                found[row.ours] = f"{found[row.ours]} and {library}" if row.ours in found else library
    return found


def hint(key: str, value: str) -> str:
    """Hint for the error of an unknown value: our name for it; empty if no other library has it either."""
    ours = VALUES.get(key, {}).get(value)
    return "" if ours is None else f" (verl's and TRL's {value} is {ours} here)"


def table() -> str:
    """The table as Markdown, for the documentation."""
    lines = ["| here | verl | TRL | prime-rl |", "|---|---|---|---|"]
    for row in EQUIVALENTS:
        cells = (row.ours, row.verl, row.trl, row.prime_rl)
        lines.append("| " + " | ".join(f"`{cell}`" if cell else "-" for cell in cells) + " |")
    values = ["", "| key | value of verl or TRL | value here |", "|---|---|---|"]
    values += [f"| `{key}` | `{t}` | `{o}` |" for key, names in VALUES.items() for t, o in names.items()]
    return "\n".join([*lines, *values]) + "\n"
