"""Which process gets which rank, node and GPUs: the order of ranks, and the pools of recipes in Ray's own tables."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl_trainer.config import load_config
from rl_trainer.errors import PlacementError, PlanError
from rl_trainer.planning import gpus
from rl_trainer.planning.gpus import check_gpus, resource_pools
from rl_trainer.planning.plan import make_plan
from rl_trainer.runtime.base import ResourcePool
from rl_trainer.runtime.heartbeat import PlacedHost, WorkerLocation
from rl_trainer.runtime.ray import in_rank_order, members_of

POOL = ResourcePool(name="engine", num_workers=16, num_gpus=1.0)


def placed(places):
    """Host processes as Ray may have placed them: in any order."""
    hosts = [PlacedHost(pool=POOL, rank=i, group=None, bundle=i, actor=None, watch=i) for i in range(len(places))]
    found = [
        WorkerLocation(node_id=node, node_address=f"10.0.0.{node[-1]}", devices=(str(gpu),), pid=i, logs=(), dumps="")
        for i, (node, gpu) in enumerate(places)
    ]
    return in_rank_order(hosts, found)


def test_ranks_are_sorted_by_node_and_gpu_under_ray():
    places = [(node, gpu) for node in ("n1", "n2") for gpu in range(12)]
    for seed in range(5):
        shuffled = random.Random(seed).sample(places, len(places))
        hosts = placed(shuffled)
        assert [host.rank for host in hosts] == [*range(24)]
        assert [(host.where.node_id, int(host.devices[0])) for host in hosts] == places  # 2 before 10
        assert [shuffled[host.bundle] for host in hosts] == places  # each keeps what it was reserved by


def test_a_replica_on_engine_gpus_has_those_of_adjacent_ranks():
    hosts = placed([(node, gpu) for gpu in range(4) for node in ("n1", "n2")])
    members = members_of(hosts, 4)
    assert [(member.rank, member.where.node_id, member.devices) for member in members] == [
        (0, "n1", ("0", "1", "2", "3")),
        (4, "n2", ("0", "1", "2", "3")),
    ]
    assert [member.devices for member in members_of(hosts, 1)] == [host.devices for host in hosts]
    assert [member.rank for member in members_of(hosts, 3)] == [0, 4], "one on each node, and ranks left over"
    assert [member.rank for member in members_of(hosts, 1, 3)] == [0, 1, 2]
    with pytest.raises(PlacementError, match="1 replicas of 8 .* placed 4, 4 ranks on its 2 nodes, which hold 0"):
        members_of(hosts, 8)
    with pytest.raises(PlacementError, match="3 replicas of 3 neighbouring .* which hold 2; make rollout.num_rep"):
        members_of(hosts, 3, 3)


def test_a_replica_takes_a_gpu_for_each_of_its_ranks(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(gpus, "local_gpus", lambda: 16)
    replicas = ["rollout.num_replicas=2", "rollout.parallel={tp: 2, dp: 2}", "engine.world_size=8"]
    apart = load_config("quickstart", [*replicas, "rollout.colocated=false"])
    pools = {pool.name: (pool.num_workers, pool.num_gpus) for pool in resource_pools(apart)}
    assert pools == {"engine": (8, 1.0), "agent": (1, 0.0), "queue": (1, 0.0), "rollout": (2, 4.0)}
    check_gpus(apart)
    monkeypatch.setattr(gpus, "local_gpus", lambda: 15)
    with pytest.raises(PlanError, match=r"asks for 16 GPUs \(engine 8, rollout 8\), and this machine has 15"):
        check_gpus(apart)
    together = load_config("quickstart", [*replicas, "rollout.colocated=true"])
    assert {pool.name for pool in resource_pools(together)} == {"engine", "agent", "queue"}
    make_plan(together)  # replicas of four GPUs each beside eight ranks


def test_colocated_replicas_that_miss_engine_gpus_are_refused():
    sizes = ["rollout.colocated=true", "rollout.parallel.tp=4", "engine.world_size=8", "rollout.num_replicas=3"]
    with pytest.raises(PlanError, match=r"num_replicas=3 of tp x pp x dp = 4 GPUs are more than engine.world_size=8"):
        make_plan(load_config("quickstart", sizes))


def test_fewer_colocated_replicas_leave_gpus_idle(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(gpus, "local_gpus", lambda: 8)
    sizes = ["runtime=ray", "rollout.parallel.tp=4", "rollout.backend=vllm", "engine.world_size=8"]
    config = gpus.settle(load_config("quickstart", sizes))
    assert config.rollout.colocated, "12 GPUs are not there"
    make_plan(config)
    check_gpus(config)
    assert dict(gpus.gpu_facts(config))["GPUs"].endswith("; 4 generate nothing")


def on_a_fake_cluster(what, num_nodes):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, str(Path(__file__).with_name("fake_cluster.py")), what, str(num_nodes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1100, check=False)
    found = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, (done.stdout + done.stderr)[-3000:]
    return json.loads(found[0])


@pytest.mark.promise(
    "Ray places every recipe as planned on a cluster of four nodes of eight GPUs, or the run is refused"
)
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ray_schedules_every_recipe_as_planned_on_four_nodes():
    """The driver's node has no GPU: the cluster's are counted."""
    found = on_a_fake_cluster("recipes", 4)
    one = {"agent": [1], "queue": [1], "nodes shared by engine and others": 0}
    assert found["qwen2.5-7b"] == {"engine": [8], **one}
    assert found["qwen2.5-32b"] == found["qwen3-30b-a3b"] == {"engine": [8, 8], **one}
    apart = found["qwen2.5-7b apart"]
    assert (apart["engine"], apart["frozen"], sum(apart["rollout"])) == ([8], [2], 4)
    assert apart["nodes shared by engine and others"] == 0
    assert "asks for 64 GPUs (engine 64), and the cluster has 32" in found["llama3.1-70b"]
    assert "asks for 128 GPUs (engine 128), and the cluster has 32" in found["qwen3-235b-a22b"]
    started = found["processes"]
    assert started["ranks"] == [[rank, [str(rank)]] for rank in range(8)]
    assert started["as in the table"]
    assert started["replicas of four"] == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]


@pytest.mark.promise("Replicas of a lost node are placed on another one, and what a replica had that left is free")
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_replicas_of_a_lost_node_move_and_free_their_gpus():
    found = on_a_fake_cluster("lost", 3)
    assert found["moved"], found
    assert found["kept"], found
    news = "\n".join(found["news"])
    assert re.search(r"^member 0 of Idle-\d+ died", news)
    assert re.search(
        r"a new member of Idle-\d+ did not start: pool 'rollout' asks for 1 x {'CPU': 1.0, 'GPU': 8.0}", news
    )
    assert news.count("has joined") == 2
    assert news.count("has left") == 1
