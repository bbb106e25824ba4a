"""verl's settings from where users have them: overrides in Hydra's syntax, YAML configurations, launch scripts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rl_agent import create_script_reader
from rl_agent.errors import SandboxError, ScriptError
from rl_trainer.equivalents import tables
from rl_trainer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_agent.types import Launch, Launches

_OVERRIDE = re.compile(r"(?P<mark>~|\+{0,2})(?P<key>[A-Za-z_][\w.@/-]*)=(?P<value>.*)", re.DOTALL)
_CONFIG = re.compile(r"(?:--config-(path|name|dir)|-c([pnd]))(?:=(.*))?")
_REFERENCE = re.compile(r"^\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^}]*))?\}$")


@dataclass(slots=True)
class Conversion:
    """A recipe, and what did not become part of it."""

    program: str = "rl-train"
    """Program that the recipe is for: rl-train, or rl-sft."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Our configuration, as a recipe file holds it."""
    missing: dict[str, str] = field(default_factory=dict)
    """Reason by verl's key: no equivalent here."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Reason by verl's key: verl itself does not read it with these settings."""
    needless: dict[str, str] = field(default_factory=dict)
    """Reason by verl's key: without effect here."""
    assumed: dict[str, str] = field(default_factory=dict)
    """Assumptions under which a script was read, and complaints of bash."""

    values: dict[str, Any] = field(default_factory=dict)
    """Value by verl's key, as given; None where it is deleted."""
    entry: Mapping[str, Any] = field(default_factory=dict)
    """Row of the program in the table `entries`; empty for main_ppo."""

    def text(self) -> str:
        """The recipe as YAML, the rest as comments above it."""
        lines = [f"# Made from verl's settings by rl-train --from-verl, for {self.program}."]
        for title, notes in (
            ("No equivalent here", self.missing),
            ("Ignored by verl too", self.ignored),
            ("Nothing to set here", self.needless),
            ("Assumed when the script was read", self.assumed),
        ):
            if notes:
                lines += ["#", f"# {title}:", *(f"#   {k}: {why}".replace("\n", " ") for k, why in notes.items())]
        return "\n".join([*lines, yaml.safe_dump(self.recipe, sort_keys=False, width=110)])


def read_settings(arguments: Sequence[str]) -> Conversion:
    """Read the settings of a command line: see `convert`."""
    chosen = next((word.partition("=")[2] for word in arguments if word.startswith("--launch=")), "")
    words, found, unknown = [word for word in arguments if not word.startswith("--launch=")], Conversion(), {}
    is_file = bool(words) and (words[0].endswith((".sh", ".yaml", ".yml")) or Path(words[0]).exists())
    file = Path(words[0]) if is_file and "=" not in words[0] else None
    folders = [Path.cwd()]
    if file is not None and file.suffix in (".yaml", ".yml"):
        found.values |= _composed(file, found)
        words = words[1:]
    elif file is not None:
        launch, all_ = _launch(file, words[1:], chosen, found)
        given, unknown = words[1:], all_.unknown
        folders = [Path(launch.folder), file.resolve().parent]
        folders += [Path(launch.folder, *launch.module.split(".")[:-1])]
        words = [*launch.arguments, *(w for w in given if _OVERRIDE.fullmatch(w) and w not in launch.arguments)]
    _check_known({word: "" for word in words if not _OVERRIDE.fullmatch(word)}, unknown)
    given = found.values | _values(words, folders, found)
    _check_known(given, unknown)
    usual = tables()["engines"].get(str(given.get("model_engine")), {})
    found.values = _resolved(usual | found.entry.get("usual", {}) | given)
    return found


def _check_known(values: Mapping[str, Any], unknown: Mapping[str, str]) -> None:
    """Refuse what holds the output of a command that was not run."""
    for key, value in values.items():
        for number, command in unknown.items():
            if (marker := f"@unknown{number}@") in f"{key}={value}":
                where = key.replace(marker, "...")
                raise ConfigError(f"--from-verl: {where}: value unknown: $({command}); give it after the script")


def _launch(file: Path, arguments: Sequence[str], chosen: str, found: Conversion) -> tuple[Launch, Launches]:
    """Launch of a script, or of a folder that a user's own run recorded, and the row of its program."""
    try:
        reader = create_script_reader()
        read = reader.recorded(file) if file.is_dir() else reader.read(file, arguments)
    except (ScriptError, SandboxError) as error:
        raise ConfigError(f"--from-verl {error}") from error
    rows = [(each, _entry(each.module)) for each in read.launches]
    ours = list({(each.module, each.arguments): (each, row) for each, row in rows if row is not None}.values())
    ours = [(each, row) for each, row in ours if "refused" not in row] or ours
    said = (
        f"; bash said: {'; '.join(read.complaints)}; its variables can be set before rl-train"
        if read.complaints
        else ""
    )
    if not ours:
        ran = "".join(f"; it runs {command[:200]}" for command in dict.fromkeys(read.unknown.values()))
        raise ConfigError(f"--from-verl {file} launches no trainer of verl's{said}{ran}; give its overrides instead")
    if len(ours) > 1 and not chosen:
        listed = "".join(
            f"\n  --launch={i}: {e.module} {' '.join(e.arguments)[:200]}" for i, (e, _) in enumerate(ours, 1)
        )
        raise ConfigError(f"--from-verl {file} launches verl {len(ours)} times; choose one:{listed}")
    if chosen and not (chosen.isdigit() and 0 < int(chosen) <= len(ours)):
        raise ConfigError(f"--launch={chosen} is none of the {len(ours)} launches of {file}; give 1 to {len(ours)}")
    launch, found.entry = ours[int(chosen or 1) - 1]
    if why := found.entry.get("refused"):
        raise ConfigError(f"--from-verl {file} launches {launch.module}: {why}")
    if note := found.entry.get("note"):
        found.missing[launch.module] = note
    if launch.options:
        found.needless[" ".join(launch.options)] = "a run starts its own processes"
    found.assumed |= dict.fromkeys(read.assumed, "as on a machine without") | dict.fromkeys(
        read.complaints, "said bash"
    )
    return launch, read


