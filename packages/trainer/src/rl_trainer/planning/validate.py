"""Everything that can be known to fail before the first process is started, checked in one place."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_type_hints

from packaging.requirements import Requirement
from pydantic import TypeAdapter, ValidationError

import rl_ckpt
import rl_engine
import rl_rollout
from rl_agent import AgentLoop
from rl_ckpt.errors import CkptError
from rl_engine.errors import EngineError
from rl_engine.types import LoraExport, ModelInit
from rl_rollout.errors import RolloutError
from rl_trainer import checkpoints, plugins
from rl_trainer.algorithms import ADVANTAGES, POLICY_LOSSES, PolicyLossFunction, estimator_named, loss_named
from rl_trainer.algorithms.distillation import ALONE
from rl_trainer.algorithms.rollout_correction import correction_bounds, rejection_bounds
from rl_trainer.checkpoints import RunState
from rl_trainer.config import (
    AlgorithmConfig,
    CriticSection,
    RewardPart,
    RewardSection,
    StalenessSection,
    TeacherSection,
)
from rl_trainer.config.schema import DataConfig
from rl_trainer.data import shows_images
from rl_trainer.data.datasets import HUB, is_saved_dataset
from rl_trainer.data.rows import check_options
from rl_trainer.errors import ConfigError, InputError, PlanError
from rl_trainer.pipeline.staleness import Schedule, create_schedule
from rl_trainer.planning.plan import (
    BatchPlan,
    actor_config,
    candidates_of,
    critic_config,
    frozen_config,
    longest_sequence,
    model_config,
    server_config,
)
from rl_trainer.rewards import check_packages, resolve_reward
from rl_trainer.rewards.code import CodeTests
from rl_trainer.rewards.rules import RULES
from rl_trainer.rewards.worker import GROUP as REWARDS
from rl_trainer.runtime.network import IN_ONE_PROCESS, LISTENING, address_of, scheme_of
from rl_trainer.trackers.group import GROUP as TRACKERS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from rl_rollout.types import Capabilities
    from rl_trainer.algorithms.advantages import Need
    from rl_trainer.config import AgentSection, Config, TrackingSection
    from rl_trainer.data import Row

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_OWN = "rl-post-trainer"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def check(config: Config, rows: list[Row], *, is_resumed: bool = False) -> None:
    """Check backends, model folder, output folder and reward rules.

    Args:
        config: Of the run.
        rows: Of its data.
        is_resumed: The run goes on with what is in its output folder.

    Raises:
        InputError: the first thing that cannot work, in one sentence.
    """
    for group, name, key in (
        ("rl_engine.backends", config.engine.backend, "engine.backend"),
        ("rl_rollout.backends", config.rollout.backend, "rollout.backend"),
        ("rl_ckpt.backends", scheme_of(config.weights_transport), "weights_transport"),
        ("rl_tq.storage", scheme_of(config.queue_storage), "queue_storage"),
        (plugins.LOOPS, config.agent.loop, "agent.loop"),
        *((TRACKERS, name, "tracking.trackers") for name in config.tracking.trackers),
    ):
        check_installed(group, name, key)
    if config.runtime == "ray" and not _is_installed("ray"):
        raise ConfigError("runtime=ray needs ray: pip install ray, or choose runtime=inline")
    check_loop_options(config.agent)
    check_tracking(config.tracking)
    check_model(config)
    if config.teacher is not None:
        check_teacher(config.teacher, config.model.path)
    if config.engine.router_replay and any(shows_images(row) for row in rows):
        raise InputError(
            "engine.router_replay=true takes the experts that the servers chose, and they do not tell those of prompts "
            "with images or videos, which rows of the data have; leave router_replay out, or those rows"
        )
    _check_rewards(config, rows)
    if config.output_dir is not None:
        check_output_dir(config, Path(config.output_dir), is_resumed=is_resumed)


def check_output_dir(config: Config, output_dir: Path, *, is_resumed: bool = False) -> None:
    """Refuse a folder in which two runs would become one.

    Args:
        config: Of the run.
        output_dir: The folder.
        is_resumed: The run goes on with what is there, from the start if that had no checkpoint yet.

    Raises:
        InputError: says which is there.
    """
    start = None if config.resume_from is None else Path(config.resume_from)
    own = start if start is not None and start.resolve().parent == output_dir.resolve() else None
    if own is None and (output_dir / "summary.json").exists():
        raise InputError(
            f"output_dir={config.output_dir} already holds a finished run; choose another, so that nothing is "
            "overwritten"
        )
    newest = checkpoints.newest(output_dir)
    if own is not None and newest is not None and newest.resolve() != own.resolve():
        newest, _ = checkpoints.newest_whole(output_dir)  # a damaged one is set aside by the run
    is_another = newest is not None or (checkpoints.has_lines(output_dir) and not is_resumed)
    if own is None and is_another:
        raise InputError(
            f"output_dir={config.output_dir} already holds a run that did not end; go on with it (--resume), choose "
            "another, or take it away: its steps would be counted among this one's"
        )
    if own is not None and newest is not None and newest.resolve() != own.resolve():
        raise InputError(
            f"resume_from={config.resume_from} is not the newest checkpoint in output_dir, which is {newest.name}; "
            "choose another output_dir, or take the newer ones away: a later --resume would go on from them"
        )


def check_loop_options(agent: AgentSection) -> None:
    """Check that the agent loop has the options that it is to be made with, and that one by a path is a loop.

    Raises:
        ConfigError: it has not (lists those that it has), or it is something else.
    """
    loop = plugins.loop_named(agent.loop)
    if isinstance(loop, str):
        if not agent.options:
            return
        loop = plugins.find(loop, plugins.LOOPS, key="agent.loop")
    elif not (isinstance(loop, type) and issubclass(loop, AgentLoop)):
        raise ConfigError(f"agent.loop={agent.loop} is no subclass of rl_agent.AgentLoop")
    known = [p.name for p in inspect.signature(loop).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for name in agent.options:
        if name not in known:
            raise ConfigError(
                f"agent.options.{name} is no option of agent.loop={agent.loop}; it has: {', '.join(known) or 'none'}"
            )


def check_tracking(tracking: TrackingSection) -> None:
    """Check that samples can be written."""
    if tracking.keep_samples and not _is_installed("pyarrow"):
        raise ConfigError("tracking.keep_samples needs pyarrow: pip install 'rl-post-trainer[parquet]'")


def _check_rewards(config: Config, rows: list[Row]) -> None:
    reward = config.reward
    own = {f"reward.parts.{name}.path": part.path for name, part in reward.parts.items() if part.kind == "function"}
    for key, path in ({"reward.path": reward.path} | own).items():
        if path is not None:
            plugins.check(path, REWARDS, key=key)
    for name, part in reward.parts.items():
        if part.kind == "classifier" and part.path is not None and not (Path(part.path) / "config.json").is_file():
            raise InputError(
                f"reward.parts.{name}.path={part.path} has no config.json, so it is no folder of a reward model"
            )
        if part.api_key_env is not None and not os.environ.get(part.api_key_env):
            raise ConfigError(f"reward.parts.{name}.api_key_env={part.api_key_env} is not set in the environment")
        if part.rule is not None:
            check_packages(part.rule, f"reward.parts.{name}.rule={part.rule} and its like")
    is_by_rule = any(part.kind == "rule" and part.rule is None for part in reward.parts.values())
    is_by_rule |= not (reward.path or reward.parts)
    if is_by_rule:
        for source in {row["data_source"] for row in rows}:
            resolve_reward(source)


def check_resume(config: Config, num_rows: int, *, is_known_whole: bool = False) -> None:
    """Check that the checkpoint to resume from is whole, has steps left, and was made of the same prompts.

    Args:
        config: Of the run.
        num_rows: Of its data.
        is_known_whole: Its files have been compared with their digests a moment ago.

    Raises:
        InputError: it is not, or the order of prompts would be another one.
    """
    if config.resume_from is None:
        return
    folder = Path(config.resume_from)
    if not is_known_whole and checkpoints.is_complete(folder) and (damage := checkpoints.damage(folder)):
        more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
        raise InputError(f"{damage[0]}{more}; give an earlier checkpoint, or let --resume find one")
    state = RunState.read(folder)
    if state.step >= config.steps:
        raise InputError(
            f"resume_from={config.resume_from} is at step {state.step} already, and steps={config.steps}; raise steps"
        )
    if (state.num_rows, state.seed) != (num_rows, config.seed):
        raise InputError(
            f"resume_from={config.resume_from} took its prompts from {state.num_rows} rows with seed "
            f"{state.seed}, but this run has {num_rows} rows and seed={config.seed}; give it the same"
        )
    if config.model.path is None:
        raise InputError(
            "resume_from needs model.path: the folder that the first run started from (its output_dir/model)"
        )


def check_installed(group: str, name: str, key: str) -> None:
    """Check that an entry point exists and that what it and its extra need is installed, importing none of it.

    Raises:
        ConfigError: unknown (lists what is installed), or known but incomplete (the pip line).
    """
    if ":" in name or isinstance(name, plugins.Serialized):
        plugins.check(name, group, key=key)
        return
    found = {point.name: point for point in entry_points(group=group)}
    if name not in found:
        raise ConfigError(f"{key}={name!r} is not installed; installed are {', '.join(sorted(found)) or 'none'}")
    missing = _missing_requirements(found[name])
    if missing:
        dist = found[name].dist
        assert dist is not None, "entry points of installed packages know their distribution"
        raise ConfigError(f"{key}={name} needs {', '.join(missing)}: pip install '{dist.name}[{name}]'")


def _missing_requirements(point: EntryPoint) -> list[str]:
    if point.dist is None:
        return []
    requirements = [Requirement(text) for text in point.dist.requires or []]
    is_ours = point.dist.name == _OWN  # runs already; ray, which it may lack, is the runtime's alone
    wanted = [
        r for r in requirements if (not is_ours if r.marker is None else r.marker.evaluate({"extra": point.name}))
    ]
    return [r.name for r in wanted if not _is_installed(r.name)]


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def check_model(config: Config) -> None:
    """Check that the policy is a folder with a config and a tokenizer, or that there is a recipe to make one."""
    if config.model.path is None:
        if config.model.warmup is None:
            raise ConfigError("model.path is not set: give a Hugging Face model folder")
        return
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise InputError(f"model.path={folder} is not a folder; download the model first, and give the folder")
    if not (folder / "config.json").is_file():
        raise InputError(f"model.path={folder} has no config.json, so it is not a Hugging Face model folder")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise InputError(
            f"model.path={folder} has no tokenizer ({' or '.join(_TOKENIZER_FILES[:3])}); copy the model's tokenizer "
            "files into it"
        )
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"model.path={folder} has no .safetensors file, so it has no weights; give a complete folder")
    model, engine = model_config(folder), config.engine
    longest, (wanted, keys) = model.get("max_position_embeddings"), longest_sequence(config)
    if longest is not None and wanted > longest:
        raise InputError(
            f"a sequence may have {keys} = {wanted} tokens, but the model in {folder} has a context of {longest} tokens"
        )
    from rl_csrc.inference.decoder import longrope_limit  # torch: a plan alone is printed without it

    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    limit = longrope_limit(rope, model.get("original_max_position_embeddings"))
    if limit is not None and wanted > limit:
        raise InputError(
            f"a sequence may have {keys} = {wanted} tokens, but beyond {limit} the model in {folder} (longrope) turns "
            "all rows of a pass by other frequencies, so that log-probs would depend on their neighbours"
        )
    for is_set, does in (
        (engine.router_aux_loss_coef > 0, f"router_aux_loss_coef={engine.router_aux_loss_coef:g} evens out the load"),
        (engine.router_replay, "router_replay=true replays the servers' choice"),
    ):
        if is_set and not any(model.get(key) for key in _EXPERTS):
            raise InputError(
                f"engine.{does} of experts, but the model in {folder} is no mixture of experts; leave it out"
            )


def check_teacher(teacher: TeacherSection, model_path: str | None) -> None:
    """Check that the teacher is a folder whose token ids mean what the policy's do.

    Raises:
        InputError: it is not, or a tokenizer is in no `tokenizer.json`, which is what can be compared.
    """
    from rl_trainer.workers.columns import takes_images

    if model_path is None:
        raise ConfigError(
            "teacher.path needs model.path: a policy that learns a teacher's words has the same tokenizer"
        )
    if teacher.url is not None and takes_images(Path(model_path)):
        raise InputError(
            f"the policy in {model_path} takes images, which a teacher at teacher.url is not shown; leave url out"
        )
    if teacher.url is None and not (Path(teacher.path) / "config.json").is_file():
        raise InputError(f"teacher.path={teacher.path} has no config.json, so it is not a Hugging Face model folder")
    policy, other = (_vocabulary(Path(path)) for path in (model_path, teacher.path))
    if policy != other:
        raise InputError(
            f"the tokenizers in {model_path} and teacher.path={teacher.path} differ ({len(policy)} and {len(other)} "
            "tokens); a policy learns from a teacher with the same one"
        )


def _vocabulary(folder: Path) -> dict[str, int]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise InputError(f"{folder} has no tokenizer.json, by which the tokenizers of policy and teacher are compared")
    values = json.loads(file.read_text())
    entries = values["model"]["vocab"]
    if not isinstance(entries, dict):  # a unigram model has them in order
        entries = {piece: index for index, (piece, *_) in enumerate(entries)}
    return entries | {token["content"]: token["id"] for token in values.get("added_tokens", [])}


_OF_REWARDS = ("advantage", "correction", "rejection", "rejection_counts")
_MEANT: dict[str, tuple[Callable[[float], bool], str]] = {
    **{name: (lambda value: value >= 0, "0 or more") for name in ("clip_low", "clip_high", "kl_coef", "dro_beta")},
    **{name: (lambda value: value > 0, "above 0") for name in ("tau_pos", "tau_neg", "ratio_max")},
    "clip_dual": (lambda value: value == 0 or value > 1, "0 (off), or above 1"),
}
"""By option of our losses: whether a value can be meant, and which can."""


def check_algorithm(config: Config) -> None:
    """Check the estimator, the loss, the KL, the correction, and what the pipeline asks of them.

    Raises:
        PlanError: settings that cannot work together, or a key that would do nothing.
        ConfigError: an algorithm or an option of one that does not exist.
    """
    _check_estimator(config)
    _check_loss(config.algorithm)
    for name in config.algorithm.stages:
        plugins.stage_named(name)
    _check_teacher(config)
    _check_kl(config)
    _check_correction(config.algorithm)
    _check_pipeline(config)


def _check_estimator(config: Config) -> None:
    name = config.algorithm.advantage
    estimator = estimator_named(name)
    for need in estimator.needs:
        if (lacking := _lacking(config, need)) is not None:
            raise PlanError(f"algorithm.advantage={name} reads {need}, which takes {lacking}")
    learned = ("values", "process_rewards")
    if config.critic is not None and not {*learned} & {*estimator.needs}:
        raise PlanError(
            f"the keys of critic do nothing with algorithm.advantage={name}; leave them out, or choose "
            f"one of {', '.join(name for name, e in sorted(ADVANTAGES.items()) if {*learned} & {*e.needs})}"
        )
    if config.critic is not None and config.critic.warmup_steps >= config.steps:
        raise PlanError(
            f"critic.warmup_steps={config.critic.warmup_steps} leaves the policy none of steps={config.steps} to learn "
            "in; lower it, or raise steps"
        )
    if "process_rewards" in estimator.needs:
        _check_process_reward(config)
    for key in ("gamma", "lam"):
        if key not in estimator.keys:
            readers = [other for other, e in sorted(ADVANTAGES.items()) if key in e.keys]
            _refuse(config.algorithm, f"algorithm.advantage is one of {', '.join(readers)}", key)
    if config.algorithm.loss != ALONE and estimator.compares_group and config.batch.group_size < 2:
        raise PlanError(
            f"algorithm.advantage={name} compares completions of one prompt: batch.group_size must be at least 2"
        )
    if config.batch.dynamic_sampling and config.batch.group_size < 2:
        raise PlanError(
            "batch.dynamic_sampling compares completions of one prompt: batch.group_size must be at least 2"
        )
    if config.batch.filter is not None:
        plugins.filter_named(config.batch.filter)


def _check_process_reward(config: Config) -> None:
    assert config.critic is not None, "prime has asked for one"
    if config.critic.clip != CriticSection().clip:
        raise PlanError("critic.clip is a value function's, and algorithm.advantage=prime has none; leave it out")
    if config.algorithm.ref_ema is not None:
        raise PlanError(
            "algorithm.advantage=prime compares with the start policy, which algorithm.ref_ema moves away; leave it out"
        )
    if config.reward.overlong_buffer:
        raise PlanError(
            "algorithm.advantage=prime learns outcomes from 0 to 1, and reward.overlong_buffer takes rewards below 0; "
            "leave it out"
        )


def _lacking(config: Config, need: Need) -> str | None:
    """What a run would have to have for an optional input of estimators; None if it has it."""
    if need in {"greedy_rewards", "logprobs"}:
        return None
    if need in {"values", "process_rewards"} and config.critic is not None:
        return None
    if need == "components" and (config.reward.parts or config.reward.path):
        return None
    if need in {"ratio", "sum_pi_squared"} and config.algorithm.old_logprobs == "recompute":
        return None
    return {
        "values": "a critic: set a key of critic, such as critic.lr",
        "ratio": "the engine's log-probs beside the sampler's: set algorithm.old_logprobs=recompute",
        "sum_pi_squared": "the engine's pass over the old policy: set algorithm.old_logprobs=recompute",
        "components": "a reward of parts: set reward.parts, or reward.path to a function that gives numbers by name",
        "process_rewards": "a process reward model: set a key of critic, such as critic.lr",
    }[need]


def _check_loss(algorithm: AlgorithmConfig) -> None:
    loss = loss_named(algorithm.loss)
    for name in algorithm.loss_options:
        if name not in loss.options:
            raise ConfigError(
                f"algorithm.loss_options.{name} is not read by algorithm.loss={algorithm.loss}; its options are: "
                f"{', '.join(loss.options) or 'none'}"
            )
    options = {**loss.options, **algorithm.loss_options}
    for name, (is_meant, wanted) in _MEANT.items() if loss.compute is None else ():
        if name in options and not is_meant(value := options[name]):
            raise PlanError(f"algorithm.loss_options.{name}={value:g} cannot be meant; it has to be {wanted}")
    if loss.selects_tokens and not 0 < options["share"] <= 1:
        raise PlanError(f"algorithm.loss_options.share={options['share']:g} is a share of the tokens; give 0 to 1")


def _check_teacher(config: Config) -> None:
    """What goes with a teacher, and what learning from it alone leaves without a meaning."""
    algorithm, teacher = config.algorithm, config.teacher
    if teacher is None:
        if algorithm.loss == ALONE:
            raise PlanError(f"algorithm.loss={ALONE} learns from a teacher alone: set teacher.path")
        return
    for name, kinds in (("forward_weight", ("mixed",)), ("num_candidates", ("forward", "mixed"))):
        is_set = getattr(teacher, name) != getattr(TeacherSection(path=""), name)
        if is_set and teacher.divergence not in kinds:
            raise PlanError(
                f"teacher.{name}={getattr(teacher, name)} does nothing unless teacher.divergence is "
                f"{' or '.join(kinds)}; leave it out"
            )
    if teacher.url is None and teacher.model is not None:
        raise PlanError(f"teacher.model={teacher.model} names a model of a server, and teacher.url is not set; set it")
    if teacher.url is not None and teacher.divergence != "reverse":
        raise PlanError(
            f"teacher.divergence={teacher.divergence} compares the teacher's likeliest tokens, which the server at "
            "teacher.url does not tell of a prompt; choose reverse, or leave url out"
        )
    if teacher.url is not None and config.rollout.temperature != 1:
        raise PlanError(
            f"the server at teacher.url tells log-probs at temperature 1, and rollout.temperature="
            f"{config.rollout.temperature:g}; make it 1, or leave url out"
        )
    if algorithm.loss == ALONE:
        _refuse(algorithm, f"algorithm.loss is another than {ALONE}, which looks at no reward", *_OF_REWARDS)


def _check_kl(config: Config) -> None:
    algorithm = config.algorithm
    if algorithm.kl_coef == 0:
        _refuse(algorithm, "algorithm.kl_coef is positive", "kl_in_reward", "kl_estimator", "ref_ema")
    if algorithm.ref_ema is not None and config.engine.lora is not None:
        raise PlanError(
            "algorithm.ref_ema moves the weights of a reference, and with engine.lora the reference is the policy "
            "without its adapter, whose weights stand still; leave one of them out"
        )
    if not algorithm.kl_in_reward:
        _refuse(algorithm, "algorithm.kl_in_reward is set", "kl_target")
        return
    if algorithm.kl_estimator.endswith("+"):
        raise PlanError(
            f"algorithm.kl_estimator={algorithm.kl_estimator} is a gradient's, and a penalty in the rewards has none; "
            f"set kl_estimator={algorithm.kl_estimator[:-1]}"
        )
    if "components" in estimator_named(algorithm.advantage).needs:
        raise PlanError(
            f"algorithm.advantage={algorithm.advantage} reads the parts of a reward, which algorithm.kl_in_reward "
            "leaves as they are; add the penalty to the loss instead (kl_in_reward=false)"
        )


def _check_correction(algorithm: AlgorithmConfig) -> None:
    if algorithm.rejection == "none":
        _refuse(algorithm, "algorithm.rejection is chosen", "rejection_bounds", "rejection_counts")
    if algorithm.correction == "none":
        _refuse(algorithm, "algorithm.correction is chosen", "correction_bounds")
    _check_bounds("correction", algorithm.correction, correction_bounds(algorithm), has_low="icepop")
    _check_bounds("rejection", algorithm.rejection, rejection_bounds(algorithm), has_low="k1")
    if algorithm.old_logprobs == "recompute":
        return
    if algorithm.rejection_counts == "after":
        raise PlanError(
            "algorithm.rejection_counts=after counts what is left before the update, and with "
            "algorithm.old_logprobs=rollout the update itself tells what is rejected; set rejection_counts=before, or "
            "old_logprobs=recompute"
        )
    if algorithm.correction != "none" and loss_named(algorithm.loss).has_ratio:
        without = [name for name, loss in POLICY_LOSSES.items() if not loss.has_ratio]
        raise PlanError(
            f"algorithm.correction={algorithm.correction} with algorithm.old_logprobs=rollout corrects twice: the "
            f"ratio of algorithm.loss={algorithm.loss} is that to the sampler already; set "
            f"algorithm.old_logprobs=recompute, correction=none, or loss={' or '.join(without)}"
        )


def _check_bounds(key: str, scheme: str, bounds: tuple[float, float], *, has_low: str) -> None:
    low, high = bounds
    if low >= high:
        raise PlanError(f"algorithm.{key}_bounds={[low, high]} are no bounds: the first has to be the lower one")
    if scheme != "none" and not scheme.endswith(has_low) and low > 0:
        raise PlanError(
            f"algorithm.{key}={scheme} has an upper bound alone, but algorithm.{key}_bounds={[low, high]}; give "
            f"[0, {high:g}]"
        )


def _check_pipeline(config: Config) -> None:
    """What learning from older weights, or from another distribution than the engine's, takes."""
    algorithm = config.algorithm
    if config.rollout.top_p < 1.0 and algorithm.old_logprobs == "recompute":
        raise PlanError(
            "rollout.top_p < 1 makes the sampler's distribution differ from the one the engine scores; set top_p=1, "
            "or algorithm.old_logprobs=rollout"
        )
    if config.pipeline in ("sync", "one_step_off") and config.staleness != StalenessSection():
        raise PlanError(f"the keys of staleness do nothing with pipeline={config.pipeline}; leave them out")
    schedule = create_schedule(config)
    if config.batch.replay is not None:
        _check_replay(config, schedule)
    if config.batch.stream:
        _check_stream(config, schedule)
    if config.batch.over_sampling and not schedule.settles_before_sync:
        raise PlanError(
            f"batch.over_sampling={config.batch.over_sampling:g} does nothing with pipeline={config.pipeline}, which "
            "begins groups ahead and waits for none that may be late: leave it out, and see staleness"
        )
    if schedule.lag or schedule.policy.max_staleness:
        _require_off_policy(algorithm, f"pipeline={config.pipeline}")


