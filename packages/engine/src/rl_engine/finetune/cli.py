"""Command lines of rl-engine: a recipe and `key=value` in, exit code 2 and one sentence for bad input."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import sys
import typing
from contextlib import contextmanager
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from rl_csrc import FolderInUseError, hold_lock
from rl_engine.errors import (
    BackendError,
    BatchError,
    CheckpointError,
    ConfigError,
    DataError,
    ModelFolderError,
)
from rl_engine.registry import model_folder

if typing.TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from rl_engine.finetune.loop import RunConfig

_Config = TypeVar("_Config", bound="RunConfig")
_NEEDED = "model.path=DIR data.path=FILE.jsonl output_dir=DIR"
RECIPES = Path(__file__).parent / "recipes"
"""Recipes that ship, a YAML file each: keys for models of usual size."""
_BAD_INPUT = (BackendError, BatchError, CheckpointError, ConfigError, DataError, FolderInUseError, ModelFolderError)


def sft_main(arguments: Sequence[str] | None = None) -> int:
    """`rl-sft`: supervised fine-tuning; see `rl_engine.finetune.sft`. Returns the exit code."""
    return _main("rl-sft", "sft", "SftConfig", arguments)


def dpo_main(arguments: Sequence[str] | None = None) -> int:
    """`rl-dpo`: preference optimisation; see `rl_engine.finetune.preferences`. Returns the exit code."""
    return _main("rl-dpo", "preferences", "DpoConfig", arguments)


def rm_main(arguments: Sequence[str] | None = None) -> int:
    """`rl-rm`: reward modelling; see `rl_engine.finetune.preferences`. Returns the exit code."""
    return _main("rl-rm", "preferences", "RmConfig", arguments)


def distill_main(arguments: Sequence[str] | None = None) -> int:
    """`rl-distill`: distillation; see `rl_engine.finetune.distill`. Returns the exit code."""
    return _main("rl-distill", "distill", "DistillConfig", arguments)


def _main(program: str, module: str, config_name: str, arguments: Sequence[str] | None) -> int:
    found = import_module(f"rl_engine.finetune.{module}")
    config_class: type[RunConfig] = getattr(found, config_name)
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in ("-h", "--help"):
        print(f"{program} [RECIPE] {_NEEDED} [key=value ...]", *_key_lines(config_class), sep="\n")
        print("RECIPE is a YAML file of such keys, or one of those that ship:")
        for file in sorted(RECIPES.glob(f"{program.removeprefix('rl-')}*.yaml")):
            print(f"{file.stem}:\n{file.read_text()}", end="")
        return 0
    # torch 2.13 warns of a name of its own whenever a jagged tensor is made; delete when no torch does
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    try:
        config = with_models(parse_config(config_class, given, program=program))
        with _held(config):
            outcome = found.train(config)
    except _BAD_INPUT as error:
        print(f"{program}: {error}\n  more in docs/guides/fine-tuning.md", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno is None:
            raise
        where = f"{error.filename}: " if error.filename else ""
        advice = "correct that, then start again, with resume=true to go on from its last checkpoint"
        print(f"{program}: {where}{os.strerror(error.errno)}; {advice}", file=sys.stderr)
        return 1
    loss = f", loss {outcome.metrics['loss']:.4f}" if outcome.metrics else ""
    if os.environ.get("RANK", "0") == "0":
        print(f"{outcome.steps} steps, {outcome.wall_s:.1f} s{loss}; model in {config.output_dir}")
    return 0


def with_models(config: _Config) -> _Config:
    """The configuration with a folder for every model of the hub that it names, downloaded where it is not there.

    Raises:
        ModelFolderError: the hub has no such model, or does not answer.
    """
    names = [name for name in ("model_path", "teacher_path") if hasattr(config, name)]
    return dataclasses.replace(
        config, **{name: model_folder(getattr(config, name), key=_spelled(name)) for name in names}
    )


@contextmanager
def _held(config: RunConfig) -> Generator[None]:
    """Rank 0 holds the output folder; it is replaced as a whole, so the lock is next to it."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    output = Path(config.output_dir).absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(output.with_name(f"{output.name}.lock"), f"output_dir={config.output_dir}"):
        yield


