"""`rl-bench NAME`: find the benchmark in the checkout, run it, print one table, write one JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from rl_bench.machine import describe_commit, describe_machine
from rl_bench.run import Row, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType


def find_checkout(start: Path) -> Path | None:
    """The workspace's root: the nearest folder at or above `start` that declares a uv workspace."""
    for folder in (start, *start.parents):
        manifest = folder / "pyproject.toml"
        if manifest.is_file() and "[tool.uv.workspace]" in manifest.read_text():
            return folder
    return None


def find_benchmarks(root: Path) -> dict[str, Path]:
    """Every benchmark by name: `NAME.py` in `bench`, `csrc/bench` or `packages/*/bench`, less `_helpers.py`.

    Raises:
        ValueError: two files have the same name.
    """
    found: dict[str, Path] = {}
    for file in sorted(
        file for part in ("benchmarks", "csrc/bench", "packages/*/bench") for file in root.glob(f"{part}/*.py")
    ):
        if file.stem in found:
            raise ValueError(f"two benchmarks are called {file.stem!r}: {found[file.stem]} and {file}; rename one")
        if not file.stem.startswith("_"):
            found[file.stem] = file
    return found


def load_benchmark(root: Path, file: Path, *, threads: int) -> ModuleType:
    """Import one benchmark, with as many threads for torch."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # before the benchmark imports torch, which reads it once
    if str(root) not in sys.path:
        sys.path.append(str(root))  # last, so that nothing is shadowed; processes that the benchmark spawns inherit it
    return importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))


def run_benchmark(root: Path, name: str, main: Callable[[Run], None], *, quick: bool, threads: int) -> dict[str, Any]:
    """Run a benchmark's `main(run)` or `gpu(run)`; returns what the JSON file holds, also where it ends early."""
    run = Run(quick=quick)
    run.parameters(quick=quick, threads=threads)
    try:
        main(run)
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 - told in full, and by the exit code
        traceback.print_exc()
        run.parameters(cut_off_by=type(error).__name__)
    return {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "commit": describe_commit(root),
        "parameters": run.inputs,
        "rows": [asdict(row) for row in run.rows()],
    }


def to_table(result: dict[str, Any]) -> Table:
    """The rows as one table; ratios above 1 are faster."""
    machine = result["machine"]
    hardware = f"{machine['cpu']} x{machine['cores']}" + "".join(f", {gpu}" for gpu in machine["gpu"])
    table = Table(title=f"{result['name']} · {hardware} · torch {machine['torch']} · {result['commit'][:12]}")
    for heading in ("metric", "system"):
        table.add_column(heading)
    for heading in ("median", "min", "max", "CPU ms", "x limit", "x best peer"):
        table.add_column(heading, justify="right")
    table.add_column("goal")
    previous = ""
    for row in (Row(**values) for values in result["rows"]):
        if previous and row.metric != previous:
            table.add_section()
        table.add_row(row.metric if row.metric != previous else "", *_cells(row))
        previous = row.metric
    return table


def _cells(row: Row) -> list[str]:
    name = row.system if row.role == "ours" else f"{row.system} ({row.role})"
    verdict = {True: "met", False: "NOT met", None: "cannot tell here"}[row.met]
    goal = f"{row.goal}: {verdict}" if row.goal else ""
    median = f"{_number(row.median)} {row.unit}" if row.n else row.note
    cpu = _number(None if row.cpu_s is None else row.cpu_s * 1e3)
    ratios = (_number(row.ratio_to_limit), _number(row.ratio_to_best_peer))
    return [name, median, _number(row.min), _number(row.max), cpu, *ratios, goal]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `rl-bench`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="rl-bench", description="Measure one part of the workspace beside its peers.")
    parser.add_argument("name", metavar="NAME", help="kernels, buffers, ckpt, tq, engine, rollout, agent, trainer ...")
    parser.add_argument("--quick", action="store_true", help="smaller inputs; not for figures that are quoted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, parameters and rows there")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of torch (default: every core)")
    parser.add_argument("--gpu", action="store_true", help="only the rows that need a GPU")
    arguments = parser.parse_args(argv)
    root = find_checkout(Path.cwd()) or find_checkout(Path(__file__).resolve())
    if root is None:
        return _refuse("rl-bench runs inside the rl-stack checkout; change into it first")
    found = find_benchmarks(root)
    if arguments.name not in found:
        return _refuse(f"no benchmark {arguments.name!r} here; there are: {', '.join(sorted(found)) or 'none'}")
    threads = arguments.threads or os.cpu_count() or 1
    module = load_benchmark(root, found[arguments.name], threads=threads)
    work = getattr(module, "gpu" if arguments.gpu else "main", None)
    if work is None:
        return _refuse(f"the benchmark {arguments.name!r} has no rows that need a GPU; leave out --gpu")
    if arguments.gpu and not has_gpu():
        return _refuse(f"no GPU: torch sees no CUDA device here, and the rows of {arguments.name} --gpu need one")
    result = run_benchmark(root, arguments.name, work, quick=arguments.quick, threads=threads)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(to_table(result))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"written to {arguments.json}")
    return {None: 0, "KeyboardInterrupt": 130}.get(result["parameters"].get("cut_off_by"), 1)


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def _refuse(sentence: str) -> int:
    Console(stderr=True).print(sentence)
    return 2


if __name__ == "__main__":
    sys.exit(main())
