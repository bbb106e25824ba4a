"""verl's settings as a recipe: `rl-train --from-verl FILE | overrides...`, for verl 0.6 to 0.9.

Reads the overrides of a command line, a YAML configuration, or a shell script that calls `verl.trainer.main_ppo`, which
is read and not run. Nothing is dropped in silence: every key becomes one of ours, needs none, or is told.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from rl_trainer import equivalents
from rl_trainer.algorithms import ADVANTAGES, POLICY_LOSSES
from rl_trainer.errors import ConfigError

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_REF = "actor_rollout_ref.ref"
_RANKS: dict[str, dict[str, str]] = {
    "fsdp": {"ulysses_sequence_parallel_size": "sp"},
    "megatron": {
        "megatron.tensor_model_parallel_size": "tp",
        "megatron.pipeline_model_parallel_size": "pp",
        "megatron.virtual_pipeline_model_parallel_size": "vpp",
        "megatron.expert_model_parallel_size": "ep",
        "megatron.context_parallel_size": "cp",
    },
    "torchtitan": {},
}
"""Keys of a layout below an actor's and a reference's own, by engine, and what they are in `engine.parallel`."""
_C = "algorithm.rollout_correction"
_OLD_NAMES = {
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.reward_manager": "reward.reward_manager.name",
    f"{_A}.optim.clip_grad": f"{_A}.grad_clip",
    f"{_A}.fsdp_config.ulysses_sequence_parallel_size": f"{_A}.ulysses_sequence_parallel_size",
    f"{_A}.optim.warmup_style": f"{_A}.optim.lr_scheduler_type",
    f"{_A}.fsdp_config.strategy": f"{_A}.strategy",
    "actor_rollout_ref.model.lora.rank": f"{_M}.lora_rank",
    "actor_rollout_ref.model.lora.alpha": f"{_M}.lora_alpha",
    "actor_rollout_ref.model.lora.target_modules": f"{_M}.target_modules",
}
"""Keys of one version, or of one engine, under the name that another has for the same."""
_OLD_PREFIXES = {
    "custom_reward_function.": "reward.custom_reward_function.",
    "reward_model.reward_kwargs.": "reward.reward_kwargs.",
}

_NEEDLESS: tuple[tuple[str, str], ...] = (
    ("*micro_batch_size*", "micro-batches are packed by tokens: engine.max_tokens_per_gpu"),
    ("*use_dynamic_bsz", "micro-batches are always packed by tokens"),
    ("*max_token_len_per_gpu", "one bound for every pass: engine.max_tokens_per_gpu"),
    ("*use_remove_padding", "rows are never padded"),
    ("*offload", "a colocated engine gives its memory back while the servers generate"),
    ("*free_cache_engine", "colocated servers give their memory back while the engine trains"),
    ("*multi_stage_wake_up", "colocated servers wake in stages"),
    ("*load_format", "servers are given the engine's weights before the first step"),
    ("*layered_summon", "weights are streamed tensor by tensor"),
    ("*use_shm", "weights go through shared memory: weights_transport"),
    ("*use_fused_kernels", "log-probs are computed without storing the logits"),
    ("*fused_kernel_options*", "log-probs are computed without storing the logits"),
    ("*entropy_from_logits_with_chunking", "log-probs are computed without storing the logits"),
    ("*entropy_checkpointing", "log-probs are computed without storing the logits"),
    ("*use_liger", "log-probs are computed without storing the logits"),
    ("*use_torch_compile", "compiling layers is engine.torch_compile, off unless it is set"),
    ("*use_mbridge", "Hugging Face weights are read and written as they are"),
    ("*vanilla_mbridge", "Hugging Face weights are read and written as they are"),
    ("*dist_checkpointing*", "the actor's weights in that format: engine.dist_checkpoint"),
    ("*calculate_log_probs", "servers always tell the log-probs of what they sampled"),
    ("*calculate_entropy", "the entropy is computed where entropy_coef asks for it"),
    ("*calculate_sum_pi_squared", "computed where the estimator reads it"),
    (f"{_R}.mode", "servers are asked asynchronously"),
    (f"{_R}.enable_prefix_caching", "the servers' default"),
    (f"{_R}.enable_chunked_prefill", "the servers' default"),
    (f"{_R}.disable_log_stats", "the servers' default"),
    (f"{_R}.dtype", "servers compute in the engine's number format: rollout.dtype"),
    (f"{_R}.prompt_length", "data.max_prompt_tokens"),
    (f"{_R}.response_length", "rollout.max_new_tokens"),
    (f"{_R}.max_num_batched_tokens", "the servers' default; theirs to set in rollout.options.args"),
    (f"{_R}.do_sample", "rollout.temperature"),
    (f"{_R}.val_kwargs.do_sample", "rollout.eval_temperature"),
    (f"{_R}.multi_turn.enable", "agent.loop"),
    (f"{_M}.torch_dtype", "engine.precision"),
    (f"{_M}.trust_remote_code", "code of a model folder is never run"),
    ("data.trust_remote_code", "code of a model folder is never run"),
    ("*tokenizer_path", "the tokenizer of model.path"),
    ("data.return_*", "rows carry everything to the agent loops"),
    ("data.val_batch_size", "all held-out rows are scored at once"),
    ("data.filter_overlong_prompts*", "longer prompts are always left out, and counted"),
    ("data.dataloader_num_workers", "rows are read by the controller"),
    ("data.reward_fn_key", "rows say it in data_source"),
    ("data.image_patch_size", "the model's own image processor"),
    ("data.gen_batch_size", "as many prompts are drawn as groups are missing"),
    ("reward*.reward_manager*", "completions are scored one by one as they finish"),
    ("reward*.num_workers", "reward.num_processes, one unless it is set"),
    ("reward*.launch_reward_fn_async", "completions are scored as they finish"),
    ("reward*.use_reward_loop", "completions are scored as they finish"),
    ("reward*.max_resp_len", "rollout.max_new_tokens"),
    ("reward*.overlong_buffer_cfg.log", "its part of the reward is always in metrics.jsonl"),
    ("trainer.balance_batch", "rows are always dealt by their cost"),
    ("trainer.project_name", "an option of a tracker: tracking.trackers={wandb: {project: ...}}"),
    ("trainer.log_val_generations", "rl-sample shows samples; tracking.keep_samples=true keeps all of them"),
    ("trainer.validation_data_dir", "rl-eval --output writes them"),
    ("trainer.resume_mode", "go on with rl-train ... --resume"),
    ("trainer.del_local_ckpt_after_load", "nothing is copied to load a checkpoint"),
    ("trainer.use_legacy_worker_impl", "there is one implementation"),
    ("trainer.use_v1", "there is one loop"),
    ("trainer.device", "the engine takes the GPUs that are there"),
    ("transfer_queue.*", "samples always go through rl-tq"),
    ("ray_kwargs.*", "a run starts its own Ray, or joins RAY_ADDRESS"),
    ("*nccl_timeout", "every wait has timeout_s"),
    ("global_profiler.*", "rl-train --profile writes trace.json"),
    ("*profiler*", "rl-train --profile writes trace.json"),
    ("*checkpoint.save_contents", "a checkpoint holds everything that a run goes on with"),
    ("*checkpoint.load_contents", "a checkpoint holds everything that a run goes on with"),
    ("actor_rollout_ref.ref.*", "the reference is laid out as the actor is, unless its layout is another"),
    ("trainer.max_critic_ckpt_to_keep", "a checkpoint holds actor and critic"),
    ("*update_weights_bucket_megabytes", "an option of weights_transport's address"),
    ("*rollout_n", "batch.group_size"),
    ("*loss_scale_factor", "seq-mean-token-sum-norm divides by rollout.max_new_tokens"),
    ("*_target_", "a name of a class of verl's"),
)
"""(pattern of keys, what makes them needless here), the first that fits."""


@dataclass(slots=True)
class Conversion:
    """A recipe, and what did not become part of it."""

    recipe: dict[str, Any] = field(default_factory=dict)
    """Our configuration, as a recipe file holds it."""
    missing: dict[str, str] = field(default_factory=dict)
    """By verl's key: what has no equivalent here."""
    ignored: dict[str, str] = field(default_factory=dict)
    """By verl's key: what verl itself would not have looked at, and why."""
    needless: dict[str, str] = field(default_factory=dict)
    """By verl's key: what needs no setting here, and why."""

    def text(self) -> str:
        """The recipe as YAML, the rest as comments above it."""
        lines = ["# Made from verl's settings by rl-train --from-verl."]
        for title, notes in (
            ("No equivalent here", self.missing),
            ("Ignored by verl too", self.ignored),
            ("Nothing to set here", self.needless),
        ):
            if notes:
                lines += ["#", f"# {title}:", *(f"#   {key}: {why}" for key, why in notes.items())]
        return "\n".join([*lines, yaml.safe_dump(self.recipe, sort_keys=False, width=110)])


