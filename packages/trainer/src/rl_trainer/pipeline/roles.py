"""Roles of a run: what a configuration implies, such as which roles there are, which share a GPU, and their settings.

Pure functions of a configuration, for the checks before a start, the setup and the loop.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_engine.errors import EngineError
from rl_engine.registry import describe_model
from rl_engine.types import EngineConfig, Head, LoraExport, ModelFacts, Mtp, OptimizerConfig
from rl_rollout.types import ServerConfig
from rl_trainer.algorithms import estimator_named, loss_named
from rl_trainer.config.schema import ADAPTER, ENGINE_POOL, PolicySection, PoolSection
from rl_trainer.errors import InputError, PlanError, naming_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rl_trainer.config import Config
    from rl_trainer.config.schema import CriticSection, EngineSection, RoleSection, ServedModel, TeacherSection


ONE_GENERATION = ("single_turn", "reasoning_gym")
"""Loops whose completions are one generation, at most `rollout.max_new_tokens` long."""


def policies_of(config: Config) -> dict[str, Config]:
    """Configuration of each policy that learns, by name; the run's own, under an empty name, without `policies`."""
    return {
        name: replace(config, policies={}, **{f.name: getattr(own, f.name) for f in fields(own)})
        for name, own in config.policies.items()
    } or {"": config}


def with_policies(policies: Mapping[str, Config]) -> Config:
    """Configuration of the run whose policies have these: `policies_of` backwards. Its sections are the first's."""
    first = next(iter(policies.values()))
    if "" in policies:
        return first
    names = [f.name for f in fields(PolicySection)]
    sections = {name: PolicySection(**{each: getattr(own, each) for each in names}) for name, own in policies.items()}
    return replace(first, policies=sections)


def of_each(config: Config, change: Callable[[Config], Config]) -> Config:
    """Configuration of the run after a change to that of each policy.

    Raises:
        InputError: as `change`, with the name of the policy.
    """
    changed: dict[str, Config] = {}
    for name, own in policies_of(config).items():
        with naming_policy(name):
            changed[name] = change(own)
    return with_policies(changed)


