"""Hydra's settings: overrides of a command line, YAML files with their `defaults`, references to other keys.

It knows the syntax, and no key. A dependency on hydra-core would compose nothing without the program's own schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_trainer.config.load import read_yaml
from rl_trainer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Protocol

    Shipped = Mapping[str, Mapping[str, Any]]

    class Notes(Protocol):
        """Reasons by word, of those without effect and of those that are not there."""

        needless: dict[str, str]
        missing: dict[str, str]


OVERRIDE = re.compile(r"(?P<mark>~|\+{0,2})(?P<key>[A-Za-z_][\w.@/-]*)(?:=(?P<value>.*))?", re.DOTALL)
_CONFIG = re.compile(r"(?:--config-|-c)(p|n|d)(?:ath|ame|ir)?(?:=(.*))?")
_REFERENCE = re.compile(r"^\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^}]*))?\}$")
_PLAIN = re.compile(r"(?i:true|false|null|none)|[-+]?[\d_]*\.?\d+\.?([eE][-+]?\d+)?|[\[{'\"].*|", re.DOTALL)


def read_words(words: Sequence[str], folders: Sequence[Path], shipped: Shipped, notes: Notes) -> dict[str, Any]:
    """Settings of words in Hydra's syntax, on top of the configuration that they name.

    Args:
        words: Overrides, and options such as `--config-name`.
        folders: Where a configuration is looked for; several where a script named it, which then has to exist.
        shipped: Settings by the name of a configuration that the program itself ships.
        notes: Gets the words, and parts of configurations, that add nothing.

    Raises:
        ConfigError: a word is none of Hydra's, or a file cannot be read.
    """
    values, config, left = dict[str, Any](), {"p": "."}, list(words)
    while left:
        word = left.pop(0)
        if option := _CONFIG.fullmatch(word):
            if option[2] is None and not left:
                raise ConfigError(f"--from-verl: {word} has no value")
            config[option[1]] = (left.pop(0) if option[2] is None else option[2]).strip("'\"")
        elif (override := OVERRIDE.fullmatch(word)) and (override["value"] is not None or override["mark"] == "~"):
            value = None if override["mark"] == "~" else _value(override["value"])
            values |= _flat({override["key"]: value})
        elif not word.strip():
            notes.needless[repr(word)] = "an empty word"
        else:
            why = "is neither key=value nor a script or .yaml file; give verl's own words"
            raise ConfigError(f"--from-verl: {word!r} {why}")
    name, path = config.get("n", "").removesuffix(".yaml"), config.get("d", config["p"])
    files = [folder / path / f"{name}.yaml" for folder in (*folders, *folders[0].parents)]
    file = next((file for file in files if name and file.is_file()), None)
    if name in shipped and (file is None or path in ("config", "./config")):  # by the program's own name for it
        return {**shipped[name], **values}
    if file is not None:
        return compose(file, shipped, notes.needless) | values
    why = f"{files[0]} does not exist; give --config-path=FOLDER"
    if name and len(folders) > 1:
        raise ConfigError(f"--from-verl: --config-name={name}: {why}")
    notes.missing |= {f"--config-name={name}": why} if name else {}
    return values


def compose(file: Path, shipped: Shipped, notes: dict[str, str], package: str = "") -> dict[str, Any]:
    """Settings of a YAML file, with those of its `defaults` that are there."""
    try:
        tree = read_yaml(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--from-verl {file} cannot be read: {error}") from error
    if not isinstance(tree, Mapping):
        raise ConfigError(f"--from-verl {file} must hold verl's configuration, a mapping of keys")
    values, defaults = dict[str, Any](), tree.get("defaults") or []
    for each in defaults if "_self_" in defaults else [*defaults, "_self_"]:
        group, name = next(iter(each.items())) if isinstance(each, Mapping) else ("", str(each))
        folder, _, target = group.removeprefix("optional ").removeprefix("override ").partition("@")
        name, _, at = str(name).partition("@")
        part, at = file.parent / folder.lstrip("/") / f"{name}.yaml", at or target or folder.replace("/", ".")
        if name == "_self_":
            values |= _flat(tree, package)
        elif part.is_file():
            values |= compose(part, shipped, notes, f"{package}{at}." if at else package)
        elif name in shipped and not folder:
            values |= shipped[name]
        elif at:
            notes[f"{file.name}: {group or each}={name}"] = "a configuration of verl's own"
        else:
            raise ConfigError(f"--from-verl {file}: its defaults name {part}, which does not exist; put it there")
    return values


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in ("_target_", "defaults", "hydra"):
            is_tree = isinstance(value, Mapping) and value
            found |= _flat(value, f"{prefix}{key}.") if is_tree else {f"{prefix}{key}": value}
    return found


def _value(text: str) -> Any:
    """As Hydra reads it: YAML with numbers such as 1e-6, and without dates, sexagesimals, yes and no."""
    try:
        value = read_yaml(text) if _PLAIN.fullmatch(text) else text
    except ValueError:
        return text
    return None if value == "None" else value


def resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """With what a whole configuration takes from its other keys; a relative one is left out."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        for _ in range(8):
            if (match := _REFERENCE.match(value) if isinstance(value, str) else None) is None:
                break
            value = settings.get(match[1], _value(match[2]) if match[2] else None)
        if value != "???" and not (isinstance(value, str) and "${" in value):
            found[key] = value
    return found
