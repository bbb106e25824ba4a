"""A machine without Ray: one process where that will do, else the pip line; and no import of Ray where none is used."""

import subprocess
import sys

import pytest

from rl_trainer.config import load_config
from rl_trainer.errors import ConfigError

WITHOUT = """
import sys, time
sys.modules["ray"] = None
from rl_trainer.cli import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules, "something heavy was imported"
assert time.process_time() < 2, "on a machine that does nothing else, these are seconds of the clock"
sys.exit(code)
"""
PLAN = """
import sys
import rl_trainer
from rl_trainer.cli import main
assert main(sys.argv[1:]) == 0
assert "ray" not in sys.modules, "Ray was imported before the settings that it reads"
import rl_trainer.api, rl_trainer.loop, rl_trainer.runtime.inline, rl_trainer.setup
assert "ray" not in sys.modules, "Ray was imported where nothing asks for it"
"""


@pytest.fixture
def no_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize("backend", ["embedded", "vllm"])
def test_without_ray_one_process_is_the_default(no_ray, backend):
    config = load_config("grpo", ["model.path=m", f"rollout.backend={backend}"])
    assert config.runtime == "inline"
    config.check_runtime()


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["rollout.num_replicas=2"], "this run has several processes, by Ray"),
        (["pipeline=one_step_off"], "this run has several processes, by Ray"),
        (["runtime=ray"], "runtime=ray needs Ray"),
    ],
)
def test_without_ray_several_processes_are_refused(no_ray, overrides, why):
    with pytest.raises(ConfigError, match=rf"{why}: pip install 'rl-post-trainer\[ray\]'\. Or set runtime=inline"):
        load_config("grpo", overrides).check_runtime()


def test_with_ray_it_is_the_default():
    assert load_config("grpo", ["model.path=m"]).runtime == "ray"


@pytest.mark.process
def test_the_pip_line_comes_within_two_seconds():
    command = [sys.executable, "-c", WITHOUT, "grpo", "model.path=m", "rollout.num_replicas=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(
        "rl-train: this run has several processes, by Ray: pip install 'rl-post-trainer[ray]'"
    )


@pytest.mark.process
def test_a_plan_of_a_run_on_ray_imports_none(tmp_path):
    small = ["data.options.num_rows=200", "data.eval_size=16", f"output_dir={tmp_path / 'out'}"]
    command = [sys.executable, "-c", PLAN, "quickstart", "runtime=ray", *small, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
