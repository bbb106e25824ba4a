"""Why there is no veomni backend: what the entry says, and VeOmni itself saying the same."""

import os
import subprocess
import sys

import pytest

from rl_engine import BackendError, EngineConfig, create_engine
from rl_engine.backends import veomni


def test_it_is_refused_with_what_stands_in_its_way():
    with pytest.raises(BackendError, match=r"The veomni backend does not run: .*no adapter to its models\. Use fsdp"):
        create_engine("veomni", EngineConfig(model_path="nowhere"))


def test_the_reasons_are_those_of_this_environment(monkeypatch):
    versions = {"transformers": "5.23.0", "datasets": "4.1.1", "torchvision": None}
    monkeypatch.setattr(veomni, "_version", versions.get)
    assert "it needs datasets 2.20 to 2.21, and 4.1.1 is installed" in veomni.blockers()
    assert "it needs torchvision, which is not installed" in veomni.blockers()
    versions |= {"datasets": "2.21.0", "torchvision": "0.28.0", "transformers": None}
    assert veomni.blockers() == ["transformers is not installed", "rl-engine has no adapter to its models"]


@pytest.mark.integration
def test_veomni_itself_cannot_be_imported(tmp_path):
    """The published wheel, without its dependencies, on the transformers that is installed here."""
    wheel = ["uv", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), f"veomni=={veomni.TRIED}"]
    subprocess.run(wheel, check=True, timeout=120)
    (metadata,) = tmp_path.glob("veomni-*.dist-info")
    wanted = (metadata / "METADATA").read_text()
    assert "Requires-Dist: datasets<=2.21.0,>=2.20.0" in wanted
    assert "Requires-Dist: timm" in wanted
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import veomni"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    name = veomni._NAME
    assert found.returncode == 1
    assert f"cannot import name '{name}'" in found.stderr
    assert any(name in clause for clause in veomni.blockers())
