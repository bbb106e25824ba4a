"""`ray://` by Ray's object store and by Ray Direct Transport (NIXL), in turns: between processes and between nodes.

256 rows of 1 MB. "Other node" is a second Ray node on the same machine, with an object store of its own: values cross
between two stores, or are read out of the keeper's memory. Without RDMA NIXL moves bytes over TCP and shared memory.

    uv run --group dev rl-bench ray_direct
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import torch

import rl_tq

if TYPE_CHECKING:
    from rl_bench import Run

ADDRESSES = {"object store": "ray://", "Ray Direct Transport, nixl": "ray://?tensor_transport=nixl"}


class Peer:
    """A process with a client of the queue."""

    def __init__(self, address: str) -> None:
        self._queue = rl_tq.connect(address, timeout_s=60.0)

    def put(self, num_rows: int) -> tuple[float, rl_tq.BatchMeta]:
        """Seconds of a put, and its rows."""
        rows = {"a": torch.ones(num_rows, 10**6, dtype=torch.uint8)}
        start = time.perf_counter()
        meta = self._queue.put(rows, partition="p")
        return time.perf_counter() - start, meta

    def get(self, meta: rl_tq.BatchMeta) -> float:
        """Seconds of a get."""
        start = time.perf_counter()
        found = self._queue.get(meta)["a"]
        assert int(found[-1, -1]) == 1
        return time.perf_counter() - start

    def clear(self) -> None:
        """Drop the rows."""
        self._queue.clear("p")


def main(run: Run) -> None:
    os.environ.setdefault("UCX_TLS", "tcp,self,sm")
    import ray
    from ray.cluster_utils import Cluster

    num_rows, rounds = (16, 2) if run.quick else (256, 7)
    run.parameters(num_rows=num_rows, rounds=rounds, ray=ray.__version__)
    store = {"object_store_memory": 2 << 30}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False, **store})
    try:
        cluster.add_node(num_cpus=8, resources={"far": 1.0}, **store)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        with rl_tq.serve(ADDRESSES["object store"]) as one, rl_tq.serve([*ADDRESSES.values()][1]) as two:
            measure(run, ray, dict(zip(ADDRESSES, (one.address, two.address), strict=True)), num_rows, rounds)
    finally:
        ray.shutdown()
        cluster.shutdown()


def measure(run: Run, ray: Any, addresses: dict[str, str], num_rows: int, rounds: int) -> None:
    """Rows of puts, and of gets in a process of the same node and of another one."""
    remote, far = ray.remote(num_cpus=0)(Peer), {"resources": {"far": 0.01}}
    peers = {
        system: (remote.remote(address), remote.remote(address), remote.options(**far).remote(address))
        for system, address in addresses.items()
    }
    names = ("put", "get, same node", "get, other node")
    seconds: dict[tuple[str, str], list[float]] = {(name, system): [] for name in names for system in addresses}
    for turn in range(rounds + 1):
        for system, (producer, near, other) in peers.items():
            put, meta = ray.get(producer.put.remote(num_rows), timeout=120)
            found = (put, ray.get(near.get.remote(meta), timeout=120), ray.get(other.get.remote(meta), timeout=120))
            ray.get(producer.clear.remote(), timeout=120)
            if turn:  # the first one connects
                for name, value in zip(names, found, strict=True):
                    seconds[name, system].append(value)
    for (name, system), found in seconds.items():
        run.record(f"{name}, {num_rows} MB", system, [num_rows / 1e3 / each for each in found], unit="GB/s")
