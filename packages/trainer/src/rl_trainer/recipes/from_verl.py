"""verl's settings as a recipe: `rl-train --from-verl SCRIPT.sh | FILE.yaml | overrides...`, for verl 0.6 to 0.9.

Which key becomes which, verl's defaults, and why a key needs none here or has no equivalent: `equivalents.yaml`. Here
are the rules that look at several keys. Every word becomes a key, is listed with a reason, or is an error.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_trainer.algorithms import ADVANTAGES, POLICY_LOSSES
from rl_trainer.equivalents import tables
from rl_trainer.errors import ConfigError
from rl_trainer.recipes.verl_settings import Conversion, read_settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_C, _D = "algorithm.rollout_correction", "distillation"


def convert(arguments: Sequence[str]) -> Conversion:
    """Convert verl's settings to a recipe.

    Args:
        arguments: Overrides of a command line (`key=value`, `+key=value`, `--config-name=...`), or first a .yaml file
            or a script, whose arguments follow. `--launch=N` chooses one of several launches of a script.

    Raises:
        ConfigError: a file cannot be read or launches no trainer of verl's, a word is no override, or a value is not
            known.
    """
    try:
        found = read_settings(arguments)
        return (_Sft if found.entry.get("is_sft") else _Ppo)(found).convert()
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"--from-verl: a value is not of its key's kind: {error}") from error


class _Converter:
    """Carries verl's keys over by the table, and lists what neither the table nor a rule has read."""

    table = "verl"

    def __init__(self, out: Conversion) -> None:
        self.rows: Mapping[str, Mapping[str, Any]] = tables()[self.table]
        self.out, self.entry, self.read = out, out.entry, set[str]()
        self.given, self.settings = dict[str, str](), dict[str, Any]()
        for key, value in out.values.items():
            names = tables()["old_names"].items()
            name = next(
                (new + key[len(old) :] for old, new in names if key == old or (old[-1] == "." and key.startswith(old))),
                key,
            )
            self.settings[name], self.given[name] = value, key

    def convert(self) -> Conversion:
        """Carry over, apply the rules, and list the rest."""
        self.carry()
        self.rules()
        for key, value in self.settings.items():
            if key not in self.read:
                self.list_unread(key, value)
        return self.out

    def rules(self) -> None:
        """Rules that look at several keys."""

    def has(self, name: str, of: str = "") -> bool:
        """Whether a named condition of the table holds."""
        raise NotImplementedError(name, of)

    def get(self, key: str) -> Any:
        """Value of verl's key, or its default."""
        self.read.add(key)
        value = self.settings.get(key)
        return self.rows.get(key, {}).get("usual") if value is None else value

    def number(self, key: str) -> Any:
        """Number at verl's key: an int where it is whole and written without an exponent."""
        value = self.get(key)
        try:
            number = math.nan if isinstance(value, bool) else float(value)
            if not math.isfinite(number):
                raise ValueError
        except (TypeError, ValueError):
            if (usual := self.rows[key].get("usual") if key in self.rows else None) is None:
                raise ConfigError(f"--from-verl: {self.given.get(key, key)}={value!r} is no number") from None
            self.miss(key, f"{value!r} is no number; {usual} is taken, set it by hand")
            return usual
        return int(number) if number.is_integer() and "e" not in str(value).lower() else number

    def whole(self, key: str) -> int:
        """Whole number at verl's key."""
        return int(self.number(key))

    def at(self, ours: str) -> Any:
        """Value of our key so far; None if it is not set."""
        tree: Any = self.out.recipe
        for name in ours.split("."):
            tree = tree.get(name) if isinstance(tree, dict) else None
        return tree

    def set(self, ours: str, value: Any) -> None:
        """Set our key; None removes it."""
        *parents, last = ours.split(".")
        tree: dict[str, Any] = self.out.recipe
        for parent in parents:
            tree = tree.setdefault(parent, {})
        tree[last] = value
        if value is None:
            del tree[last]

    def below(self, prefix: str) -> list[str]:
        """Keys that are given and start with a prefix."""
        return [key for key in self.settings if key.startswith(prefix)]

    def miss(self, key: str, why: str) -> None:
        """List a key as one without equivalent."""
        self.read.add(key)
        self.out.missing[self.given.get(key, key)] = why

    def ignore(self, why: str, *keys: str) -> None:
        """List keys as not read by verl either."""
        self.read.update(keys)
        self.out.ignored.update({self.given[key]: why for key in keys if self.settings.get(key) is not None})

    def holds(self, condition: str) -> bool:
        """Whether a condition of the table holds: a key is set, has a value, or a named one of ours."""
        if condition.startswith("@"):
            return self.has(*condition[1:].split())
        key, mark, value = condition.partition("=")
        found = self.settings.get(key)
        found = self.rows.get(key, {}).get("usual") if found is None else found
        return str(found) == value if mark else bool(found)

    def carry(self) -> None:
        """Apply the table's rows, in its order."""
        for key, row in self.rows.items():
            needs, without = row.get("if"), row.get("unless")
            if key in self.settings and "ignored" in row:
                self.ignore(row["ignored"], key)
            elif needs and not self.holds(needs):
                of = needs.removeprefix("@")
                self.ignore(tables()["conditions"].get(of, f"{of} is not so" if "=" in of else f"{of} is not set"), key)
            elif without and self.holds(without):
                self.ignore(f"{without} is set", key)
            elif "missing" in row:
                self.read.add(key)
                usual = row["usual"] if isinstance(row["usual"], list) else [row["usual"]]
                if key in self.settings and self.settings[key] not in usual:
                    self.miss(key, row["missing"])
            elif "as" in row and (value := self.get(key)) is not None:
                value = self.cast(row, key, value)
                if value is not None and (value or not row.get("drop")):
                    self.set(row["ours"], value)

    def cast(self, row: Mapping[str, Any], key: str, value: Any) -> Any:
        """Value of a row in our terms; None leaves our key alone."""
        kind, choices = row["as"], row.get("choices", {})
        if kind == "choice":
            if str(value) not in choices:
                known = sorted({ours for ours in choices.values() if isinstance(ours, str)}) or list(choices)
                taken = f"; {row['else']} is set" if row["else"] else ""
                self.miss(key, f"no {value} here; there are {', '.join(known)}{taken}")
            return choices.get(str(value), row["else"])
        if kind == "names":
            return choices.get(value) if isinstance(value, str) and value in choices else _listed(value)
        if kind == "count":
            return max(self.whole(key), 0)
        if kind == "floats":
            return [float(each) for each in _listed(value)]
        if kind in ("int", "float"):
            return self.whole(key) if kind == "int" else float(self.number(key))
        return {"bool": bool, "str": str, "path": _path}[kind](value)

    def list_unread(self, key: str, value: Any) -> None:
        """List a key that nothing has read; what is off is off here too."""
        for name, notes in (("needless", self.out.needless), ("missing", self.out.missing)):
            why = next((why for pattern, why in tables()[name] if fnmatchcase(key, pattern)), None)
            if why is not None:
                notes[self.given[key]] = why
                return
        is_off = value in (None, False, "", -1) or value in ([], {})
        (self.out.needless if is_off else self.out.missing)[self.given[key]] = (
            "off" if is_off else "nothing here does that"
        )

    def files(self, key: str) -> list[str]:
        """Paths at verl's key."""
        return [_path(file) for file in _listed(self.get(key))]


