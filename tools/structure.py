"""Structure of every package: files, lines, import circles, longest function, widest class.

    uv run python tools/structure.py           # a table
    uv run python tools/structure.py --write   # record the lines of each package in tools/structure.json

Reads the checkout as text (ast, grimp), runs nothing of it. `tests/test_structure.py` fails where a package has grown
beyond its record, so that a change which adds lines also says so in this file, or deletes as many.
"""

from __future__ import annotations

import ast
import json
import sys
from functools import cache
from pathlib import Path

import grimp
import networkx as nx

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tools" / "structure.json"
SHORT = 100
"""Lines below which a module with one importer belongs in its importer."""
LARGEST_CLASS = 25
"""Most methods of a class; another library's surface and conformance suites have as many as they need."""


def sources() -> dict[str, Path]:
    """Source folder of every package by its import name."""
    folders = [ROOT / "csrc" / "src", *sorted(ROOT.glob("packages/*/src"))]
    return {package.name: package for folder in folders for package in sorted(folder.glob("rl_*"))}


def num_lines(package: Path) -> int:
    """Lines of the Python files of a package."""
    return sum(len(file.read_text().splitlines()) for file in package.rglob("*.py"))


def classes(package: Path) -> dict[str, int]:
    """Number of methods by class, without special ones (a protocol) but `__init__`; conformance suites are left out."""
    found: dict[str, int] = {}
    for file in package.rglob("*.py"):
        if "testing" in file.relative_to(package).parts or file.name == "testing.py":
            continue
        for node in _definitions(file):
            if isinstance(node, ast.ClassDef):
                names = [each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
                count = sum(not name.startswith("__") or name == "__init__" for name in names)
                found[f"{file.relative_to(package)}:{node.name}"] = count
    return found


def functions(package: Path) -> dict[str, int]:
    """Lines by function, nested ones included."""
    found: dict[str, int] = {}
    for file in package.rglob("*.py"):
        for node in _definitions(file):
            if not isinstance(node, ast.ClassDef):
                name = f"{file.relative_to(package)}:{node.name}:{node.lineno}"
                found[name] = (node.end_lineno or node.lineno) - node.lineno + 1
    return found


@cache
def _definitions(file: Path) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Classes and functions of a file, nested ones included."""
    nodes = ast.walk(ast.parse(file.read_text()))
    return [node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]


def measure(package: Path) -> dict[str, int]:
    """Counts for a package, whose parent folder has to be on `sys.path`."""
    files = {_module(package, file): file for file in package.rglob("*.py")}
    lines = {name: len(file.read_text().splitlines()) for name, file in files.items()}
    imports = _imports(package.name)
    folders: nx.DiGraph[str] = nx.DiGraph()
    folders.add_edges_from(
        (a, b) for a, b in ((_folder(x, files), _folder(y, files)) for x, y in imports.edges) if _are_apart(a, b)
    )
    parents = [file.parent for file in files.values()]
    return {
        "files": len(files),
        "lines": sum(lines.values()),
        "modules in the widest folder": max(parents.count(parent) for parent in parents),
        "short modules with one importer": sum(_is_lone(name, lines[name], imports) for name in files),
        "import circles": _num_circles(imports),
        "folder circles": _num_circles(folders),
        "lines of the longest function": max(functions(package).values(), default=0),
        "methods of the largest class": max(classes(package).values(), default=0),
    }


def _imports(package: str) -> nx.DiGraph[str]:
    """Imports between modules, those under TYPE_CHECKING too; a module loads its parents anyway."""
    graph = grimp.build_graph(package, cache_dir=None)
    found: nx.DiGraph[str] = nx.DiGraph()
    found.add_nodes_from(graph.modules)
    for module in graph.modules:
        others = graph.find_modules_directly_imported_by(module)
        found.add_edges_from((module, other) for other in others if not module.startswith(other + "."))
    return found


def _num_circles(graph: nx.DiGraph[str]) -> int:
    return sum(len(members) > 1 for members in nx.strongly_connected_components(graph))


def _is_lone(module: str, count: int, imports: nx.DiGraph[str]) -> bool:
    is_found_by_name = any(f".{name}" in module for name in ("testing", "backends", "storage", "loops"))
    return count < SHORT and not is_found_by_name and imports.in_degree(module) == 1


def _module(package: Path, file: Path) -> str:
    return ".".join(file.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")


def _folder(module: str, files: dict[str, Path]) -> str:
    return module if files[module].name == "__init__.py" else module.rpartition(".")[0]


def _are_apart(folder: str, other: str) -> bool:
    return folder != other and not f"{folder}.".startswith(f"{other}.") and not f"{other}.".startswith(f"{folder}.")


def main() -> None:
    """Print the table, or record the lines."""
    packages = sources()
    if sys.argv[1:] == ["--write"]:
        RECORD.write_text(json.dumps({name: num_lines(each) for name, each in packages.items()}, indent=2) + "\n")
        return
    sys.path[:0] = [str(package.parent) for package in packages.values()]
    measured = {name: measure(package) for name, package in packages.items()}
    names = [*next(iter(measured.values()))]
    print(f"| package | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for package, values in measured.items():
        print(f"| {package} | {' | '.join(f'{values[name]:,}' for name in names)} |")


if __name__ == "__main__":
    main()