def convert(arguments: Sequence[str]) -> Conversion:
    """The recipe that verl's settings come to.

    Args:
        arguments: Overrides of a command line (`key=value`, `+key=value`, `--config-name=...`), or first a .yaml or
            .sh file, and then overrides.

    Raises:
        ConfigError: a file is not there or calls no `main_ppo`, an override is none, or a value is out of range.
    """
    settings: dict[str, Any] = {}
    for argument in arguments:
        if argument.endswith((".yaml", ".yml")) and "=" not in argument:
            settings |= _flat(_yaml(Path(argument)))
        elif argument.endswith(".sh") and "=" not in argument:
            settings |= _overrides(_words_of_script(Path(argument)))
        else:
            settings |= _overrides([argument])
    return _Converter(_resolved(settings)).convert()


def _yaml(file: Path) -> Mapping[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--from-verl {file} cannot be read: {error}") from error
    if not isinstance(tree, Mapping):
        raise ConfigError(f"--from-verl {file} must hold verl's configuration, a mapping of keys")
    return tree


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        elif key not in ("_target_", "defaults", "hydra"):
            found[f"{prefix}{key}"] = value
    return found


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        key, mark, value = word.partition("=")
        if word.startswith("--config-path"):
            continue
        if not mark:
            raise ConfigError(
                f"--from-verl: {word!r} is neither key=value nor a .yaml or .sh file; give verl's overrides as they are"
            )
        found[key.lstrip("+~")] = _value(value)
    return found


def _value(text: str) -> Any:
    """As Hydra reads it: YAML, with numbers such as 1e-6."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if value == "None":
        return None
    if isinstance(value, str):
        try:
            return float(value) if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value) else value
        except ValueError:
            return value
    return value


_REFERENCE = re.compile(r"^\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^}]*))?\}$")


def _resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """With what a whole configuration takes from its other keys; a relative one is left out."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        for _ in range(8):
            match = _REFERENCE.match(value) if isinstance(value, str) else None
            if match is None:
                break
            value = settings.get(match[1], _value(match[2]) if match[2] else None)
        if value != "???" and not (isinstance(value, str) and "${" in value):
            found[key] = value
    return found


def _words_of_script(file: Path) -> list[str]:
    """Overrides of the call of verl in a shell script, with the script's own variables; nothing is run."""
    try:
        text = file.read_text().replace("\\\n", " ")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--from-verl {file} cannot be read: {error}") from error
    variables = {"HOME": str(Path.home())}
    for line in _whole_lines(text):
        assignment = re.match(r"^\s*(?:export\s+)?(\w+)=(.*)$", line, re.DOTALL)
        if assignment is not None and "main_ppo" not in line:
            words = _split(_expanded(assignment[2], variables))
            variables[assignment[1]] = words[0] if words else ""
        elif "verl.trainer.main_ppo" in line or "main_ppo.py" in line:
            words = _split(_expanded(line, variables))
            at = next(i for i, word in enumerate(words) if "main_ppo" in word and "=" not in word)
            kept = [word for word in words[at + 1 :] if "=" in word and re.match(r"^(\+{0,2}|~|--)[A-Za-z]", word)]
            if kept:
                return kept
    raise ConfigError(f"--from-verl {file} calls no verl.trainer.main_ppo with settings; give its overrides instead")


def _whole_lines(text: str) -> list[str]:
    """Lines, each to the end of the quotes that it opens."""
    lines, held = list[str](), ""
    for line in text.splitlines():
        held = f"{held}\n{line}" if held else line
        if held.lstrip().startswith("#"):
            held = ""
        elif held.count('"') % 2 == 0:
            lines.append(held)
            held = ""
    return lines


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()


_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    def value_of(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        if name in variables:
            return variables[name]
        return (default or "").strip('"') if default is not None else f"${name}"

    text = _VARIABLE.sub(value_of, text)
    text = re.sub(r"\$\([^()]*\)", "", text)  # a command, which is not run
    sums = re.compile(r"\$\(\(([\w\s+*/()-]*)\)\)")
    while (match := sums.search(text)) is not None:
        text = text[: match.start()] + _sum(match[1], variables) + text[match.end() :]
    return text


def _sum(expression: str, variables: Mapping[str, str]) -> str:
    """Integer arithmetic of numbers and variables, as in $((a + b))."""
    tokens = re.findall(r"\d+|\w+|[-+*/()]", expression)
    words = [variables.get(token, token) for token in tokens]
    if not all(re.fullmatch(r"\d+|[-+*/()]", word) for word in words):
        return expression

    def term(at: int) -> tuple[int, int]:
        value, at = factor(at)
        while at < len(words) and words[at] in "*/":
            other, after = factor(at + 1)
            value, at = (value * other if words[at] == "*" else value // other), after
        return value, at

    def factor(at: int) -> tuple[int, int]:
        if words[at] == "(":
            value, at = whole(at + 1)
            return value, at + 1
        return int(words[at]), at + 1

    def whole(at: int) -> tuple[int, int]:
        value, at = term(at)
        while at < len(words) and words[at] in "+-":
            other, after = term(at + 1)
            value, at = (value + other if words[at] == "+" else value - other), after
        return value, at

    try:
        return str(whole(0)[0])
    except (IndexError, ValueError, ZeroDivisionError):
        return expression


class _Converter:
    """Asks for verl's keys one by one; what nobody asked for at the end is told."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._given: dict[str, str] = {}
        self._settings: dict[str, Any] = {}
        for key, value in settings.items():
            name = _OLD_NAMES.get(key, key)
            for old, new in _OLD_PREFIXES.items():
                name = new + name.removeprefix(old) if name.startswith(old) else name
            self._settings[name], self._given[name] = value, key
        self._asked: set[str] = set()
        self._out = Conversion()

    def convert(self) -> Conversion:
        for section in (
            self._run, self._data, self._batch, self._model, self._algorithm, self._loss, self._kl, self._correction,
            self._optimizer, self._engine, self._rollout, self._agent, self._reward, self._critic, self._teacher,
            self._pipeline, self._offload,
        ):  # fmt: skip
            section()
        self._rest()
        return self._out

    def _get(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        value = self._settings.get(key)
        return default if value is None else value

    def _number(self, key: str, default: float) -> Any:
        value = self._get(key, default)
        try:
            number = float(value)
        except (TypeError, ValueError):
            self._miss(key, f"{value!r} is no number; set it by hand")
            return default
        return int(number) if number.is_integer() and "e" not in str(value).lower() else number

    def _is_set(self, key: str) -> bool:
        return self._settings.get(key) is not None

    def _set(self, key: str, value: Any) -> None:
        tree: dict[str, Any] = self._out.recipe
        *parents, last = key.split(".")
        for parent in parents:
            tree = tree.setdefault(parent, {})
        tree[last] = value

    def _take(self, key: str, ours: str) -> None:
        """Carry a value over as it is, if it is given."""
        if (value := self._get(key)) is not None:
            self._set(ours, value)

    def _miss(self, key: str, why: str) -> None:
        self._asked.add(key)
        self._out.missing[self._given.get(key, key)] = why

    def _ignore(self, key: str, why: str) -> None:
        self._asked.add(key)
        if self._is_set(key):
            self._out.ignored[self._given.get(key, key)] = why

    def _run(self) -> None:
        self._set("name", str(self._get("trainer.experiment_name", "from_verl")))
        self._take("data.seed", "seed")
        for key, ours in (("trainer.test_freq", "eval_every"), ("trainer.save_freq", "save_every")):
            self._set(ours, max(int(self._number(key, -1)), 0))
        self._take("trainer.default_local_dir", "output_dir")
        self._take("trainer.resume_from_path", "resume_from")
        if (kept := int(self._number("trainer.max_actor_ckpt_to_keep", 0))) > 0:
            self._set("keep_checkpoints", kept)
        if self._get("trainer.val_before_train", True) is False:
            self._miss("trainer.val_before_train", "the start policy is always evaluated once")
        if self._get("trainer.rollout_data_dir"):
            self._set("tracking.keep_samples", True)
        loggers = self._get("trainer.logger", ["console", "wandb"])
        loggers = _value(loggers) if isinstance(loggers, str) else loggers
        loggers = [loggers] if isinstance(loggers, str) else list(loggers)
        known = [name for name in loggers if name in ("console", "wandb", "tensorboard", "trackio")]
        if lost := [str(name) for name in loggers if name not in known]:
            self._miss(
                "trainer.logger", f"no tracker {', '.join(lost)}; there are console, tensorboard, trackio, wandb"
            )
        project = self._get("trainer.project_name", "verl_examples")
        self._set(
            "tracking.trackers", {n: {"project": project} if n == "wandb" else {} for n in known} or {"console": {}}
        )

    def _data(self) -> None:
        for key, ours in (("data.train_files", "data.path"), ("data.val_files", "data.eval_path")):
            files = self._get(key)
            files = [files] if isinstance(files, str) else list(files or [])
            if files:
                self._set(ours, _path(files[0]))
            if len(files) > 1 and ours == "data.path":
                self._out.recipe["data"] = {
                    "mixture": {Path(str(f)).parent.name or f"part{i}": {"path": _path(f)} for i, f in enumerate(files)}
                }
                self._miss(
                    key, "data.mixture draws evenly from its parts; verl joins the files: set weights to their rows"
                )
            elif len(files) > 1 or (files and "mixture" in self._out.recipe.get("data", {})):
                self._out.recipe["data"].pop("eval_path", None)
                self._miss(key, "parts of data.mixture hold out test.* of their own folder, or their last rows")
        self._set("data.max_prompt_tokens", self._number("data.max_prompt_length", 512))
        if self._get("data.shuffle", True) is False:
            self._miss("data.shuffle", "rows are drawn in a seeded order, shuffled every epoch")
        if self._get("data.truncation", "error") in ("left", "right", "middle"):
            self._miss("data.truncation", "longer prompts are left out and counted, never cut")
        for key, usual in (("data.prompt_key", "prompt"), ("data.image_key", "images"), ("data.video_key", "videos")):
            if self._get(key, usual) != usual:
                self._miss(key, f"rows have {usual!r}; rename the column")
        if path := self._get("data.custom_cls.path"):
            self._get("data.custom_cls.name")
            self._miss("data.custom_cls.path", f"a Dataset class; give rows by a function: data.format={path}:FUNCTION")
        if int(self._number("data.train_max_samples", -1)) > 0:
            self._miss("data.train_max_samples", "shorten the file")
        if (size := int(self._number("data.val_max_samples", -1))) > 0:
            self._set("data.eval_size", size)

    def _batch(self) -> None:
        batch, group = self._number("data.train_batch_size", 1024), self._number(f"{_R}.n", 1)
        mini = self._number(f"{_A}.ppo_mini_batch_size", 256)
        if batch % mini:
            mini = next(size for size in range(min(batch, mini), 0, -1) if batch % size == 0)
            self._miss(f"{_A}.ppo_mini_batch_size", f"must divide the batch of {batch}; {mini} is the nearest below")
        self._out.recipe["batch"] = {"batch_size": batch, "group_size": group, "mini_batch_size": mini}
        self._steps(batch)
        if self._number(f"{_A}.ppo_epochs", 1) != 1:
            self._miss(
                f"{_A}.ppo_epochs", "each mini-batch is learned from once; batch.replay learns from groups again"
            )
        if self._get("algorithm.filter_groups.enable", False):
            self._set("batch.dynamic_sampling", True)
            if times := self._number("algorithm.filter_groups.max_num_gen_batches", 0):
                self._set("batch.max_refills", times)
            if (metric := self._get("algorithm.filter_groups.metric", "reward")) not in ("reward", "seq_reward", "acc"):
                self._miss("algorithm.filter_groups.metric", f"groups are compared by their rewards, not by {metric}")
        if rate := self._number(f"{_R}.over_sample_rate", 0):
            self._set("batch.over_sampling", rate)

    def _steps(self, batch: int) -> None:
        epochs = self._number("trainer.total_epochs", 30)
        if self._is_set("trainer.total_training_steps"):
            self._set("steps", int(self._number("trainer.total_training_steps", 100)))
            self._ignore("trainer.total_epochs", "trainer.total_training_steps is set")
            return
        rows = _num_rows(self._get("data.train_files"))
        if rows is None:
            self._set("epochs", int(epochs))  # a run counts them; verl drops the last rows of each, ours does not
        else:
            self._set("steps", max(epochs * (rows // batch), 1))

    def _model(self) -> None:
        if path := self._get(f"{_M}.path"):
            self._set("model.path", _path(path))
        self._set("engine.activation_checkpointing", bool(self._get(f"{_M}.enable_gradient_checkpointing", True)))
        if rank := int(self._number(f"{_M}.lora_rank", 0)):
            lora: dict[str, Any] = {"rank": rank, "alpha": self._number(f"{_M}.lora_alpha", 16)}
            modules = self._get(f"{_M}.target_modules", "all-linear")
            if modules != "all-linear":
                lora["target_modules"] = [modules] if isinstance(modules, str) else list(modules)
            self._set("engine.lora", lora)
        else:
            for name in ("lora_alpha", "target_modules"):
                self._ignore(f"{_M}.{name}", "lora_rank is 0")

    def _algorithm(self) -> None:
        name = str(self._get("algorithm.adv_estimator", "gae"))
        if name not in equivalents.ADVANTAGES:
            self._miss("algorithm.adv_estimator", f"no estimator {name}; there are {', '.join(sorted(ADVANTAGES))}")
        ours = equivalents.ADVANTAGES.get(name, "grpo")
        if ours == "grpo" and self._get("algorithm.norm_adv_by_std_in_grpo", True) is False:
            ours = "dr_grpo"
        elif ours != "grpo":
            self._ignore("algorithm.norm_adv_by_std_in_grpo", f"adv_estimator={name} does not read it")
        self._set("algorithm.advantage", ours)
        for key in ("gamma", "lam"):
            value = self._number(f"algorithm.{key}", 1.0)
            if key in ADVANTAGES[ours].keys:
                self._set(f"algorithm.{key}", float(value))
            else:
                self._ignore(f"algorithm.{key}", f"adv_estimator={name} does not read it")
        if ADVANTAGES[ours].compares_group and self._out.recipe["batch"]["group_size"] < 2:
            self._set("batch.group_size", 2)
            self._miss(f"{_R}.n", f"{ours} compares completions of one prompt, and refuses groups of one; 2 is set")

    def _loss(self) -> None:
        name = str(self._get(f"{_A}.policy_loss.loss_mode", "vanilla"))
        if name == "bypass_mode":
            name = "gpg" if self._get(f"{_C}.loss_type", "ppo_clip") == "reinforce" else "vanilla"
        elif self._get(f"{_C}.bypass_mode", False) and self._get(f"{_C}.loss_type", "ppo_clip") == "reinforce":
            name = "gpg"
        if name not in equivalents.LOSSES:
            self._miss(f"{_A}.policy_loss.loss_mode", f"no loss {name}; there are {', '.join(POLICY_LOSSES)}")
        loss = equivalents.LOSSES.get(name, "ppo")
        self._set("algorithm.loss", loss)
        usual = {"clip_low": 0.2, "clip_high": 0.2, "clip_dual": 3.0, "ratio_max": 3.0, "tau_pos": 1.0, "tau_neg": 1.05}
        usual |= {"dro_beta": 0.1, "low": 1.0, "high": 5.0, "share": 2e-4, "kl_coef": 0.1}
        keys = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high", "clip_dual": "clip_ratio_c"}
        keys |= {"ratio_max": "clip_ratio_c", "tau_pos": "tau_pos", "tau_neg": "tau_neg"}
        keys |= {"dro_beta": "policy_loss.dro_beta", "kl_coef": "policy_loss.ppo_kl_coef"}
        keys |= {"low": "policy_loss.clip_cov_lb", "high": "policy_loss.clip_cov_ub"}
        keys["share"] = "policy_loss.kl_cov_ratio" if loss == "kl_cov" else "policy_loss.clip_cov_ratio"
        options = [o for o in POLICY_LOSSES[loss].options if o != "clip_dual" or loss == "ppo"]
        if options:
            self._set("algorithm.loss_options", {o: float(self._number(f"{_A}.{keys[o]}", usual[o])) for o in options})
        read = {keys[option] for option in options}
        for key in sorted({*keys.values(), "policy_loss.kl_cov_ratio"} - read):
            self._ignore(f"{_A}.{key}", f"loss_mode={name} does not read it")
        if "clip_low" in options:
            self._ignore(f"{_A}.clip_ratio", "clip_ratio_low and clip_ratio_high, 0.2 unless set, stand above it")
        else:
            self._ignore(f"{_A}.clip_ratio", f"loss_mode={name} does not read it")
        aggregation = self._get(f"{_A}.loss_agg_mode", "token-mean")
        if loss in ("sapo", "gmpo"):
            aggregation = "seq-mean-token-mean"
            self._ignore(f"{_A}.loss_agg_mode", f"loss_mode={name} always takes the mean over sequences")
        self._set("algorithm.aggregation", aggregation)
        if coef := float(self._number(f"{_A}.entropy_coeff", 0)):
            self._set("algorithm.entropy_coef", coef)

    def _kl(self) -> None:
        names = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
        names |= {"low_var_kl+": "k3+", "kl+": "k1+", "k1+": "k1+", "k3+": "k3+"}
        in_loss = bool(self._get(f"{_A}.use_kl_loss", False))
        in_reward = bool(self._get("algorithm.use_kl_in_reward", False))
        coefs = (
            float(self._number(f"{_A}.kl_loss_coef", 0.001)),
            float(self._number("algorithm.kl_ctrl.kl_coef", 0.001)),
        )
        kinds = self._get(f"{_A}.kl_loss_type", "low_var_kl"), self._get("algorithm.kl_penalty", "kl")
        if in_loss and in_reward and all(coefs):
            self._miss("algorithm.use_kl_in_reward", "one KL term: that of the loss is kept")
            in_reward = False
        if not in_loss:
            for key in ("kl_loss_coef", "kl_loss_type"):
                self._ignore(f"{_A}.{key}", "use_kl_loss is false")
        if not in_reward:
            for key in ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", "algorithm.kl_ctrl.type"):
                self._ignore(key, "use_kl_in_reward is false")
        coef, kind = (coefs[0], kinds[0]) if in_loss else (coefs[1], kinds[1])
        if not (in_loss or in_reward) or coef == 0:
            return
        key = f"{_A}.kl_loss_type" if in_loss else "algorithm.kl_penalty"
        if kind not in names:
            self._miss(key, f"no estimator {kind}; k3 is set")
        self._set("algorithm.kl_coef", coef)
        self._set("algorithm.kl_estimator", names.get(str(kind), "k3"))
        if in_reward and not in_loss:
            self._set("algorithm.kl_in_reward", True)
            if self._get("algorithm.kl_ctrl.type", "fixed") == "adaptive":
                self._set("algorithm.kl_target", float(self._number("algorithm.kl_ctrl.target_kl", 0.1)))
                self._miss("algorithm.kl_ctrl.horizon", "the coefficient moves by a tenth of the error per batch")

    def _correction(self) -> None:
        bypass, rejection = bool(self._get(f"{_C}.bypass_mode", False)), self._get(f"{_C}.rollout_rs")
        if bypass:
            self._set("algorithm.old_logprobs", "rollout")
        level = self._get(f"{_C}.rollout_is")
        threshold = str(self._get(f"{_C}.rollout_is_threshold", 2.0))
        if level in ("token", "sequence"):
            has_ratio = POLICY_LOSSES[self._out.recipe["algorithm"]["loss"]].has_ratio
            if bypass and has_ratio:
                self._ignore(f"{_C}.rollout_is", "in bypass mode the loss's own ratio is to the sampler already")
            else:
                kind = "icepop" if "_" in threshold else "tis"
                self._set("algorithm.correction", kind if level == "token" else f"sequence_{kind}")
                low, high = threshold.split("_") if "_" in threshold else ("0", threshold)
                self._set("algorithm.correction_bounds", [float(low), float(high)])
        else:
            self._ignore(f"{_C}.rollout_is_threshold", "rollout_is is off")
        if self._get(f"{_C}.rollout_is_batch_normalize", False):
            self._miss(f"{_C}.rollout_is_batch_normalize", "weights are not divided by their mean")
        if not rejection or rejection == "null":
            self._ignore(f"{_C}.rollout_rs_threshold", "rollout_rs is off")
            return
        schemes = [each.strip() for each in str(rejection).split(",")]
        bounds = str(self._get(f"{_C}.rollout_rs_threshold", "2.0")).split(",")
        if len(schemes) > 1:
            self._miss(f"{_C}.rollout_rs", f"one test a run: {schemes[0]} is kept, {', '.join(schemes[1:])} is not")
        low, _, high = bounds[0].strip().rpartition("_")
        scheme = schemes[0].replace("seq_sum_", "sequence_").replace("seq_", "sequence_")
        self._set("algorithm.rejection", scheme)
        upper = float(high)
        if scheme.endswith("k1"):  # verl bounds rollout / engine, ours is engine / rollout
            self._set("algorithm.rejection_bounds", [1 / upper, 1 / float(low) if low else upper])
        else:
            self._set("algorithm.rejection_bounds", [0.0, upper])

    def _optimizer(self) -> None:
        o, recipe = f"{_A}.optim", self._out.recipe
        optimizer: dict[str, Any] = {"lr": float(self._number(f"{o}.lr", 1e-6))}
        optimizer["weight_decay"] = float(self._number(f"{o}.weight_decay", 0.01))
        if betas := self._get(f"{o}.betas"):
            optimizer["betas"] = [float(beta) for beta in betas]
        optimizer["max_grad_norm"] = float(self._number(f"{_A}.grad_clip", 1.0))
        steps, per_step = recipe.get("steps", 0), recipe["batch"]["batch_size"] // recipe["batch"]["mini_batch_size"]
        warmup = self._number(f"{o}.lr_warmup_steps", -1)
        ratio = float(self._number(f"{o}.lr_warmup_steps_ratio", 0.0))
        if warmup > 0:
            self._ignore(f"{o}.lr_warmup_steps_ratio", "lr_warmup_steps is set")
        elif not steps and ratio:
            self._miss(
                f"{o}.lr_warmup_steps_ratio", f"set engine.optimizer.warmup_steps to {ratio:g} x steps x {per_step}"
            )
        warmup = int(warmup) if warmup > 0 else round(ratio * steps)
        if warmup:
            optimizer["warmup_steps"] = warmup * per_step  # verl counts training steps, ours are the optimizer's
        if self._get(f"{o}.lr_scheduler_type", "constant") == "cosine":
            self._set("engine.lr_schedule", "cosine")
            if least := float(self._number(f"{o}.min_lr_ratio", 0.0)):
                self._set("engine.min_lr_ratio", least)
        kind = str(self._get(f"{o}.optimizer", "AdamW")).lower()
        if "muon" in kind:
            optimizer["kind"] = "muon"
        elif kind not in ("adamw", "adam"):
            self._miss(f"{o}.optimizer", f"no optimizer {kind}; there are adamw and muon; adamw is set")
        self._set("engine.optimizer", optimizer)

    def _engine(self) -> None:
        megatron = any(key.startswith(f"{_A}.megatron.") for key in self._settings)
        megatron |= "megatron" in str(self._get("--config-name", "")) or "megatron" in str(
            self._get("model_engine", "")
        )
        strategy = str(self._get(f"{_A}.strategy", "megatron" if megatron else "fsdp"))
        backend = equivalents.VALUES["engine.backend"].get(strategy, strategy)
        if backend not in ("fsdp", "megatron", "torchtitan"):
            self._miss(f"{_A}.strategy", f"no engine {strategy}; there are fsdp, megatron, torchtitan; fsdp is set")
            backend = "fsdp"
        world = int(self._number("trainer.n_gpus_per_node", 8)) * int(self._number("trainer.nnodes", 1))
        self._set("engine.backend", backend)
        self._set("engine.world_size", world)
        rows = self._out.recipe["batch"]["mini_batch_size"] * self._out.recipe["batch"]["group_size"]
        if rows % world:
            self._miss("trainer.n_gpus_per_node", f"a mini-batch of {rows} completions must divide over {world} GPUs")
        dtype = str(self._get(f"{_A}.fsdp_config.dtype", "bfloat16"))
        self._set("engine.precision", {"bf16": "bfloat16", "fp32": "float32"}.get(dtype, dtype))
        layout: dict[str, int] = {}
        for of, names in _RANKS.items():
            for name, ours in names.items():
                self._layout(layout, f"{_A}.{name}", ours, is_read=of == backend)
        size = int(self._number(f"{_A}.fsdp_config.fsdp_size", -1))
        if backend == "fsdp" and 0 < size < world:
            layout["dp_replicate"] = world // size
        if self._number(f"{_A}.megatron.expert_tensor_parallel_size", 1) not in (1, layout.get("tp", 1)):
            self._miss(f"{_A}.megatron.expert_tensor_parallel_size", "experts are not cut themselves")
        if layout:
            self._set("engine.parallel", layout)
        if backend == "megatron" and self._get(f"{_A}.megatron.use_dist_checkpointing", False):
            self._set("engine.dist_checkpoint", _path(self._get(f"{_A}.megatron.dist_checkpointing_path", "")))
        if self._get(f"{_A}.fsdp_config.offload_policy", False):
            self._set("engine.cpu_offload", True)
        if self._get(f"{_M}.enable_activation_offload", False):
            self._set("engine.activation_offload", True)
        self._reference(backend, layout)
        mode = self._get(f"{_A}.router_replay.mode", "disabled")
        if mode == "R3" or self._get(f"{_R}.enable_rollout_routing_replay", False):
            self._set("engine.router_replay", True)
        elif mode != "disabled":
            self._miss(
                f"{_A}.router_replay.mode", f"{mode} replays the engine's own experts; engine.router_replay is R3"
            )
        longest = self._out.recipe["data"]["max_prompt_tokens"] + self._number("data.max_response_length", 512)
        if self._get(f"{_A}.use_dynamic_bsz", False):
            tokens = int(self._number(f"{_A}.ppo_max_token_len_per_gpu", 16384))
        else:
            tokens = longest * int(self._number(f"{_A}.ppo_micro_batch_size_per_gpu", 1))
            self._ignore(f"{_A}.ppo_max_token_len_per_gpu", "use_dynamic_bsz is false")
        self._set("engine.max_tokens_per_gpu", max(tokens, longest))

    def _reference(self, backend: str, layout: Mapping[str, int]) -> None:
        """The reference's own layout, where it has one that is not the actor's."""
        own = dict(layout)
        for name, ours in _RANKS[backend].items():
            if (size := int(self._number(f"{_REF}.{name}", layout.get(ours, 1)))) > 1:
                own[ours] = size
            else:
                own.pop(ours, None)
        if own != layout and self._out.recipe["algorithm"].get("kl_coef"):
            self._set("placement.reference.engine.parallel", own)

    def _layout(self, layout: dict[str, int], key: str, ours: str, *, is_read: bool) -> None:
        size = int(self._number(key, 1))
        if not is_read:
            self._ignore(key, "the engine is another one")
        elif size > 1:
            layout[ours] = size

    def _rollout(self) -> None:
        name = str(self._get(f"{_R}.name", "vllm"))
        backend = equivalents.VALUES["rollout.backend"].get(name, name)
        if backend not in ("vllm", "sglang", "tensorrt_llm", "embedded"):
            self._miss(f"{_R}.name", f"no server {name}; there are embedded, sglang, tensorrt_llm, vllm; vllm is set")
            backend = "vllm"
        self._set("rollout.backend", backend)
        response = self._number("data.max_response_length", 512)
        longest = self._out.recipe["data"]["max_prompt_tokens"] + response
        self._set("rollout.max_new_tokens", response)
        self._set("rollout.max_model_len", max(int(self._number(f"{_R}.max_model_len", 0)), longest))
        self._set("rollout.max_num_seqs", int(self._number(f"{_R}.max_num_seqs", 256)))
        self._set("rollout.temperature", float(self._number(f"{_R}.temperature", 1.0)))
        if (top_p := float(self._number(f"{_R}.top_p", 1.0))) < 1:
            self._set("rollout.top_p", top_p)
            self._set("algorithm.old_logprobs", "rollout")
            self._miss(f"{_R}.top_p", "the engine scores the whole distribution: algorithm.old_logprobs=rollout is set")
        if int(self._number(f"{_R}.top_k", -1)) > 0:
            self._miss(f"{_R}.top_k", "tokens are drawn from all of the vocabulary that top_p leaves")
        if self._get(f"{_R}.val_kwargs.do_sample", False):
            self._set("rollout.eval_temperature", float(self._number(f"{_R}.val_kwargs.temperature", 0)))
        else:
            self._ignore(f"{_R}.val_kwargs.temperature", "val_kwargs.do_sample is false")
        for key in ("top_p", "top_k"):
            if float(self._number(f"{_R}.val_kwargs.{key}", {"top_k": -1}.get(key, 1))) not in (1, -1):
                self._miss(f"{_R}.val_kwargs.{key}", "held-out completions are drawn from the whole distribution")
        if (count := int(self._number(f"{_R}.val_kwargs.n", 1))) > 1:
            if self._out.recipe["rollout"].get("eval_temperature"):
                self._set("rollout.eval_samples", count)
            else:
                self._miss(f"{_R}.val_kwargs.n", "greedy completions of a row are all the same")
        self._replicas(backend)

    def _replicas(self, backend: str) -> None:
        world = int(self._out.recipe["engine"]["world_size"])
        names = {"tp": "tensor_model", "pp": "pipeline_model", "dp": "data", "ep": "expert"}
        usual = {"tp": 2}
        layout = {o: int(self._number(f"{_R}.{n}_parallel_size", usual.get(o, 1))) for o, n in names.items()}
        if backend == "embedded":
            layout = dict.fromkeys(layout, 1)
        ranks = layout["tp"] * layout["pp"] * layout["dp"]
        if self._get("actor_rollout_ref.hybrid_engine", True) and self._mode() != "separate_async":
            if world % ranks:
                self._miss(f"{_R}.tensor_model_parallel_size", f"{world} GPUs are no multiple of {ranks}; 1 is set")
                layout, ranks = dict.fromkeys(layout, 1), 1
            self._set("rollout.num_replicas", world // ranks)
            self._set("rollout.colocated", True)
        else:
            own = int(self._number(f"{_R}.nnodes", 0)) * int(self._number(f"{_R}.n_gpus_per_node", 8))
            self._set("rollout.num_replicas", max(own // ranks, 1))
            self._set("rollout.colocated", False)
        if layout := {name: size for name, size in layout.items() if size > 1}:
            self._set("rollout.parallel", layout)
        share, eager = float(self._number(f"{_R}.gpu_memory_utilization", 0.5)), self._get(f"{_R}.enforce_eager", False)
        flags = {
            "vllm": [
                "--enable-sleep-mode",
                "--gpu-memory-utilization",
                f"{share:g}",
                *["--enforce-eager"] * bool(eager),
            ],
            "sglang": ["--enable-memory-saver", "--mem-fraction-static", f"{share:g}"],
        }
        if self._out.recipe.get("engine", {}).get("router_replay") and backend == "vllm":
            flags["vllm"].append("--enable-return-routed-experts")
        for engine in ("vllm", "sglang", "trtllm"):
            for key, value in self._settings.items():
                prefix = f"{_R}.engine_kwargs.{engine}."
                if key.startswith(prefix) and value is not None and engine == backend and value is not False:
                    flag = f"--{key.removeprefix(prefix).replace('_', '-')}"
                    flags[backend] += [flag] if value is True else [flag, str(value)]
                    self._asked.add(key)
                elif key.startswith(prefix) and engine != backend:
                    self._ignore(key, f"the server is {backend}")
        if backend in flags:
            self._set("rollout.options", {"args": flags[backend]})

    def _agent(self) -> None:
        loop = str(self._get(f"{_R}.agent.default_agent_loop", "single_turn_agent"))
        turns, tools = self._get(f"{_R}.multi_turn.max_assistant_turns"), self._get(f"{_R}.multi_turn.tool_config_path")
        tools = tools or self._get("data.tool_config_path")
        is_multi = loop == "tool_agent" or bool(tools) or self._get(f"{_R}.multi_turn.enable", False)
        if loop not in ("single_turn_agent", "tool_agent"):
            self._miss(f"{_R}.agent.default_agent_loop", f"{loop} is a class of verl's; give agent.loop=FILE.py:CLASS")
        if is_multi:
            options: dict[str, Any] = {"max_turns": int(turns or 8)}
            if self._is_set(f"{_R}.multi_turn.format"):
                options["parser"] = self._get(f"{_R}.multi_turn.format")
            if self._is_set(f"{_R}.multi_turn.max_tool_response_length"):
                options["max_tool_tokens"] = int(self._number(f"{_R}.multi_turn.max_tool_response_length", 256))
            options["max_completion_tokens"] = self._out.recipe["rollout"]["max_new_tokens"]
            self._set("agent.loop", "tool")
            self._set("agent.options", options)
            if tools:
                self._miss(
                    f"{_R}.multi_turn.tool_config_path",
                    "classes of verl's; make each a function in agent.options.tools",
                )
        else:
            for key in ("max_assistant_turns", "format", "max_tool_response_length", "max_parallel_calls"):
                self._ignore(f"{_R}.multi_turn.{key}", "there are no tools")
        if (workers := int(self._number(f"{_R}.agent.num_workers", 0))) > 0:
            self._set("agent.num_workers", workers)

    def _reward(self) -> None:
        if path := self._get("reward.custom_reward_function.path"):
            self._set("reward.path", f"{path}:{self._get('reward.custom_reward_function.name', 'compute_score')}")
        else:
            self._ignore("reward.custom_reward_function.name", "custom_reward_function.path is not set")
        for key in self._settings:
            if key.startswith("reward.custom_reward_function.reward_kwargs."):
                self._miss(key, "give the function its default, or wrap it")
        buffer = "reward.reward_kwargs.overlong_buffer_cfg"
        if self._get(f"{buffer}.enable", False):
            self._set("reward.overlong_buffer", int(self._number(f"{buffer}.len", 0)))
            if float(self._number(f"{buffer}.penalty_factor", 1.0)) != 1:
                self._miss(f"{buffer}.penalty_factor", "the longest completion loses 1")
        else:
            for key in ("len", "penalty_factor", "log"):
                self._ignore(f"{buffer}.{key}", "overlong_buffer_cfg.enable is false")
        if self._get("reward.reward_model.enable", False):
            path = _path(self._get("reward.reward_model.model_path", ""))
            self._set("reward.parts", {"model": {"kind": "classifier", "path": path}})
            self._out.recipe["reward"].pop("path", None)
            if self._get("reward.reward_model.enable_resource_pool", False):
                self._set("placement.reward.pool", "reward")
                gpus = int(self._number("reward.reward_model.n_gpus_per_node", 0)) * int(
                    self._number("reward.reward_model.nnodes", 0)
                )
                if gpus > 1:
                    self._miss("reward.reward_model.n_gpus_per_node", f"each model has one GPU, and not {gpus}")
        for key in self._settings:
            if key.startswith(("reward_model.", "reward.reward_model.")) and key not in self._asked:
                self._out.needless[self._given[key]] = "a reward model that the run serves shares the engine's GPUs"
                self._asked.add(key)

    def _critic(self) -> None:
        advantage = self._out.recipe["algorithm"]["advantage"]
        if "values" not in ADVANTAGES[advantage].needs:
            for key in [*self._settings]:
                if key.startswith("critic.") or key == "trainer.critic_warmup":
                    self._ignore(key, f"adv_estimator={self._get('algorithm.adv_estimator')} has no critic")
            return
        critic: dict[str, Any] = {"lr": float(self._number("critic.optim.lr", 1e-5))}
        if path := self._get("critic.model.path"):
            critic["path"] = _path(path)
        critic["clip"] = float(self._number("critic.cliprange_value", 0.5))
        if warmup := int(self._number("trainer.critic_warmup", 0)):
            critic["warmup_steps"] = warmup
        self._set("critic", critic)
        for key in self._settings:
            if key.startswith("critic.") and key not in self._asked:
                self._out.needless[self._given[key]] = "the critic's engine is laid out as the actor's"
                self._asked.add(key)

    def _teacher(self) -> None:
        d = "distillation"
        if not self._get(f"{d}.enabled", False):
            for key in [*self._settings]:
                if key.startswith(f"{d}."):
                    self._ignore(key, "distillation.enabled is false")
            return
        path = _path(self._get(f"{d}.teacher_models.teacher_model.model_path", ""))
        mode = str(self._get(f"{d}.distillation_loss.loss_mode", "k3"))
        coef = float(self._number(f"{d}.distillation_loss.distillation_loss_coef", 1.0))
        teacher: dict[str, Any] = {"path": path, "coef": coef}
        if "forward" in mode:
            teacher |= {"divergence": "forward", "num_candidates": int(self._number(f"{d}.distillation_loss.topk", 32))}
        self._set("teacher", teacher)
        if not self._get(f"{d}.distillation_loss.use_task_rewards", True):
            self._set("algorithm.loss", "distill")
            for key in ("loss_options", "correction", "correction_bounds", "rejection", "rejection_bounds"):
                self._out.recipe["algorithm"].pop(key, None)
            self._set("algorithm.advantage", "grpo")

    def _mode(self) -> str:
        return str(self._get("trainer.v1.trainer_mode", "sync"))

    def _pipeline(self) -> None:
        mode, threshold = self._mode(), self._get("async_training.staleness_threshold")
        if mode == "sync" and threshold is None:
            return
        if mode == "colocate_async":
            self._miss("trainer.v1.trainer_mode", "colocated servers generate between updates: pipeline=sync is kept")
            return
        self._set("pipeline", "fully_async")
        self._set("rollout.colocated", False)
        if threshold is not None:
            self._set("staleness", {"policy": "threshold_fraction", "max_staleness": float(threshold)})
        else:
            self._set("staleness.max_staleness", int(self._number("trainer.v1.sampler.max_off_policy_threshold", 8)))
        algorithm = self._out.recipe["algorithm"]
        if algorithm.get("old_logprobs") != "rollout" and "correction" not in algorithm:
            self._set("algorithm.old_logprobs", "rollout")
        args = self._out.recipe["rollout"].get("options", {}).get("args", [])
        for flag in ("--enable-sleep-mode", "--enable-memory-saver"):
            if flag in args:
                args.remove(flag)

    def _offload(self) -> None:
        """What verl offloads while servers generate: of use here where they have GPUs of their own."""
        keys = [f"{_A}.{engine}.optimizer_offload" for engine in ("fsdp_config", "megatron")]
        if not self._out.recipe["rollout"]["colocated"] and any(self._settings.get(key) for key in keys):
            self._asked.update(keys)
            self._set("engine.optimizer_offload", True)

    def _rest(self) -> None:
        """Tell what nobody asked for; what is off is not missed."""
        for key, value in self._settings.items():
            if key in self._asked or value in (None, False, "", -1) or value in ([], {}) or key.startswith("--"):
                continue
            why = next((why for pattern, why in _NEEDLESS if fnmatchcase(key, pattern)), None)
            if why is not None:
                self._out.needless[self._given[key]] = why
            elif "override_transformer_config" in key or "override_optimizer_config" in key:
                self._out.missing[self._given[key]] = "Megatron's own settings follow the model and engine.parallel"
            else:
                self._out.missing[self._given[key]] = "nothing here does that"


def _path(value: object) -> str:
    return str(Path(text).expanduser()) if (text := str(value)).startswith("~") else text


def _num_rows(files: Any) -> int | None:
    """Rows of parquet files that are here; None if one is not, or is of another kind."""
    try:
        from pyarrow import parquet

        files = [files] if isinstance(files, str) else list(files or [])
        return sum(parquet.read_metadata(Path(file).expanduser()).num_rows for file in files) if files else None
    except (ImportError, OSError):
        return None
