"""Structure of every package: files, lines, imports, and private words, beside the goals that the design set.

Reads source and imports of the checkout as text (grimp) and runs nothing of it. Imports under TYPE_CHECKING count.
An import of a module's own parent package is left out: every submodule loads its parents anyway.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import grimp
import networkx as nx

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_bench import Run

GOALS = {
    "rl_csrc": {"files": 36, "lines": 6200},
    "rl_ckpt": {"files": 75, "lines": 11800},
    "rl_tq": {"files": 70, "lines": 12000},
    "rl_engine": {"files": 48, "lines": 9800},
    "rl_rollout": {"files": 52, "lines": 10200},
    "rl_agent": {"files": 44, "lines": 5700},
    "rl_trainer": {"files": 68, "lines": 11000},
}
"""Upper bounds for each package; every package also has the bounds of `SHARED_GOALS`."""

SHARED_GOALS = {
    "import circles": 0,
    "private root modules": 0,
    "widest folder, modules": 14,
    "names with private words": 0,
}
SHORT = 100
"""Lines below which a module with a single importer belongs in its importer."""

PRIVATE_WORDS = frozenset(
    [
        "bell",
        "desk",
        "errand",
        "replica_set",
        "replica_sets",
        "inlet",
        "landing",
        "landings",
        "lacks",
        "mates",
        "mover",
        "nudge",
        "outbox",
        "parcel",
        "parcels",
        "passage",
        "shelf",
        "sight",
        "speaker",
        "speakers",
        "strangers",
        "stretch",
        "tally",
        "telling",
        "turnstile",
        "visitor",
        "visitors",
        "wishes",
    ]
)
"""Words that the code once had meanings of its own for; docs/glossary.md has the field's."""

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def main(run: Run) -> None:
    """Record one row per measure and package, with its goal."""
    root = Path(__file__).resolve().parents[1]
    sources = [root / "csrc" / "src", *sorted(root.glob("packages/*/src"))]
    sys.path[:0] = [str(source) for source in sources]  # this checkout's packages, whatever is installed
    packages = [package for source in sources for package in sorted(source.glob("rl_*/"))]
    measured = {package.name: measure_package(package) for package in packages}
    for measure in measured["rl_csrc"]:
        for package, values in measured.items():
            bound = {**GOALS.get(package, {}), **SHARED_GOALS}.get(measure)
            goal = None if bound is None else f"<= {bound} {measure.split()[-1]}"
            run.record(measure, package, [values[measure]], unit=measure.split()[-1], goal=goal)


def measure_package(folder: Path) -> dict[str, int]:
    """Counts for the package at `folder`; its parent folder has to be on `sys.path`."""
    files = {_module_name(folder, file): file for file in folder.rglob("*.py")}
    lines = {name: len(file.read_text().splitlines()) for name, file in files.items()}
    imports = _imports(folder.name)
    folders: nx.DiGraph[str] = nx.DiGraph()
    folders.add_edges_from(
        (a, b) for a, b in ((_folder(x, files), _folder(y, files)) for x, y in imports.edges) if _are_apart(a, b)
    )
    siblings = [file.parent for file in files.values()]
    return {
        "files": len(files),
        "lines": sum(lines.values()),
        "private root modules": sum(1 for file in folder.glob("_*.py") if not file.name.startswith("__")),
        "widest folder, modules": max(siblings.count(parent) for parent in siblings),
        "under 100 lines with one importer, modules": sum(
            _is_lone(name, lines[name], imports) for name, file in files.items() if not file.name.startswith("__")
        ),
        "import circles": _count_circles(imports),
        "folder circles": _count_circles(folders),
        "longest function, lines": max(
            (length for file in files.values() for length in _function_lengths(file)), default=0
        ),
        "names with private words": sum(len(private_words(file, name)) for name, file in files.items()),
    }


def private_words(file: Path, module: str) -> list[str]:
    """Names of a module, its classes, functions, parameters and fields that hold one of `PRIVATE_WORDS`."""
    names = [module.rpartition(".")[2]]
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.arg(arg=name)
            ):
                names.append(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.append(name)
            case _:
                pass
    return [name for name in names if PRIVATE_WORDS & {word.lower() for word in _WORD.findall(name)}]


def _imports(package: str) -> nx.DiGraph[str]:
    graph = grimp.build_graph(package, cache_dir=None)
    found: nx.DiGraph[str] = nx.DiGraph()
    found.add_nodes_from(graph.modules)
    for module in graph.modules:
        others = graph.find_modules_directly_imported_by(module)
        found.add_edges_from((module, other) for other in others if not module.startswith(other + "."))
    return found


def _count_circles(graph: nx.DiGraph[str]) -> int:
    return sum(len(members) > 1 for members in nx.strongly_connected_components(graph))


def _is_lone(module: str, num_lines: int, imports: nx.DiGraph[str]) -> bool:
    is_found_by_name = ".testing" in module or ".backends" in module or ".storage" in module
    return num_lines < SHORT and not is_found_by_name and imports.in_degree(module) == 1


def _module_name(folder: Path, file: Path) -> str:
    return ".".join(file.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")


def _folder(module: str, files: dict[str, Path]) -> str:
    return module if files[module].name == "__init__.py" else module.rpartition(".")[0]


def _are_apart(folder: str, other: str) -> bool:
    return folder != other and not f"{folder}.".startswith(f"{other}.") and not f"{other}.".startswith(f"{folder}.")


def _function_lengths(file: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1
