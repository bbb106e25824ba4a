"""A group has its class's methods for a type-checker: what it is called with, and what comes back, is checked."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

WORKER = """
from rl_trainer.runtime.base import Dispatch, ResourcePool, WorkerContext, register
from rl_trainer.runtime import create_runtime


class Scorer:
    def __init__(self, context: WorkerContext, *, bonus: float) -> None:
        self.bonus = bonus

    @register(Dispatch.SPLIT, axis="dp")
    def score(self, texts: list[str], *, scale: float = 1.0) -> list[float]:
        return [len(text) * scale + self.bonus for text in texts]


with create_runtime("inline") as runtime:
    runtime.start([ResourcePool(name="pool", num_workers=1)])
    group = runtime.create_group(Scorer, "pool", mesh={"dp": 1}, bonus=1.0)
    scores: list[float] = group.score(["a"], scale=2.0)
"""
WRONG = [  # a line more, and the rule that it breaks
    ("group.score([1])", "reportArgumentType"),
    ("group.score(['a'], factor=2.0)", "reportCallIssue"),
    ("text: str = group.score(['a'])", "reportAssignmentType"),
    ("group.grade(['a'])", "reportAttributeAccessIssue"),
    ("runtime.create_group(Scorer, 1)", "reportArgumentType"),
]


def test_correct_group_use_passes_and_every_misuse_is_found(tmp_path):
    (tmp_path / "right.py").write_text(WORKER)
    start = WORKER.count("\n")
    (tmp_path / "wrong.py").write_text(WORKER + "".join(f"    {line}\n" for line, _ in WRONG))
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "standard"}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "--project", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = [
        (each["file"].rpartition("/")[2], each["range"]["start"]["line"] - start, each["rule"])
        for each in json.loads(done.stdout)["generalDiagnostics"]
        if each["severity"] == "error"
    ]
    assert sorted(found) == sorted(("wrong.py", line, rule) for line, (_, rule) in enumerate(WRONG))
