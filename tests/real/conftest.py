"""The two pretrained models, fetched once; a test of the tier is skipped with the reason where they cannot be."""

import os
import runpy
from pathlib import Path

import pytest

_TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "real_models.py"))
_ROOT = Path(os.environ.get("RL_REAL_MODELS", Path.home() / ".cache" / "rl-stack" / "real-models"))


def _folder(name):
    try:
        return _TOOL["model_folder"](name, _ROOT)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{name}: {error}")


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct: tied embeddings, grouped heads, a chat template."""
    return _folder("smollm2")


@pytest.fixture(scope="session", params=["smollm2", "gemma270m"])
def model(request):
    """Each of the two; Gemma has sliding windows and a tied head of 262,144 tokens, and no chat template."""
    return _folder(request.param)
