"""Who has which GPU, and how weights travel: what the plan decides where a run leaves it open."""

import json
import os
import subprocess
import sys

import pytest

from rl_trainer import cli
from rl_trainer.config import load_config
from rl_trainer.errors import ConfigError
from rl_trainer.pipeline.roles import is_in_turn, is_offloaded
from rl_trainer.planning import gpus
from rl_trainer.planning.gpus import check_ipc, gpu_facts, resource_pools, settle
from rl_trainer.planning.memory import memory_plan

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 6, "num_gpus": 1, "include_dashboard": False})
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
BEHIND = ["pipeline=one_step_off", "algorithm.correction=tis"]


@pytest.fixture
def machine(monkeypatch):
    """Sets the number of this machine's GPUs."""
    for name in ("RAY_ADDRESS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return lambda count: monkeypatch.setattr(gpus, "local_gpus", lambda: count)


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "is_colocated", "transport"),
    [
        (0, [], False, "shm"),
        (1, [], True, "cuda-ipc"),
        (2, [], False, "shm"),
        (1, ["runtime=inline"], True, "cuda-ipc"),
        (8, ["runtime=inline"], True, "cuda-ipc"),  # it uses one of them
        (0, ["runtime=inline"], False, "shm"),
        (8, ["engine.world_size=8", "rollout.num_replicas=8", "batch.mini_batch_size=64"], True, "cuda-ipc"),
        (8, ["engine.world_size=4", "rollout.num_replicas=4"], False, "shm"),
        (1, BEHIND, False, "shm"),
        (1, ["rollout.num_replicas=2"], False, "shm"),
        (1, ["rollout.colocated=false"], False, "shm"),
        (2, ["rollout.colocated=true"], True, "cuda-ipc"),
        (1, ["weights_transport=tcp"], True, "tcp"),
        (2, ["reward.parts={liked: {kind: classifier, model: {path: there}}}"], True, "cuda-ipc"),
    ],
)
def test_servers_share_engine_gpus_if_roles_ask_for_too_many(machine, num_gpus, overrides, is_colocated, transport):
    machine(num_gpus)
    config = settle(load_config("gsm8k", overrides))
    assert (config.rollout.colocated, config.weights_transport) == (is_colocated, transport)
    assert settle(config) == config
    pools = {pool.name: pool.num_workers * pool.num_gpus for pool in resource_pools(config)}
    assert ("rollout" in pools) is not is_colocated
    if is_colocated:
        assert sum(pools.values()) <= num_gpus
    told = dict(gpu_facts(config))
    assert ("GPUs" in told) is (num_gpus > 0)
    assert ("colocated" in told.get("GPUs", "")) is is_colocated


@pytest.mark.promise("`weights_transport=cuda-ipc` is refused where engine and server share no GPU")
@pytest.mark.parametrize(
    ("num_gpus", "overrides", "why"),
    [
        (0, [], "there is no GPU here; leave it out"),
        (2, ["rollout.colocated=false"], "the servers have GPUs of their own"),
        (2, ["rollout.colocated=true", "engine.world_size=2", "rollout.parallel.tp=2", "rollout.backend=vllm"],
         "a replica of 2 GPUs computes on others than the sender's"),
    ],
)  # fmt: skip
def test_cuda_ipc_is_refused_without_a_shared_gpu(machine, num_gpus, overrides, why):
    machine(num_gpus)
    with pytest.raises(ConfigError, match=why):
        check_ipc(settle(load_config("gsm8k", ["weights_transport=cuda-ipc", *overrides])))
    machine(1)
    check_ipc(settle(load_config("gsm8k", [])))


QWEN3_600M = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("gib", "overrides", "sleeps"),
    [
        (140.0, [], False),
        (80.0, [], False),
        (24.0, [], True),
        (None, [], True),
        (140.0, ["rollout.sleep=true"], True),
        (24.0, ["rollout.sleep=false"], False),
        (140.0, ["rollout.backend=vllm"], True),  # which takes a share of the GPU, whatever is on it
        (24.0, ["rollout.kv_cache_bytes=1000000000"], False),
        (140.0, ["reward.parts={liked: {kind: classifier, model: {path: there}}}"], True),  # its memory is in no plan
        (140.0, ["rollout.colocated=false"], None),
    ],
)
def test_colocated_parts_keep_memory_if_both_fit(machine, monkeypatch, tmp_path, gib, overrides, sleeps):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_600M))
    machine(1)
    monkeypatch.setattr(gpus, "gpu_gib", lambda: gib)
    config = settle(load_config("gsm8k", [f"model.path={tmp_path}", *overrides]))
    assert config.rollout.sleep is sleeps
    if sleeps is False and not overrides:  # the rows of a step at most, or a quarter of the GPU
        assert config.rollout.kv_cache_bytes == pytest.approx(gib / 4 * 2**30)
    if config.rollout.colocated:
        assert is_offloaded(config) is sleeps
        assert is_in_turn(config, "reference") is sleeps
        told = dict(gpu_facts(config))["GPUs"]
        assert ("in turn" in told, "both in its memory" in told) == (sleeps, not sleeps)
        plan = memory_plan(config, QWEN3_600M)
        beside = 0 if sleeps else sum(plan.server.values())
        assert plan.fullest() == ("training", sum(plan.engine.values()) + beside)


def test_an_allocator_without_export_sends_through_the_host(machine, monkeypatch):
    machine(1)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments: True")
    assert settle(load_config("gsm8k", [])).weights_transport == "shm"


@pytest.mark.process
def test_every_recipe_for_small_models_is_planned_on_one_gpu(machine):
    machine(1)
    for recipe in ("gsm8k", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "ppo", "lora", "quickstart"):
        config = settle(load_config(recipe, []))
        assert sum(pool.num_workers for pool in resource_pools(config) if pool.num_gpus) == 1, recipe


@pytest.mark.slow
def test_the_readme_command_is_planned_on_one_gpu_without_a_key(machine, capsys, model, tmp_path, monkeypatch):
    machine(1)
    monkeypatch.setattr(gpus, "_can_share_memory", lambda config: False)  # which looks for the GPU that is not here
    data = tmp_path / "train.jsonl"
    data.write_text((json.dumps({"question": "q", "answer": "#### 1"}) + "\n") * 400)
    assert (
        cli.main(["gsm8k", f"data.path={data}", f"model.path={model}", "rollout.max_model_len=1536", "--dry-run"]) == 0
    )
    assert "1 for engine 1, rollout 1: colocated, in turn" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_has_one_gpu_of_a_cluster_for_engine_and_server(model, tmp_path):
    """Ray believes in the GPU: it would place nothing that asks for a second one. What computes is the CPU."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_AUTH_MODE": "disabled"}
    sizes = ["steps=2", "batch.batch_size=4", "batch.mini_batch_size=4", "eval_every=0", "data.eval_size=16"]
    with subprocess.Popen([sys.executable, "-c", CLUSTER], stdin=-1, stdout=-1, env=environment, text=True) as process:
        address = next(line.split()[1] for line in process.stdout if line.startswith("address "))
        command = [
            sys.executable,
            "-m",
            "rl_trainer.cli",
            "quickstart",
            "runtime=ray",
            f"model.path={model}",
            "output_dir=out",
            *sizes,
        ]
        done = subprocess.run(
            command,
            env=environment | {"RAY_ADDRESS": address},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        process.stdin.close()
        process.wait(120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 for engine 1, rollout 1: colocated" in " ".join(done.stdout.split())
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["steps"] == 2
