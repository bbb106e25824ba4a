"""Why the megatron backend maps weights itself (docs/backends.md): what Megatron-Bridge's wheel asks for."""

import os
import subprocess
import sys

import pytest


@pytest.mark.integration
def test_megatron_bridge_conflicts_with_rl_engine(tmp_path):
    """The published wheel, without its dependencies."""
    wheels = ["megatron-bridge==0.3.1", "omegaconf==2.3.0", "antlr4-python3-runtime==4.9.3"]
    command = ["uv", "pip", "install", "-q", "--no-deps", "--python", sys.executable, "--target", str(tmp_path)]
    subprocess.run([*command, *wheels], check=True, timeout=300)
    (metadata,) = tmp_path.glob("megatron_bridge-*.dist-info")
    wanted = (metadata / "METADATA").read_text()
    assert "Requires-Dist: transformers<5.0.0" in wanted  # rl-engine wants 5 or newer
    assert "Requires-Dist: transformer-engine[core_cu13,pytorch]" in wanted
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "from megatron.bridge.models.conversion import model_bridge"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "No module named 'transformer_engine'" in found.stderr
