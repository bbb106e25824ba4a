"""Explanations of configuration keys: doc, type, default, source of the value, readers.

One source, the dataclasses, for `rl-train --explain`, `--print-config`, shell completion and the reference page.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent, wrap
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from rl_trainer import equivalents
from rl_trainer.config.load import Setting, as_tree, is_named, layers, of_policy, settings, unknown_key
from rl_trainer.errors import ConfigError

if TYPE_CHECKING:
    from rl_trainer.config.schema import Config

_PACKAGES = ("rl_agent", "rl_engine", "rl_rollout", "rl_trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One configuration key."""

    name: str
    """Dotted; NAME is a placeholder of a user-defined name."""
    type: str
    default: str
    """Default as YAML; empty where a value has to be given."""
    doc: str
    owner: str
    """The package whose dataclass defines it."""
    is_section: bool
    """Whether further keys are below it."""


@cache
def keys() -> Mapping[str, Key]:
    """Every key, in the order of the schema."""
    return {each.name: _key(each) for each in settings()}


def _key(of: Setting) -> Key:
    name, section = of.field.name, of.section
    owner = next(c for c in reversed(of.cls.__mro__) if name in vars(c).get("__annotations__", {}))
    doc = docs_of(of.cls).get(name) or (inspect.getdoc(section) or "" if section else "")
    default = of.field.default if of.field.default_factory is MISSING else of.field.default_factory()
    return Key(
        name=of.name,
        type=type_name(of.hint),
        default="" if default is MISSING or is_dataclass(default) else _yaml(default),
        doc=" ".join(doc.split("\n\n")[0].split()),
        owner=owner.__module__.partition(".")[0].replace("_", "-").replace("rl-trainer", "rl-post-trainer"),
        is_section=section is not None,
    )


@cache
def docs_of(cls: type) -> Mapping[str, str]:
    """Docstrings of fields: the string below each field of a dataclass and its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        body = ast.parse(dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef), "it is the source of a class"
        for field_, text in zip(body.body, body.body[1:], strict=False):
            if not (isinstance(field_, ast.AnnAssign) and isinstance(field_.target, ast.Name)):
                continue
            if (
                isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                found[field_.target.id] = inspect.cleandoc(text.value.value)
    return found


def type_name(hint: Any) -> str:
    """Type in words: `int > 0`, `sync or async`, `float, or null`."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = [c for each in inner[1:] for c in getattr(each, "metadata", [each])]
        marks = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        limits = [f"{mark} {getattr(c, name)}" for c in bounds for name, mark in marks if hasattr(c, name)]
        return " ".join([type_name(inner[0]), " and ".join(limits)]).strip()
    if origin is Literal:
        return " or ".join(str(each) for each in inner)
    if origin in (Union, UnionType):
        kinds = [type_name(each) for each in inner if each is not NoneType]
        return " or ".join(kinds) + (", or null" if NoneType in inner else "")
    if origin is tuple:
        return f"list of {type_name(inner[0])}" if inner[-1] is Ellipsis else f"[{', '.join(map(type_name, inner))}]"
    if origin in (Mapping, dict):
        return f"mapping of names to {type_name(inner[1])}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " or ".join(str(each.value) for each in hint)
    if is_dataclass(hint):
        return "section"
    return {"str": "text", "bool": "true or false", "Any": "any value"}.get(
        getattr(hint, "__name__", str(hint)), getattr(hint, "__name__", str(hint))
    )


def _yaml(value: Any) -> str:
    if is_dataclass(value):
        return "section"
    plain = _plain(value)
    return yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (tuple, list)) else value


def explain(name: str) -> str:
    """Explanation of a key: doc, type, default and readers; of a section, one line per key.

    Raises:
        ConfigError: there is no such key (names the nearest).
    """
    found = find(name)
    lines = [f"{found.name}: {found.type}" + (f", default {found.default}" if found.default else "")]
    lines += wrap(found.doc, 100, initial_indent="  ", subsequent_indent="  ")
    lines += [f"  Defined by {found.owner}; read in {', '.join(readers(found.name)) or found.owner}."]
    for key in keys().values():
        if found.is_section and key.name.startswith(f"{found.name}."):
            lines += wrap(
                f"{key.name}: {first_sentence(key.doc)}", 100, initial_indent="  ", subsequent_indent="      "
            )
    return "\n".join(lines)


def find(name: str) -> Key:
    """Find a key by its dotted name, which may contain user-defined names.

    Raises:
        ConfigError: there is none.
    """
    for key in keys().values():
        if is_named(key.name, name) or is_named(key.name, of_policy(name)):
            return key
    raise ConfigError(unknown_key(name))


def first_sentence(doc: str) -> str:
    """First sentence of a text."""
    return re.split(r"(?<=[^.\d]\.)\s", doc, maxsplit=1)[0]