def facts_of_each(config: Config, facts: Callable[[Config], Iterable[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Lines of the plan about each policy, with its name where there are several.

    Raises:
        InputError: as `facts`, with the name of the policy.
    """
    found = list[tuple[str, str]]()
    for name, own in policies_of(config).items():
        with naming_policy(name):
            found += [(f"{name}: {what}" if name else what, how) for what, how in facts(own)]
    return found


def with_model(config: Config, path: Path) -> Config:
    """Configuration with the folder of the start policy, for policies that have no `model.path`."""
    return of_each(config, lambda own: replace(own, model=replace(own.model, path=own.model.path or str(path))))


def pool_of(policy: str, pool: str) -> str:
    """Name of a policy's pool among those of the run, where there are several policies."""
    return f"{policy}.{pool}" if policy and pool != REWARD_POOL else pool


def data_parallel_ranks(engine: EngineSection) -> int:
    """Number of ranks that have different rows; those of tp, pp, cp and sp share theirs."""
    layout = engine.parallel
    return max(engine.world_size // (layout.tp * layout.pp * layout.cp * layout.sp), 1)


def longest_sequence(config: Config) -> tuple[int, str]:
    """Tokens of the longest sequence that a run may make, and the keys that they come from.

    A loop of several turns is bounded by its own `max_completion_tokens`, or else by what a server takes.
    """
    prompt, agent = config.data.max_prompt_tokens, config.agent
    if agent.loop in ONE_GENERATION:
        return prompt + config.rollout.max_new_tokens, "data.max_prompt_tokens + rollout.max_new_tokens"
    if (completion := agent.options.get("max_completion_tokens")) is not None:
        return prompt + int(completion), "data.max_prompt_tokens + agent.options.max_completion_tokens"
    return config.rollout.max_model_len, f"(agent.loop={agent.loop} sets no bound) rollout.max_model_len"


def engine_of(config: Config, role: str) -> EngineSection:
    """The keys of `engine` for a role of `placement` that has one, with the role's own settings.

    Raises:
        PlanError: the layout does not divide the processes of its pool.
    """
    section: RoleSection | None = getattr(config.placement, role)
    if section is None:
        return config.engine
    own = {f.name: value for f in fields(section.engine) if (value := getattr(section.engine, f.name)) is not None}
    size, layout = pool_size(config, section.pool), own.get("parallel", config.engine.parallel)
    if size % (ranks := layout.tp * layout.pp * layout.cp):
        raise PlanError(
            f"the {role} has {size} processes in pool {section.pool!r}, which is not a multiple of tp x pp x cp = "
            f"{layout.tp} x {layout.pp} x {layout.cp}; set placement.{role}.engine.parallel, or "
            f"placement.{role}.num_gpus to a multiple of {ranks}"
        )
    return replace(config.engine, world_size=size, **own)


def pool_size(config: Config, pool: str) -> int:
    """Processes of a pool of engines: as many as a role of it says, or else as the policy has."""
    if pool == ENGINE_POOL:
        return config.engine.world_size
    sections = (config.placement.reference, config.placement.critic, config.placement.teacher)
    sizes = (section.num_gpus for section in sections if section is not None and section.pool == pool)
    return next((size for size in sizes if size is not None), config.engine.world_size)


def has_reference(config: Config) -> bool:
    """Whether the run has a reference, frozen or EMA."""
    return config.algorithm.kl_coef > 0 or has_process_rewards(config)


def has_old_pass(config: Config) -> bool:
    """Whether the engine scores a batch before it is learned from (`algorithm.old_logprobs=recompute`).

    With one mini-batch the update's own pass gives the same, unless something reads them before.
    """
    has_several = config.batch.mini_batch_size < config.batch.batch_size
    return config.algorithm.old_logprobs == "recompute" and (has_several or reads_old_pass(config))


def reads_old_pass(config: Config) -> bool:
    """Whether something reads the scores of the engine's pass before the update."""
    algorithm = config.algorithm
    return (
        bool({"ratio", "logprobs", "sum_pi_squared"} & {*estimator_named(algorithm.advantage).reads})
        or (algorithm.kl_in_reward and algorithm.kl_coef > 0)
        or loss_named(algorithm.loss).selects_tokens
        or algorithm.top_entropy < 1
        or (algorithm.rejection != "none" and algorithm.rejection_counts == "after")
    )


def update_barrier(config: Config) -> str | None:
    """The key for which streamed mini-batches are learned from once all of the batch are scored.

    None if each can be learned from as it comes: its update changes nothing that the others are scored with, and they
    need nothing of it. Scores of a mini-batch are under the weights before the step in either case.
    """
    algorithm = config.algorithm
    waits = {
        "algorithm.old_logprobs=recompute": has_old_pass(config),
        "critic": config.critic is not None,
        "teacher.context, which makes the policy its own teacher": config.teacher is not None
        and is_self(config.teacher),
        f"algorithm.advantage={algorithm.advantage}": estimator_named(algorithm.advantage).scope != "group",
        f"algorithm.loss={algorithm.loss}": loss_named(algorithm.loss).selects_tokens,
        "algorithm.top_entropy": algorithm.top_entropy < 1,
        "algorithm.kl_target": algorithm.kl_in_reward and algorithm.kl_target > 0,
        "algorithm.entropy_target": algorithm.entropy_target > 0,
        "tracking.keep_samples": config.tracking.keep_samples is True,
    }
    return next((key for key, is_so in waits.items() if is_so), None)


def has_process_rewards(config: Config) -> bool:
    """Whether the critic is an implicit process reward model."""
    return "process_rewards" in estimator_named(config.algorithm.advantage).reads


def model_facts(folder: Path) -> ModelFacts:
    """Facts about the model in a folder.

    Raises:
        InputError: a file of the folder is not what it should be; names it.
    """
    try:
        return describe_model(folder)
    except EngineError as error:
        raise InputError(str(error)) from error


def actor_config(config: Config, model_path: Path) -> EngineConfig:
    """Engine configuration of the policy."""
    num_idle, algorithm = config.critic.warmup_steps if config.critic is not None else 0, config.algorithm
    return _engine_config(
        config,
        model_path,
        lora=None if config.engine.lora is None else replace(config.engine.lora, dropout=0.0),
        optimizer=_optimizer(config, num_idle=num_idle),
        entropy=algorithm.entropy_coef > 0 or algorithm.entropy_target > 0 or algorithm.top_entropy < 1,
        sum_pi_squared="sum_pi_squared" in estimator_named(config.algorithm.advantage).reads,
        router_aux_loss_coef=config.engine.router_aux_loss_coef,
        num_candidates=candidates_of(config.teacher) if config.teacher is not None and is_self(config.teacher) else 0,
        exports_mtp=drafts_by_mtp(config),
    )


def frozen_config(config: Config, role: str, model_path: Path, num_candidates: int = 0) -> EngineConfig:
    """Engine configuration of the `reference` or the `teacher`."""
    values = {"dist_checkpoint": None} if role == "teacher" else {}  # the policy's first weights
    return _engine_config(config, model_path, role, optimizer=None, num_candidates=num_candidates, **values)


def critic_config(config: Config, section: CriticSection, model_path: Path) -> EngineConfig:
    """Engine configuration of the critic."""
    path = Path(section.path) if section.path is not None else model_path
    head = Head.LM if has_process_rewards(config) else Head.VALUE
    values = {} if section.path is None else {"dist_checkpoint": None}
    optimizer = replace(_optimizer(config), lr=section.lr)
    return _engine_config(config, path, "critic", optimizer=optimizer, head=head, **values)


def is_self(teacher: TeacherSection) -> bool:
    """Whether the policy is its own teacher."""
    return teacher.path is None


def teacher_folders(teacher: TeacherSection | None) -> dict[str, Path]:
    """Folders of the teachers that the run loads, by `data_source`, "" for all others."""
    if teacher is None or teacher.url is not None or teacher.path is None:
        return {}
    return {"": Path(teacher.path)} | {source: Path(path) for source, path in teacher.by_source.items()}


def candidates_of(teacher: TeacherSection) -> int:
    """Number of candidate tokens per position whose log-probs the teacher gives."""
    return 0 if teacher.divergence == "reverse" else teacher.num_candidates


def _engine_config(config: Config, model_path: Path, role: str | None = None, **values: Any) -> EngineConfig:
    """Engine configuration: keys of `engine` or of the role's own, of other sections, and `values` of this engine.

    Raises:
        PlanError: the layout does not divide the role's ranks.
    """
    engine = config.engine if role is None else engine_of(config, role)
    keys: dict[str, Any] = {f.name: getattr(engine, f.name) for f in fields(EngineConfig)}
    keys |= {"model_path": str(model_path), "temperature": config.rollout.temperature}
    keys |= {"seed": config.seed, "timeout_s": config.timeout_s, "lora": None, "router_aux_loss_coef": 0.0}
    keys |= values
    if keys["optimizer"] is None:  # these are for what is trained
        keys |= {"optimizer_offload": False, "activation_offload": False}
    if role is not None and keys["mtp"] == Mtp.TRAIN:  # the policy's alone
        keys["mtp"] = Mtp.FREEZE
    return EngineConfig(**keys)


def _optimizer(config: Config, *, num_idle: int = 0) -> OptimizerConfig:
    """Optimizer configuration; an engine that learns later has fewer steps."""
    optimizer = config.engine.optimizer
    if config.engine.lr_schedule == "constant":
        return optimizer
    num_updates = config.batch.batch_size // config.batch.mini_batch_size
    num_steps, least = (config.steps - num_idle) * num_updates, config.engine.min_lr_ratio
    return replace(optimizer, total_steps=num_steps, min_lr_ratio=least)


def sends_adapter(config: Config) -> bool:
    """Whether servers hold the base model, and weight syncs carry the adapter alone."""
    return config.engine.lora is not None and config.engine.lora.export == LoraExport.ADAPTER


def drafts_by_mtp(config: Config) -> bool:
    """Whether servers draft with the model's layer for multi-token prediction, so that weight syncs carry it."""
    return bool(config.rollout.options.get("num_mtp_tokens"))


def server_config(config: Config, model_path: Path, adapter: Path | None = None) -> ServerConfig:
    """Server configuration: keys of `rollout` and of other sections, in the engine's number format.

    `adapter` is the folder of the one that every request is served with.
    """
    keys: dict[str, Any] = {f.name: getattr(config.rollout, f.name) for f in fields(ServerConfig)}
    if adapter is not None:
        keys["options"] = {**config.rollout.options, "adapters": {ADAPTER: str(adapter)}, "default_adapter": ADAPTER}
    converts = config.rollout.backend != "embedded" and config.rollout.quantization != "none"
    if config.rollout.dtype == "auto" and not converts:  # third-party servers then choose, none takes float32
        keys["dtype"] = str(config.engine.precision)
    keys |= {"model_path": str(model_path), "seed": config.seed, "timeout_s": config.timeout_s}
    return ServerConfig(**keys)


REWARD_POOL = "reward"
"""Pool of reward models that share no GPU."""


def home_of(config: Config, role: str) -> str:
    """The pool of a role of `placement`."""
    section: PoolSection | None = getattr(config.placement, role)
    if section is not None:
        return section.pool
    return REWARD_POOL if role == "reward" and not config.rollout.colocated else ENGINE_POOL


def has(config: Config, role: str) -> bool:
    """Whether a run has processes of a role of `placement`."""
    if role == "reference":
        return has_reference(config) and config.engine.lora is None
    if role == "critic":
        return config.critic is not None
    if role == "teacher":
        return bool(teacher_folders(config.teacher))
    return bool(reward_models(config))


def reward_models(config: Config) -> dict[str, tuple[str, ServedModel]]:
    """Task, `generate` or `score`, and model of each part of the reward that the run serves."""
    models = {name: (part.kind, part.served_model) for name, part in config.reward.parts.items()}
    tasks = {"judge": "generate", "classifier": "score"}
    return {name: (tasks[kind], model) for name, (kind, model) in models.items() if model is not None}


def lends_engine(config: Config) -> bool:
    """Whether the engine's GPUs are lent to rollout while learning waits."""
    return config.rollout.elastic is not None and config.rollout.elastic.lend


def is_offloaded(config: Config) -> bool:
    """Whether engine and colocated servers give each other their memory."""
    return bool(config.rollout.colocated) and config.rollout.sleep is not False


def is_in_turn(config: Config, role: str) -> bool:
    """Whether a role has memory in turn with servers; reward models not with lent ones: they are asked all along."""
    lends = lends_engine(config) and role != "reward"
    return (is_offloaded(config) or lends) and home_of(config, role) == ENGINE_POOL
