"""What is owed on a GPU can be run when one is at hand: its commands start on a machine as bare as a GPU's has been."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_rollout.testing import write_tiny_model
from rl_trainer.config import load_config

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
THERE = ("torch", "transformers", "pytest", "triton", "pybind11", "scikit-build-core", "pip", "setuptools")
"""Distributions of the machine, with what they need. `.ci/gpu pack` brings the rest."""


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def brought():
    named = re.search(r"RL_LACKS:-([^}]*)}", (ROOT / "tools/gpu.sh").read_text())[1]
    return {normal(name.partition("==")[0]) for name in named.split()}


def with_needs(names):
    found, todo = set(), [*map(normal, names)]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        todo += [normal(re.match(r"[\w.-]+", need)[0]) for need in needs if "extra ==" not in need]
    return found


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """The environment variables of a process that sees no more than the machine's distributions and ours."""
    seen = with_needs(THERE) | brought()
    hidden = [
        module
        for module, names in metadata.packages_distributions().items()
        if not any(normal(name) in seen or normal(name).startswith("rl-") for name in names)
    ]
    assert {"ray", "rich", "peft", "hypothesis", "aiohttp"} & {*hidden} == {"ray", "peft"}
    work = tmp_path_factory.mktemp("gpu")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RL_", "PYTEST_"))}
    return kept | {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT / "tests/gpu_machine"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # most are not there
        "PYTEST_PLUGINS": "pytest_timeout,xdist.plugin",
        "RL_HIDDEN": ",".join(hidden),
        "RL_STUBS": "rl_csrc._cuda",
        "RL_WORK": str(work / "work"),
        "OUT": str(work / "out"),
    }


def start(command, environment):
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_step_command_starts_without_a_gpu_and_ray(machine):
    said = start([".ci/gpu", "--dry"], machine)
    steps = start([".ci/gpu", "--list"], machine).split()
    assert re.findall(r"^== (\w+) ended", said, re.MULTILINE) == steps
    benches = [step for step in steps if step not in {"build", "csrc", "test", "sanitize", "gsm8k"}]
    assert f"rows for a GPU: {', '.join(benches)}" in said
    counts = [int(count) for count in re.findall(r"^(\d+)/\d+ tests collected", said, re.MULTILINE)]
    assert len(counts) == 5  # the packages (side by side, and alone), rl-csrc, and two sanitizers
    assert min(counts) > 5
    assert not list(Path(machine["RL_WORK"]).glob("passed.*"))  # a dry step has not passed
    results = json.loads((Path(machine["OUT"]) / "gsm8k" / "results.json").read_text())
    assert [*results] == ["settings", "before", "sft", "after_sft", "grpo", "after_grpo"]


def test_a_packed_model_travels_in_small_pieces(tmp_path, monkeypatch):
    tool = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "real_models.py")))
    assert tool.PIECE_BYTES <= 55_000_000
    monkeypatch.setitem(tool.pack.__globals__, "PIECE_BYTES", 7)
    (tmp_path / "whole").write_bytes(bytes(range(20)))
    pieces = tool.pack(tmp_path / "whole", tmp_path / "pieces", "smollm2")
    assert [piece.stat().st_size for piece in pieces] == [7, 7, 6]
    assert tool.joined(tmp_path / "pieces", "smollm2", tmp_path / "again").read_bytes() == bytes(range(20))
    assert tool.joined(tmp_path / "pieces", "gemma270m", tmp_path / "none") is None


def test_the_gpu_steps_begin_with_what_is_owed_first():
    steps = start([".ci/gpu", "--list"], dict(os.environ)).split()
    assert steps[:7] == ["build", "trainer_gpu", "rollout", "gsm8k", "real_model", "ckpt", "engine_update"]


@pytest.mark.slow
def test_the_step_s_benchmark_can_plan_its_run_without_ray(machine, tmp_path):
    write_tiny_model(tmp_path)
    task = ROOT / "packages/trainer/bench/_letters.py"
    data = f"data={{format: {task}:Letters, eval_size: 2, max_prompt_tokens: 64}}"
    overrides = [f"model.path={tmp_path}", data, f"reward.path={task}:share_of_even", "runtime=inline"]
    overrides += ["rollout.max_new_tokens=64", "rollout.max_model_len=128"]
    assert "memory" in start([sys.executable, "-m", "rl_trainer.cli", "gsm8k", *overrides, "--dry-run"], machine)


def commands():
    table = [line for line in (ROOT / "benchmarks/gpu-owed.md").read_text().splitlines() if re.match(r"\| \d", line)]
    return [command for line in table for command in re.findall(r"`([^`]+)`", line.split("|")[3])]


@pytest.mark.parametrize("command", commands())
def test_an_owed_command_parses(command):
    words = shlex.split(command)
    variables = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    device = (ROOT / "csrc/bench/gpu/device.sh").read_text()
    for name in variables:
        assert name in (ROOT / "tools/gpu.sh").read_text() + device
    match words:
        case [".ci/gpu", *steps]:
            known = subprocess.run([".ci/gpu", "--list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
            assert steps
            assert {*steps} <= {*known.split(), "pack"}
        case ["bash", "csrc/bench/gpu/device.sh", *steps]:
            assert steps
            assert all(f"{step}) {step}" in device or f"{step}) run_{step}" in device for step in steps)
        case ["rl-train", recipe, *overrides]:
            load_config(recipe, [word for word in overrides if not word.startswith("--")])
        case ["python", "-m", "pytest", "-m", "gpu", *paths]:
            if "-k" in paths:
                paths, (_, chosen) = paths[: paths.index("-k")], paths[paths.index("-k") :]
                assert all(f'"{chosen}"' in (ROOT / path).read_text() for path in paths)
            assert paths
            assert all("mark.gpu" in (ROOT / path).read_text() for path in paths)
        case _:
            pytest.fail(f"{command!r} is none of the commands that this test knows")
