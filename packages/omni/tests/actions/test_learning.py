"""Action policies learn from reward alone, through rl-train."""

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from packages.omni.tests.actions.conftest import HEADS

from rl_omni.testing import write_tiny_policy

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[4]
SIDES = '''"""One step: the first number says whether the picture is bright."""
import numpy
from rl_omni.pictures import observation_of

class Sides:
    def reset(self, *, seed=None):
        self.is_bright = numpy.random.default_rng(seed).random() < 0.5
        return observation_of(numpy.full((16, 16, 3), 200 * self.is_bright, numpy.uint8), "reach"), {}

    def step(self, action):
        reward = float((action[0] > 0) == self.is_bright)
        return self.reset()[0], reward, True, False, {}
'''


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "recipe"), [("bins", "reach"), ("bins", "reach_ppo"), ("flow", "reach_flow")])
def test_a_choice_is_learnt_from_nothing(tmp_path, kind, recipe):
    """A random policy is right half of the time; one that ignores the picture, too."""
    folder = write_tiny_policy(tmp_path / "model", HEADS[kind], ("reach",), patch_size=4)
    (tmp_path / "sides.py").write_text(SIDES)
    words = [f"model.path={folder}", f"output_dir={tmp_path / 'out'}", f"agent.environment={tmp_path}/sides.py:Sides"]
    words += ["steps=20", "data.eval_size=64"]
    command = [sys.executable, "-m", "rl_trainer.cli", f"examples/actions/{recipe}.yaml", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    records = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    found = [each["eval_reward"] for each in records if each["eval_reward"] is not None]
    assert found[0] < 0.75
    assert found[-1] > 0.9


@pytest.mark.promise("RL raises the success of an action policy that imitated")
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_success_rises_by_rl(tmp_path, monkeypatch):
    spec = spec_from_file_location("actions", ROOT / "packages/omni/bench/actions.py")
    bench = module_from_spec(spec)
    spec.loader.exec_module(bench)
    monkeypatch.chdir(tmp_path)
    before, after = bench.trained("GRPO, flow", 1)["eval_reward"]
    assert bench.random_policy() < before
    assert after > before + 0.2
