"""A Ray cluster of fake nodes on this machine, and where Ray places the pools of recipes on it; prints JSON.

`python fake_cluster.py recipes NODES`, or `lost NODES`: nodes of 8 fake GPUs each, beside a head that has none.
"""

import json
import os
import sys
import time
from collections import Counter

import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from rl_trainer.config import load_config
from rl_trainer.errors import TrainerError
from rl_trainer.planning.gpus import check_gpus, resource_pools, settle
from rl_trainer.runtime.base import Dispatch, ResourcePool, register
from rl_trainer.runtime.ray import RayRuntime, members_of

APART = ["rollout.colocated=false", "rollout.num_replicas=4", "rollout.parallel={tp: 4}", "algorithm.kl_coef=0.1"]
APART += ["placement.reference={pool: frozen, num_gpus: 2}"]
RUNS = {
    "qwen2.5-7b": ["qwen2.5-7b"],
    "qwen2.5-7b apart": ["qwen2.5-7b", *APART],
    "qwen2.5-32b": ["qwen2.5-32b"],
    "qwen3-30b-a3b": ["qwen3-30b-a3b"],
    "llama3.1-70b": ["llama3.1-70b"],
    "qwen3-235b-a22b": ["qwen3-235b-a22b"],
}


class Idle:
    """A worker that does nothing but say where it is."""

    def __init__(self, context):
        self.context = context

    @register(Dispatch.GATHER)
    def where(self):
        runtime = ray.get_runtime_context()
        return [(self.context.rank, runtime.get_node_id(), runtime.get_accelerator_ids()["GPU"])]

    def node(self):
        return ray.get_runtime_context().get_node_id()


def recipes():
    """By recipe: the sentence that refuses it, or by pool the bundles on each node, by Ray's own table."""
    found = {}
    for name, (recipe, *overrides) in RUNS.items():
        config = settle(load_config(recipe, ["data.path=there", "model.path=there", *overrides]))
        runtime = RayRuntime(timeout_s=300)
        try:
            check_gpus(config)
            pools = resource_pools(config)
            placed = {pool.name: nodes_of(runtime, pool) for pool in pools}
            found[name] = {pool: sorted(Counter(nodes).values()) for pool, nodes in placed.items()}
            found[name]["nodes shared by engine and others"] = len(
                set(placed["engine"]) & {node for pool in ("frozen", "rollout") for node in placed.get(pool, [])}
            )
        except TrainerError as error:
            found[name] = str(error)
        runtime.stop()
        time.sleep(1)
    return found | {"processes": processes()}


def nodes_of(runtime, pool):
    """By bundle of a pool, its node."""
    bundles = runtime._reserve_bundles(pool)
    return [placement_group_table(group)["bundles_to_node_id"][index] for group, index in bundles]


def processes():
    """Of the 7 B recipe, whose host processes are started: nodes and GPUs of its ranks, and of colocated replicas."""
    config = settle(load_config("qwen2.5-7b", ["data.path=there", "model.path=there"]))
    with RayRuntime(timeout_s=300) as runtime:
        runtime.start(resource_pools(config))
        hosts = runtime.answers.hosts["engine"]
        table = hosts[0].group
        nodes = placement_group_table(table)["bundles_to_node_id"]
        ranks = runtime.create_group(Idle, "engine").where()
        pairs = members_of(hosts, 4)
        return {
            "ranks": [(rank, gpus) for rank, _, gpus in ranks],
            "as in the table": all(node == nodes[hosts[rank].bundle] for rank, node, _ in ranks),
            "replicas of four": [member.devices for member in pairs],
        }


def lost(cluster):
    """Two replicas of 8 GPUs on three nodes; the node of one is lost, and later one is added and taken away."""
    with RayRuntime(timeout_s=300) as runtime:
        runtime.start([ResourcePool(name="rollout", num_workers=2, num_gpus=8.0, is_elastic=True)])
        replicas = runtime.create_replicas(Idle, "rollout")
        before = replicas.call(Idle.node, dict.fromkeys(replicas.members, ()))
        node = next(node for node in cluster.worker_nodes if node.node_id == before[0])
        cluster.remove_node(node)
        until(lambda: 0 not in replicas.members and len(replicas.members) == 2)
        after = replicas.call(Idle.node, dict.fromkeys(replicas.members, ()))
        replicas.resize(3)  # for which there is no node left
        news = []
        until(lambda: news.extend(replicas.take_news()) or any("did not start" in line for line in news))
        replicas.resize(1)
        until(lambda: ray.available_resources().get("GPU", 0) == 8)
        replicas.resize(2)
        until(lambda: len(replicas.members) == 2)
        return {
            "moved": before[0] not in after.values() and len({*after.values()}) == 2,
            "kept": before[1] in after.values(),
            "news": [*news, *replicas.take_news()],
        }


def until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("it did not come about")
        time.sleep(0.2)


def main(what, num_nodes):
    os.environ["RAY_AUTH_MODE"] = "disabled"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": 0, "include_dashboard": False})
    for _ in range(int(num_nodes)):
        cluster.add_node(num_cpus=16, num_gpus=8)
    cluster.wait_for_nodes()
    os.environ["RAY_ADDRESS"] = cluster.address
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
    found = recipes() if what == "recipes" else lost(cluster)
    sys.stdout.write(f"FOUND {json.dumps(found)}\n")
    sys.stdout.flush()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
