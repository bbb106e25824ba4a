"""A run whose engine, server, transport, queue and agent loop are somebody else's (examples/strangers)."""

import json
import math
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rl_rollout.testing import write_tiny_model

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[3] / "examples"
KEYS = ("engine.backend", "rollout.backend", "weights_transport", "queue_storage", "agent.loop")
RUN = """
import json, re, sys
from rl_trainer.cli import main
code = main(sys.argv[1:])
ours = re.compile(r"rl_\\w+\\.(backends|loops|storage)\\b")
print(json.dumps([code, sorted(name for name in sys.modules if ours.match(name) or name.partition(".")[0] == "ray")]))
"""


def install(folder):
    """Metadata of the strangers' distribution, as pip would write it."""
    project = tomllib.loads((EXAMPLES / "strangers/pyproject.toml").read_text())["project"]
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.mark.process
@pytest.mark.promise("An engine, a server, a transport, a queue and an agent loop of others train together")
def test_a_run_learns_with_five_parts_of_strangers(tmp_path):
    install(tmp_path)
    write_tiny_model(tmp_path / "model")
    rows = [
        {
            "prompt": [{"role": "user", "content": "abcdefgh"[at % 8]}],
            "data_source": "letters",
            "reward_model": {"ground_truth": "a"},
        }
        for at in range(64)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def share(text, row):\n    return text.count('a') / max(len(text), 1)\n")
    settings = {
        **dict.fromkeys(KEYS, "stranger"),
        "model.path": tmp_path / "model",
        "data": f"{{path: {tmp_path / 'rows.jsonl'}, eval_size: 8}}",
        "reward.path": f"{tmp_path / 'reward.py'}:share",
        "runtime": "inline",
        "steps": 12,
        "eval_every": 12,
        "batch": "{batch_size: 8, group_size: 8, mini_batch_size: 8}",
        "rollout": "{backend: stranger, max_new_tokens: 8, max_model_len: 64, num_replicas: 1}",
        "engine.optimizer.lr": 0.5,
        "engine.world_size": 1,
        "algorithm.kl_coef": 0,
        "output_dir": tmp_path / "out",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, "grpo", *(f"{key}={value}" for key, value in settings.items())],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{EXAMPLES}"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    code, ours = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stdout + done.stderr
    assert ours == [], "backends of ours were loaded"
    steps = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    learned = [step for step in steps if step["metrics"]]
    assert [step["step"] for step in learned] == list(range(1, 13))
    assert all(math.isfinite(step["metrics"]["loss"]) for step in learned)
    assert steps[-1]["weights"]["version"] == 13
    assert steps[0]["eval_reward"] < 0.1 < 0.5 < steps[-1]["eval_reward"]
    assert (tmp_path / "out/checkpoint-12/engine/manifest.json").is_file()