def _check_stream(config: Config, schedule: Schedule) -> None:
    """That a step's mini-batches may be learned from one by one as they come, with the gradients of a whole batch."""
    batch, algorithm = config.batch, config.algorithm
    per_group = ", ".join(name for name, estimator in sorted(ADVANTAGES.items()) if estimator.scope == "group")
    in_the_way = {
        "rollout.colocated=true, whose servers have to end before the engine may begin": bool(config.rollout.colocated),
        f"pipeline={config.pipeline}, which generates ahead": not schedule.is_on_policy,
        f"batch.mini_batch_size={batch.mini_batch_size}, which is the whole batch: make it smaller": (
            batch.mini_batch_size == batch.batch_size
        ),
        "batch.over_sampling, which stops what comes last": batch.over_sampling > 0,
        "batch.replay, which is added to a whole batch": batch.replay is not None,
        "tracking.keep_samples, which writes a file per batch": config.tracking.keep_samples,
        "critic, whose values change between mini-batches": config.critic is not None,
        "algorithm.old_logprobs=recompute, which asks the engine before its first update: set it to rollout": (
            algorithm.old_logprobs == "recompute"
        ),
        "algorithm.kl_target, which follows a whole batch": algorithm.kl_in_reward and algorithm.kl_target > 0,
        f"algorithm.loss={algorithm.loss}, which selects tokens of the batch": loss_named(
            algorithm.loss
        ).selects_tokens,
        f"algorithm.advantage={algorithm.advantage}, which compares beyond a group; choose one of {per_group}": (
            estimator_named(algorithm.advantage).scope != "group"
        ),
    }
    for what, is_so in in_the_way.items():
        if is_so:
            raise PlanError(f"batch.stream=true does not go with {what}")


