"""Command lines of rl-engine: `key=value` arguments in, exit code 2 and one sentence for bad input."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import typing
from enum import StrEnum
from types import NoneType
from typing import Any, TypeVar

from rl_engine.errors import BackendError, BatchError, ConfigError, DataError, ModelFolderError

if typing.TYPE_CHECKING:
    from collections.abc import Sequence

_Config = TypeVar("_Config")
_SFT_DOC = "rl-sft model.path=DIR data.path=FILE.jsonl output_dir=DIR [key=value ...]"


def sft_main(arguments: Sequence[str] | None = None) -> int:
    """`rl-sft`: supervised fine-tuning; see `rl_engine.sft`. Returns the exit code."""
    from rl_engine.sft import SftConfig, train

    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in ("-h", "--help"):
        print(_SFT_DOC, *_key_lines(SftConfig), sep="\n")
        return 0
    try:
        config = parse_config(SftConfig, given)
        outcome = train(config)
    except (BackendError, BatchError, ConfigError, DataError, ModelFolderError) as error:
        print(f"rl-sft: {error}", file=sys.stderr)
        return 2
    print(f"{outcome.steps} steps in {outcome.wall_s:.1f} s, loss {outcome.loss:.4f}; model in {config.output_dir}")
    return 0


def parse_config(config_class: type[_Config], arguments: Sequence[str]) -> _Config:
    """Build a config dataclass from `key=value` arguments; `model.path` and `model_path` are the same key.

    Raises:
        ConfigError: an unknown key (nearest named), a value of the wrong type, a key twice or a needed key missing.
    """
    types = typing.get_type_hints(config_class)
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
    needed = [
        _spelled(field.name)
        for field in dataclasses.fields(config_class)  # pyright: ignore[reportArgumentType] - a dataclass by contract
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in values
    ]
    if needed:
        raise ConfigError(f"{' and '.join(needed)} must be given, as in: {_SFT_DOC}")
    return config_class(**values)


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
        return kind(text)
    except ValueError as error:
        wanted = ", ".join(kind) if issubclass(kind, StrEnum) else {int: "a whole number", float: "a number"}[kind]
        raise ConfigError(f"{key} is {text!r}; wanted {wanted}.") from error


def _spelled(name: str) -> str:
    """`model.path` and `data.path` are written as in rl-train."""
    return {"model_path": "model.path", "data_path": "data.path"}.get(name, name)


def _key_lines(config_class: Any) -> list[str]:
    lines: list[str] = []
    for field in dataclasses.fields(config_class):
        default = "needed" if field.default is dataclasses.MISSING else field.default
        lines.append(f"  {_spelled(field.name)}={default}")
    return lines


if __name__ == "__main__":
    sys.exit(sft_main())
