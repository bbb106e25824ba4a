"""Whole jobs on Ray whose completions a real vLLM or SGLang samples, with its weights from the engine at every step.

RL_ROLLOUT_VLLM and RL_ROLLOUT_SGLANG are folders of virtual environments with that engine and rl-ckpt.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_trainer.config import load_config
from rl_trainer.config.schema import WarmupConfig
from rl_trainer.data import load_datasets
from rl_trainer.data.warmup import make_small_model

pytestmark = pytest.mark.process

BACKENDS = {
    "vllm": {
        "module": "vllm.entrypoints.openai.api_server",
        "args": ["--enforce-eager"],
        "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"},
    },
    "sglang": {
        "module": "sglang.launch_server",
        "args": [
            *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--grammar-backend", "none", "--disable-overlap-schedule", "--skip-server-warmup"),
            *("--mem-fraction-static", "0.1", "--max-total-tokens", "65536"),
        ],
        "env": {"SGLANG_USE_CPU_ENGINE": "1"},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """As the other jobs', with heads of 32: vLLM's attention on a CPU has no smaller ones."""
    small = load_config("quickstart", ["data.options.num_rows=2000", "data.eval_size=16"])
    warmup = WarmupConfig(hidden_size=128, num_layers=1, steps=2, batch_size=16)
    rows = load_datasets(small.data, seed=0).train
    return make_small_model(
        tmp_path_factory.mktemp("m"), warmup, rows, seed=0, timeout_s=300, on_line=lambda line: None
    )


@pytest.mark.integration
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_step_is_sampled_from_the_previous_weights(backend, model, tmp_path):
    """The engine's log-probs are those that the server told, at every version: what it serves is what was trained."""
    environment = os.environ.get(f"RL_ROLLOUT_{backend.upper()}")
    if not environment:
        pytest.skip(f"RL_ROLLOUT_{backend.upper()} names no environment with {backend} and rl-ckpt")
    how = BACKENDS[backend]
    options = {"command": f"{environment}/bin/python -m {how['module']}", "args": how["args"], "env": how["env"]}
    overrides = [
        *("data.options.num_rows=2000", "data.eval_size=16", "batch.batch_size=4", "batch.mini_batch_size=2"),
        *("batch.group_size=4", f"model.path={model}", f"output_dir={tmp_path / 'out'}", "steps=3", "timeout_s=600"),
        *("engine.optimizer.lr=1e-2", "engine.optimizer.warmup_steps=0", "engine.matmul_precision=highest"),
        *("algorithm.old_logprobs=recompute", "algorithm.entropy_coef=0.1", "algorithm.correction=tis"),
        *(f"rollout.backend={backend}", f"rollout.options={json.dumps(options)}"),
    ]
    command = [sys.executable, "-m", "rl_trainer.cli", "quickstart", "runtime=ray", *overrides]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    records = [json.loads(line) for line in Path(tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    metrics = [record["metrics"] for record in records if record["metrics"]]
    assert len(metrics) == 3
    assert all(m["mismatch_abs"] < 1e-4 for m in metrics), metrics
