"""Everything that can be known to fail before the first process is started, checked in one place."""

from __future__ import annotations

import inspect
import json
import math
import os
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from rl_trainer import checkpoints
from rl_trainer.addresses import scheme_of
from rl_trainer.checkpoints import RunState
from rl_trainer.data import shows_images
from rl_trainer.errors import ConfigError, InputError
from rl_trainer.plan import has_reference, longest_sequence
from rl_trainer.rewards import check_function, check_packages, resolve_reward
from rl_trainer.trackers.group import GROUP as TRACKERS

if TYPE_CHECKING:
    from rl_trainer.config import AgentSection, Config, TeacherSection, TrackingSection
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
        ("rl_agent.loops", config.agent.loop, "agent.loop"),
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
    """Check that the agent loop has the options that it is to be made with.

    Raises:
        ConfigError: it has not; lists those that it has.
    """
    if not agent.options:
        return
    (point,) = entry_points(group="rl_agent.loops", name=agent.loop)
    known = [p.name for p in inspect.signature(point.load()).parameters.values() if p.kind is p.KEYWORD_ONLY]
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
    for path in (reward.path, *(part.path for part in reward.parts.values() if part.kind == "function")):
        if path is not None:
            check_function(path)
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


def memory_estimate(config: Config) -> str:
    """What the weights take, and the cache of a server that is full, in words; activations and buffers come on top.

    The engine's copy is float32 (4 bytes per parameter) with gradients (4) and AdamW's moments (8), cut over its ranks.
    The cache is that of `rollout.max_num_seqs` sequences of the greatest length, in bfloat16; a server makes do with
    less, and lets requests wait.
    """
    if config.model.path is None:
        return "a small model, made on the spot"
    count = num_parameters(Path(config.model.path))
    if count is None:
        return "unknown: the model folder has no safetensors files"
    ranks, gb = config.engine.world_size, 1e-9 * count
    per_rank = (16 * gb if config.engine.lora is None else 4 * gb) / ranks
    parts = [f"engine {per_rank:.1f} GB per rank"]
    parts += [f"reference {4 * gb / ranks:.1f} GB"] if has_reference(config) and config.engine.lora is None else []
    if config.teacher is not None and config.teacher.url is None:
        size = num_parameters(Path(config.teacher.path))
        parts += ["teacher unknown" if size is None else f"teacher {4e-9 * size / ranks:.1f} GB"]
    parts += [f"critic {16 * gb / ranks:.1f} GB"] if config.critic is not None else []
    return (
        f"{count / 1e6:,.1f} M parameters: {', '.join(parts)}, weights and optimizer alone; {_cache_estimate(config)}"
    )


def _cache_estimate(config: Config) -> str:
    model, longest = _model_config(Path(str(config.model.path))), longest_sequence(config)[0]
    try:
        heads = model.get("num_key_value_heads", model["num_attention_heads"])
        width = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        size = 4 * model["num_hidden_layers"] * heads * width * longest * config.rollout.max_num_seqs
    except KeyError as missing:
        return f"keys and values unknown: config.json has no {missing}"
    return f"keys and values {1e-9 * size:.1f} GB for {config.rollout.max_num_seqs} sequences of {longest} tokens"


def num_parameters(folder: Path) -> int | None:
    """Elements of the folder's safetensors files, by their headers; None without such files."""
    total, files = 0, sorted(folder.glob("*.safetensors"))
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total if files else None


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
    model, engine = _model_config(folder), config.engine
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
    from rl_trainer.workers.images import takes_images

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


def _model_config(folder: Path) -> dict[str, Any]:
    """Of the language model, which a model for more than language keeps in a part of its own."""
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values | values.get("text_config", {})