def _check_replay(config: Config, schedule: Schedule) -> None:
    replay = config.batch.replay
    assert replay is not None, "the caller has checked it"
    if not schedule.settles_before_sync:
        raise PlanError(
            "batch.replay goes with pipeline=sync or one_step_off: how many fresh groups a step then needs depends on "
            f"what earlier steps had to teach, and pipeline={config.pipeline} releases groups ahead by a fixed number "
            "per step, which bounds their age; leave it out"
        )
    # With a lag, the batch of step s has tokens of version s - 1, and is in the history when that of s + 2 is drawn.
    if replay.max_age < (least := 1 + 2 * schedule.lag):
        raise PlanError(
            f"batch.replay.max_age={replay.max_age} does nothing with pipeline={config.pipeline}: the next batch is "
            f"made while this one trains, so that what is replayed is {least} versions old; give {least} or more"
        )
    if int(replay.share * config.batch.batch_size) == 0:
        raise PlanError(
            f"batch.replay.share={replay.share:g} of batch.batch_size={config.batch.batch_size} groups is "
            "less than one, so that it does nothing; raise it, or leave batch.replay out"
        )
    _require_off_policy(config.algorithm, "batch.replay")


def _require_off_policy(algorithm: AlgorithmConfig, what: str) -> None:
    if algorithm.correction != "none":
        return
    if algorithm.old_logprobs == "recompute":
        raise PlanError(
            f"{what} learns from tokens of older weights, which algorithm.old_logprobs=recompute "
            "would treat as the engine's own; set algorithm.correction=tis (or icepop), or "
            "algorithm.old_logprobs=rollout"
        )
    if not loss_named(algorithm.loss).has_ratio:
        raise PlanError(
            f"{what} learns from tokens of older weights, and algorithm.loss={algorithm.loss} has no ratio that would "
            "tell; set algorithm.correction=tis (or icepop)"
        )


