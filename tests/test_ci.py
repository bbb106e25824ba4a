"""The exit code of `.ci/run`, with a `uv` that does nothing but succeed or fail."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]


@pytest.mark.process
@pytest.mark.parametrize(("uv", "tiers", "code"), [(0, "lint", 0), (0, "types", 0), (1, "lint", 1), (1, "types", 1)])
def test_ci_exits_with_0_only_if_all_tiers_pass(tmp_path, uv, tiers, code):
    (tmp_path / "uv").write_text(f"#!/bin/sh\nexit {uv}\n")
    (tmp_path / "uv").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(["bash", ROOT / ".ci" / "run", tiers], env=environment, capture_output=True, text=True)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert ("all tiers passed" in ended.stdout) == (code == 0)
