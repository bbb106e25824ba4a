"""Engines in a Python environment of their own, with a backend that is installed there alone."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import rl_engine.registry
from rl_trainer.config import load_config
from rl_trainer.errors import ConfigError
from rl_trainer.pipeline.roles import actor_config
from rl_trainer.planning import environments
from rl_trainer.planning.environments import check_environment, engine_python, gives_shards
from rl_trainer.planning.preflight import backends_asked, check_engines

pytestmark = [pytest.mark.timeout(400), pytest.mark.process]
BACKEND = """
import sys
from pathlib import Path
from rl_engine.backends.fsdp import FsdpBackend
from rl_engine.model.module_engine import ModuleEngine

class Elsewhere(ModuleEngine):
    def initialize(self):
        super().initialize()
        Path(sys.prefix, "initialized").write_text(sys.executable)

def create(config):
    return Elsewhere(FsdpBackend(config))
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """An environment with all that this one has, and a backend `elsewhere` beside it."""
    folder = tmp_path_factory.mktemp("environments") / "one"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    here = sysconfig.get_path("purelib")
    (site / "run.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    (site / "elsewhere_backend.py").write_text(BACKEND)
    described = site / "elsewhere-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[rl_engine.backends]\nelsewhere = elsewhere_backend\n")
    return folder


POOLS = """
import json, sys
from rl_trainer.runtime import create_runtime
from rl_trainer.runtime.base import Dispatch, ResourcePool, register

class Where:
    def __init__(self, context):
        self.context = context

    @register(Dispatch.RANK_ZERO)
    def prefix(self):
        return sys.prefix

with create_runtime("ray") as runtime:
    pools = {"engine": sys.argv[1], "agent": None}
    runtime.start([ResourcePool(name=n, num_workers=1, num_cpus=0.1, python=python) for n, python in pools.items()])
    print(json.dumps({name: runtime.create_group(Where, name).prefix() for name in pools}))
"""


@pytest.mark.promise("Engines run under `engine.environment`")
def test_the_processes_of_a_pool_run_under_its_interpreter(elsewhere):
    command = [sys.executable, "-c", POOLS, str(elsewhere / "bin" / "python")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"engine": str(elsewhere), "agent": sys.prefix}


@pytest.mark.slow
def test_the_backend_is_checked_where_it_is(elsewhere, model):
    def config_of(*more):
        return load_config("quickstart", [f"engine.environment={elsewhere}", "engine.backend=elsewhere", *more])

    check_environment(config_of())
    assert check_engines(config_of(), model, is_made=True)["prefix_sharing"] == "yes"
    with pytest.raises(ConfigError, match=r"engine.backend=elsewhere cannot be used for the policy: parallel is"):
        check_engines(config_of("engine.parallel.tp=2", "engine.world_size=2"), model, is_made=True)
    with pytest.raises(ConfigError, match="No engine backend is named 'nowhere'"):
        check_engines(config_of("engine.backend=nowhere"), model, is_made=True)


@pytest.mark.slow
def test_a_run_trains_in_it(elsewhere, model, tmp_path):
    command = [sys.executable, "-m", "rl_trainer.cli", "quickstart", "runtime=ray", f"model.path={model}",
               "steps=1", "eval_every=0",
               f"output_dir={tmp_path / 'run'}", f"engine.environment={elsewhere}",
               "engine.backend=elsewhere"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert Path((elsewhere / "initialized").read_text()).parent == elsewhere / "bin"


def test_what_an_environment_lacks_is_one_sentence(tmp_path):
    def refused(folder, *more):
        with pytest.raises(ConfigError) as caught:
            check_environment(load_config("quickstart", [f"engine.environment={folder}", *more]))
        return str(caught.value)

    assert engine_python(load_config("quickstart", [])) is None
    folder = tmp_path / "bare"
    assert refused(folder) == (
        f"engine.environment={folder} has no bin/python; make an environment there: uv venv {folder}"
    )
    assert "needs its own processes, and runtime=inline has none; set runtime=ray" in refused(folder, "runtime=inline")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    assert f"engine.environment={folder} has no rl-post-trainer; install that of the run there: uv pip inst" in refused(
        folder
    )
    (site,) = folder.glob("lib/python*/site-packages")
    for name, version in (("rl_post_trainer", "0.0.9"), ("rl_engine", "0.1.0"), ("ray", "2.0.0")):
        described = site / f"{name}-{version}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    assert "has rl-post-trainer 0.0.9, and the run has" in refused(folder)
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    (folder / "bin" / "python").chmod(0o755)
    assert refused(folder) == f"engine.environment={folder}: its Python ended with 3: broken"


@pytest.mark.slow
def test_a_child_process_asks_the_backend_while_rows_are_read(model, monkeypatch):
    def refuse(*args):
        raise AssertionError("this process asked")

    monkeypatch.delitem(sys.modules, "transformers", raising=False)  # as in a command that has just begun
    here = rl_engine.check
    monkeypatch.setattr(rl_engine.registry, "check", refuse)
    monkeypatch.setattr(environments, "_gives_shards", refuse)
    config = load_config("quickstart", [f"model.path={model}", "runtime=ray"])
    with backends_asked(config):
        assert check_engines(config, model, is_made=True)["loss_in_head"].startswith("yes")
    assert gives_shards(config, actor_config(config, model)), "it is known after the child has ended"
    cut = ["runtime=ray", "engine.parallel.cp=2", "engine.world_size=2"]
    wrong = load_config("quickstart", [f"model.path={model}", *cut])
    with backends_asked(wrong), pytest.raises(ConfigError, match=r"engine.backend=fsdp cannot be used for the policy"):
        check_engines(wrong, model, is_made=True)
    monkeypatch.setattr(rl_engine.registry, "check", here)
    other = load_config("quickstart", [f"model.path={model}", "runtime=inline"])
    with backends_asked(other):
        assert not environments._CHILDREN, "an engine in this process is asked here"
    monkeypatch.setattr(environments, "_PROGRAM", "raise SystemExit(3)")
    with backends_asked(config):
        assert check_engines(config, model, is_made=True), "a child that fails is not needed"
