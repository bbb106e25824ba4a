"""Whole jobs on Ray: an engine of two gloo ranks, and a replica of two processes that both take every version.

The replica is rl-rollout's stand-in for vLLM, which can sleep on a CPU: the real one cannot there. What a real vLLM of
two ranks gives is in `test_trainer_real_replicas.py`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

FAKE = Path(__file__).parents[3] / "rollout" / "tests" / "peers" / "fake_vllm.py"
SIZES = [
    "data.options.num_rows=400", "data.eval_size=4", "batch.batch_size=4", "batch.mini_batch_size=2",
    "batch.group_size=4", "steps=3", "eval_every=0", "timeout_s=400", "agent.num_workers=1", "engine.world_size=2",
    "engine.optimizer.lr=1e-2", "engine.optimizer.warmup_steps=0", "engine.matmul_precision=highest",
    "algorithm.old_logprobs=recompute", "algorithm.correction=tis", "algorithm.entropy_coef=0.1",
    "rollout.backend=vllm", "rollout.parallel.tp=2", "weights.mode=gathered",
]  # fmt: skip
MEGATRON = ["engine.backend=megatron_on_cpu", "engine.parallel.tp=2"]
COLOCATED = ["rollout.colocated=true"]


@pytest.mark.promise(
    "Both ranks of a replica have every version of an engine of two, in every pipeline, colocated and not"
)
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("megatron_on_cpu")
@pytest.mark.parametrize(
    ("pipeline", "overrides", "oldest"),
    [
        ("sync", COLOCATED, 0),
        ("sync", [*COLOCATED, *MEGATRON], 0),
        ("sync", MEGATRON, 0),
        ("one_step_off", MEGATRON, 1),
        ("fully_async", [], 1),
    ],
)
def test_both_ranks_have_every_version_of_a_two_rank_engine(pipeline, overrides, oldest, model, tmp_path):
    options = {"command": [sys.executable, str(FAKE)], "args": ["--enable-sleep-mode"]}
    own = [f"pipeline={pipeline}", f"model.path={model}", f"output_dir={tmp_path / 'out'}"]
    command = [sys.executable, "-m", "rl_trainer.cli", "quickstart", "runtime=ray", *SIZES, *own, *overrides]
    command += [f"rollout.options={json.dumps(options)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    metrics = [record["metrics"] for record in records if record["metrics"]]
    assert len(metrics) == 3
    assert all(m["grad_norm"] > 0 for m in metrics)
    assert max(m["staleness_max"] for m in metrics) <= oldest
    # The log-probs that the replica told are those of the weights that each token was sampled from.
    fresh = [m for m in metrics if m["staleness_max"] == 0]
    assert fresh
    assert all(m["mismatch_abs"] < 1e-4 for m in fresh), metrics
