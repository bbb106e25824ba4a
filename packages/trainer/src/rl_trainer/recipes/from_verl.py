"""verl's settings as a recipe: `rl-train --from-verl SCRIPT.sh | FILE.yaml | overrides...`, for verl 0.6 to 0.9.

`equivalents.yaml` maps the keys; this is its interpreter, with the rules that compute with several keys.
Every word becomes a key, is listed with a reason, or is an error.
"""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass, field
from functools import partialmethod, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rl_agent.errors import SandboxError, ScriptError
from rl_agent.registry import create_script_reader
from rl_trainer.algorithms import ADVANTAGES, POLICY_LOSSES
from rl_trainer.config.hydra import OVERRIDE, compose, read_words, resolved
from rl_trainer.equivalents import tables
from rl_trainer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_agent.types import Launch

_PROJECTS = {"mlflow": "experiment", "swanlab": "project", "wandb": "project"}
"""Options of trackers that take verl's project, by name."""
_A, _R, _C = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
_TITLES = {"missing": "No equivalent here", "ignored": "Ignored by verl too", "needless": "Nothing to set here",
           "assumed": "Assumed when the script was read"}  # fmt: skip


@dataclass(slots=True)
class Conversion:
    """A recipe, and by verl's key the reason why it did not become part of it."""

    program: str = "rl-train"  # or rl-sft
    recipe: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    needless: dict[str, str] = field(default_factory=dict)
    assumed: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # by verl's key, as given; None for a deleted one
    entry: Mapping[str, Any] = field(default_factory=dict)  # verl's program in the table `entries`; empty for main_ppo

    def text(self) -> str:
        """The recipe as YAML, the rest as comments above it."""
        lines = [f"# Made from verl's settings by rl-train --from-verl, for {self.program}."]
        for name, title in _TITLES.items():
            notes = [f"#   {key}: {why}".replace("\n", " ") for key, why in getattr(self, name).items()]
            lines += ["#", f"# {title}:", *notes] if notes else []
        return "\n".join([*lines, yaml.safe_dump(self.recipe, sort_keys=False, width=110)])


def convert(arguments: Sequence[str]) -> Conversion:
    """Convert verl's settings to a recipe.

    Args:
        arguments: Overrides of a command line (`key=value`, `+key=value`, `--config-name=...`), or first a .yaml file
            or a script, whose arguments follow. `--launch=N` chooses one of several launches of a script.

    Raises:
        ConfigError: a file cannot be read or launches no trainer of verl's, or a word or value is not understood.
    """
    try:
        return _Converter(_read(arguments)).convert()
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"--from-verl: a value is not of its key's kind: {error}") from error


def _read(arguments: Sequence[str]) -> Conversion:
    """Read the settings of a command line."""
    chosen = next((word.partition("=")[2] for word in arguments if word.startswith("--launch=")), "")
    words, found, unknown = [word for word in arguments if not word.startswith("--launch=")], Conversion(), {}
    file, folders = Path(words[0] if words and "=" not in words[0] else ""), [Path.cwd()]
    if file.suffix in (".yaml", ".yml"):
        found.values |= compose(file, tables()["configs"], found.needless)
        words = words[1:]
    elif file.name and (file.suffix == ".sh" or file.exists()):
        given = [word for word in words[1:] if "=" in word and OVERRIDE.fullmatch(word)]
        launch, unknown = _launch(file, words[1:], chosen, found)
        folders = [Path(launch.folder), file.resolve().parent, Path(launch.folder, *launch.module.split(".")[:-1])]
        words = [*launch.arguments, *(word for word in given if word not in launch.arguments)]
    _check_known({word: "" for word in words if not OVERRIDE.fullmatch(word)}, unknown)
    given = found.values | read_words(words, folders, tables()["configs"], found)
    _check_known(given, unknown)
    engine = tables()["engines"].get(str(given.get("model_engine")), {})
    found.values = resolved(engine | found.entry.get("usual", {}) | given)
    return found


def _check_known(values: Mapping[str, Any], unknown: Mapping[str, str]) -> None:
    """Refuse what holds the output of a command that was not run."""
    for key, value in values.items():
        for number, command in unknown.items():
            if (marker := f"@unknown{number}@") in f"{key}={value}":
                said = f"{key.replace(marker, '...')}: value unknown: $({command})"
                raise ConfigError(f"--from-verl: {said}; give it after the script")


