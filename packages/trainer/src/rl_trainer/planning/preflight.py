"""Preflight checks on this machine before a process is started: packages, folders, backends."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import rl_ckpt.registry
import rl_rollout.registry
from rl_agent.base import AgentLoop
from rl_ckpt.errors import CkptError
from rl_engine.errors import EngineError
from rl_engine.registry import describe_tokens, model_folder
from rl_engine.types import ModelInit, Mtp
from rl_rollout.errors import RolloutError
from rl_trainer import plugins
from rl_trainer.algorithms import PolicyLossFunction
from rl_trainer.checkpoints import check_output_dir
from rl_trainer.data import has_sounds, shows_images, shows_videos
from rl_trainer.errors import ConfigError, DataError, InputError
from rl_trainer.pipeline.roles import (
    actor_config,
    candidates_of,
    critic_config,
    drafts_by_mtp,
    engine_of,
    frozen_config,
    has,
    is_offloaded,
    longest_sequence,
    model_facts,
    sends_adapter,
    server_config,
    teacher_folders,
)
from rl_trainer.pipeline.weight_transfer import check_start_layers
from rl_trainer.planning.environments import (
    asked_in_background,
    check_engine,
    check_environment,
    gives_shards,
    role_python,
)
from rl_trainer.planning.gpus import check_ipc, count_gpus
from rl_trainer.rewards.checks import check_rewards
from rl_trainer.runtime.network import IN_ONE_PROCESS, LISTENING, address_of, has_votes, scheme_of
from rl_trainer.runtime.profiling import check_profiler
from rl_trainer.trackers.base import GROUP as TRACKERS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from rl_rollout.types import Capabilities
    from rl_trainer.config import Config
    from rl_trainer.config.schema import AgentSection, TeacherSection
    from rl_trainer.data import Row

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")

_PROGRAMS = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "tensorrt_llm"}
"""Package that a rollout backend's server is started from, unless rollout.options.command names a program."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def with_models(config: Config) -> Config:
    """The configuration with a folder for every model of the hub that it names, downloaded if it is not there.

    Of the policy that is the configuration and the tokenizer: `with_policy` downloads its weights once all is checked.

    Raises:
        InputError: the hub has no such model, or does not answer.
    """
    config = with_policy(config, config.model.path, has_weights=False)
    if config.critic is not None:
        config = replace(config, critic=replace(config.critic, path=_model_folder(config.critic.path, "critic.path")))
    if (teacher := config.teacher) is not None:
        by_source = {s: str(_model_folder(path, f"teacher.by_source.{s}")) for s, path in teacher.by_source.items()}
        teacher = replace(teacher, path=_model_folder(teacher.path, "teacher.path"), by_source=by_source)
        config = replace(config, teacher=teacher)
    return config


def with_policy(config: Config, path: str | None, *, has_weights: bool = True) -> Config:
    """The configuration with the folder of the policy at `path`, by default with its weights.

    Raises:
        InputError: the hub has no such model, or does not answer.
    """
    folder = _model_folder(path, "model.path", has_weights=has_weights)
    return replace(config, model=replace(config.model, path=folder))


def _model_folder(path: str | None, key: str, *, has_weights: bool = True) -> str | None:
    try:
        return None if path is None else model_folder(path, key=key, has_weights=has_weights)
    except EngineError as error:
        raise InputError(str(error)) from error


