"""Whole jobs on Ray whose replicas are a real vLLM of several ranks: every rank takes the weights of every step.

RL_ROLLOUT_VLLM is the folder of a virtual environment with vLLM and rl-ckpt.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_trainer.config import WarmupConfig, load_config
from rl_trainer.data import load_datasets
from rl_trainer.data.warmup import make_small_model

ENVIRONMENT = os.environ.get("RL_ROLLOUT_VLLM")
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}


@pytest.mark.integration
@pytest.mark.timeout(2400)
@pytest.mark.skipif(not ENVIRONMENT, reason="RL_ROLLOUT_VLLM names no environment with vLLM and rl-ckpt")
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_every_rank_of_every_replica_samples_from_the_weights_of_the_step_before(num_replicas, tmp_path):
    """The engine's log-probs are those that the servers told: a rank with older weights would shift every token."""
    small = load_config("quickstart", ["data.options.num_rows=2000", "data.eval_size=16"])
    warmup = WarmupConfig(hidden_size=128, num_layers=1, steps=2, batch_size=16)
    rows = load_datasets(small.data, seed=0).train
    model = make_small_model(tmp_path / "m", warmup, rows, seed=0, timeout_s=300, on_line=lambda line: None)
    options = {"command": f"{ENVIRONMENT}/bin/python -m vllm.entrypoints.openai.api_server"}
    options |= {"args": ["--enforce-eager"], "env": SETTINGS}
    overrides = [
        *("data.options.num_rows=2000", "data.eval_size=16", "batch.batch_size=4", "batch.mini_batch_size=2"),
        *("batch.group_size=4", f"model.path={model}", f"output_dir={tmp_path / 'out'}", "steps=5", "timeout_s=900"),
        *(
            "engine.optimizer.lr=1e-2",
            "engine.optimizer.warmup_steps=0",
            "engine.matmul_precision=highest",
            "eval_every=0",
        ),
        *("algorithm.old_logprobs=recompute", "algorithm.correction=tis", "rollout.backend=vllm"),
        "algorithm.entropy_coef=0.1",  # so that the weights change whatever the rewards are
        *("rollout.parallel.tp=2", f"rollout.num_replicas={num_replicas}", f"rollout.options={json.dumps(options)}"),
    ]
    command = [sys.executable, "-m", "rl_trainer.cli", "quickstart", *overrides]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2300, check=False)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    records = [json.loads(line) for line in Path(tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    metrics = [record["metrics"] for record in records if record["metrics"]]
    assert len(metrics) == 5
    assert all(m["grad_norm"] > 0 and m["lr"] > 0 for m in metrics), metrics
    assert all(m["mismatch_abs"] < 1e-4 for m in metrics), metrics
