"""The recipe for mixtures of experts: what the replay of the servers' choice is for."""

import json

import pytest
from rich.console import Console

from rl_rollout.testing import write_tiny_model
from rl_trainer.config import load_config
from rl_trainer.run import run

pytestmark = pytest.mark.process


def test_replay_brings_the_engine_nearer_to_the_sampler(tmp_path):
    """The server computes in float32, the engine in bfloat16: many routers of a random model are near ties."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_position_embeddings": 512}
    model = write_tiny_model(tmp_path / "model", family="qwen3_moe", **sizes)
    data = tmp_path / "data.jsonl"
    lines = [{"question": f"{a} + {b} =", "answer": f"#### {a + b}"} for a in range(10, 14) for b in range(4)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = [
        "runtime=inline", "steps=1", "eval_every=0", "timeout_s=120", "data.eval_size=1", "data.max_prompt_tokens=200",
        "batch.batch_size=8", "batch.mini_batch_size=8", "batch.group_size=4", "rollout.max_new_tokens=48",
        "rollout.max_model_len=256", f"data.path={data}", f"model.path={model}",
    ]  # fmt: skip

    def mismatch(replays):
        out = tmp_path / str(replays)
        run(
            load_config("moe", [*settings, f"engine.router_replay={replays}", f"output_dir={out}"]), Console(quiet=True)
        )
        record = json.loads((out / "metrics.jsonl").read_text().splitlines()[1])
        assert record["num_tokens"] > 500
        return record["metrics"]["mismatch_k3"]

    replayed, chosen_anew = mismatch("true"), mismatch("false")
    assert 0 < replayed < 0.5 * chosen_anew
