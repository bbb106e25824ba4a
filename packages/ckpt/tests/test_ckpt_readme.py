"""The code of the README and of docs/: the first block as the two processes it says, others where they can run."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_ckpt import tree_digest
from rl_ckpt.testing import new_name

pytestmark = pytest.mark.process


def blocks():
    folder = Path(__file__).parents[1]
    pages = [folder / "README.md", *sorted((folder.parents[1] / "docs/packages/ckpt").glob("*.md"))]
    return [code for page in pages for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


@pytest.mark.promise("The README's script moves a state dict between two processes")
@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="shm:// needs Linux")
def test_the_script_of_the_readme_moves_a_state_dict(tmp_path):
    code = blocks()[0]
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


@pytest.mark.process
def test_the_resharding_of_the_readme():
    """FSDP to tensor parallel, two ranks each, all in this process."""
    (code,) = [block for block in blocks() if "ShardPlan(" in block]
    example = {}
    exec(code, example)
    weight = torch.arange(48.0).reshape(8, 6)
    columns = [torch.zeros(8, 3) for _ in (0, 1)]
    report, versions = asyncio.run(example["main"](f"inproc://{new_name()}", weight.split(4), columns))
    assert torch.equal(torch.cat(columns, dim=1), weight)
    assert versions == [1, 1]
    assert (report.num_bytes, report.digest) == (4 * 48, tree_digest({"up": weight}))