class _Sft(_Converter):
    """Keys of `sft_trainer`, for rl-sft: its recipes are flat."""

    table = "sft"

    def set(self, ours: str, value: Any) -> None:
        self.out.recipe[ours] = ",".join(value) if isinstance(value, list) else value

    def rules(self) -> None:
        self.out.program = "rl-sft"
        for key, ours in (("data.train_files", "data.path"), ("data.val_files", "eval.path")):
            files = self.files(key)
            self.out.recipe.update({ours: files[0]} if files else {})
            if len(files) > 1:
                self.miss(key, f"one file: {files[0]} is taken; join them")


class _Ppo(_Converter):
    """Keys of `main_ppo`, of its asynchronous variants, and of the recipes that are made of it."""

    @property
    def mode(self) -> str:
        return self.entry.get("mode") or str(self.get("trainer.v1.trainer_mode"))

    def has(self, name: str, of: str = "") -> bool:
        """Whether a named condition of the table holds."""
        tools = (f"{_R}.multi_turn.enable", f"{_R}.multi_turn.tool_config_path", "data.tool_config_path")
        advantage, loss = ADVANTAGES.get(self.at("algorithm.advantage") or ""), self.at("algorithm.loss")
        return {
            "fully_async": self.mode == "fully_async",
            "apart": self.mode not in ("sync", "colocate_async") or not self.get("actor_rollout_ref.hybrid_engine"),
            "cosine": self.at("engine.lr_schedule") == "cosine",
            "critic": advantage is not None and "values" in advantage.needs,
            "reads": advantage is not None and of in advantage.keys,
            "option": loss is not None and of in POLICY_LOSSES[loss].options,
            "tools": self.get(f"{_R}.agent.default_agent_loop") == "tool_agent" or any(map(self.settings.get, tools)),
        }[name]

    def rules(self) -> None:
        for rule in (
            self._data, self._batch, self._algorithm, self._loss, self._correction, self._optimizer, self._engine,
            self._rollout, self._servers, self._agent, self._reward, self._teacher, self._pipeline,
        ):  # fmt: skip
            rule()

    def _data(self) -> None:
        train, held_out = self.files("data.train_files"), self.files("data.val_files")
        if len(train) > 1:
            names = [f"{i}_{Path(file).parent.name or 'part'}" for i, file in enumerate(train)]
            self.set("data.mixture", {name: {"path": file} for name, file in zip(names, train, strict=True)})
            why = "data.mixture draws evenly from its parts; verl joins the files: set weights to their rows"
            self.miss("data.train_files", why)
        elif train:
            self.set("data.path", train[0])
        if held_out and len(train) == 1 and len(held_out) == 1:
            self.set("data.eval_path", held_out[0])
        elif held_out:
            self.miss("data.val_files", "one file next to data.path; parts of data.mixture hold out their last rows")
        if path := self.get("data.custom_cls.path"):
            self.get("data.custom_cls.name")
            self.miss("data.custom_cls.path", f"a Dataset class; give rows by a function: data.format={path}:FUNCTION")
        loggers = [str(name) for name in _listed(self.get("trainer.logger"))]
        known = [name for name in loggers if name in ("console", "wandb", "tensorboard", "trackio")]
        if len(known) < len(loggers):
            self.miss("trainer.logger", f"of {', '.join(loggers)} there are console, tensorboard, trackio, wandb")
        wandb = {"project": self.get("trainer.project_name")}
        self.set("tracking.trackers", {name: wandb if name == "wandb" else {} for name in known or ["console"]})

    def _batch(self) -> None:
        batch, mini = self.whole("data.train_batch_size"), self.whole(f"{_A}.ppo_mini_batch_size")
        epochs, rows = self.number("trainer.total_epochs"), _num_rows(self.files("data.train_files"))
        if self.has("fully_async"):
            self.ignore("a step takes ppo_mini_batch_size x require_batches prompts", "data.train_batch_size")
            batch = mini * self.whole("async_training.require_batches")
        if min(batch, mini) < 1:
            raise ConfigError(f"--from-verl: batches of {batch} prompts in mini-batches of {mini}; both are positive")
        if batch % mini:
            mini = next(size for size in range(min(batch, mini), 0, -1) if batch % size == 0)
            self.miss(f"{_A}.ppo_mini_batch_size", f"must divide the batch of {batch}; {mini} is the nearest below")
        self.set("batch.batch_size", batch)
        self.set("batch.mini_batch_size", mini)
        if self.has("fully_async"):
            most = self.whole("rollout.total_rollout_steps")
            self.set("steps", max((most if rows is None else min(most, int(rows * epochs))) // batch, 1))
        elif self.settings.get("trainer.total_training_steps") is not None:
            self.set("steps", self.whole("trainer.total_training_steps"))
            self.ignore("trainer.total_training_steps is set", "trainer.total_epochs")
        elif rows is None:
            self.set("epochs", int(epochs))  # a run counts them; verl drops the last rows of each, ours does not
        else:
            self.set("steps", max(int(epochs) * (rows // batch), 1))

    def _algorithm(self) -> None:
        ours = self.at("algorithm.advantage")
        if ours == "grpo" and self.get("algorithm.norm_adv_by_std_in_grpo") is False:
            self.set("algorithm.advantage", "dr_grpo")
        if ADVANTAGES[ours].compares_group and self.at("batch.group_size") < 2:
            self.set("batch.group_size", 2)
            self.miss(f"{_R}.n", f"{ours} compares completions of one prompt, and refuses groups of one; 2 is set")
        if self.at("algorithm.kl_coef") is None:
            for key in ("kl_estimator", "kl_in_reward", "kl_target"):
                self.set(f"algorithm.{key}", None)
        elif self.get(f"{_A}.use_kl_loss") and self.at("algorithm.kl_in_reward"):
            self.miss("algorithm.use_kl_in_reward", "one KL term: that of the loss is taken")
            self.set("algorithm.kl_in_reward", None)
            for key in (f"{_A}.kl_loss_coef", f"{_A}.kl_loss_type"):
                self.set(self.rows[key]["ours"], self.cast(self.rows[key], key, self.get(key)))
        coefs = {f"{_A}.use_kl_loss": f"{_A}.kl_loss_coef", "algorithm.use_kl_in_reward": "algorithm.kl_ctrl.kl_coef"}
        self.read.update([*coefs, *coefs.values()])

    def _loss(self) -> None:
        is_bypass = self.get(f"{_C}.bypass_mode") or self.get(f"{_A}.policy_loss.loss_mode") == "bypass_mode"
        if is_bypass and self.get(f"{_C}.loss_type") == "reinforce":
            self.set("algorithm.loss", "reinforce")
            self.set("algorithm.loss_options", None if self.at("algorithm.loss_options") is None else {})
        loss = self.at("algorithm.loss")
        option = "clip_dual" if loss == "ppo" else "ratio_max"
        if self.has("option", option):
            self.set(f"algorithm.loss_options.{option}", float(self.number(f"{_A}.clip_ratio_c")))
        else:
            self.ignore(f"the loss {loss} does not read it", f"{_A}.clip_ratio_c")
        if loss in ("sapo", "gmpo"):
            self.ignore(f"the loss {loss} always takes the mean over sequences", f"{_A}.loss_agg_mode")
            self.set("algorithm.aggregation", "seq-mean-token-mean")

    def _correction(self) -> None:
        level, threshold = self.get(f"{_C}.rollout_is"), str(self.get(f"{_C}.rollout_is_threshold"))
        bounds, rejection = str(self.get(f"{_C}.rollout_rs_threshold")).split(","), self.get(f"{_C}.rollout_rs")
        if level not in ("token", "sequence", None, "null"):
            self.miss(f"{_C}.rollout_is", f"no {level} here; there are token and sequence")
        elif level in ("token", "sequence"):
            if self.get(f"{_C}.bypass_mode") and POLICY_LOSSES[self.at("algorithm.loss")].has_ratio:
                self.ignore("in bypass mode the loss's own ratio is to the sampler already", f"{_C}.rollout_is")
            else:
                kind = "icepop" if "_" in threshold else "tis"
                self.set("algorithm.correction", kind if level == "token" else f"sequence_{kind}")
                low, high = threshold.split("_") if "_" in threshold else ("0", threshold)
                self.set("algorithm.correction_bounds", [float(low), float(high)])
        if not rejection or rejection == "null":
            return
        schemes = [each.strip() for each in str(rejection).split(",")]
        if len(schemes) > 1:
            self.miss(f"{_C}.rollout_rs", f"one test a run: {schemes[0]} is taken, {', '.join(schemes[1:])} is not")
        low, _, high = bounds[0].strip().rpartition("_")
        scheme, upper = self.cast(self.rows[f"{_C}.rollout_rs"], f"{_C}.rollout_rs", schemes[0]), float(high)
        inverse = [1 / upper, 1 / float(low) if low else upper]  # verl's ratio is rollout / engine
        self.set("algorithm.rejection", scheme)
        self.set("algorithm.rejection_bounds", inverse if scheme.endswith("k1") else [0.0, upper])

    def _optimizer(self) -> None:
        o, steps = f"{_A}.optim", self.at("steps") or 0
        per_step = self.at("batch.batch_size") // self.at("batch.mini_batch_size")
        warmup, ratio = self.whole(f"{o}.lr_warmup_steps"), float(self.number(f"{o}.lr_warmup_steps_ratio"))
        if warmup > 0:
            self.ignore("lr_warmup_steps is set", f"{o}.lr_warmup_steps_ratio")
        elif not steps and ratio:
            why = f"set engine.optimizer.warmup_steps to {ratio:g} x steps x {per_step}"
            self.miss(f"{o}.lr_warmup_steps_ratio", why)
        if warmup := warmup if warmup > 0 else round(ratio * steps):
            self.set("engine.optimizer.warmup_steps", warmup * per_step)  # verl counts training steps
        if self.has("cosine") and (least := float(self.number(f"{o}.min_lr"))):
            self.set("engine.min_lr_ratio", least / self.at("engine.optimizer.lr"))

    def _engine(self) -> None:
        layouts, response = tables()["layouts"], self.number("data.max_response_length")
        given = next((kind for kind in layouts if self.below(f"{_A}.{kind}.")), "fsdp")
        key = "model_engine" if self.get("model_engine") not in (None, "dp") else f"{_A}.strategy"
        name = str(self.get(key) or given)
        self.get(f"{_A}.strategy")
        backend = tables()["values"]["engine.backend"].get(name, name)
        of = backend if backend in layouts else "fsdp"
        if backend not in ("fsdp", "megatron", "torchtitan"):
            self.miss(key, f"no engine {backend}; there are fsdp, megatron, torchtitan; fsdp is set")
            backend = "fsdp"
        world = self.whole("trainer.n_gpus_per_node") * self.whole("trainer.nnodes")
        self.set("engine.backend", backend)
        self.set("engine.world_size", world)
        key = f"{_A}.{'megatron' if backend == 'megatron' else 'fsdp_config'}.dtype"
        self.set("engine.precision", self.cast(self.rows[key], key, self.get(key)))
        layout = self._layout(of, _A, {})
        size = self.whole(f"{_A}.{'veomni' if of == 'veomni' else 'fsdp_config'}.fsdp_size")
        if backend == "fsdp" and 0 < size < world:
            layout["dp_replicate"] = world // size
        self.set("engine.parallel", layout or None)
        reference = self._layout(of, "actor_rollout_ref.ref", layout)
        if reference != layout and self.at("algorithm.kl_coef"):
            self.set("placement.reference.engine.parallel", reference)
        others = [f"{_A}.{each}" for other in layouts if other != of for each in layouts[other]]
        self.ignore(f"the engine is {name}", *others)
        ranks = world // (layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1) * layout.get("sp", 1))
        rows = self.at("batch.mini_batch_size") * self.at("batch.group_size")
        if rows % max(ranks, 1):
            self.miss("trainer.n_gpus_per_node", f"a mini-batch of {rows} completions must divide over {ranks} ranks")
        longest = self.at("data.max_prompt_tokens") + response
        tokens = longest * self.whole(f"{_A}.ppo_micro_batch_size_per_gpu")
        if self.get(f"{_A}.use_dynamic_bsz"):
            tokens = self.whole(f"{_A}.ppo_max_token_len_per_gpu")
        self.set("engine.max_tokens_per_gpu", max(tokens, longest))

    def _layout(self, of: str, prefix: str, usual: Mapping[str, int]) -> dict[str, int]:
        """Layout of the actor or the reference; what is not set is as in `usual`."""
        found = dict(usual)
        for name, ours in tables()["layouts"][of].items():
            if self.get(key := f"{prefix}.{name}") is not None:
                found[ours] = self.whole(key)
        return {name: size for name, size in found.items() if size > 1}

    def _rollout(self) -> None:
        longest = self.at("data.max_prompt_tokens") + self.at("rollout.max_new_tokens")
        self.set("rollout.max_model_len", max(self.whole(f"{_R}.max_model_len"), longest))
        if float(self.number(f"{_R}.top_p")) < 1:
            self.miss(f"{_R}.top_p", "tokens are drawn from the whole vocabulary, which is what the engine scores")
        if (count := self.whole(f"{_R}.val_kwargs.n")) > 1 and self.at("rollout.eval_temperature"):
            self.set("rollout.eval_samples", count)
        elif count > 1:
            self.miss(f"{_R}.val_kwargs.n", "greedy completions of a row are all the same")
        names = {"tp": "tensor_model", "pp": "pipeline_model", "dp": "data", "ep": "expert"}
        layout = {ours: self.whole(f"{_R}.{name}_parallel_size") for ours, name in names.items()}
        if self.at("rollout.backend") == "embedded":
            layout = dict.fromkeys(layout, 1)
        gpus, ranks = self.at("engine.world_size"), layout["tp"] * layout["pp"] * layout["dp"]
        if self.has("apart"):
            where = "rollout" if "mode" in self.entry and not self.settings.get(f"{_R}.nnodes") else _R
            gpus = self.whole(f"{where}.nnodes") * self.whole(f"{where}.n_gpus_per_node")
        elif gpus % ranks:
            self.miss(f"{_R}.tensor_model_parallel_size", f"{gpus} GPUs are no multiple of {ranks}; 1 is set")
            layout, ranks = dict.fromkeys(layout, 1), 1
        self.set("rollout.num_replicas", max(gpus // ranks, 1))
        self.set("rollout.colocated", not self.has("apart"))
        self.set("rollout.parallel", {name: size for name, size in layout.items() if size > 1} or None)

    def _servers(self) -> None:
        backend, share = self.at("rollout.backend"), f"{float(self.number(f'{_R}.gpu_memory_utilization')):g}"
        if (named := tables()["server_flags"].get(backend)) is None:
            return
        flags = [named["share"], share]
        flags = [named["sleep"], *flags] if self.at("rollout.colocated") else flags
        flags += [named["eager"]] if self.get(f"{_R}.enforce_eager") else []
        flags += [named["experts"]] if self.at("engine.router_replay") and "experts" in named else []
        flags += ["--quantization", str(self.get(f"{_R}.quantization"))] if self.get(f"{_R}.quantization") else []
        for key in self.below(f"{_R}.engine_kwargs."):
            engine, _, name = key.removeprefix(f"{_R}.engine_kwargs.").partition(".")
            value = self.settings[key]
            if engine != backend:
                self.ignore(f"the server is {backend}", key)
            elif name and value is not None and value is not False:
                self.read.add(key)
                flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        self.set("rollout.options", {"args": flags})

    def _agent(self) -> None:
        if not self.has("tools"):
            return
        self.set("agent.loop", "tool")
        self.set("agent.options.max_completion_tokens", self.at("rollout.max_new_tokens"))
        if length := self.settings.get(f"{_R}.multi_turn.max_tool_response_length"):
            self.set("agent.options.max_tool_tokens", -(-int(length) // 4))

    def _reward(self) -> None:
        c, m = "reward.custom_reward_function", "reward.reward_model"
        path = self.get(f"{c}.path")
        has_model = bool(self.get(f"{m}.enable"))
        if path:
            self.set("reward.path", f"{_path(path)}:{self.get(f'{c}.name')}")
        if has_model and path:
            self.miss(f"{m}.enable", "the function gives the reward: serve the model, and let it ask that server")
        elif has_model:
            self.set("reward.parts.model", {"kind": "classifier", "path": _path(self.get(f"{m}.model_path") or "")})
            if self.get(f"{m}.enable_resource_pool"):
                self.set("placement.reward.pool", "reward")
                if (gpus := self.whole(f"{m}.n_gpus_per_node") * self.whole(f"{m}.nnodes")) > 1:
                    self.miss(f"{m}.n_gpus_per_node", f"each model has one GPU, and not {gpus}")
        elif not path:
            self.set("reward.parts.rule", {"kind": "rule", "rule": "verl/default"})
        for prefix, is_on, of in ((f"{m}.", has_model, "reward model"), ("critic.", self.has("critic"), "critic")):
            for key in {*self.below(prefix), *self.below("reward_model." if "model" in of else prefix)} - self.read:
                (self.out.needless if is_on else self.out.ignored)[self.given[key]] = (
                    f"the {of} shares GPUs and layout of the engine" if is_on else f"there is no {of}"
                )
                self.read.add(key)

    def _teacher(self) -> None:
        loss, models = f"{_D}.distillation_loss", f"{_D}.teacher_models."
        if not self.get(f"{_D}.enabled"):
            return self.ignore("distillation.enabled is not set", *self.below(f"{_D}."))
        names = dict.fromkeys(key.removeprefix(models).partition(".")[0] for key in self.below(models))
        paths = {name: _path(path) for name in names if (path := self.get(f"{models}{name}.model_path"))}
        sources = {str(self.get(f"{models}{name}.key") or name): path for name, path in paths.items()}
        self.set("teacher.path", next(iter(paths.values()), None))
        if len(paths) > 1:
            self.set("teacher.by_source", sources)
        if "forward" in str(self.get(f"{loss}.loss_mode")):
            self.set("teacher.divergence", "forward")
            self.set("teacher.num_candidates", self.whole(f"{loss}.topk"))
        if not self.get(f"{loss}.use_task_rewards"):
            for key in ("loss_options", "correction", "correction_bounds", "rejection", "rejection_bounds"):
                self.out.recipe["algorithm"].pop(key, None)
            self.out.recipe["algorithm"] |= {"loss": "distill", "advantage": "grpo"}
        return None

    def _pipeline(self) -> None:
        keys = [f"{_A}.{engine}.optimizer_offload" for engine in ("fsdp_config", "megatron", "veomni")]
        if self.has("apart") and any(self.settings.get(key) for key in keys):
            self.read.update(keys)
            self.set("engine.optimizer_offload", True)  # a colocated engine gives its memory back anyway
        if self.mode == "colocate_async":
            self.miss("trainer.v1.trainer_mode", "colocated servers generate between updates: pipeline=sync is set")
        if self.mode in ("sync", "colocate_async"):
            return
        self.set("pipeline", "one_step_off" if self.mode == "one_step_off" else "fully_async")
        if self.has("fully_async"):
            self.set("staleness.policy", "threshold_fraction")
        elif self.mode == "separate_async":
            self.set("staleness.max_staleness", self.whole("trainer.v1.sampler.max_off_policy_threshold"))
        if not self.at("algorithm.correction"):
            self.set("algorithm.old_logprobs", "rollout")


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
