"""A job on the machines of a Ray cluster that runs already."""

import json
import os
import subprocess
import sys

import pytest

from rl_trainer.errors import ConfigError
from rl_trainer.runtime.network import address_of, check_reach, make_tokens, server_token, storage_of

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
cluster.add_node(num_cpus=6, resources={"scorers": 1})
raylets = [node.all_processes["raylet"][0].process.pid for node in (cluster.head_node, *cluster.worker_nodes)]
print("address", cluster.address, *raylets, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
SIZES = ["steps=2", "batch.batch_size=4", "batch.mini_batch_size=4", "eval_every=0", "data.eval_size=16"]
SIZES += ["rollout.num_replicas=2", "engine.world_size=2", "output_dir=out", "timeout_s=300"]


def test_an_address_is_the_backend_s_own_or_made_for_the_run():
    place = ("10.0.0.1", 7070)
    assert address_of("shm", "run", place) == "shm://run"
    assert address_of("tcp", "run", place) == "tcp://10.0.0.1:7070"
    assert address_of("tcp://10.0.0.2:1?streams=4", "run", place) == "tcp://10.0.0.2:1?streams=4"


@pytest.mark.promise("Over several nodes samples stay where they were made")
def test_samples_stay_on_the_node_that_made_them():
    assert [storage_of(None, nodes) for nodes in (1, 2)] == ["shm", "ray"]
    assert [storage_of("tcp", nodes) for nodes in (1, 2)] == ["tcp", "tcp"]


def test_what_does_not_leave_its_machine_is_refused_on_several():
    check_reach("weights_transport", "shm", 1)
    check_reach("weights_transport", "tcp://10.0.0.1:1", 2)
    for key, backend in (("weights_transport", "shm://run"), ("queue_storage", "shm")):
        with pytest.raises(ConfigError, match=f"{key}={backend} does not leave its machine, .* placed this run on 2"):
            check_reach(key, backend, 2)


def test_secrets_are_those_of_the_environment_or_new(monkeypatch):
    monkeypatch.setenv("RL_CKPT_TOKEN", "mine")
    for name in ("RL_TQ_TOKEN", "RL_ROLLOUT_API_TOKEN"):
        monkeypatch.setenv(name, "")  # so that the test's end takes back what is set now
        monkeypatch.delenv(name)
    assert server_token() is None
    tokens = make_tokens()
    assert tokens["RL_CKPT_TOKEN"] == "mine"
    assert len({*tokens.values()}) == 3
    assert make_tokens() == tokens
    assert server_token() == tokens["RL_ROLLOUT_API_TOKEN"]


@pytest.fixture
def cluster():
    """The address of a Ray of two nodes, and what joins it has to have in its environment."""
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(command, stdin=-1, stdout=-1, env=environment, text=True) as process:
        _, address, *raylets = next(line for line in process.stdout if line.startswith("address ")).split()
        yield environment | {"RAY_ADDRESS": address, "RAYLETS": " ".join(raylets)}
        process.stdin.close()
        process.wait(120)


@pytest.mark.promise("A run over two nodes, with samples on each")
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_job_runs_on_two_nodes_and_explains_single_node_limits(cluster, model, tmp_path):
    """Samples are on each node, and the plan names what would keep the job on one."""

    def train(*overrides):
        command = [
            sys.executable,
            "-m",
            "rl_trainer.cli",
            "quickstart",
            "runtime=ray",
            f"model.path={model}",
            *SIZES,
            *overrides,
        ]
        return subprocess.run(command, env=cluster, cwd=tmp_path, capture_output=True, text=True, timeout=500)

    refused = train()
    assert refused.returncode == 2
    assert "weights_transport=shm does not leave its machine" in refused.stdout + refused.stderr
    done = train("weights_transport=tcp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "samples by shm, or ray over several nodes" in done.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())  # the relative path meant the same to all
    assert (summary["steps"], summary["failed_rollouts"]) == (2, 0)


WHERE = """
import os

def raylet(text, row):
    with open("raylets", "a") as file:
        file.write(os.environ["RAY_RAYLET_PID"] + " ")
    return float(len(text))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rewards_are_computed_on_nodes_of_their_own(cluster, model, tmp_path):
    """Agent workers are on the node that has the resource; one that no node has is refused before anything starts.

    One replica shares the CPUs of two engine ranks: weights come from both.
    """
    (tmp_path / "where.py").write_text(WHERE)
    command = [sys.executable, "-m", "rl_trainer.cli", "quickstart", "runtime=ray", f"model.path={model}", *SIZES]
    command += [
        "weights_transport=tcp",
        "reward.path=where.py:raylet",
        "rollout.colocated=true",
        "rollout.num_replicas=1",
    ]

    def train(resource):
        last = f"placement.agent={{num_cpus: 2, resource: {resource}}}"
        return subprocess.run([*command, last], env=cluster, cwd=tmp_path, capture_output=True, text=True, timeout=500)

    refused = train("nowhere")
    assert refused.returncode == 1
    assert "'nowhere': 0.0}; make the pools smaller" in refused.stdout + refused.stderr
    (tmp_path / "raylets").unlink(missing_ok=True)  # of the trial before the start
    done = train("scorers")
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = cluster["RAYLETS"].split()
    found = (tmp_path / "raylets").read_text().split()
    assert second in found
    assert first not in found