def readers(name: str) -> tuple[str, ...]:
    """Modules that read a key, found in their source as `section.key` or `config.key`."""
    section, _, last = name.rpartition(".")
    before = section.rpartition(".")[2] or "config"
    return tuple(sorted(_reads().get(("part" if before == "NAME" else before, last), ())))


@cache
def _reads() -> Mapping[tuple[str, str], set[str]]:
    """Index of the sources: modules by `section.key`."""
    found: dict[tuple[str, str], set[str]] = {}
    for package in _PACKAGES:
        spec = find_spec(package)
        assert spec is not None, "the trainer depends on it"
        assert spec.origin is not None, "it has an __init__.py"
        folder = Path(spec.origin).parent
        for file in folder.rglob("*.py"):
            if file.stem in _TALKERS or "testing" in file.parts:
                continue
            module = ".".join((package, *file.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
            for pair in _PAIR.findall(file.read_text()):
                found.setdefault(pair, set()).add(module)
    return found


_PAIR = re.compile(r"(?<![\w])_?(\w+)\.(\w+)\b(?!\()")
_TALKERS = ("equivalents", "explain", "from_verl", "testing")
"""Modules that speak of keys and read none."""


def annotated(config: Config, recipe: str, overrides: Sequence[str]) -> str:
    """The configuration as YAML that `load_config` reads, with doc, type, default and source of every key."""
    sources = {key: source for source, tree in layers(recipe, overrides) for key in _leaves(tree)}
    lines: list[str] = []
    _write(lines, config, as_tree(config), "", sources)
    return "\n".join(lines) + "\n"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found.append(name)
        if isinstance(value, Mapping):
            found += _leaves(value, f"{name}.")
    return found


def _write(lines: list[str], section: Any, tree: Mapping[str, Any], prefix: str, sources: Mapping[str, str]) -> None:
    indent = "  " * prefix.count(".")
    for name, value in tree.items():
        key = keys()[f"{prefix}{name}"]
        held = getattr(section, name)
        line = f"{first_sentence(key.doc)} ({key.type}" + (f"; default {key.default}" if key.default else "")
        line += f"; from {sources.get(key.name, 'the default')})" if not is_dataclass(held) else ")"
        lines += wrap(line, 112 - len(indent), initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        if is_dataclass(held):
            lines.append(f"{indent}{name}:")
            _write(lines, held, value, f"{key.name}.", sources)
        else:
            lines.append(f"{indent}{name}: {_yaml(value)}")


def names_elsewhere() -> str:
    """Names of verl, TRL and prime-rl with ours, as Markdown for the documentation."""
    lines = ["| here | verl | TRL | prime-rl |", "|---|---|---|---|"]
    lines += [
        "| " + " | ".join(f"`{cell}`" if cell else "-" for cell in row.values()) + " |" for row in equivalents.rows()
    ]
    values = ["", "| key | value of verl or TRL | value here |", "|---|---|---|"]
    values += [
        f"| `{key}` | `{t}` | `{o}` |" for key, of in equivalents.tables()["values"].items() for t, o in of.items()
    ]
    notes = ["", "| key of verl (a pattern, with `*`) | why `--from-verl` sets nothing for it |", "|---|---|"]
    notes += [
        f"| `{key}` | {row['missing']} |" for key, row in equivalents.tables()["verl"].items() if "missing" in row
    ]
    notes += [f"| `{pattern}` | {why} |" for _, pattern, why, *_ in equivalents.tables()["unread"]]
    return "\n".join([*lines, *values, *notes]) + "\n"


def reference() -> str:
    """Reference page of all keys: a table per section."""
    out = ["# Configuration", "", "Every key of `rl-train`, from the dataclasses that the components own.", ""]
    out += [
        "`rl-train RECIPE key=value ...` sets them, `--explain KEY` explains one, `--print-config` all of a run's.",
        "",
    ]
    sections: dict[str, list[Key]] = {}
    for key in keys().values():
        sections.setdefault(key.name.rpartition(".")[0], []).append(key)
    for section, members in sections.items():
        out += [f"## {f'`{section}`' if section else 'The run'}", ""]
        if section in keys():
            out += [_markdown(keys()[section].doc), ""]
        out += ["| key | what | type | default | owner; read in |", "|---|---|---|---|---|"]
        for key in members:
            read = ", ".join(f"`{r.rpartition('.')[2]}`" for r in readers(key.name)[:4])
            cells = (
                f"`{key.name}`",
                _markdown(key.doc),
                _markdown(key.type),
                f"`{key.default}`" if key.default else "-",
            )
            out.append(f"| {' | '.join(cells)} | {key.owner}{f'; {read}' if read else ''} |")
        out.append("")
    return "\n".join(out)


def _markdown(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
