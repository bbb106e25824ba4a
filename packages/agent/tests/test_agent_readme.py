import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

PACKAGE = Path(__file__).parents[1]


def run_example(page, start):
    example = re.search(rf"```python\n({start}.*?)```", (PACKAGE / page).read_text(), re.DOTALL)
    assert example is not None
    return subprocess.run([sys.executable, "-c", example[1]], capture_output=True, text=True, check=True).stdout


@pytest.mark.promise("The README's examples run")
def test_the_first_example_of_the_readme_runs():
    told = run_example("README.md", r"import asyncio\nfrom rl_agent import AgentRunner")
    assert len(told.splitlines()) == 8
    assert "failed" not in told


def test_the_example_of_tools_runs():
    told = run_example("../../docs/packages/agent/loops.md", r"import asyncio\nfrom rl_agent import create_loop")
    assert "tool\n42<|im_end|>" in told
    assert "It is 42." in told