def check(
    config: Config,
    rows: list[Row],
    *,
    is_resumed: bool = False,
    has_weights: bool = True,
    is_one_of: bool = False,
) -> None:
    """Check backends, model folder, output folder and reward rules.

    `has_weights`: the model's weights are there already, and not to be downloaded once all is checked. `is_one_of`: the
    configuration is that of one of several policies.

    Raises:
        InputError: the first thing that cannot work, in one sentence.
    """
    check_environment(config)
    check_profiler(config, has)
    backends = {"policy": (config.engine.backend, "engine.backend")}
    for role in ("reference", "critic", "teacher"):
        if has(config, role):
            backends[role] = (engine_of(config, role).backend, f"placement.{role}.engine.backend")
    here = [entry for role, entry in backends.items() if role_python(config, role) is None]
    for group, name, key in (
        *(("rl_engine.backends", name, key) for name, key in here),
        ("rl_rollout.backends", config.rollout.backend, "rollout.backend"),
        ("rl_ckpt.backends", scheme_of(config.weights_transport), "weights_transport"),
        ("rl_tq.storage", scheme_of(config.queue_storage), "queue_storage"),
        (plugins.LOOPS, config.agent.loop, "agent.loop"),
        *((TRACKERS, name, "tracking.trackers") for name in config.tracking.trackers),
    ):
        plugins.check(name, group, key=key)
    if config.tracking.keep_samples is True and not plugins.is_installed("pyarrow"):
        raise ConfigError("tracking.keep_samples needs pyarrow: pip install 'rl-post-trainer[parquet]'")
    check_model(config, has_weights=has_weights)
    if is_one_of and config.model.path is not None and model_facts(Path(config.model.path)).takes_images:
        raise InputError(
            f"the model in {config.model.path} takes images, which runs of several policies do not pass on"
        )
    if config.teacher is not None:
        check_teacher(config.teacher, config.model.path)
    _check_rollouts(config, rows)
    if config.output_dir is not None:
        check_output_dir(config, Path(config.output_dir), is_resumed=is_resumed)


def check_policy(config: Config, rows: list[Row], *, is_served: bool) -> None:
    """Check what the evaluation of a policy needs: model folder, agent loop, server and reward rules.

    Raises:
        InputError: the first thing that cannot work.
    """
    plugins.check(config.agent.loop, plugins.LOOPS, key="agent.loop")
    check_model(config)
    _check_rollouts(config, rows)
    if not is_served:
        plugins.check(config.rollout.backend, "rl_rollout.backends", key="rollout.backend")
        _server_capabilities(config, str(config.model.path))


def _check_rollouts(config: Config, rows: list[Row]) -> None:
    check_loop_options(config.agent)
    if config.model.path is not None and any(shows_images(row) for row in rows):
        check_images(config, has_audio=any(map(has_sounds, rows)))
    check_rewards(config.reward, rows)


def check_loop_options(agent: AgentSection) -> None:
    """Check that the agent loop has the options that it is to be made with, and that one by a path is a loop.

    Raises:
        ConfigError: it has not (lists those that it has), or it is something else.
    """
    loop = plugins.loop_named(agent.loop)
    if isinstance(loop, str):
        if not agent.options and agent.environment is None:
            return
        loop = plugins.find(loop, plugins.LOOPS, key="agent.loop")
    elif not (isinstance(loop, type) and issubclass(loop, AgentLoop)):
        raise ConfigError(f"agent.loop={agent.loop} is not a subclass of rl_agent.AgentLoop")
    known = [p.name for p in inspect.signature(loop).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if agent.environment is not None and "environment" not in known:
        raise ConfigError(
            f"agent.environment={agent.environment} does nothing with agent.loop={agent.loop}, which plays none; leave "
            "one of them out"
        )
    for name in agent.options:
        if name not in known:
            raise ConfigError(
                f"agent.options.{name} is not an option of agent.loop={agent.loop}; "
                f"it has: {', '.join(known) or 'none'}"
            )


def check_model(config: Config, *, has_weights: bool = True) -> None:
    """Check that the policy is a folder with a config and a tokenizer, or that there is a recipe to make one."""
    if config.model.path is None:
        if config.model.warmup is None:
            raise ConfigError("model.path is not set: give a Hugging Face model folder, or the hub's id of a model")
        return
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise InputError(f"model.path={folder} is neither a folder nor the hub's id of a model (OWNER/NAME)")
    if model_facts(folder).is_pipeline:  # the engine checks it
        return
    if not (folder / "config.json").is_file():
        raise InputError(f"model.path={folder} has no config.json, so it is not a Hugging Face model folder")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise InputError(
            f"model.path={folder} has no tokenizer ({' or '.join(_TOKENIZER_FILES[:3])}); copy the model's tokenizer "
            "files into it"
        )
    if has_weights and not any(folder.glob("*.safetensors")):
        raise InputError(f"model.path={folder} has no .safetensors file, so it has no weights; give a complete folder")
    facts, engine = model_facts(folder), config.engine
    model, limit = facts.config, facts.longrope_limit
    longest, (wanted, keys) = model.get("max_position_embeddings"), longest_sequence(config)
    if longest is not None and wanted > longest:
        raise InputError(
            f"a sequence may have {keys} = {wanted} tokens, but the model in {folder} has a context of {longest} tokens"
        )
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
                f"engine.{does} of experts, but the model in {folder} is not a mixture of experts; leave it out"
            )


