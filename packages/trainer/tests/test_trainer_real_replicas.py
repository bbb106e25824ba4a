"""Whole jobs on Ray whose replicas are a real vLLM of several ranks: every rank takes the weights of every step.

RL_ROLLOUT_VLLM is the folder of a virtual environment with vLLM and rl-ckpt.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl_trainer.config import WarmupConfig, load_config
from rl_trainer.data import load_datasets
from rl_trainer.data.warmup import make_small_model

ENVIRONMENT = os.environ.get("RL_ROLLOUT_VLLM")
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}


pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not ENVIRONMENT, reason="RL_ROLLOUT_VLLM names no environment with vLLM and rl-ckpt"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    small = load_config("quickstart", ["data.options.num_rows=2000", "data.eval_size=16"])
    warmup = WarmupConfig(hidden_size=128, num_layers=2, steps=2, batch_size=16)
    rows = load_datasets(small.data, seed=0).train
    folder = tmp_path_factory.mktemp("m")
    return make_small_model(folder, warmup, rows, seed=0, timeout_s=300, on_line=lambda line: None)


def run(model, folder, *, steps, overrides):
    """What the run says, and its records of steps."""
    options = {"command": f"{ENVIRONMENT}/bin/python -m vllm.entrypoints.openai.api_server"}
    options |= {"args": ["--enforce-eager"], "env": SETTINGS}
    settings = [
        *("data.options.num_rows=2000", "data.eval_size=16", "batch.batch_size=4", "batch.mini_batch_size=2"),
        *("batch.group_size=4", f"model.path={model}", f"output_dir={folder}", f"steps={steps}", "timeout_s=900"),
        *("engine.optimizer.lr=1e-2", "engine.optimizer.warmup_steps=0", "engine.matmul_precision=highest"),
        *("algorithm.old_logprobs=recompute", "algorithm.correction=tis", "rollout.backend=vllm", "eval_every=0"),
        "algorithm.entropy_coef=0.1",  # so that the weights change whatever the rewards are
        *("rollout.parallel.tp=2", f"rollout.options={json.dumps(options)}", *overrides),
    ]
    command = [sys.executable, "-m", "rl_trainer.cli", "quickstart", *settings]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2300, check=False)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    records = [json.loads(line) for line in Path(folder / "metrics.jsonl").read_text().splitlines()]
    return re.sub(r"[\s│]+", " ", ended.stdout), [record for record in records if record["metrics"]]


def check(records, num_receipts):
    """The engine's log-probs are those that the servers told: a rank with older weights would shift every token."""
    assert all(each["metrics"]["grad_norm"] > 0 and each["metrics"]["lr"] > 0 for each in records), records
    assert all(each["metrics"]["mismatch_abs"] < 1e-4 for each in records), records
    assert all(each["weights"]["confirmed"] >= num_receipts for each in records if each["weights"]), records
    assert len({each["weights"]["digest"] for each in records if each["weights"]}) > 1, "they change"


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_every_rank_of_every_replica_samples_from_the_weights_of_the_step_before(num_replicas, model, tmp_path):
    told, records = run(model, tmp_path / "out", steps=5, overrides=[f"rollout.num_replicas={num_replicas}"])
    assert "from shard to shard" in told
    assert len(records) == 5
    check(records, 2 * num_replicas)


MEGATRON = ("engine.backend=megatron", "engine.world_size=4", "engine.parallel.tp=2", "engine.parallel.pp=2")


@pytest.mark.parametrize("ranks", [("engine.world_size=2",), MEGATRON], ids=["two fsdp ranks", "megatron tp=2 x pp=2"])
def test_ranks_of_the_engine_send_what_they_hold_and_the_model_moves_once(ranks, model, tmp_path):
    told, records = run(model, tmp_path / "out", steps=3, overrides=ranks)
    assert "from shard to shard" in told
    size = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    for each in records:
        assert size * 0.9 < each["weights"]["bytes"] < 1.1 * size, "what both ranks have, the norms, is little"
    check(records, 4)  # one of every pair of ranks that have something for each other


def test_an_adapter_alone_is_what_every_token_was_sampled_from(model, tmp_path):
    lora = ["engine.lora.rank=4", "engine.lora.export=adapter"]
    told, records = run(model, tmp_path / "out", steps=3, overrides=lora)
    assert "the adapter alone is sent" in told
    check(records, 2)
    size = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    assert all(each["weights"]["bytes"] < 0.3 * size for each in records), "of a model of two narrow layers"
