"""What engines and servers are built from, by the configuration; and engines, placed."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import rl_engine
from rl_engine.errors import EngineError
from rl_engine.types import EngineConfig, Head, LoraConfig, MatmulPrecision, ModelInit, OptimizerConfig, Precision
from rl_rollout.types import ServerConfig
from rl_trainer.algorithms import Aggregation, estimator_named
from rl_trainer.errors import ConfigError
from rl_trainer.plan import has_old_pass, has_process_rewards
from rl_trainer.workers.columns import EXPERTS
from rl_trainer.workers.engine import CriticWorker, EngineWorker, ProcessRewardWorker
from rl_trainer.workers.images import IMAGES, takes_images
from rl_trainer.workers.reference import ReferenceWorker
from rl_trainer.workers.teacher import ServedTeacherWorker

if TYPE_CHECKING:
    from rl_trainer.base import Runtime
    from rl_trainer.config import Config, CriticSection, TeacherSection


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
    inputs = IMAGES if takes_images(model_path) else ()
    if is_trained and config.engine.router_replay:  # a reference chooses its own
        inputs += EXPERTS
    return runtime.create_group(
        EngineWorker if is_trained else ReferenceWorker,
        "engine",
        backend=config.engine.backend,
        config=actor_config(config, model_path) if is_trained else frozen_config(config, model_path, num_candidates),
        algorithm=config.algorithm,
        has_old_pass=has_old_pass(config),
        inputs=inputs,
        teacher=config.teacher,
        max_new_tokens=config.rollout.max_new_tokens,
        queue_address=queue_address,
        weights_address=weights_address,
        timeout_s=config.timeout_s,
    )


def create_teacher(config: Config, runtime: Runtime, queue_address: str) -> EngineWorker | ServedTeacherWorker | None:
    """Place the teacher on the engine pool, laid out like the policy, or what asks a server, if there is to be one."""
    teacher = config.teacher
    if teacher is None:
        return None
    if teacher.url is not None:
        return runtime.create_group(
            ServedTeacherWorker, "queue", teacher=teacher, queue_address=queue_address, timeout_s=config.timeout_s
        )
    path, num_candidates = Path(teacher.path), candidates_of(teacher)
    return create_engine(config, runtime, path, queue_address, None, is_trained=False, num_candidates=num_candidates)


def create_critic(config: Config, runtime: Runtime, model_path: Path, queue_address: str) -> CriticWorker | None:
    """Place the value function on the engine pool, laid out like the policy, if there is to be one."""
    if config.critic is None or has_process_rewards(config):
        return None
    return runtime.create_group(
        CriticWorker,
        "engine",
        backend=config.engine.backend,
        config=critic_config(config, config.critic, model_path),
        clip=config.critic.clip,
        aggregation=Aggregation(name=config.algorithm.aggregation, norm_constant=config.rollout.max_new_tokens),
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
    return runtime.create_group(
        ProcessRewardWorker,
        "engine",
        backend=config.engine.backend,
        config=critic_config(config, section, model_path),
        inputs=IMAGES if takes_images(model_path) else (),
        queue_address=queue_address,
        timeout_s=config.timeout_s,
    )


def check_engines(config: Config, model_path: Path, *, is_made: bool) -> dict[str, str]:
    """Hold what the job's engines are to be built from against what their backend takes; starts nothing.

    Args:
        config: The run's.
        model_path: The policy's folder.
        is_made: Whether it is complete; otherwise it has a `config.json` alone.

    Returns:
        By key, what settings that are left to the policy's engine come to.

    Raises:
        ConfigError: the backend refuses; in its words.
    """
    teacher, critic = config.teacher, config.critic
    engines = {"the policy": actor_config(config, model_path)}
    if teacher is not None and teacher.url is None:
        engines["the teacher"] = frozen_config(config, Path(teacher.path), candidates_of(teacher))
    if critic is not None:
        engines["the critic"] = critic_config(config, critic, model_path)
    found: dict[str, dict[str, str]] = {}
    for name, engine in engines.items():
        init = engine.init if is_made or engine.model_path != str(model_path) else ModelInit.RANDOM
        try:
            found[name] = rl_engine.check(config.engine.backend, replace(engine, init=init), config.engine.world_size)
        except EngineError as error:
            raise ConfigError(f"engine.backend={config.engine.backend} cannot be used for {name}: {error}") from error
    return found["the policy"]


def actor_config(config: Config, model_path: Path) -> EngineConfig:
    """What the policy's engine is built from."""
    algorithm, lora = config.algorithm, config.engine.lora
    num_idle = config.critic.warmup_steps if config.critic is not None else 0
    return replace(
        _trained_config(config, model_path, config.engine.lr, num_idle=num_idle),
        lora=LoraConfig(**asdict(lora)) if lora is not None else None,
        entropy=algorithm.entropy_coef > 0,
        sum_pi_squared="sum_pi_squared" in estimator_named(algorithm.advantage).needs,
        router_aux_loss_coef=config.engine.router_aux_loss_coef,
    )


def frozen_config(config: Config, model_path: Path, num_candidates: int = 0) -> EngineConfig:
    """What the engine of a reference or a teacher is built from."""
    trained = _trained_config(config, model_path, config.engine.lr)
    return replace(trained, optimizer=None, num_candidates=num_candidates)


def critic_config(config: Config, section: CriticSection, model_path: Path) -> EngineConfig:
    """What the value function's engine, or the process reward model's, is built from."""
    path = Path(section.path) if section.path is not None else model_path
    trained = _trained_config(config, path, section.lr)
    return trained if has_process_rewards(config) else replace(trained, head=Head.VALUE)


def candidates_of(teacher: TeacherSection) -> int:
    """Tokens of each place whose log-probs are asked of the teacher."""
    return 0 if teacher.divergence == "reverse" else teacher.num_candidates


def _trained_config(config: Config, model_path: Path, lr: float, *, num_idle: int = 0) -> EngineConfig:
    """What every trained engine of a job has in common; one that is idle at first learns in fewer steps."""
    section = config.engine
    num_updates = config.batch.batch_size // config.batch.mini_batch_size
    optimizer = OptimizerConfig(
        lr=lr,
        betas=section.betas,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        warmup_steps=section.lr_warmup_steps,
        total_steps=(config.steps - num_idle) * num_updates if section.lr_schedule == "cosine" else None,
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