def _launch(file: Path, arguments: Sequence[str], chosen: str, found: Conversion) -> tuple[Launch, Mapping[str, str]]:
    """Launch of a script, or of a folder that a user's own run recorded, and the commands that were not run."""
    try:
        reader = create_script_reader()
        read = reader.recorded(file) if file.is_dir() else reader.read(file, arguments)
    except (ScriptError, SandboxError) as error:
        raise ConfigError(f"--from-verl {file}{': ' if file.is_dir() else ' '}{error}") from error
    named = {(each.module, each.arguments): (each, row) for each in read.launches
             for row in reversed(tables()["entries"]) if fnmatch.fnmatchcase(each.module, row["module"])}  # fmt: skip
    ours = [each for each in named.values() if "refused" not in each[1]] or [*named.values()]
    if not ours:
        said = "; ".join(read.complaints)
        said = f"; bash said: {said}; its variables can be set before rl-train" if said else ""
        ran = "".join(f"; it runs {command[:200]}" for command in dict.fromkeys(read.unknown.values()))
        raise ConfigError(f"--from-verl {file} launches no trainer of verl's{said}{ran}; give its overrides instead")
    numbered = {str(i): each for i, each in enumerate(ours, 1)}
    if (chosen or (len(ours) > 1)) and chosen not in numbered:
        lines = [f"--launch={i}: {one.module} {' '.join(one.arguments)[:200]}" for i, (one, _) in numbered.items()]
        listed = "\n  ".join(lines[:20])
        raise ConfigError(f"--from-verl {file} launches verl {len(ours)} times; choose one:\n  {listed}")
    launch, found.entry = numbered[chosen or "1"]
    if why := found.entry.get("refused"):
        raise ConfigError(f"--from-verl {file} launches {launch.module}: {why}")
    found.program = "rl-sft" if found.entry.get("is_sft") else "rl-train"
    found.missing |= {launch.module: found.entry["note"]} if "note" in found.entry else {}
    found.needless |= {" ".join(launch.options): "a run starts its own processes"} if launch.options else {}
    found.assumed |= dict.fromkeys(read.assumed, "no command was run")
    found.assumed |= dict.fromkeys(read.complaints, "said bash")
    return launch, read.unknown


