"""A visitor's first hour: seconds from the clone to the first reward and to a model that has learned, and its price.

Clones the checkout, installs it by `uv sync` (packages come from uv's cache or the index, as on the machine at hand),
and follows the lines of `rl-train quickstart` as a terminal would show them. `--quick` takes the installation that is
there and one runtime. What is typed, set and read is counted in the README and the pages themselves.
"""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_bench import Run

ROOT = Path(__file__).parents[1]
LEARNED = 0.65
"""Held-out accuracy of the quickstart at which its model counts as learned."""
_REWARD, _HELD_OUT = re.compile(r"^step \d+/\d+ .*\breward "), re.compile(r"^step \d+/\d+ .*\bheld-out (\d\.\d+)")
_COMMANDS = re.compile(r"```bash\n(.*?)```", re.DOTALL)


def main(run: Run) -> None:
    """See the module."""
    run.parameters(learned=LEARNED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scripts, installed_s = Path(sys.executable).parent, 0.0
        if not run.quick:
            started = time.perf_counter()
            clone = folder / "clone"
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
            subprocess.run(["uv", "sync", "--quiet"], cwd=clone, check=True)
            scripts, installed_s = clone / ".venv/bin", time.perf_counter() - started
            run.record("clone and install", "ours", [installed_s], unit="s")
        for runtime in ("inline",) if run.quick else ("inline", "ray"):
            found = follow(scripts, runtime, folder / runtime)
            for what, seconds in found.items():
                goal = {"start to first reward": "<= 20 s", "whole quickstart": "<= 150 s"}.get(what)
                run.record(what, f"ours, runtime={runtime}", [seconds], unit="s", goal=goal)
            if "start to first reward" in found:
                run.record(
                    "clone to first reward",
                    f"ours, runtime={runtime}",
                    [installed_s + found["start to first reward"]],
                    unit="s",
                )
    for what, count in counts().items():
        run.record(what, "ours", [float(count)], unit="")


def follow(scripts: Path, runtime: str, output_dir: Path) -> dict[str, float]:
    """Run the quickstart; seconds until its first reward, until it has learned, and until its end."""
    line = [str(scripts / "rl-train"), "quickstart", f"runtime={runtime}", f"output_dir={output_dir}"]
    started, found = time.perf_counter(), dict[str, float]()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "it is a pipe"
        for text in process.stdout:
            passed = time.perf_counter() - started
            if _REWARD.match(text):
                found.setdefault("start to first reward", passed)
            if (held_out := _HELD_OUT.match(text)) and float(held_out[1]) >= LEARNED:
                found.setdefault("start to a model that has learned", passed)
    if process.returncode:
        raise RuntimeError(f"{' '.join(line)} ended with exit code {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found["whole quickstart"] = time.perf_counter() - started
    if runtime == "inline":  # other processes than the command's own are not counted
        found["whole quickstart, processor seconds"] = sum(
            (after.ru_utime, after.ru_stime, -before.ru_utime, -before.ru_stime)
        )
    shutil.rmtree(output_dir)
    return found


def counts() -> dict[str, int]:
    """Commands and keys of the README's first block, and pages whose code a test runs."""
    first = _COMMANDS.search((ROOT / "README.md").read_text())
    assert first is not None, "the README begins with a command"
    commands = [part.strip() for line in first[1].splitlines() for part in line.partition("#")[0].split("&&")]
    pages = [file.read_text() for file in sorted((ROOT / "docs").rglob("*.md"))]
    return {
        "commands typed": len([command for command in commands if command]),
        "keys that have to be set": len(re.findall(r"\b[\w.]+=\S", first[1])),
        "pages of docs whose code a test runs": sum(bool(re.search(r"^```(python|bash)", p, re.M)) for p in pages),
        "blocks of code in them": sum(len(re.findall(r"^```(?:python|bash)", p, re.M)) for p in pages),
    }