def parse_config(config_class: type[_Config], arguments: Sequence[str], *, program: str = "rl-sft") -> _Config:
    """Build a config dataclass from a recipe and `key=value` arguments, which win over the recipe's keys.

    `model.path` and `model_path` are the same key.

    Raises:
        ConfigError: an unknown key (nearest named), a value of the wrong type, a key twice or a needed key missing.
    """
    types = typing.get_type_hints(config_class)
    named = [each for each in arguments[:1] if "=" not in each and not each.startswith("-")]
    given = _values(types, arguments[len(named) :])
    values = _values(types, _recipe(named[0], program)) if named else {}
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if one in given and other not in given:  # both say how long: the command line's counts
            values.pop(other, None)
    values |= given
    needed = [
        _spelled(field.name)
        for field in dataclasses.fields(config_class)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in values
    ]
    if needed:
        raise ConfigError(f"{' and '.join(needed)} must be given, as in: {program} {_NEEDED} [key=value ...]")
    return config_class(**values)


def _recipe(name: str, program: str) -> list[str]:
    """A recipe's keys as arguments.

    Raises:
        ConfigError: there is no such recipe, or it is no mapping of keys to values.
    """
    import yaml

    shipped = program.removeprefix("rl-")
    file = Path(name) if Path(name).suffix in (".yaml", ".yml") else RECIPES / f"{name}.yaml"
    if not file.is_file() or (file.parent == RECIPES and name.removesuffix("-vlm") != shipped):
        raise ConfigError(
            f"there is no recipe {name!r} of {program}: give {shipped}, {shipped}-vlm, or a .yaml file, or key=value."
        )
    try:
        found = yaml.safe_load(text := file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must hold keys and values, such as lr: 1.0e-5")
    names = [key.value for key, _ in yaml.compose(text).value]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{file} has the key {twice!r} twice; take one out")
    words = {None: "none", True: "true", False: "false"}
    return [f"{key}={words[value] if value is None or type(value) is bool else value}" for key, value in found.items()]


def _values(types: dict[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """Values of keys by name of the field."""
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.removeprefix("--").partition("=")
        name = key.replace(".", "_").replace("-", "_")
        if not equals:
            raise ConfigError(f"Argument {argument!r} is not key=value.")
        if name not in types:
            near = difflib.get_close_matches(name, types, n=1, cutoff=0.0)
            raise ConfigError(f"Unknown key {key!r}; the nearest is {_spelled(near[0])!r}.")
        if name in values:
            raise ConfigError(f"Key {key!r} is given twice.")
        values[name] = _parse(key, text, types[name])
    return values


def _parse(key: str, text: str, kind: Any) -> Any:
    options = typing.get_args(kind) or (kind,)
    if NoneType in options and text.lower() in ("none", "null"):
        return None
    kind = next(option for option in options if option is not NoneType)
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{key} is {text!r}; wanted true or false.")
        return text.lower() == "true"
    try:
        return kind(str(Path(text).expanduser()) if text.startswith("~/") else text)
    except ValueError as error:
        wanted = ", ".join(kind) if issubclass(kind, StrEnum) else {int: "a whole number", float: "a number"}[kind]
        raise ConfigError(f"{key} is {text!r}; wanted {wanted}.") from error


def _spelled(name: str) -> str:
    """`model.path`, `data.path` and `lora.rank` are written as in rl-train."""
    dotted = ("model_path", "data_path", "eval_path", "teacher_path")
    return name.replace("_", ".", 1) if name in dotted or name.startswith("lora_") else name


def _key_lines(config_class: Any) -> list[str]:
    lines: list[str] = []
    for field in dataclasses.fields(config_class):
        default = "needed" if field.default is dataclasses.MISSING else field.default
        lines.append(f"  {_spelled(field.name)}={default}")
    return lines


if __name__ == "__main__":
    sys.exit(sft_main())
