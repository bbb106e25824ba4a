"""Models with linear attention in a run: the server's recurrent state and the packed rows of the engine agree."""

import json

import pytest
from rich.console import Console

from rl_rollout.testing import write_tiny_model
from rl_trainer.config import load_config
from rl_trainer.run import run

pytestmark = pytest.mark.process
DELTA = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 8, "linear_value_head_dim": 8, "max_position_embeddings": 512}  # fmt: skip


def test_every_step_is_sampled_from_the_trained_weights(tmp_path):
    model = write_tiny_model(tmp_path / "model", family="qwen3_5_text", **DELTA)
    data = tmp_path / "data.jsonl"
    lines = [{"question": f"{a} + {b} =", "answer": f"#### {a + b}"} for a in range(10, 14) for b in range(4)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = [
        "runtime=inline", "steps=3", "eval_every=0", "timeout_s=120", "data.eval_size=1", "data.max_prompt_tokens=200",
        "batch.batch_size=4", "batch.mini_batch_size=4", "batch.group_size=4", "rollout.max_new_tokens=24",
        "rollout.max_model_len=256", "engine.precision=float32", "algorithm.entropy_coef=0.1",
        "engine.optimizer.lr=0.01", f"data.path={data}", f"model.path={model}", f"output_dir={tmp_path / 'out'}",
    ]  # fmt: skip
    run(load_config("gsm8k", settings), Console(quiet=True))
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    metrics = [record["metrics"] for record in records if record["metrics"]]
    assert len(metrics) == 3
    assert all(each["grad_norm"] > 0 for each in metrics)
    assert all(each["mismatch_abs"] < 1e-4 for each in metrics), metrics
