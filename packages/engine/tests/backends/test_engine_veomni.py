"""Why there is no veomni backend (docs/backends.md): VeOmni's own import says it."""

import os
import subprocess
import sys

import pytest

VEOMNI = "0.1.12"
MISSING = "Qwen2_5OmniThinkerCausalLMOutputWithPast"  # veomni.utils.model_outputs takes it from transformers


@pytest.mark.integration
def test_veomni_cannot_be_imported(tmp_path):
    """The published wheel, without its dependencies, on the transformers that is installed here."""
    wheel = ["uv", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), f"veomni=={VEOMNI}"]
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
    assert found.returncode == 1
    assert f"cannot import name '{MISSING}'" in found.stderr
