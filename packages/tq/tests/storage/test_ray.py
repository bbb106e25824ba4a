"""The queue in Ray's object store, on a real Ray."""

import os
import time
from pathlib import Path

import pytest
import torch

import rl_tq
from rl_bench.waiting import until
from rl_tq.testing import TransferQueueContract

pytestmark = pytest.mark.process

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    """Ray on this machine, with more processes than it has cores; NIXL moves bytes by TCP and shared memory."""
    os.environ.setdefault("UCX_TLS", "tcp,self,sm")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: starved by whatever else a machine does
    before = os.environ.get("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # else Ray warns that it will
    ray.init(
        "local",
        num_cpus=16,
        include_dashboard=False,
        object_store_memory=1 << 30,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()
    os.environ.pop("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")
    if before is not None:
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = before


@pytest.mark.slow  # every queue starts an actor
@pytest.mark.usefixtures("cluster")
class TestRay(TransferQueueContract):
    address = "ray://"


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
class TestRayDirect(TransferQueueContract):
    address = "ray://?tensor_transport=nixl"


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("options", ["", pytest.param("?tensor_transport=nixl", marks=pytest.mark.slow)])
def test_ray_tasks_exchange_rows_and_values_outlive_their_maker(options):
    @ray.remote(num_cpus=1, max_calls=1)  # its process ends with it
    def produce(address: str) -> rl_tq.BatchMeta:
        with rl_tq.connect(address, timeout_s=60.0) as queue:
            return queue.put({"a": torch.arange(3.0), "r": [torch.ones(n) for n in (1, 200_000, 0)]}, partition="p")

    if options:
        pytest.importorskip("nixl")
    with rl_tq.serve(f"ray://{options}", timeout_s=60.0) as queue:
        assert queue.address.startswith("ray://")
        with pytest.raises(rl_tq.AddressError, match="served already"):
            rl_tq.serve(queue.address)
        put = ray.get(produce.remote(queue.address), timeout=120)
        meta = queue.get_meta(partition="p", columns=["a", "r"], batch_size=3, task="t")
        assert meta.rows == put.rows
        batch = queue.get(meta.reorder([2, 1, 0]))
        assert batch["a"].tolist() == [2.0, 1.0, 0.0]
        assert [len(row) for row in batch["r"].unbind()] == [0, 200_000, 1]
        batch["a"] += 1  # ours
        assert queue.get(meta)["a"].tolist() == [0.0, 1.0, 2.0]
        queue.ack(meta)
        queue.clear(meta.reorder([0]))
        with pytest.raises(rl_tq.StaleReferenceError):
            queue.get(meta)
        # The actor that keeps the values is killed, which takes its time: an error says so, not a hang and not other
        # values.
        ray.kill(ray.get_actor(f"rl-tq/{queue.address.removeprefix('ray://')}", namespace="rl-tq"))
        with pytest.raises(rl_tq.ServerLostError, match="what ray://.* kept on the serving node is lost"):
            get_until_lost(queue, meta.reorder([1, 2]))
    with pytest.raises(rl_tq.ServerLostError, match="no process serves"):
        rl_tq.connect(queue.address)


def get_until_lost(queue: rl_tq.TransferQueue, meta: rl_tq.BatchMeta) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert queue.get(meta)["a"].tolist() == [1.0, 2.0]


def stored_bytes() -> float:
    """Bytes in Ray's object store, by Ray's count."""
    return ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("address", ["shm://", "tcp://127.0.0.1:0", "ray://?tensor_transport=nixl"])
def test_values_of_other_queues_never_enter_ray_s_object_store(address: str):
    @ray.remote(num_cpus=1)
    class Worker:
        def __init__(self, address: str) -> None:
            self.queue = rl_tq.connect(address, timeout_s=60.0)

        def put(self) -> rl_tq.BatchMeta:
            return self.queue.put({"a": torch.arange(1 << 20).reshape(8, -1)}, partition="p")  # 8 MiB

        def sum(self, meta: rl_tq.BatchMeta) -> int:
            return int(self.queue.get(meta)["a"].sum())

    # Ray counts with a delay. Not 0: the traceback of a test that failed before refers to values, and pytest keeps it.
    until(lambda: stored_bytes() < 4 << 20)
    known = ray.put(torch.zeros(64 << 20, dtype=torch.uint8).numpy())
    until(lambda: stored_bytes() >= 64 << 20)
    of_one_object = stored_bytes()
    with rl_tq.serve(address, timeout_s=60.0) as queue:
        token = {"RL_TQ_TOKEN": os.environ["RL_TQ_TOKEN"]} if address.startswith("tcp") else {}
        worker = Worker.options(runtime_env={"env_vars": token})
        producer, consumer = worker.remote(queue.address), worker.remote(queue.address)
        metas = [ray.get(producer.put.remote(), timeout=120) for _ in range(3)]
        sums = [ray.get(consumer.sum.remote(meta), timeout=120) for meta in metas]
        assert sums == [sum(range(1 << 20))] * 3
        # What came later is counted: all that was put before is, too.
        more = ray.put(torch.zeros(32 << 20, dtype=torch.uint8).numpy())
        until(lambda: stored_bytes() >= of_one_object + (28 << 20))
        assert stored_bytes() < of_one_object + (33 << 20)
        del more
    del known


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Ray's own processes
def test_each_node_keeps_what_is_put_on_it():
    from ray.cluster_utils import Cluster

    if ray.is_initialized():
        ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=4, resources={"far": 1.0})
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

        @ray.remote(num_cpus=1, resources={"far": 0.1}, max_calls=1)
        def exchange(address: str, meta: rl_tq.BatchMeta) -> tuple[str, rl_tq.BatchMeta, list[float]]:
            with rl_tq.connect(address, timeout_s=60.0) as queue:
                there = queue.get(meta)["a"].tolist()
                node = ray.get_runtime_context().get_node_id()
                return node, queue.put({"a": torch.arange(2.0)}, partition="p"), there

        with rl_tq.serve("ray://", timeout_s=60.0) as queue:
            here = queue.put({"a": torch.tensor([7.0])}, partition="p")
            node, put, there = ray.get(exchange.remote(queue.address, here), timeout=120)
            assert there == [7.0]
            assert node != ray.get_runtime_context().get_node_id()
            assert queue.get(rl_tq.BatchMeta.concat([put, here]))["a"].tolist() == [0.0, 1.0, 7.0]
            keeper = ray.get_actor(f"rl-tq/{queue.address.removeprefix('ray://')}/{node}", namespace="rl-tq")
            assert [each is None for each in ray.get(keeper.give.remote([1, 2]), timeout=60)] == [False, True]
            queue.clear("p")
            until(lambda: ray.get(keeper.give.remote([1]), timeout=60) == [None])
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.promise("`ray://`: values are read where they were put, and pass neither the server nor its node")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Ray's own processes
def test_values_are_read_from_their_node_and_bypass_the_server():
    """512 MiB are put and got on another node; the server's process and its node's object store stay as they were."""
    from ray.cluster_utils import Cluster

    if ray.is_initialized():
        ray.shutdown()
    store = {"object_store_memory": 1 << 30}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False, **store})
    try:
        cluster.add_node(num_cpus=4, resources={"far": 1.0}, **store)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

        @ray.remote(num_cpus=1, resources={"far": 0.1}, max_calls=1)
        def produce(address: str) -> rl_tq.BatchMeta:
            with rl_tq.connect(address, timeout_s=60.0) as queue:
                puts = [{"a": torch.full((64, 1 << 20), index, dtype=torch.uint8)} for index in range(8)]
                return rl_tq.BatchMeta.concat([queue.put(each, partition="p") for each in puts])

        @ray.remote(num_cpus=1, resources={"far": 0.1}, max_calls=1)
        def consume(address: str) -> list[int]:
            with rl_tq.connect(address, timeout_s=60.0) as queue:
                meta = queue.get_meta(partition="p", columns=["a"], batch_size=512, task="t")
                return queue.get(meta)["a"][:, -1].tolist()

        with rl_tq.serve("ray://", timeout_s=60.0) as queue:
            warm = queue.put({"a": torch.zeros(1, 1 << 20, dtype=torch.uint8)}, partition="q")
            queue.get(warm)
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before = peak_bytes()
            put = ray.get(produce.remote(queue.address), timeout=120)
            assert sorted(ray.get(consume.remote(queue.address), timeout=120)) == [
                i for i in range(8) for _ in range(64)
            ]
            assert peak_bytes() - before < 64 << 20
            here = ray.get_runtime_context().get_node_id()
            stored = ray._private.state.available_resources_per_node()[here]["object_store_memory"]
            assert (1 << 30) - stored < 64 << 20
            assert len(put) == 512
    finally:
        ray.shutdown()
        cluster.shutdown()


def peak_bytes() -> int:
    """Most that this process had in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("transport", ["gloo", "nccl", "tcp"])
def test_a_transport_that_readers_cannot_use_alone_is_refused(transport):
    with pytest.raises(rl_tq.AddressError, match=f"takes tensor_transport=nixl, not '{transport}'"):
        rl_tq.serve(f"ray://?tensor_transport={transport}")


def test_without_ray_it_says_what_to_do():
    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises(rl_tq.StorageError, match=r"call ray.init\(\)"):
        rl_tq.serve("ray://")
