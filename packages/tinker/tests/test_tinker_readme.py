"""The README's example and the SDK, over real training processes and a real sampling server of a tiny model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packages.tinker.tests.support import KEY, running

from rl_tinker.ranks.group import ElasticGroup
from rl_tinker.service.replicas import Replicas
from rl_tinker.types import ServeConfig

pytestmark = pytest.mark.process

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    config = ServeConfig(model_path=str(tiny_model), output_dir=str(tmp_path_factory.mktemp("out")), max_model_len=256)
    group = ElasticGroup(config, str(tiny_model))
    replicas = Replicas(config, str(tiny_model), Path(config.output_dir) / "checkpoints")
    with running(Path(config.output_dir), tiny_model, group=group, replicas=replicas) as server:
        yield server


@pytest.mark.process
def test_the_example_of_the_readme_learns_and_samples(server, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    code = code.replace("tinker.AdamParams()", "tinker.AdamParams(learning_rate=1e-2)")
    environment = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY, "HOME": str(tmp_path), "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    *steps, sample = done.stdout.splitlines()
    losses = [float(line.split()[0]) for line in steps]
    assert len(losses) == 10
    assert losses[-1] < 0.5 * losses[0]
    assert len(sample.split(",")) == 5
