"""Examples that train: the custom trainer on one page, and the benchmark after SFT and GRPO."""

import asyncio
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from rl_rollout.testing import write_tiny_model

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[3] / "examples"
EXAMPLE = EXAMPLES / "custom_trainer.py"


@pytest.mark.promise("The example of a trainer of one's own is under 80 lines, and learns")
def test_the_custom_trainer_learns(model):
    train = runpy.run_path(str(EXAMPLE))["train"]
    means = asyncio.run(train(str(model), 20))
    assert means[-1] > means[0] + 0.2
    assert len(EXAMPLE.read_text().splitlines()) < 80


@pytest.mark.promise("SFT, GRPO and the benchmark go on where they were cut off")
@pytest.mark.slow
def test_the_gsm8k_example_goes_on_where_it_was_cut_off(tmp_path):
    """A start without time stops with what it has; the next one measures all, and keeps the figures of done stages."""
    write_tiny_model(tmp_path / "model", max_position_embeddings=4096)
    lines = [{"question": f"{a} + 1 =", "answer": f"<<{a}+1={a + 1}>>Add them.\n#### {a + 1}"} for a in range(12)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    line = [sys.executable, EXAMPLES / "gsm8k" / "run.py", "--model", tmp_path / "model", "--data", tmp_path]
    line += ["--out", tmp_path / "out", "--size", "tiny"]
    cut = subprocess.run([*line, "--minutes", "0.0001"], timeout=300, check=False, capture_output=True)
    assert cut.returncode in (3, -15)
    subprocess.run(line, timeout=300, check=True)
    rows = [json.loads(row) for row in (tmp_path / "out" / "sft.jsonl").read_text().splitlines()]
    assert rows[1]["completion"] == "Add them.\nThe answer is \\boxed{2}."
    first = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {*first} == {"settings", "before", "sft", "after_sft", "grpo", "after_grpo"}
    assert {*first["before"]} == {"greedy", "mean of 8", "majority of 8", "seconds"}
    assert (first["sft"]["steps"], first["grpo"]["steps"]) == (2, 2)
    kept = {name: first[name] for name in first if "grpo" not in name}
    (tmp_path / "out" / "results.json").write_text(json.dumps(kept))
    subprocess.run(line, timeout=300, check=True)
    again = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {name: again[name] for name in kept} == kept
    assert again["grpo"]["rewards"] == first["grpo"]["rewards"]