def _refuse(algorithm: AlgorithmConfig, unless: str, *keys: str) -> None:
    """Refuse keys that are set and would do nothing."""
    default = AlgorithmConfig()
    for key in keys:
        value, usual = getattr(algorithm, key), getattr(default, key)
        if value != usual:
            raise PlanError(
                f"algorithm.{key}={value} does nothing unless {unless}; leave it out, or set it back to {usual}"
            )


_KEYS_OF_KINDS = {
    "rule": ("rule",),
    "options": ("rule",),
    "path": ("function", "classifier"),
    "url": ("classifier", "judge"),
    "model": ("classifier", "judge"),
    "prompt": ("classifier", "judge"),
    "max_attempts": ("classifier", "judge"),
    "max_concurrent": ("classifier", "judge"),
    "requests_per_minute": ("classifier", "judge"),
    "tokens_per_minute": ("classifier", "judge"),
    "api_key_env": ("classifier", "judge"),
    "pattern": ("judge",),
    "max_tokens": ("judge",),
    "score_at": ("classifier",),
}
_NEEDED_KEYS = {"function": ("path",), "judge": ("url", "model", "prompt")}


def check_reward(reward: RewardSection) -> None:
    """Check that every key of the section does something.

    Raises:
        PlanError: one does nothing, or one is missing.
    """
    default = RewardSection()
    if reward.path is not None and reward.parts:
        raise PlanError(
            "reward.path gives the whole reward, and reward.parts its parts; set one of them (a part of kind=function "
            "has a path of its own)"
        )
    if reward.overlong_buffer and "overlong" in reward.parts:
        raise PlanError(
            "reward.parts.overlong has the name of what reward.overlong_buffer takes off, and one would hide the "
            "other; give it another"
        )
    kinds = {part.kind for part in reward.parts.values()}
    if kinds and not kinds & {"function", "rule"} and reward.num_processes != default.num_processes:
        raise PlanError("reward.num_processes does nothing without a part of kind=function or rule; leave it out")
    for name, part in reward.parts.items():
        _check_part(f"reward.parts.{name}", part)