def folder_facts(config: Config) -> list[tuple[str, str]]:
    """Lines of the plan about the model folder: the tokens that end a turn.

    Raises:
        InputError: one of its files cannot be read.
    """
    if config.model.path is None:
        return []
    try:
        ends, *warnings = describe_tokens(config.model.path).lines
    except EngineError as error:
        raise InputError(str(error)) from error
    return [("turns end at", ends), *(("warning", warning) for warning in warnings)]


def check_images(config: Config, *, has_audio: bool = False) -> None:
    """Check that the policy takes images, or with `has_audio` that it and its server take sounds, as rows have them.

    Raises:
        InputError: it takes none.
        ConfigError: the server takes none.
    """
    facts = model_facts(Path(str(config.model.path)))
    if not facts.takes_images:
        raise InputError(
            f"rows of the data have images, and the model in {config.model.path} takes none: "
            f"{facts.why_blind}; choose another, or leave those rows out"
        )
    if has_audio and not facts.takes_audio:
        raise InputError(
            f"rows of the data have sounds, and the model in {config.model.path} takes none; models that do: "
            "Qwen2.5-Omni, Qwen3-Omni. Choose one, or leave those rows out"
        )
    if has_audio:
        _require(config, _server_capabilities(config, str(config.model.path)), [_SOUNDS])


def serves_videos(config: Config) -> bool:
    """Whether model and server take videos as videos, and not as frames, each an image."""
    folder = config.model.path
    is_of_model = folder is not None and model_facts(Path(folder)).takes_videos
    return is_of_model and _server_capabilities(config, str(folder)).takes_videos


