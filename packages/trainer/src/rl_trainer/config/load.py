"""Configuration loading: a recipe file and `key=value` overrides. YAML and strings exist only here.

A key that no component owns is an error that names the nearest one.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError
from yaml.composer import ComposerError

from rl_trainer.config.schema import AlgorithmConfig, Config, PolicySection, ServedModel
from rl_trainer.equivalents import rows
from rl_trainer.errors import ConfigError, PlanError
from rl_trainer.plugins import absolute

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic_core import ErrorDetails

RECIPES = Path(__file__).parents[1] / "recipes"
FINETUNING = ("sft", "dpo", "rm")
"""Recipes of rl-engine's commands."""


def load_config(recipe: str, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe (a shipped name or a YAML file) and apply `key=value` overrides.

    Raises:
        ConfigError: no such recipe, an unknown key (names the nearest), or a value of the wrong type or range.
        PlanError: keys of one section that cannot work together.
    """
    tree = _read_recipe(recipe)
    algorithm: dict[str, Any] = tree.get("algorithm") or {}
    values = [_parse(override) for override in overrides]
    given = dict(values)
    if "algorithm.loss" in given and given["algorithm.loss"] != algorithm.get("loss", AlgorithmConfig().loss):
        algorithm.pop("loss_options", None)  # they are the options of the recipe's own loss
    if {"steps", "epochs"} <= set(given):
        raise ConfigError("steps and epochs both say how long the run is; leave one out")
    for key, value in values:
        _set(tree, key, value)
    _keep_ratio(tree, recipe, given)
    _fill_policies(tree)
    try:
        config = _validator().validate_python(_with_absolute_files(tree))
    except ValidationError as error:
        found = [each for each in error.errors() if each["loc"][-1:] != ("str",)]  # of a text or a section, the section
        for each in found:
            if isinstance(own := each.get("ctx", {}).get("error"), PlanError):  # a section's own sentence
                where = ".".join(map(str, each["loc"][:2])) if each["loc"][:1] == ("policies",) else ""
                raise (PlanError(f"{where}: {own}") if where else own) from None
        unknown = [_key_of(e) for e in found if e["type"] == "unexpected_keyword_argument"]
        if unknown:
            raise ConfigError(unknown_key(unknown[0])) from None
        problems = "; ".join(_problem(each) for each in found)
        raise ConfigError(f"the configuration cannot be used: {problems}") from error
    _check_numbers(_tree(config), "")
    return config


@cache
def _validator() -> TypeAdapter[Config]:
    """Validator of whole configurations: to build one takes some 20 ms, to use it a tenth of that."""
    return TypeAdapter(Config)


class _Loader(yaml.SafeLoader):
    """YAML whose numbers may be written as 1e-3, as in YAML 1.2, and whose mappings have each key once."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        before: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in before:
                    raise ComposerError(None, None, f"found the key {key.value!r} a second time", key.start_mark)
                before.add((key.tag, key.value))
        return node


_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def read_yaml(text: str) -> Any:
    """Value of a YAML document.

    Raises:
        ValueError: it is not valid, or a mapping has a key twice; the message has line and column.
    """
    try:
        return _Loader(text).get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _parse(override: str) -> tuple[str, Any]:
    """Key and value of an override."""
    key, separator, value = override.partition("=")
    if not separator:
        raise ConfigError(f"override {override!r} is not of the form key=value")
    try:
        return key.strip(), read_yaml(value)
    except ValueError as error:
        raise ConfigError(f"the value of override {override!r} is not valid YAML: {error}") from error


def _keep_ratio(tree: dict[str, Any], recipe: str, given: Collection[str]) -> None:
    """Let `mini_batch_size` follow a `batch_size` that was given alone: as many updates a step as in the recipe."""
    if "batch.batch_size" not in given or "batch.mini_batch_size" in given:
        return
    batch, before = tree["batch"], _read_recipe(recipe).get("batch") or {}
    size, mini, new = before.get("batch_size", 0), before.get("mini_batch_size", 0), batch["batch_size"]
    if all(isinstance(each, int) and each > 0 for each in (size, mini, new)):
        num_updates = max(size // mini, 1)
        batch["mini_batch_size"] = new // num_updates if new % num_updates == 0 else new


def _fill_policies(tree: dict[str, Any]) -> None:
    """Fill in the keys that policies have from the run's own sections, which are those of the first one."""
    policies = tree.get("policies")
    if not policies or not isinstance(policies, dict):
        return
    names = [each.name for each in fields(PolicySection)]
    base = {name: tree.get(name) or {} for name in names}
    tree["policies"] = policies = {
        name: _laid_over(base, own or {}) if isinstance(own or {}, dict) else own for name, own in policies.items()
    }
    if isinstance(first := next(iter(policies.values())), dict):
        tree |= {name: first[name] for name in names}


def layers(recipe: str, overrides: Sequence[str] = ()) -> list[tuple[str, dict[str, Any]]]:
    """(where from, tree) of every layer of a configuration, the lowest first."""
    found: list[tuple[str, dict[str, Any]]] = []
    base: str | None = recipe
    relative_to: Path | None = None
    while base is not None:
        path = _path_of(base, relative_to)
        tree = read_yaml(path.read_text())
        relative_to, base = path.parent, tree.pop("extends", None)
        found.insert(0, (path.name, tree))
    for override in overrides:
        tree: dict[str, Any] = {}
        _set(tree, *_parse(override))
        found.append(("the command line", tree))
    return found


def _path_of(recipe: str, relative_to: Path | None) -> Path:
    path = Path(recipe)
    if path.suffix not in {".yaml", ".yml"}:
        return RECIPES / f"{recipe}.yaml"
    return path if relative_to is None else relative_to / path


def _read_recipe(recipe: str, relative_to: Path | None = None, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe's tree, merged over that of the recipe it `extends`; a file name is relative to the recipe's folder."""
    path = _path_of(recipe, relative_to)
    if not path.is_file():
        shipped = sorted(p.stem for p in RECIPES.glob("*.yaml"))
        if recipe in FINETUNING:
            raise ConfigError(
                f"{recipe} is a recipe of another command: rl-{recipe} {recipe} model.path=MODEL data.path=FILE "
                "output_dir=DIR"
            )
        raise ConfigError(
            f"there is no recipe {recipe!r}: give one of {', '.join(shipped)}, or the path of a .yaml file"
        )
    if path in below:
        raise ConfigError(
            f"{path} extends itself, by {' and '.join(str(each) for each in below)}; take one of them out"
        )
    try:
        tree = read_yaml(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of configuration keys")
    base = tree.pop("extends", None)
    return tree if base is None else _laid_over(_read_recipe(str(base), path.parent, (*below, path)), tree)


def _laid_over(base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in tree.items():
        below = merged.get(key)
        merged[key] = _laid_over(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
    return merged


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a key. A section given as a mapping leaves the keys alone that it does not name; options are replaced."""
    *parents, last = key.split(".")
    for parent in parents:
        child = tree.get(parent)
        if child is None:
            child = tree[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {key!r}: {parent!r} is a value, not a section")
        tree = child
    below = tree.get(last)
    if isinstance(value, dict) and isinstance(below, dict) and _is_section(key):
        value = _laid_over(cast("dict[str, Any]", below), cast("dict[str, Any]", value))
    tree[last] = value


class Setting(NamedTuple):
    """One key of the schema, with its place in it."""

    name: str
    """Dotted; NAME is a placeholder of a user-defined name."""
    cls: type
    """Dataclass that has it."""
    field: Field[Any]
    hint: Any
    section: type | None
    """Dataclass of the keys below it, if there are any."""
    is_by_name: bool
    """Whether it holds such sections under user-defined names."""


@cache
def settings() -> tuple[Setting, ...]:
    """Every key, in the order of the schema."""
    return tuple(_settings(Config, ""))


def _settings(cls: type, prefix: str) -> Iterator[Setting]:
    hints = get_type_hints(cls, include_extras=True)
    for each in (f for f in fields(cls) if f.init):
        hint = hints[each.name]
        section, is_by_name = section_of(hint), get_origin(bare(hint)) is Mapping
        found = Setting(f"{prefix}{each.name}", cls, each, hint, section, is_by_name)
        yield found
        if section is not None and cls is not PolicySection:  # whose keys are those of the run's own sections
            yield from _settings(section, f"{found.name}.NAME." if is_by_name else f"{found.name}.")


def section_of(hint: Any) -> type | None:
    """Dataclass of a section's type: at the key, or by name below it."""
    hint = bare(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        return hint
    return next((found for each in get_args(hint) if (found := section_of(each)) is not None), None)


def bare(hint: Any) -> Any:
    """Type without its annotations."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def of_policy(key: str) -> str:
    """Key of a policy of `policies` without the policy's name: the key of the run; any other key as it is."""
    return re.sub(r"^policies\.[\w-]+\.", "", key)


def is_named(name: str, key: str) -> bool:
    """Whether a dotted key, which may contain user-defined names, is the one of a `Setting.name`."""
    return re.fullmatch(re.escape(name).replace("NAME", r"[\w-]+"), key) is not None


def _is_section(key: str) -> bool:
    """Whether a key is a section of the configuration, and not a single value such as `data.options`."""
    names = (each.name + ".NAME" * each.is_by_name for each in settings() if each.section is not None)
    return any(is_named(name, key) for name in names)


def _key_of(error: ErrorDetails) -> str:
    """Key of an error, without the class that pydantic names where a value may be a text or a section."""
    return ".".join(str(each) for each in error["loc"] if each != ServedModel.__name__)


def _problem(error: ErrorDetails) -> str:
    """Error text for one key; a rule of a whole section names its values itself."""
    key = _key_of(error)
    if error["type"] == "value_error":
        return f"{key}: {error['msg'].removeprefix('Value error, ').removesuffix('.')}"
    return f"{key}: {error['msg']}, got {error['input']!r}"


def unknown_key(key: str) -> str:
    """Error text for an unknown key, with the nearest one of its section, or one of the same last name."""
    if (own := of_policy(key)) != key:
        where = key.removesuffix(own)
        return unknown_key(own).replace(" key ", f" key {where}", 1).replace(" one is ", f" one is {where}", 1)
    keys = [each.name for each in settings()]
    last = [each for each in keys if each.rpartition(".")[2] == key.rpartition(".")[2]]
    if not last and (others := _keys_elsewhere(key)):
        named = " or ".join(f"{ours} ({libraries})" for ours, libraries in others.items())
        return f"unknown configuration key {key}; here it is {named}"
    near = difflib.get_close_matches(key, last or keys, n=1, cutoff=0.0)
    return f"unknown configuration key {key}; the nearest one is {near[0]}"


def _keys_elsewhere(name: str) -> dict[str, str]:
    """Libraries by our key that use this name, its last part or the whole."""
    found: dict[str, str] = {}
    last = name.rpartition(".")[2]
    for row in rows():
        ours = row["ours"]
        for library, theirs in (("verl", row["verl"]), ("TRL", row["trl"]), ("prime-rl", row["prime_rl"])):
            if theirs and last == theirs.rpartition(".")[2] and library not in found.get(ours, ""):
                found[ours] = f"{found[ours]} and {library}" if ours in found else library
    return found


def _check_numbers(value: Any, key: str) -> None:
    """Check the size of every number: float32 squares them, and clocks and counters have 64 bits.

    Raises:
        ConfigError: names the key.
    """
    if isinstance(value, Mapping):
        for name, each in cast("Mapping[str, Any]", value).items():
            _check_numbers(each, f"{key}.{name}".removeprefix("."))
    elif isinstance(value, list | tuple):
        for each in cast("Sequence[Any]", value):
            _check_numbers(each, key)
    elif isinstance(value, int | float) and key not in _MAY_BE_INFINITE and not abs(value) <= LARGEST_NUMBER:
        raise ConfigError(f"{key}={value:g} cannot be used; a number of at most {LARGEST_NUMBER:g} is needed")


_MAY_BE_INFINITE = ("engine.optimizer.max_grad_norm",)
LARGEST_NUMBER = 1e18


def _with_absolute_files(value: Any) -> Any:
    """Make every `FILE.py:NAME` absolute, as workers run in other folders, and a leading `~/` the home folder."""
    if isinstance(value, dict):
        return {
            absolute(key) if isinstance(key, str) else key: _with_absolute_files(item) for key, item in value.items()
        }
    if isinstance(value, list):
        return [_with_absolute_files(item) for item in value]
    if not isinstance(value, str):
        return value
    return absolute(str(Path(value).expanduser()) if value.startswith("~/") else value)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of a tree by dotted key; an empty section is a value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        is_section = isinstance(value, Mapping) and value
        found |= flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return found


def as_tree(config: Config) -> dict[str, Any]:
    """Configuration as a tree of plain values, defaults included, which `load_config` reads again."""
    return json.loads(json.dumps(_tree(config)))


def _tree(value: Any) -> Any:
    """Section as a mapping of its keys; fields that the run fills in are left out."""
    if is_dataclass(value):
        return {f.name: _tree(getattr(value, f.name)) for f in fields(value) if f.init}
    return {key: _tree(item) for key, item in value.items()} if isinstance(value, Mapping) else value
