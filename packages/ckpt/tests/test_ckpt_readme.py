"""The first code block of the README, run as the two processes that it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl_ckpt.testing import new_name


@pytest.mark.skipif(sys.platform != "linux", reason="shm:// needs Linux")
def test_the_script_of_the_readme_moves_a_state_dict(tmp_path):
    readme = Path(__file__).parents[1].joinpath("README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]
    assert "import rl_ckpt" in code
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    script = tmp_path / "move.py"
    script.write_text(code.replace("shm://demo", f"shm://{new_name()}"))
    ends = {
        role: subprocess.Popen([sys.executable, script, role], stdout=subprocess.PIPE, text=True)
        for role in ("receive", "send")
    }
    said = {role: end.communicate(timeout=120)[0].splitlines() for role, end in ends.items()}
    assert [end.returncode for end in ends.values()] == [0, 0]
    assert said["send"][0] == "4 tensors, 132352 bytes, 1 receiver"
    assert said["receive"][0] == "version 1 is committed"
    assert said["send"][1] == said["receive"][1]