def video_facts(config: Config, rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Line of the plan: how videos of the rows reach the model; none without videos."""
    if not any(map(shows_videos, rows)):
        return []
    if serves_videos(config):
        return [("videos", "as videos")]
    is_model = not model_facts(Path(str(config.model.path))).takes_videos
    who = f"the model in {config.model.path}" if is_model else f"rollout.backend={config.rollout.backend}"
    return [("videos", f"as frames (nframes), each an image: {who} takes no videos")]


def check_teacher(teacher: TeacherSection, model_path: str | None) -> None:
    """Check that the teacher is a folder whose token ids mean what the policy's do.

    Raises:
        InputError: it is not, or a tokenizer is in no `tokenizer.json`, which is what can be compared.
    """
    if model_path is None and teacher.path is None:  # the small model that is made
        return
    if model_path is None:
        raise ConfigError(
            "teacher.path needs model.path: a policy that learns a teacher's words has the same tokenizer"
        )
    if teacher.url is not None and model_facts(Path(model_path)).takes_images:
        raise InputError(
            f"the policy in {model_path} takes images, which a teacher at teacher.url is not shown; leave url out"
        )
    if teacher.context is not None and model_facts(Path(model_path)).takes_images:
        raise InputError(
            f"the policy in {model_path} takes images, which teacher.context has no place for; leave it out"
        )
    if teacher.path is None:
        return
    paths = {"path": teacher.path, **{f"by_source.{source}": path for source, path in teacher.by_source.items()}}
    for key, path in paths.items():
        if teacher.url is None and not (Path(path) / "config.json").is_file():
            raise InputError(f"teacher.{key}={path} has no config.json, so it is not a Hugging Face model folder")
        policy, other = _vocabulary(Path(model_path)), _vocabulary(Path(path))
        if policy != other:
            raise InputError(
                f"the tokenizers in {model_path} and teacher.{key}={path} differ ({len(policy)} and {len(other)} "
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


@dataclass(frozen=True, slots=True)
class _Need:
    """Capability that a run may need of its servers: who asks for it, who has it, and the error text without it."""

    asks: Callable[[Config], bool]
    is_met: Callable[[Capabilities], bool]
    sentence: str
    is_known_early: bool = True
    """Whether a server can answer before it has loaded its model."""


_NEEDS = (
    _Need(
        lambda _: True,
        lambda can: can.takes_token_ids and can.has_logprobs,
        "does not give the ids and log-probs of the tokens that it sampled, so that nothing can be learned from them; "
        "choose another backend",
    ),
    _Need(
        lambda _: True,
        lambda can: can.updates_weights,
        "takes no new weights with these rollout.options and this folder, so that the policy could not be updated "
        "(weights that the server quantises, as by --quantization, are not those that were sent, and cannot be "
        "compared with them); choose other options, or another backend",
    ),
    _Need(
        is_offloaded,
        lambda can: 2 in can.sleep_levels,
        "cannot give the memory of its weights back with these rollout.options, which rollout.colocated=true needs; "
        "have its options turn sleeping on (vllm: --enable-sleep-mode among args), or set colocated=false",
    ),
    _Need(
        lambda config: config.engine.router_replay,
        lambda can: can.gives_routed_experts,
        "does not return the experts that it chose, which engine.router_replay=true needs; have its options turn that "
        "on (vllm: --enable-return-routed-experts among args), or leave router_replay out",
        is_known_early=False,
    ),
)
_IMAGES = _Need(
    lambda _: True,
    lambda can: can.takes_images,
    "takes no images for this model, and rows of the data have some; choose another backend, or other rows",
    is_known_early=False,
)

_SOUNDS = _Need(
    lambda _: True,
    lambda can: can.takes_audio,
    "takes no sounds for this model, and rows of the data have some; choose the embedded backend, or other rows",
)


def check_backends(config: Config) -> list[tuple[str, str]]:
    """Check the backends' settings and capabilities; returns lines of the plan.

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
    if drafts_by_mtp(config) and (config.engine.mtp == Mtp.REFUSE or sends_adapter(config)):
        raise ConfigError(
            f"rollout.options.num_mtp_tokens={config.rollout.options['num_mtp_tokens']} has servers draft with the "
            "model's layer for multi-token prediction: set engine.mtp=train or freeze, leave engine.lora.export out"
        )
    with _folder(config) as folder:
        left = check_engines(config, Path(folder), is_made=_is_made(folder))
        can = _server_capabilities(config, folder)
    _require(config, can, [need for need in _NEEDS if need.is_known_early])
    levels = " and ".join(str(level) for level in can.sleep_levels) or "none"
    seeds = (
        "seeded requests" if can.is_seeded else "requests without seeds (the same seed samples other tokens each run)"
    )
    reason = why_gathered(config, can)
    is_attested = reason is None or can.attests_weights
    weights, quantization = "new weights", config.rollout.quantization
    if quantization.startswith("fp8") and not count_gpus(config):
        raise ConfigError(
            f"rollout.quantization={quantization} takes a GPU, and there is none; choose int8, or leave it out"
        )
    if drafts_by_mtp(config) and config.rollout.backend == "vllm" and not count_gpus(config):
        raise ConfigError(
            "rollout.options.num_mtp_tokens takes a GPU, and there is none: vLLM 0.32 on a CPU draws drafted tokens at "
            "temperatures that it leaves uninitialised; leave it out"
        )
    if quantization == "none":
        weights += "" if is_attested else ", not attested with this rollout.parallel"
    else:
        weights += f" (receipts are of the weights before the server quantises them to {quantization})"
    is_chain = config.weights.delta and not _has_votes(config)
    if reason is not None and (config.weights.mode == "sharded" or (config.weights.delta and not is_chain)):
        asked = "mode=sharded" if config.weights.mode == "sharded" else "delta=true"
        raise ConfigError(f"weights.{asked} cannot be, because {reason}; leave it out")
    if sends_adapter(config) and not can.updates_adapters:
        raise ConfigError(
            f"rollout.backend={config.rollout.backend} takes no updates of an adapter alone; leave "
            "engine.lora.export out, and it is sent the model with the adapter added in"
        )
    path = "from shard to shard" if reason is None else f"gathered, and sent by rank 0, because {reason}"
    if config.engine.mtp != Mtp.REFUSE:
        drafts = "with the layer" if can.takes_mtp else "without the layer (rollout.options.num_mtp_tokens is not set)"
        path += f", {drafts} for multi-token prediction"
    return [
        *left.items(),
        ("weights", path + ", as differences" * config.weights.delta),
        ("server", f"{config.rollout.backend}: {weights}, {seeds}, levels of sleep: {levels}"),
    ]


def why_gathered(config: Config, can: Capabilities) -> str | None:
    """Reason why weights are gathered, as the end of a sentence; None if they go from shard to shard."""
    transport, engine, rollout = config.weights_transport or "", config.engine, config.rollout
    if config.weights.mode == "gathered":
        return "weights.mode=gathered asks for it"
    if not _has_votes(config):
        return f"{scheme_of(transport)}:// takes no votes, so that slices could be of two versions"
    if "://" in transport and scheme_of(transport) in LISTENING:
        return f"weights_transport={transport} is one port and every rank needs its own: write {scheme_of(transport)}"
    if sends_adapter(config):
        return "the adapter alone is sent (engine.lora.export=adapter)"
    if engine.lora is not None:
        alone = "; engine.lora.export=adapter sends it alone" if can.updates_adapters and not rollout.colocated else ""
        return f"an adapter is merged into whole tensors (engine.lora{alone})"
    if not can.takes_slices:
        return f"rollout.backend={rollout.backend} takes whole tensors"
    if rollout.dtype not in ("auto", str(engine.precision)):
        return f"slices come as engine.precision={engine.precision}, and rollout.dtype={rollout.dtype} is another"
    if not gives_shards(config, actor_config(config, Path())):
        return f"engine.backend={engine.backend} exports whole tensors"
    return None


def _has_votes(config: Config) -> bool:
    return has_votes(address_of(config.weights_transport, "plan", ("127.0.0.1", 1)))


def check_started(config: Config, can: Capabilities, *, has_images: bool) -> None:
    """Check the capabilities of a started server.

    Raises:
        ConfigError: less than is asked for.
    """
    _require(config, can, [*_NEEDS, *([_IMAGES] if has_images else [])])


def _require(config: Config, can: Capabilities, needs: list[_Need]) -> None:
    for need in needs:
        if need.asks(config) and not need.is_met(can):
            raise ConfigError(f"rollout.backend={config.rollout.backend} {need.sentence}")


def _check_transport(config: Config) -> None:
    check_ipc(config)
    address = address_of(config.weights_transport, "plan", ("127.0.0.1", 1))
    try:
        token = "of the plan" if scheme_of(address) in LISTENING else None
        session = rl_ckpt.registry.connect(address, role="receive", token=token, timeout_s=config.timeout_s)
        asyncio.run(session.close())
    except CkptError as error:
        raise ConfigError(f"weights_transport={config.weights_transport or address} cannot be used: {error}") from error


def _server_capabilities(config: Config, folder: str) -> Capabilities:
    backend = config.rollout.backend
    asked = replace(server_config(config, Path(folder)), dtype="auto")  # a backend that takes none has worse to say
    try:
        server = rl_rollout.registry.create_server(backend, asked)
        can = server.capabilities
        asyncio.run(server.stop())
    except RolloutError as error:
        raise ConfigError(f"rollout.backend={backend} cannot be used as configured: {error}") from error
    return can


@contextmanager
def backends_asked(config: Config) -> Generator[None]:
    """Ask the policy's backend in a child process while the body does something else (`asked_in_background`)."""
    if config.model.path is None and config.model.warmup is None:
        yield
        return
    if config.model.path is not None and not (Path(config.model.path) / "config.json").is_file():
        yield  # an error is raised later, or it is downloaded
        return
    with _folder(config) as folder, asked_in_background(config, Path(folder), is_made=_is_made(folder)):
        yield


def _is_made(folder: str) -> bool:
    """Whether a model's folder has weights: one that is yet to be made, or downloaded, has none."""
    return any(Path(folder).glob("*.safetensors")) or model_facts(Path(folder)).is_pipeline


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


def check_engines(config: Config, model_path: Path, *, is_made: bool) -> dict[str, str]:
    """Check the engines' configurations against their backend; starts nothing.

    `is_made`: the policy's folder is complete; otherwise it has a `config.json` alone.

    Returns:
        By key, what settings that are left to the policy's engine come to.

    Raises:
        ConfigError: the backend refuses; in its words.
    """
    teacher, critic = config.teacher, config.critic
    engines = {"policy": (config.engine, actor_config(config, model_path))}
    if has(config, "reference"):
        engines["reference"] = (engine_of(config, "reference"), frozen_config(config, "reference", model_path))
    for source, path in teacher_folders(teacher).items():
        assert teacher is not None, "it has folders"
        frozen = frozen_config(config, "teacher", path, candidates_of(teacher))
        engines["teacher" + (source and f" of {source}")] = (engine_of(config, "teacher"), frozen)
    if critic is not None:
        engines["critic"] = (engine_of(config, "critic"), critic_config(config, critic, model_path))
    found: dict[str, dict[str, str]] = {}
    for role, (section, engine) in engines.items():
        init = engine.init if is_made or engine.model_path != str(model_path) else ModelInit.RANDOM
        try:
            found[role] = check_engine(config, role.partition(" ")[0], section, replace(engine, init=init))
        except EngineError as error:
            key = "engine" if section.backend == config.engine.backend else f"placement.{role.partition(' ')[0]}.engine"
            raise ConfigError(f"{key}.backend={section.backend} cannot be used for the {role}: {error}") from error
    left = found["policy"]
    layers = left.pop("adapter_layers", "").split()
    if config.engine.lora is not None and sends_adapter(config) and is_made:
        check_start_layers(layers, model_path, config.engine.lora)
    if config.engine.lora is not None and config.engine.lora.dropout:
        adapter = f"engine.lora.dropout={config.engine.lora.dropout:g}"
        left["dropout"] = f"{left['dropout']}, {adapter}" if "dropout" in left else f"off: {adapter}"
    loss = PolicyLossFunction(config=config.algorithm, teacher=teacher)
    row_term = loss.row_term
    engine, why = config.engine, loss.term_without_advantage
    for name, is_set in (("router_aux_loss_coef", engine.router_aux_loss_coef), ("mtp", engine.trains_mtp)):
        why = f"engine.{name} is set" if is_set else why
    left["backward_pass"] = "of rows with an advantage" if why is None else f"of all rows: {why}"
    if row_term is not None and left.get("loss_in_head", "no").startswith("yes"):
        left["loss_in_head"] = f"no: {row_term}"
    return left


def program_facts(config: Config) -> list[tuple[str, str]]:
    """Line of the plan: the program that the rollout backend starts, if it is another library's.

    Raises:
        ConfigError: there is none.
    """
    backend, command = config.rollout.backend, config.rollout.options.get("command")
    if (package := _PROGRAMS.get(backend)) is None:
        return []
    if command is None:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"rollout.backend={backend} starts {package}, which is not installed here; install it, or give "
                "rollout.options.command the program of the environment that has it"
            )
        return [("server's program", f"{package} of this environment")]
    program = command.split()[0] if isinstance(command, str) else command[0]
    if (path := shutil.which(program)) is None:
        raise ConfigError(f"rollout.options.command starts {program}, which is not there; give its whole path")
    return [("server's program", path)]


def check_given(rows: Iterable[Row], count: int) -> None:
    """Check that every row gives as many completions as its group takes from it.

    Raises:
        DataError: one does not.
    """
    for row in rows if count else ():
        given = row.get("given")
        if not isinstance(given, list | tuple) or len(given) < count or not all(isinstance(x, str) for x in given):
            raise DataError(
                f"batch.given={count} takes completions from every row, and one of {row['data_source']!r} has "
                f"given={given!r:.80}; give each a list of {count} texts or more, or lower batch.given"
            )