def _check_part(key: str, part: RewardPart) -> None:
    default = RewardPart(kind=part.kind)
    for name in _NEEDED_KEYS.get(part.kind, ()):
        if getattr(part, name) is None:
            raise PlanError(f"{key} is of kind={part.kind}, which needs {key}.{name}")
    for name, kinds in _KEYS_OF_KINDS.items():
        if part.kind not in kinds and getattr(part, name) != getattr(default, name):
            raise PlanError(
                f"{key}.{name} does nothing with kind={part.kind}, only with {' or '.join(kinds)}; leave it out"
            )
    if part.kind == "classifier":
        _check_classifier(key, part)
    _check_rule(key, part)
    if part.prompt is not None and "{completion}" not in part.prompt:
        raise PlanError(
            f"{key}.prompt has no {{completion}} in it, so that every completion would be asked about alike"
        )
    try:
        num_groups = re.compile(part.pattern).groups
    except re.error as error:
        raise PlanError(f"{key}.pattern={part.pattern!r} is no regular expression: {error}") from error
    if num_groups != 1:
        raise PlanError(f"{key}.pattern={part.pattern!r} has {num_groups} groups; one is needed, around the score")
    if part.url is not None and not part.url.startswith(("http://", "https://")):
        raise PlanError(f"{key}.url={part.url!r} is no URL; it starts with http:// or https://")