def _entry(module: str) -> Mapping[str, Any] | None:
    return next((row for row in tables()["entries"] if fnmatchcase(module, row["module"])), None)


def _values(words: Sequence[str], folders: Sequence[Path], found: Conversion) -> dict[str, Any]:
    """Settings of words in Hydra's syntax, on top of the configuration that they name."""
    values, config, left = dict[str, Any](), dict[str, str](), list(words)
    while left:
        word = left.pop(0)
        if option := _CONFIG.fullmatch(word):
            kind = option[1] or {"p": "path", "n": "name", "d": "dir"}[option[2]]
            if option[3] is None and not left:
                raise ConfigError(f"--from-verl: {word} has no value")
            config[kind] = (left.pop(0) if option[3] is None else option[3]).strip("'\"")
        elif override := _OVERRIDE.fullmatch(word):
            value = None if override["mark"] == "~" else _value(override["value"])
            values |= (
                _flat(value, f"{override['key']}.") if isinstance(value, dict) and value else {override["key"]: value}
            )
        elif re.fullmatch(r"~[A-Za-z_][\w.]*", word):
            values[word[1:]] = None
        elif not word.strip():
            found.needless[repr(word)] = "an empty word"
        else:
            raise ConfigError(
                f"--from-verl: {word!r} is neither key=value nor a script or .yaml file; give verl's own words"
            )
    name, path = config.get("name", "").removesuffix(".yaml"), config.get("path") or config.get("dir") or "."
    shipped = tables()["configs"].get(name)
    files = [folder / path / f"{name}.yaml" for folder in (*folders, *folders[0].parents)]
    file = next((file for file in files if name and file.is_file()), None)
    if shipped is not None and (file is None or path in ("config", "./config")):  # verl's own, by its own name for it
        return shipped | values
    if file is not None:
        return _composed(file, found) | values
    if name and len(folders) > 1:
        raise ConfigError(f"--from-verl: --config-name={name}: {files[0]} does not exist; give --config-path=FOLDER")
    if name:
        found.missing[f"--config-name={name}"] = f"{files[0]} does not exist; give --config-path=FOLDER"
    return values


def _composed(file: Path, found: Conversion, package: str = "") -> dict[str, Any]:
    """Settings of a YAML file, with those of its `defaults` that are there; verl's own are those of the table."""
    try:
        tree = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--from-verl {file} cannot be read: {error}") from error
    if not isinstance(tree, Mapping):
        raise ConfigError(f"--from-verl {file} must hold verl's configuration, a mapping of keys")
    values, own = dict[str, Any](), {k: v for k, v in tree.items() if k not in ("defaults", "hydra")}
    defaults = tree.get("defaults") or []
    for each in defaults if "_self_" in defaults else [*defaults, "_self_"]:
        group, name = next(iter(each.items())) if isinstance(each, Mapping) else ("", str(each))
        folder, _, target = group.removeprefix("optional ").removeprefix("override ").partition("@")
        name, _, at = str(name).partition("@")
        part, at = file.parent / folder.lstrip("/") / f"{name}.yaml", at or target or folder.replace("/", ".")
        if name == "_self_":
            values |= _flat(own, package)
        elif part.is_file():
            values |= _composed(part, found, f"{package}{at}." if at else package)
        elif name in tables()["configs"] and not folder:
            values |= tables()["configs"][name]
        elif at:
            found.needless[f"{file.name}: {group or each}={name}"] = "a configuration of verl's own"
        else:
            raise ConfigError(f"--from-verl {file}: its defaults name {part}, which does not exist; put it there")
    return values


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        elif key not in ("_target_", "defaults", "hydra"):
            found[f"{prefix}{key}"] = value
    return found


def _value(text: str) -> Any:
    """As Hydra reads it: YAML with numbers such as 1e-6, and without dates, sexagesimals, yes and no."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if value == "None":
        return None
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    is_plain = (
        not isinstance(value, bool | int | float)
        or text.lower() in ("true", "false")
        or re.fullmatch(r"[-+.\d_eE]+|\.?\w+", text)
    )
    is_word = isinstance(value, bool) and text.lower() not in ("true", "false")
    return (
        value if is_plain and not is_word and isinstance(value, bool | int | float | str | list | dict | None) else text
    )


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
