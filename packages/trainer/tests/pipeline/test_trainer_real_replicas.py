"""Whole jobs on Ray whose replicas are a real vLLM of several ranks: every rank takes the weights of every step.

RL_ROLLOUT_VLLM is the folder of a virtual environment with vLLM and rl-ckpt.
"""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from rl_bench.waiting import until
from rl_trainer.config import load_config
from rl_trainer.config.schema import WarmupConfig
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


def command_of(model, folder, *, steps, overrides):
    """Command of a run whose weights change, whatever the rewards are."""
    options = {"command": f"{ENVIRONMENT}/bin/python -m vllm.entrypoints.openai.api_server"}
    options |= {"args": ["--enforce-eager"], "env": SETTINGS}
    settings = [
        *("data.options.num_rows=2000", "data.eval_size=16", "batch.batch_size=4", "batch.mini_batch_size=2"),
        *("batch.group_size=4", f"model.path={model}", f"output_dir={folder}", f"steps={steps}", "timeout_s=900"),
        *("engine.optimizer.lr=1e-2", "engine.optimizer.warmup_steps=0", "engine.matmul_precision=highest"),
        *("algorithm.old_logprobs=recompute", "algorithm.correction=tis", "rollout.backend=vllm", "eval_every=0"),
        "algorithm.entropy_coef=0.1",
        *("rollout.parallel.tp=2", f"rollout.options={json.dumps(options)}", *overrides),
    ]
    return [sys.executable, "-m", "rl_trainer.cli", "quickstart", "runtime=ray", *settings]


def run(model, folder, *, steps, overrides):
    """What the run says, and its records of steps."""
    command = command_of(model, folder, steps=steps, overrides=overrides)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2300, check=False)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    return re.sub(r"[\s│]+", " ", ended.stdout), records_of(folder)


def records_of(folder):
    file = Path(folder / "metrics.jsonl")
    records = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [record for record in records if record["metrics"]]


def check(records, num_receipts):
    """The engine's log-probs are those that the servers told: a rank with older weights would shift every token."""
    assert all(each["metrics"]["grad_norm"] > 0 and each["metrics"]["lr"] > 0 for each in records), records
    assert all(each["metrics"]["mismatch_abs"] < 1e-4 for each in records), records
    assert all(each["weights"]["confirmed"] >= num_receipts for each in records if each["weights"]), records
    assert len({each["weights"]["digest"] for each in records if each["weights"]}) > 1, "they change"


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_every_rank_samples_from_the_previous_step_s_weights(num_replicas, model, tmp_path):
    told, records = run(model, tmp_path / "out", steps=5, overrides=[f"rollout.num_replicas={num_replicas}"])
    assert "from shard to shard" in told
    assert len(records) == 5
    check(records, 2 * num_replicas)


def descendants(ancestor, title):
    """Processes that `ancestor` started, or what it started, whose titles begin so."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = []
    for pid in parents:
        above = pid
        while above not in (0, ancestor):
            above = parents.get(above, 0)
        with suppress(OSError):
            if above and Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title):
                found.append(pid)
    return found


@pytest.mark.promise("A run goes on without a replica of which a worker is killed")
def test_a_run_continues_without_a_replica_with_a_killed_worker(model, tmp_path):
    """The replica is ended and another one started; until that has joined, the other one generates."""
    log, folder = tmp_path / "log", tmp_path / "out"
    command = command_of(model, folder, steps=5, overrides=["rollout.num_replicas=2"])
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        until(lambda: not (process.poll() is None and len(records_of(folder)) < 2))
        workers = descendants(process.pid, b"VLLM::Worker_TP1")
        assert len(workers) == 2, log.read_text()[-3000:]
        os.kill(workers[0], signal.SIGKILL)
        code = process.wait(2000)
    told, records = log.read_text(), records_of(folder)
    assert code == 0, told[-3000:]
    assert f"VLLM::Worker_TP1 (pid {workers[0]}) had died" in told, told[-3000:]
    assert len(records) == 5
    check(records, 2)


MEGATRON = ("engine.backend=megatron_on_cpu", "engine.world_size=4", "engine.parallel.tp=2", "engine.parallel.pp=2")


@pytest.mark.usefixtures("megatron_on_cpu")
@pytest.mark.parametrize("ranks", [("engine.world_size=2",), MEGATRON], ids=["two fsdp ranks", "megatron tp=2 x pp=2"])
def test_engine_ranks_send_their_shards_and_weights_move_once(ranks, model, tmp_path):
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