def _check_classifier(key: str, part: RewardPart) -> None:
    if (part.url is None) == (part.path is None):
        raise PlanError(
            f"{key} is of kind=classifier, which needs one of {key}.url (of a server that is there) and {key}.path "
            "(of a model that the run serves)"
        )
    default = RewardPart(kind=part.kind)
    for name in ("model", "score_at", "api_key_env"):
        if part.path is not None and getattr(part, name) != getattr(default, name):
            raise PlanError(f"{key}.{name} is of a server at {key}.url, and the run serves {key}.path; leave it out")


def _check_rule(key: str, part: RewardPart) -> None:
    names = sorted([*RULES, "code"])
    if part.rule is None:
        if part.options:
            raise PlanError(
                f"{key}.options are those of a rule, and {key}.rule names none: the data source's has no options. Name "
                f"one of {', '.join(names)}, or leave them out"
            )
        return
    if part.rule not in names:
        raise PlanError(f"{key}.rule={part.rule!r} is no rule; there are {', '.join(names)}")
    _check_options(f"{key}.options", part.options, part.rule, CodeTests if part.rule == "code" else RULES[part.rule])


def _check_options(key: str, options: Mapping[str, Any], rule: str, function: Callable[..., Any]) -> None:
    """Check options against a function's keyword-only parameters."""
    known = {p.name: p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    there = ", ".join(known)
    for name in options:
        if name not in known:
            raise PlanError(f"{key}.{name} does nothing with rule={rule}, whose options are {there}; leave it out")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options:
            raise PlanError(f"{key} lacks {name}, without which there is no rule={rule}")
    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    for name, value in options.items():
        try:
            TypeAdapter(hints[name]).validate_python(value, strict=isinstance(value, (bool, str)))
        except ValidationError as error:
            said = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise PlanError(f"{key}.{name}={value!r} cannot be used: {said}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """Something that a run may ask of its servers."""

    asks: Callable[[Config], bool]
    """Whether a configuration does."""
    is_met: Callable[[Capabilities], bool]
    """Whether a server can."""
    sentence: str
    """What is wrong otherwise, and what to do; after the backend's name."""
    is_known_early: bool = True
    """Whether a server can tell before it has loaded its model."""


_NEEDS = (
    _Need(
        asks=lambda _: True,
        is_met=lambda can: can.takes_token_ids and can.has_logprobs,
        sentence="does not give the ids and log-probs of the tokens that it sampled, so that nothing can be learned "
        "from them; choose another backend",
    ),
    _Need(
        asks=lambda _: True,
        is_met=lambda can: can.updates_weights,
        sentence="takes no new weights with these rollout.options, so that the policy could not be updated; choose "
        "other options, or another backend",
    ),
    _Need(
        asks=lambda config: bool(config.rollout.colocated),
        is_met=lambda can: 2 in can.sleep_levels,
        sentence="cannot give the memory of its weights back with these rollout.options, which rollout.colocated=true "
        "needs; have its options turn sleeping on (vllm: --enable-sleep-mode among args), or set colocated=false",
    ),
    _Need(
        asks=lambda config: config.engine.router_replay,
        is_met=lambda can: can.gives_routed_experts,
        sentence="does not tell the experts that it chose, which engine.router_replay=true needs; have its options "
        "turn that on (vllm: --enable-return-routed-experts among args), or leave router_replay out",
        is_known_early=False,
    ),
)
_IMAGES = _Need(
    asks=lambda _: True,
    is_met=lambda can: can.takes_images,
    sentence="takes no images for this model, and rows of the data have some; choose another backend, or other rows",
    is_known_early=False,
)


def check_backends(config: Config) -> list[tuple[str, str]]:
    """Check the backends' own settings, and what they can do; returns `(what, how)` for the screen.

    Raises:
        ConfigError: a setting does nothing, or asks for what its backend cannot do; names the backend.
    """
    for key in ("weights_transport", "queue_storage"):
        backend: str | None = getattr(config, key)
        if scheme_of(backend) == IN_ONE_PROCESS and config.runtime != "inline":
            raise ConfigError(
                f"{key}={backend} moves data inside one process, and runtime={config.runtime} has several; choose "
                "another, or runtime=inline"
            )
    _check_transport(config)
    with _folder(config) as folder:
        left = check_engines(config, Path(folder), is_made=config.model.path is not None)
        can = _server_capabilities(config, folder)
    _require(config, can, [need for need in _NEEDS if need.is_known_early])
    levels = " and ".join(str(level) for level in can.sleep_levels) or "none"
    seeds = (
        "seeded requests" if can.is_seeded else "requests without seeds (the same seed samples other tokens each run)"
    )
    weights = "new weights" if can.attests_weights else "new weights, not attested with this rollout.parallel"
    return [*left.items(), ("server", f"{config.rollout.backend}: {weights}, {seeds}, levels of sleep: {levels}")]


def check_started(config: Config, can: Capabilities, *, has_images: bool) -> None:
    """Check what a server that is there can do.

    Raises:
        ConfigError: less than is asked for.
    """
    _require(config, can, [*_NEEDS, *([_IMAGES] if has_images else [])])


def _require(config: Config, can: Capabilities, needs: list[_Need]) -> None:
    for need in needs:
        if need.asks(config) and not need.is_met(can):
            raise ConfigError(f"rollout.backend={config.rollout.backend} {need.sentence}")


def _check_transport(config: Config) -> None:
    address = address_of(config.weights_transport, "plan", ("127.0.0.1", 1))
    try:
        token = "of the plan" if scheme_of(address) in LISTENING else None
        session = rl_ckpt.connect(address, role="receive", token=token, timeout_s=config.timeout_s)
        asyncio.run(session.close())
    except CkptError as error:
        raise ConfigError(f"weights_transport={config.weights_transport or address} cannot be used: {error}") from error


def _server_capabilities(config: Config, folder: str) -> Capabilities:
    backend = config.rollout.backend
    asked = replace(server_config(config, Path(folder)), dtype="auto")  # a backend that takes none has worse to say
    try:
        server = rl_rollout.create_server(backend, asked)
        can = server.capabilities
        asyncio.run(server.stop())
    except RolloutError as error:
        raise ConfigError(f"rollout.backend={backend} cannot be used as configured: {error}") from error
    return can


@contextmanager
def _folder(config: Config) -> Generator[str]:
    """The model's folder; where the model is yet to be made, one with its description."""
    if config.model.path is not None:
        yield config.model.path
        return
    from rl_trainer.data.warmup import write_config

    assert config.model.warmup is not None, "it was checked that there is a model"
    with TemporaryDirectory(prefix="rl-trainer-") as folder:
        write_config(Path(folder), config.model.warmup)
        yield folder


def make_plan(config: Config) -> BatchPlan:
    """Compute and check the plan.

    Raises:
        PlanError: numbers that do not divide, or settings that cannot work together.
        ConfigError: an algorithm that is not registered.
    """
    batch, engine = config.batch, config.engine
    if batch.batch_size % batch.mini_batch_size:
        raise PlanError(
            f"batch.batch_size={batch.batch_size} prompts cannot be cut into mini-batches of "
            f"batch.mini_batch_size={batch.mini_batch_size}; "
            "choose a divisor"
        )
    per_optimizer_step = batch.mini_batch_size * batch.group_size
    if per_optimizer_step % engine.world_size:
        raise PlanError(
            f"a mini-batch of {batch.mini_batch_size} prompts x {batch.group_size} completions = "
            f"{per_optimizer_step} rows does not divide over "
            f"engine.world_size={engine.world_size} ranks"
        )
    longest, sum_ = longest_sequence(config)
    if longest > engine.max_tokens_per_gpu:
        raise PlanError(
            f"a sequence may have {sum_} = {longest} tokens, more than "
            f"engine.max_tokens_per_gpu={engine.max_tokens_per_gpu} of a micro-batch; raise it or lower the others"
        )
    if longest > config.rollout.max_model_len:
        raise PlanError(
            f"a sequence may have {sum_} = {longest} tokens, more than rollout.max_model_len="
            f"{config.rollout.max_model_len}"
        )
    _check_data(config.data)
    check_reward(config.reward)
    if config.reward.overlong_buffer > config.rollout.max_new_tokens:
        raise PlanError(
            f"reward.overlong_buffer={config.reward.overlong_buffer} is longer than the longest completion, "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}"
        )
    check_algorithm(config)
    _check_layout(config)
    return BatchPlan(
        prompts=batch.batch_size,
        completions=batch.batch_size * batch.group_size,
        optimizer_steps=batch.batch_size // batch.mini_batch_size,
        completions_per_optimizer_step=per_optimizer_step,
        completions_per_rank=per_optimizer_step // engine.world_size,
        max_sequence_tokens=longest,
        total_completions=config.steps * batch.batch_size * batch.group_size,
    )


def _check_layout(config: Config) -> None:
    """Processes and who shares them."""
    schedule = create_schedule(config)
    if config.rollout.colocated and not schedule.is_on_policy:
        raise PlanError(
            f"pipeline={config.pipeline} generates and trains at the same time, which rollout.colocated=true rules "
            "out; choose pipeline=sync, or colocated=false"
        )
    replica, num_replicas = config.rollout.parallel, config.rollout.num_replicas
    if config.rollout.colocated and num_replicas * replica.num_ranks != config.engine.world_size:
        raise PlanError(
            f"rollout.colocated=true puts the replicas on all GPUs of the engine, but rollout.num_replicas="
            f"{num_replicas} of tp x pp x dp = {replica.num_ranks} GPUs and engine.world_size="
            f"{config.engine.world_size}; make the product equal to it"
        )
    engine = config.engine
    if engine.lr_schedule == "cosine" and engine.optimizer.total_steps is not None:
        raise PlanError(
            f"engine.lr_schedule=cosine falls to the end of the run, which engine.optimizer.total_steps="
            f"{engine.optimizer.total_steps} contradicts; leave one of them out"
        )
    if engine.lora is not None and engine.lora.export != LoraExport.MERGED:
        raise PlanError(
            f"engine.lora.export={engine.lora.export}: servers take the model with the adapter added in; leave it out"
        )
    layout, world_size = engine.parallel, engine.world_size
    if world_size % (layout.tp * layout.pp * layout.cp):
        raise PlanError(
            f"engine.world_size={world_size} is no multiple of engine.parallel tp x pp x cp = "
            f"{layout.tp} x {layout.pp} x {layout.cp}"
        )
    sizes = {"engine.world_size": world_size, "agent.num_workers": config.agent.num_workers}
    for key, size in (sizes | {"rollout.num_replicas": config.rollout.num_replicas}).items():
        if config.runtime == "inline" and size > 1:
            raise PlanError(f"{key}={size} needs processes of its own: use runtime=ray")
    if config.runtime == "inline" and not schedule.is_on_policy:
        raise PlanError(f"pipeline={config.pipeline} generates and trains at the same time, which takes runtime=ray")


def _check_data(data: DataConfig) -> None:
    """Keys of `data` that would do nothing with this source."""
    default = DataConfig()
    is_file = data.format in {"rows", "gsm8k"}
    is_streamed = is_file and data.options.get("stream_buffer") is not None
    is_dataset = is_file and data.path is not None and (data.path.startswith(HUB) or is_saved_dataset(data.path))

    def refuse(is_used: bool, why: str, *names: str) -> None:
        for name in names:
            if not is_used and getattr(data, name) != getattr(default, name):
                raise PlanError(f"data.{name}={getattr(data, name)!r} does nothing {why}; leave it out")

    with_format = f"with data.format={data.format}"
    refuse(data.format != "reasoning_gym", with_format, "path", "eval_path")
    refuse(is_file, with_format, "mixture")
    refuse(not data.mixture, "beside data.mixture", "path", "eval_path")
    if data.curriculum is not None and (is_streamed or data.mixture):
        raise PlanError(
            "data.curriculum chooses among all rows of one dataset, so it goes with neither data.options.stream_buffer "
            "nor data.mixture; leave it out"
        )
    if data.curriculum is not None and data.curriculum.pass_rate[0] >= data.curriculum.pass_rate[1]:
        raise PlanError(f"data.curriculum.pass_rate={list(data.curriculum.pass_rate)}: the first has to be the lower")
    uses_datasets = is_dataset or any(
        part.path.startswith(HUB) or is_saved_dataset(part.path) for part in data.mixture.values()
    )
    refuse(not is_dataset, "with a dataset of the datasets package: set data.options.eval_split", "eval_path")
    check_options(data, uses_datasets=uses_datasets)


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
    left = found["the policy"]
    row_term = PolicyLossFunction(config=config.algorithm, teacher=teacher).row_term
    if row_term is not None and left.get("loss_in_head", "no").startswith("yes"):
        left["loss_in_head"] = f"no: {row_term}"
    return left
