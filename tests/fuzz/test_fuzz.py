"""What reads what others wrote: known inputs in the default tier, coverage-guided fuzzing in the slow one."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

RUN = Path(__file__).with_name("run.py")
TARGETS = sorted(path.stem for path in (RUN.parent / "targets").glob("[a-z]*.py"))


def run(*arguments, timeout_s):
    command = [sys.executable, str(RUN), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.promise("What reads bytes of others answers with an error that is promised")
def test_no_known_input_is_more_than_an_error_that_is_promised():
    assert run("--replay", timeout_s=280).count(" ok\n") == len(TARGETS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", TARGETS)
def test_fuzzing_finds_nothing(target):
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("fuzzing needs atheris: uv sync --group dev --group fuzz")
    seconds = os.environ.get("RL_FUZZ_SECONDS", "30")
    assert run(target, "--seconds", seconds, "--no-record", timeout_s=800)
