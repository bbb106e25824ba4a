"""What engines and servers are built from, by the configuration; and engines, placed."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rl_engine.types import EngineConfig, Head, LoraConfig, MatmulPrecision, OptimizerConfig, Precision
from rl_rollout.types import ServerConfig
from rl_trainer.algorithms import estimator_named
from rl_trainer.plan import has_process_rewards
from rl_trainer.workers.columns import EXPERTS
from rl_trainer.workers.engine import CriticWorker, EngineWorker, ProcessRewardWorker
from rl_trainer.workers.images import IMAGES, takes_images
from rl_trainer.workers.reference import ReferenceWorker

if TYPE_CHECKING:
    from rl_trainer.base import Runtime
    from rl_trainer.config import Config


def create_engine(
    config: Config,
    runtime: Runtime,
    model_path: Path,
    queue_address: str,
    weights_address: str | None,
    *,
    is_trained: bool,
    num_candidates: int = 0,
) -> EngineWorker:
    """Place the actor, the reference or the teacher on the engine pool."""
    algorithm, lora = config.algorithm, config.engine.lora
    inputs = IMAGES if takes_images(model_path) else ()
    if is_trained and config.engine.router_replay:  # a reference chooses its own
        inputs += EXPERTS
    engine_config = replace(
        engine_config_of(config, model_path, config.engine.lr),
        lora=LoraConfig(**asdict(lora)) if is_trained and lora is not None else None,
        entropy=is_trained and algorithm.entropy_coef > 0,
        sum_pi_squared=is_trained and "sum_pi_squared" in estimator_named(algorithm.advantage).needs,
        num_candidates=num_candidates,
        router_aux_loss_coef=config.engine.router_aux_loss_coef if is_trained else 0.0,
    )
    return runtime.create_group(
        EngineWorker if is_trained else ReferenceWorker,
        "engine",
        backend=config.engine.backend,
        config=engine_config if is_trained else replace(engine_config, optimizer=None),
        algorithm=algorithm,
        inputs=inputs,
        teacher=config.teacher,
        max_new_tokens=config.rollout.max_new_tokens,
        queue_address=queue_address,
        weights_address=weights_address,
        timeout_s=config.timeout_s,
    )


def create_teacher(config: Config, runtime: Runtime, queue_address: str) -> EngineWorker:
    """Place the teacher on the engine pool, laid out like the policy."""
    assert config.teacher is not None, "the caller has checked it"
    path, num_candidates = Path(config.teacher.path), config.teacher.num_candidates
    return create_engine(
        config,
        runtime,
        path,
        queue_address,
        None,
        is_trained=False,
        num_candidates=0 if config.teacher.divergence == "reverse" else num_candidates,
    )


def create_critic(config: Config, runtime: Runtime, model_path: Path, queue_address: str) -> CriticWorker | None:
    """Place the value function on the engine pool, laid out like the policy, if there is to be one."""
    if config.critic is None or has_process_rewards(config):
        return None
    path = Path(config.critic.path) if config.critic.path is not None else model_path
    return runtime.create_group(
        CriticWorker,
        "engine",
        backend=config.engine.backend,
        config=replace(engine_config_of(config, path, config.critic.lr), head=Head.VALUE),
        clip=config.critic.clip,
        inputs=IMAGES if takes_images(model_path) else (),
        queue_address=queue_address,
        timeout_s=config.timeout_s,
    )


def create_process_reward(
    config: Config, runtime: Runtime, model_path: Path, queue_address: str
) -> ProcessRewardWorker | None:
    """Place the process reward model on the engine pool, laid out like the policy, if there is to be one."""
    section = config.critic
    if section is None or not has_process_rewards(config):
        return None
    path = Path(section.path) if section.path is not None else model_path
    return runtime.create_group(
        ProcessRewardWorker,
        "engine",
        backend=config.engine.backend,
        config=engine_config_of(config, path, section.lr),
        inputs=IMAGES if takes_images(model_path) else (),
        queue_address=queue_address,
        timeout_s=config.timeout_s,
    )


def engine_config_of(config: Config, model_path: Path, lr: float) -> EngineConfig:
    """What every trained engine of a job has in common."""
    section = config.engine
    num_updates = config.batch.batch_size // config.batch.mini_batch_size
    optimizer = OptimizerConfig(
        lr=lr,
        betas=section.betas,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        warmup_steps=section.lr_warmup_steps,
        total_steps=config.steps * num_updates if section.lr_schedule == "cosine" else None,
    )
    precision, _, matmul = section.precision.partition("_")
    return EngineConfig(
        model_path=str(model_path),
        optimizer=optimizer,
        parallel=section.parallel,
        precision=Precision(precision),
        matmul_precision=MatmulPrecision(matmul or "highest"),
        max_tokens_per_gpu=config.batch.max_tokens_per_gpu,
        temperature=config.rollout.temperature,
        activation_checkpointing=section.activation_checkpointing,
        async_checkpoints=section.async_checkpoints,
        seed=config.seed,
        timeout_s=config.timeout_s,
    )


def server_config(config: Config, model_path: Path) -> ServerConfig:
    """What one rollout server is built from; it computes in the number format that the engine computes and sends in."""
    return ServerConfig(
        model_path=str(model_path),
        max_model_len=config.rollout.max_model_len,
        max_num_seqs=config.rollout.max_num_seqs,
        dtype=config.engine.precision.partition("_")[0],  # how the engine multiplies is its own matter
        options=config.rollout.options,
        seed=config.seed,
        timeout_s=config.timeout_s,
    )