class _Converter:
    """Interpreter of the table: carries verl's keys over, and lists what neither the table nor a rule has read."""

    def __init__(self, out: Conversion) -> None:
        self.out, self.read = out, set[str]()
        self.rows: Mapping[str, Mapping[str, Any]] = tables()["sft" if out.program == "rl-sft" else "verl"]
        self.given, self.settings, names = dict[str, str](), dict[str, Any](), tables()["old_names"]
        for key, value in out.values.items():
            old = next((old for old in names if key == old or (old[-1] == "." and key.startswith(old))), "")
            name = names.get(old, "") + key[len(old) :]
            self.settings[name], self.given[name] = value, key
        engine, strategy = (self.settings.get(key) for key in ("model_engine", f"{_A}.strategy"))
        if not (engine or strategy):  # the engine that has keys of its own
            named = (name for name in tables()["layouts"] if fnmatch.filter(self.settings, f"{_A}.{name}.*"))
            if engine := next(named, None):
                self.settings["model_engine"] = engine
        self.engine = engine if engine not in (None, "dp") else strategy
        self.mode = out.entry.get("mode") or str(self.get("trainer.v1.trainer_mode"))

    def convert(self) -> Conversion:
        """Apply the table and the rules, and list the rest."""
        for key, row in self.rows.items():
            self.carry(key, row)
        if self.out.program == "rl-train":
            for rule in (self._data, self._batch, self._correction, self._optimizer, self._engine, self._rollout,
                         self._teacher):  # fmt: skip
                rule()
        for key in [key for key in self.settings if key not in self.read]:
            self.list_unread(key)
        return self.out

    def carry(self, key: str, row: Mapping[str, Any]) -> None:
        """Apply a row, or the one that replaces it (`or`) where a condition does not hold."""
        wanted = [*_listed(row.get("if")), *(f"not {each}" for each in _listed(row.get("unless")))]
        if (failed := next((each for each in wanted if not self.holds(each)), None)) is not None:
            if "or" in row:
                return self.carry(key, row["or"])
            reasons, kind = tables()["conditions"], failed.partition(" ")[0]
            return self.note("ignored", key, reasons.get(failed) or reasons.get(kind) or f"{failed} is not set")
        self.read.update(each for each in _listed(row.get("if")) if each in self.settings)
        for ours, value in row.get("set", {}).items():
            self.set(ours, value)
        for notes in {"ignored", "needless"} & row.keys():
            self.note(notes, key, row[notes])
        if "missing" in row:
            self.read.add(key)
            value = row.get("default") if (given := self.settings.get(key)) is None else given
            if (key in self.settings or "default" in row) and value not in _listed(row["usual"]):
                self.miss(key, row["missing"].replace("VALUE", str(value)))
        if "as" in row and (value := self.get(key)) is not None:
            value = self.cast(row, key, value)
            if value is not None and (value or not row.get("drop")):
                self.set("rollout.options.args" if row["as"] == "flag" else row["ours"], value)
        return None

    def holds(self, condition: str) -> bool:
        """Whether a condition of the table holds: a key of verl's or ours is set or has a value, or a named one."""
        subject, wanted = condition.removeprefix("not "), not condition.startswith("not ")
        if subject.startswith("@"):
            name, _, of = subject[1:].partition(" ")
            return self.has(name, of) == wanted
        key, mark, value = subject.partition("=")
        found = self.at(key.removeprefix("ours.")) if key.startswith("ours.") else self.peek(key)
        return (str(found) in value.split("|") if mark else bool(found)) == wanted

    def cast(self, row: Mapping[str, Any], key: str, value: Any) -> Any:
        """Value of a row in our terms; None leaves our key alone."""
        kind, choices = row["as"], row.get("choices", {})
        if kind == "choice":
            if str(value) not in choices:
                known = sorted({ours for ours in choices.values() if isinstance(ours, str)}) or list(choices)
                why = row.get("none", "no VALUE here").replace("VALUE", str(value))
                taken = f"; {row['else']} is set" if row["else"] else ""
                self.miss(key, f"{why}; there are {', '.join(known)}{taken}")
            return choices.get(str(value), row["else"])
        if kind == "names":
            return choices.get(value) if isinstance(value, str) and value in choices else _listed(value)
        if kind == "file":
            first, *others = self.files(key) or [None]
            if others:
                self.miss(key, row["several"].replace("VALUE", str(first)))
            return first
        if kind == "count":
            return max(math.ceil(self.number(key) * row.get("scale", 1)), 0) or row.get("zero", 0)
        if kind == "flag":
            flag = row["flags"][self.at("rollout.backend")]
            words = [] if value is False else [flag] if value is True else [flag, str(value)]
            return [*(self.at("rollout.options.args") or []), *words] or None
        if kind in ("int", "float", "size"):
            number = float(self.number(key)) if kind == "float" else self.whole(key)
            return None if kind == "size" and number < 2 else number
        if kind == "floats":
            return [float(each) for each in _listed(value)]
        return {"bool": bool, "str": str, "path": _path}[kind](value)

    def peek(self, key: str) -> Any:
        """Value of verl's key, or its default."""
        row = self.rows.get(key, {})
        if (value := self.settings.get(key)) is not None:
            return value
        return self.peek(row["like"]) if "like" in row else row.get("default" if "missing" in row else "usual")

    def get(self, key: str) -> Any:
        """Value of verl's key, or its default; the key counts as read."""
        self.read.add(key)
        return self.peek(key)

    def number(self, key: str) -> Any:
        """Number at verl's key: an int where it is whole and written without an exponent."""
        value, usual = self.get(key), self.rows.get(key, {}).get("usual")
        try:
            number = math.nan if isinstance(value, bool) else float(value)
            if not math.isfinite(number):
                raise ValueError
        except (TypeError, ValueError):
            if usual is None or isinstance(usual, list):
                raise ConfigError(f"--from-verl: {self.given.get(key, key)}={value!r} is not a number") from None
            self.miss(key, f"{value!r} is not a number; {usual} is taken, set it by hand")
            return usual
        return int(number) if number.is_integer() and "e" not in str(value).lower() else number

    def whole(self, key: str) -> int:
        """Whole number at verl's key."""
        return int(self.number(key))

    def at(self, ours: str) -> Any:
        """Value of our key so far; None if it is not set."""
        *parents, last = ours.split(".")
        return reduce(lambda tree, name: tree.get(name) or {}, parents, self.out.recipe).get(last)

    def set(self, ours: str, value: Any) -> None:
        """Set our key; the recipes of rl-sft are flat."""
        *parents, last = ours.split(".")
        if self.out.program == "rl-sft":
            parents, last, value = [], ours, ",".join(value) if isinstance(value, list) else value
        reduce(lambda tree, name: tree.setdefault(name, {}), parents, self.out.recipe)[last] = value

    def note(self, notes: str, key: str, why: str) -> None:
        """List a key with a reason: one without equivalent also where its default is verl's, any other if given."""
        self.read.add(key)
        if notes == "missing" or self.settings.get(key) is not None:
            getattr(self.out, notes)[self.given.get(key, key)] = why

    miss = partialmethod(note, "missing")

    def list_unread(self, key: str) -> None:
        """List a key that no rule has read; disabled features need none."""
        value = self.settings[key]
        for notes, pattern, why, *needs in tables()["unread"]:
            if fnmatch.fnmatchcase(key, pattern) and all(map(self.holds, needs)):
                return getattr(self.out, notes).update({self.given[key]: why})
        if value in (None, False, "", -1) or value in ([], {}):
            return self.out.needless.update({self.given[key]: "off"})
        return self.miss(key, "nothing here does that")

    def files(self, key: str) -> list[str]:
        """Paths at verl's key."""
        return [_path(file) for file in _listed(self.get(key))]

    def has(self, name: str, of: str) -> bool:
        tools = (f"{_R}.multi_turn.enable", f"{_R}.multi_turn.tool_config_path", "data.tool_config_path")
        advantage, loss = ADVANTAGES.get(self.at("algorithm.advantage") or ""), self.at("algorithm.loss")
        return {
            "mode": self.mode == of,
            "several": len(_listed(self.peek(of))) > 1,
            "apart": self.mode not in ("sync", "colocate_async") or not self.get("actor_rollout_ref.hybrid_engine"),
            "engine": (self.engine if self.engine in tables()["layouts"] else "fsdp") == of,
            "bypass": self.peek(f"{_C}.bypass_mode") or self.peek(f"{_A}.policy_loss.loss_mode") == "bypass_mode",
            "critic": advantage is not None and "values" in advantage.reads,
            "reads": advantage is not None and of in advantage.keys,
            "option": loss is not None and of in POLICY_LOSSES[loss].options,
            "tools": self.get(f"{_R}.agent.default_agent_loop") == "tool_agent" or any(map(self.settings.get, tools)),
        }[name]

    def _data(self) -> None:
        train = self.files("data.train_files")
        if len(train) > 1:
            parts = {f"{i}_{Path(file).parent.name or 'part'}": {"path": file} for i, file in enumerate(train)}
            self.out.recipe["data"].pop("path")
            self.set("data.mixture", parts)
        loggers = [*map(str, _listed(self.get("trainer.logger")))]
        known = [name for name in loggers if name in ("console", *_PROJECTS, "tensorboard", "trackio")]
        if len(known) < len(loggers):
            there = ", ".join(sorted(("console", *_PROJECTS, "tensorboard", "trackio")))
            self.miss("trainer.logger", f"of {', '.join(loggers)} there are {there}")
        project = self.get("trainer.project_name")
        options = {name: {_PROJECTS[name]: project} if name in _PROJECTS else {} for name in known or ["console"]}
        self.set("tracking.trackers", options)
        if path := self.at("reward.path"):
            self.set("reward.path", f"{path}:{self.get('reward.custom_reward_function.name')}")

    def _batch(self) -> None:
        batch, mini = self.whole("data.train_batch_size"), self.whole(f"{_A}.ppo_mini_batch_size")
        epochs, rows = self.number("trainer.total_epochs"), _num_rows(self.files("data.train_files"))
        if self.mode == "fully_async":
            batch = mini * self.whole("async_training.require_batches")
        if min(batch, mini) < 1:
            raise ConfigError(f"--from-verl: batches of {batch} prompts in mini-batches of {mini}; both are positive")
        if batch % mini:
            mini = next(size for size in range(min(batch, mini), 0, -1) if batch % size == 0)
            self.miss(f"{_A}.ppo_mini_batch_size", f"must divide the batch of {batch}; {mini} is the nearest below")
        self.set("batch.batch_size", batch)
        self.set("batch.mini_batch_size", mini)
        if self.mode == "fully_async":
            most = self.whole("rollout.total_rollout_steps")
            self.set("steps", max((most if rows is None else min(most, int(rows * epochs))) // batch, 1))
        elif self.at("steps") is None:  # verl drops the last rows of each epoch; a run that counts epochs does not
            by_rows = rows is not None
            self.set(
                "steps" if by_rows else "epochs", max(int(epochs) * (rows // batch), 1) if by_rows else int(epochs)
            )
        advantage = self.at("algorithm.advantage")
        if ADVANTAGES[advantage].compares_group and self.at("batch.group_size") < 2:
            self.set("batch.group_size", 2)
            self.miss(f"{_R}.n", f"{advantage} compares completions of one prompt, and refuses groups of one; 2 is set")

    def _correction(self) -> None:
        level, threshold = self.get(f"{_C}.rollout_is"), str(self.get(f"{_C}.rollout_is_threshold"))
        if level in ("token", "sequence"):
            if self.get(f"{_C}.bypass_mode") and POLICY_LOSSES[self.at("algorithm.loss")].has_ratio:
                self.note("ignored", f"{_C}.rollout_is", "in bypass mode the loss's ratio is to the sampler already")
            else:
                kind = "icepop" if "_" in threshold else "tis"
                self.set("algorithm.correction", kind if level == "token" else f"sequence_{kind}")
                self.set("algorithm.correction_bounds", [float(each) for each in f"0_{threshold}".split("_")[-2:]])
        elif level not in (None, "null"):
            self.miss(f"{_C}.rollout_is", f"no {level} here; there are token and sequence")
        first, *others = (each.strip() for each in str(self.get(f"{_C}.rollout_rs")).split(","))
        if first not in ("None", "null", ""):
            if others:
                self.miss(f"{_C}.rollout_rs", f"one test a run: {first} is taken, {', '.join(others)} is not")
            low, _, high = str(self.get(f"{_C}.rollout_rs_threshold")).split(",")[0].strip().rpartition("_")
            scheme, upper = self.cast(self.rows[f"{_C}.rollout_rs"], f"{_C}.rollout_rs", first), float(high)
            inverse = [1 / upper, 1 / float(low) if low else upper]  # verl's ratio is rollout / engine
            bounds = inverse if scheme.endswith("k1") else [0.0, upper]
            self.out.recipe["algorithm"] |= {"rejection": scheme, "rejection_bounds": bounds}
        is_off_policy = self.mode not in ("sync", "colocate_async") or self.at("batch.over_sampling")
        if is_off_policy and not self.at("algorithm.correction"):
            self.set("algorithm.old_logprobs", "rollout")

    def _optimizer(self) -> None:
        o, steps = f"{_A}.optim", self.at("steps") or 0
        per_step = self.at("batch.batch_size") // self.at("batch.mini_batch_size")
        warmup, ratio = self.whole(f"{o}.lr_warmup_steps"), float(self.number(f"{o}.lr_warmup_steps_ratio"))
        if warmup > 0:
            self.note("ignored", f"{o}.lr_warmup_steps_ratio", "lr_warmup_steps is set")
        elif not steps and ratio:
            why = f"set engine.optimizer.warmup_steps to {ratio:g} x steps x {per_step}"
            self.miss(f"{o}.lr_warmup_steps_ratio", why)
        if warmup := warmup if warmup > 0 else round(ratio * steps):  # verl counts training steps
            self.set("engine.optimizer.warmup_steps", warmup * per_step)
        if self.at("engine.lr_schedule") == "cosine" and (least := float(self.number(f"{o}.min_lr"))):
            self.set("engine.min_lr_ratio", least / self.at("engine.optimizer.lr"))

    def _engine(self) -> None:
        world = self.whole("trainer.n_gpus_per_node") * self.whole("trainer.nnodes")
        self.set("engine.world_size", world)
        size = self.whole(f"{_A}.{'veomni' if self.has('engine', 'veomni') else 'fsdp_config'}.fsdp_size")
        layout = self.at("engine.parallel") or {}
        if self.at("engine.backend") == "veomni":
            self.miss("model_engine", "set engine.environment to the folder of a Python environment that has VeOmni")
            if 0 < size < world or any(degree > 1 for degree in layout.values()):
                self.set("engine.backend", "fsdp")
                self.miss("model_engine", "engine veomni has no sp, ep or replicas here; fsdp has, and takes its place")
        if self.at("engine.backend") == "fsdp" and 0 < size < world:
            self.set("engine.parallel.dp_replicate", world // size)
        layout = self.at("engine.parallel") or {}
        reference = layout | (self.at("placement.reference.engine.parallel") or {})
        reference = {name: size for name, size in reference.items() if size > 1}
        self.out.recipe.get("placement", {}).pop("reference", None)
        if reference != layout and self.at("algorithm.kl_coef"):
            self.set("placement.reference.engine.parallel", reference)
        elif self.at("placement") == {}:
            del self.out.recipe["placement"]
        ranks = world // math.prod(layout.get(name, 1) for name in ("tp", "pp", "cp", "sp"))
        rows = self.at("batch.mini_batch_size") * self.at("batch.group_size")
        if rows % max(ranks, 1):
            self.miss("trainer.n_gpus_per_node", f"a mini-batch of {rows} completions must divide over {ranks} ranks")
        longest = self.at("data.max_prompt_tokens") + self.at("rollout.max_new_tokens")
        rows, tokens = self.whole(f"{_A}.ppo_micro_batch_size_per_gpu"), self.whole(f"{_A}.ppo_max_token_len_per_gpu")
        tokens = tokens if self.get(f"{_A}.use_dynamic_bsz") else rows * longest
        self.set("engine.max_tokens_per_gpu", max(tokens, longest))
        self.set("rollout.max_model_len", max(self.whole(f"{_R}.max_model_len"), longest))

    def _rollout(self) -> None:
        if (count := self.whole(f"{_R}.val_kwargs.n")) > 1 and self.at("rollout.eval_temperature"):
            self.set("rollout.eval_samples", count)
        elif count > 1:
            self.miss(f"{_R}.val_kwargs.n", "greedy completions of a row are all the same")
        layout, gpus = self.at("rollout.parallel") or {}, self.at("engine.world_size")
        ranks = math.prod(layout.get(name, 1) for name in ("tp", "pp", "dp"))
        if self.has("apart", ""):
            where = "rollout" if "mode" in self.out.entry and not self.settings.get(f"{_R}.nnodes") else _R
            gpus = self.whole(f"{where}.nnodes") * self.whole(f"{where}.n_gpus_per_node")
        elif gpus % ranks:
            self.miss(f"{_R}.tensor_model_parallel_size", f"{gpus} GPUs are not a multiple of {ranks}; 1 is set")
            ranks = 1
            del self.out.recipe["rollout"]["parallel"]
        self.set("rollout.num_replicas", max(gpus // ranks, 1))
        self.set("rollout.colocated", not self.has("apart", ""))
        if self.at("agent.loop") == "tool":
            most = self.at("rollout.max_new_tokens")  # bounds turns too: each takes a token
            self.set("agent.options.max_completion_tokens", most)
            self.set("agent.options.max_turns", self.at("agent.options.max_turns") or most)
        if self.at("engine.router_replay") and self.at("rollout.backend") == "vllm":
            self.at("rollout.options.args").append("--enable-return-routed-experts")
        for key in fnmatch.filter(self.settings, f"{_R}.engine_kwargs.*"):
            engine, _, name = key.removeprefix(f"{_R}.engine_kwargs.").partition(".")
            if (backend := self.at("rollout.backend")) != engine and backend in ("vllm", "sglang"):
                self.note("ignored", key, f"the server is {backend}")
            elif name and backend == engine and (value := self.settings[key]) is not None and value is not False:
                row = {"as": "flag", "flags": {engine: f"--{name.replace('_', '-')}"}}
                self.set("rollout.options.args", self.cast(row, key, self.get(key)))

    def _teacher(self) -> None:
        models = "distillation.teacher_models."
        if not self.get("distillation.enabled"):
            return
        given = [key for key in fnmatch.filter(self.settings, f"{models}*.model_path") if self.get(key)]
        paths = {str(self.get(f"{key[:-11]}.key") or key.split(".")[2]): _path(self.get(key)) for key in given}
        self.set("teacher.path", next(iter(paths.values()), None))
        if len(paths) > 1:
            self.set("teacher.by_source", paths)
        if not self.get("distillation.distillation_loss.use_task_rewards"):
            for key in ("loss_options", "correction", "correction_bounds", "rejection", "rejection_bounds"):
                self.out.recipe["algorithm"].pop(key, None)
            self.out.recipe["algorithm"] |= {"loss": "distill", "advantage": "grpo"}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _path(value: object) -> str:
    return str(Path(text).expanduser()) if (text := str(value)).startswith("~") else text


def _num_rows(files: Sequence[str]) -> int | None:
    """Rows of parquet files that are here; None if one is not, or is of another kind."""
    try:
        from pyarrow import parquet

        return sum(parquet.read_metadata(file).num_rows for file in files) if files else None
    except (ImportError, OSError):
        return None
