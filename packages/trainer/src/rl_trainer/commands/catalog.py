"""Catalog of choices: recipes, backends, algorithms, plug-ins, a line each; and shell completion."""

from __future__ import annotations

import ast
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from inspect import getdoc
from pathlib import Path
from typing import Literal

from rl_trainer.algorithms import ADVANTAGES, POLICY_LOSSES
from rl_trainer.config import RECIPES
from rl_trainer.config.explain import first_sentence, keys
from rl_trainer.config.load import FINETUNING

_GROUPS = {
    "engine.backend": "rl_engine.backends",
    "rollout.backend": "rl_rollout.backends",
    "weights_transport": "rl_ckpt.backends",
    "queue_storage": "rl_tq.storage",
    "agent.loop": "rl_agent.loops",
    "agent.options.tools": "rl_agent.tools",
    "agent.options.parser": "rl_agent.parsers",
    "tracking.trackers": "rl_trainer.trackers",
    "algorithm.advantage (installed)": "rl_trainer.advantages",
    "algorithm.loss (installed)": "rl_trainer.policy_losses",
    "algorithm.stages": "rl_trainer.stages",
    "batch.filter": "rl_trainer.filters",
    "pipeline (installed)": "rl_trainer.schedules",
    "staleness.policy (installed)": "rl_tq.policies",
    "rollout.elastic.policy (installed)": "rl_trainer.elastic",
    "data.format (installed)": "rl_trainer.datasets",
    "reward.path": "rl_trainer.rewards",
}
"""Entry point groups by key."""


def listing() -> str:
    """Listing of everything that a key can name, a section per key; imports none of it."""
    recipes = {file.stem: file.read_text().splitlines()[0].lstrip("# ") for file in sorted(RECIPES.glob("*.yaml"))}
    sections = {"recipes": recipes, "recipes of rl-sft, rl-dpo and rl-rm": _finetuning()}
    estimators = {name: getdoc(estimator.compute) or "" for name, estimator in sorted(ADVANTAGES.items())}
    sections["algorithm.advantage"] = {name: " ".join(doc.split("\n\n")[0].split()) for name, doc in estimators.items()}
    sections["algorithm.loss"] = {name: loss.source for name, loss in POLICY_LOSSES.items()}
    for key, group in _GROUPS.items():
        if found := {point.name: _doc_of(point) for point in sorted(entry_points(group=group), key=lambda p: p.name)}:
            sections[key] = found
    lines: list[str] = []
    for title, entries in sections.items():
        width = max(map(len, entries))
        lines += [f"{title}:", *(shorten(f"  {name:{width}}  {doc}") for name, doc in entries.items()), ""]
    return "\n".join(lines).rstrip()


def _finetuning() -> dict[str, str]:
    """First lines of rl-engine's recipes, by name."""
    spec = find_spec("rl_engine.finetune")
    folder = Path(spec.origin).parent / "recipes" if spec is not None and spec.origin else Path()
    files = [folder / f"{name}.yaml" for name in FINETUNING]
    return {file.stem: file.read_text().splitlines()[0].lstrip("# ") for file in files}


def shorten(line: str, most: int = 120) -> str:
    """A line of at most so many characters, cut between words."""
    return line.rstrip() if len(line) <= most else line[: most - 3].rpartition(" ")[0] + " ..."


def _doc_of(point: EntryPoint) -> str:
    """First sentence about an entry point, read from its source."""
    try:
        spec = find_spec(point.module)
        tree = ast.parse(Path(spec.origin).read_text()) if spec is not None and spec.origin else None
    except (ImportError, OSError, SyntaxError, ValueError):
        return "(cannot be read)"
    if tree is None:
        return ""
    named = [n for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == point.attr]
    doc = next((found for node in (*named, tree) if (found := ast.get_docstring(node))), "")
    return first_sentence(" ".join(str(doc).split("\n\n")[0].split()))


def completion(shell: Literal["bash", "zsh"]) -> str:
    """Shell script that completes recipes, options and keys: `eval "$(rl-train --completion bash)"`."""
    options = "--runtime --profile --print-config --explain --list --dry-run --quiet --resume --verify --from-verl"
    recipes = " ".join(sorted(file.stem for file in RECIPES.glob("*.yaml")))
    settable = " ".join(f"{key.name}=" for key in keys().values() if "NAME" not in key.name and not key.is_section)
    lines = [
        *(["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []),
        "_rl_train() {",
        '  local word="${COMP_WORDS[COMP_CWORD]}"',
        f'  COMPREPLY=($(compgen -W "{options} {recipes} {settable}" -- "$word"))',
        '  [[ "${COMPREPLY[0]}" == *= ]] && compopt -o nospace 2>/dev/null',
        "  return 0",
        "}",
        "complete -o default -F _rl_train rl-train rl-eval",
    ]
    return "\n".join(lines)
