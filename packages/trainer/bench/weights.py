"""New weights from the ranks of a trainer to a server: from shard to shard beside gathered, in the same run.

The ranks are processes with a real engine (two of fsdp; four of megatron, tp=2 x pp=2), the server is `rl-serve` in a
process of its own (or vLLM at tp=2, where RL_ROLLOUT_VLLM names an environment with it), and what sends is rl-train's
own `ShardedTransfer` and `GatheredTransfer`. Without a GPU megatron's ranks have the stand-in of rl-engine's tests.
Memory is what the resident memory of a process grows by in its first sync by a way, shared buffers included. vLLM's
processes poll their message queues for a second after each message, on a core each; here for 50 ms, so that what is
counted is work. RL_BENCH names the parts to run, with commas: fsdp, megatron, vllm; all, if it is not set.
"""

import asyncio
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import torch

import rl_ckpt
from rl_bench import Role, Run
from rl_bench.processes import children, cpu_s, reset_peak, status_bytes
from rl_bench.shapes import qwen3
from rl_engine import EngineConfig, Precision, create_engine
from rl_engine.types import ParallelConfig
from rl_rollout import CkptReceiver, ServerConfig, launch_server
from rl_rollout.testing import write_tiny_model
from rl_rollout.types import ServerParallel
from rl_trainer.pipeline.weight_transfer import GatheredTransfer, ShardedTransfer, session_pattern
from rl_trainer.workers.rollout import Receivers
from rl_trainer.workers.weights import LocalWeights

NUM_RANKS = {"fsdp": 2, "megatron": 4}
TIMEOUT_S = 300
CHANGED = 0.01
BUFFERS_MIB = 256
"""A session's ring over shm: 32 buckets of 8 MiB."""
WAYS = ("gathered", "sharded", "differences")
ADDRESSES = {
    "gathered": ("shm", False),
    "sharded": ("shm", False),
    "differences": ("shm", True),
    "sharded, tcp": ("tcp", False),
}
"""By way: transport, and whether differences are sent."""
NO_POLLING = """
import importlib.abc, importlib.machinery, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "vllm.distributed.device_communicators.shm_broadcast":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def load(module):
            run(module)
            module.SpinCondition.__init__.__defaults__ = (0.05,)  # busy_loop_s

        spec.loader.exec_module = load
        return spec

sys.meta_path.insert(0, Finder())
"""
STAND_IN = Path(__file__).parents[2] / "engine" / "tests" / "support" / "megatron_on_cpu"
PARTS = ("fsdp", "megatron", "vllm")


def main(run: Run) -> None:
    parts = [part for part in os.environ.get("RL_BENCH", ",".join(PARTS)).split(",") if part]
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"RL_BENCH names {sorted(unknown)}; there are {PARTS}")
    os.environ.setdefault("RL_CKPT_TOKEN", uuid.uuid4().hex)
    num_layers, rounds = (4, 2) if run.quick else (30, 2)
    sizes = qwen3("0.6B", num_hidden_layers=num_layers, vocab_size=32000, max_position_embeddings=64)
    load = [round(each, 1) for each in os.getloadavg()[:2]]
    run.parameters(num_layers=num_layers, rounds=rounds, parts=parts, load_averages_at_the_start=load)
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny_model(Path(folder) / "model", **sizes))
        num_bytes = sum(file.stat().st_size for file in Path(model).glob("*.safetensors")) / 2  # bfloat16
        if "fsdp" in parts:
            ways = (*WAYS, "sharded, tcp")
            report(run, "fsdp, 2 ranks, to embedded", asyncio.run(measure(model, rounds, ways=ways)), num_bytes)
        if "megatron" in parts:
            taken = asyncio.run(measure(model, rounds, source="megatron", ways=("gathered", "sharded")))
            report(run, "megatron, tp=2 x pp=2, to embedded", taken, num_bytes)
        if "vllm" in parts and os.environ.get("RL_ROLLOUT_VLLM"):
            Path(folder, "sitecustomize.py").write_text(NO_POLLING)
            for source in ("fsdp", "megatron"):
                ways = ("gathered", "sharded")
                work = measure(model, rounds, source=source, ways=ways, backend="vllm", python_path=folder)
                report(run, f"{source} to vLLM, tp=2", asyncio.run(work), num_bytes)


async def measure(model, rounds, *, source="fsdp", option="", ways=WAYS, backend="embedded", python_path=None):
    """By way, a sample of its first round ("first"), and of each after it.

    `option` goes into every address, `python_path` into the server's environment.
    """
    name = f"bench-weights-{uuid.uuid4().hex[:12]}"
    ranks = Ranks(model, source)
    server = launch_server(backend, config_of(model, backend, python_path))
    try:
        pid = (await server.start()).pid
        made = {way: await asyncio.to_thread(make, ranks, way, f"{name}-{i}", option) for i, way in enumerate(ways)}
        receivers = {}
        for way, (transfer, address) in made.items():
            shapes = transfer.weights_for(0)
            layout = None if shapes is None else await server.weight_layout(shapes)
            await asyncio.to_thread(transfer.join, 0, Receivers(server.capabilities.num_receivers, layout, "here"))
            with suppress(KeyError):
                address = (await asyncio.to_thread(transfer.addresses, [0]))[0]
            receivers[way] = CkptReceiver(address, timeout_s=TIMEOUT_S)
        version, taken = 0, {way: [] for way in ways}
        count = {0: server.capabilities.num_receivers}
        for turn in range(rounds + 1):
            for way in ways:
                differs = "differences" in way
                for _ in range(2 if differs else 1):  # the first is whole: the ways before took its base
                    version += 1
                    ranks.call("touch", CHANGED if differs else 1.0)
                    sample = await sync(ranks, server, pid, receivers[way], (made[way][0], count), version)
                if turn in (0, rounds):  # it takes longer than the sync
                    sample["digest"] = sample["told"] == await asyncio.to_thread(ranks.digest)
                taken[way].append(sample)
        return taken
    finally:
        await server.stop()
        ranks.close()


def config_of(model, backend, python_path=None):
    if backend == "embedded":
        return ServerConfig(model_path=model, dtype="bfloat16", timeout_s=TIMEOUT_S)
    options = {
        "command": f"{os.environ['RL_ROLLOUT_VLLM']}/bin/python -m vllm.entrypoints.openai.api_server",
        "args": ["--enforce-eager"],
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"},
    }
    if python_path is not None:
        inherited = os.environ.get("PYTHONPATH")
        options["env"]["PYTHONPATH"] = os.pathsep.join([python_path, *([inherited] if inherited else [])])
    return ServerConfig(
        model_path=model,
        dtype="bfloat16",
        timeout_s=600,
        parallel=ServerParallel(tp=2),
        options=options,
        kv_cache_bytes=2**28,
        num_threads=1,
        max_num_seqs=4,
    )


def make(ranks, way, name, option):
    """What rl-train sends by, and the address where that is one for all receivers."""
    scheme, delta = ADDRESSES[way]
    if way == "gathered":
        address = f"{scheme}://{name}{option}"
        return GatheredTransfer(Actor(ranks, way, address), address), address
    place = f"{scheme}://{name}{option}" if scheme == "shm" else f"{scheme}://127.0.0.1:0{option}"
    pattern = session_pattern(place, delta=delta).replace("{host}", "127.0.0.1")
    return ShardedTransfer(Actor(ranks, way, ""), pattern), ""


async def sync(ranks, server, pid, receiver, sending, version):
    """One sync as the controller drives it; its figures."""
    transfer, count = sending
    ranks.call("reset")
    pids = [pid, *children(pid)]
    before = {each: status_bytes("VmRSS", each) for each in pids}
    for each in pids:
        reset_peak(each)
    since, cpu = time.perf_counter(), {each: cpu_s(each) for each in pids}
    sent = asyncio.to_thread(transfer.send, version, count)
    report, _ = await asyncio.gather(sent, server.update_weights(receiver, version))
    wall = time.perf_counter() - since
    grown = ranks.call("grown")
    return {
        "wall": wall,
        "wire": report.num_wire_bytes,
        "told": report.digest,
        "server": max(status_bytes("VmHWM", each) - before[each] for each in pids),
        "server_cpu": sum(cpu_s(each) - cpu[each] for each in pids) / count[0],
        "ranks": [each[0] for each in grown],
        "rank_cpu": [each[1] for each in grown],
    }


def report(run, what, taken, num_bytes):
    """Rows of one source and server; the first sync of each way is for memory alone."""
    first, later = ({way: samples[s] for way, samples in taken.items()} for s in (slice(0, 1), slice(1, None)))
    roles = {way: Role.PEER if way == "gathered" else Role.OURS for way in taken}
    gigabytes, num_ranks = num_bytes / 1e9, len(taken["sharded"][0]["ranks"])
    base = statistics.median(sample["wall"] for sample in later["gathered"])

    def record(metric, way, samples, unit, goal=None):
        run.record(f"{what}: {metric}", way, samples, unit=unit, role=roles[way], goal=goal, note=f"{gigabytes:.2f} GB")

    for way in taken:
        record("wall time of a sync", way, [sample["wall"] for sample in later[way]], "s")
    for way in taken:
        if way != "gathered":
            goal = "<= 0.6 x" if way == "sharded" else None
            record("wall time over gathered", way, [sample["wall"] / base for sample in later[way]], "x", goal)
    for way in taken:
        goal = {"gathered": None, "differences": "<= 0.02 x"}.get(way, "<= 1.01 x")
        record("bytes over the model's", way, [sample["wire"] / num_bytes for sample in later[way]], "x", goal)
    for rank in range(num_ranks):
        for way in taken:
            goal = f"<= {BUFFERS_MIB} MiB" if way == "sharded" else None
            grown = [sample["ranks"][rank] / 2**20 for sample in first[way]]
            record(f"memory that rank {rank} grows by", way, grown, "MiB", goal)
    for way in taken:
        grown = [sample["server"] / 2**20 for sample in first[way]]
        record("memory that a process of the server grows by", way, grown, "MiB")
    for way in taken:
        goal = "<= 0.4 s/GB" if way.startswith("sharded") else None
        shares = [sum(sample["rank_cpu"]) / gigabytes for sample in later[way]]
        record("CPU of the ranks, together", way, shares, "s/GB", goal)
        record("CPU of a receiver", way, [sample["server_cpu"] / gigabytes for sample in later[way]], "s/GB", goal)
    for way in taken:
        equal = [float(sample["digest"]) for sample in taken[way] if "digest" in sample]
        record("syncs whose digest is that of the whole model", way, equal, "share", ">= 1 share")


class Actor:
    """The ranks as rl-train's transfers call them: one way to send among several, which share the ranks."""

    def __init__(self, ranks, way, address):
        self._ranks, self._way, self._address = ranks, way, address

    def weight_layout(self):
        return self._ranks.call("layout")

    def open_sessions(self, layouts, targets, pattern):
        return self._ranks.call("open", self._way, layouts, targets, pattern)

    def stage_weights(self, version, num_replicas):
        return self._ranks.call("stage", self._way, version, num_replicas)

    join_digest = staticmethod(rl_ckpt.join_digest)

    def commit_weights(self, version, digest):
        return self._ranks.call("commit", self._way, version, digest)

    def abort_weights(self, why):
        self._ranks.call("abort", self._way, why)

    def call_off(self):
        """The ranks answer one call at a time: they end their waits themselves."""

    def send_weights(self, version, num_receivers):
        return self._ranks.call("gathered", self._address, version, num_receivers)[0]


class Ranks:
    """The ranks of a trainer as processes, and the calls that its controller makes."""

    def __init__(self, model, source):
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(NUM_RANKS[source]):
            mine, theirs = context.Pipe()
            process = context.Process(target=be_rank, args=(theirs, rank, port, model, source), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        self.call("ready")

    def call(self, *command):
        for pipe in self.pipes:
            pipe.send(command)
        answers = [pipe.recv() for pipe in self.pipes]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def digest(self):
        """Of the whole model, which is gathered for it."""
        return self.call("digest")[0]

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(20)
            process.kill()


class RankEnd:
    """What a rank does at each call."""

    def __init__(self, rank, model, source):
        self.rank = rank
        backend = source
        config = EngineConfig(
            model_path=model,
            precision=Precision.BFLOAT16,
            parallel=ParallelConfig(tp=2, pp=2) if backend == "megatron" else ParallelConfig(),
            optimizer=None,
        )
        if backend == "megatron" and not torch.cuda.is_available():
            sys.path.insert(0, str(STAND_IN))
            backend = STAND_IN.name
        self.engine = create_engine(backend, config)
        self.engine.initialize()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.sender, self.shards, self.before, self.cpu = None, {}, 0, 0.0

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(TIMEOUT_S)

    def ready(self):
        return True

    def layout(self):
        held = LocalWeights([], {}, "here")
        for spec, tensor in self.engine.get_local_shards():
            held.specs.append(spec)
            held.dtypes[spec.name] = str(tensor.dtype).removeprefix("torch.")
        return held

    def digest(self):
        weights = ((name, tensor) for name, tensor in self.engine.get_per_tensor_param()[0])
        if self.rank:  # the gather is collective
            return [None for _ in weights][:0]
        return rl_ckpt.tree_digest((name, tensor.clone()) for name, tensor in weights)

    def touch(self, share):
        """Change one bit of one number in so many."""
        step = round(1 / share)
        for _, tensor in self.engine.get_local_shards():
            numbers = tensor.view(torch.int16)
            (numbers.view(-1) if numbers.is_contiguous() else numbers)[::step] ^= 1

    def open(self, way, layouts, targets, pattern):
        plan = rl_ckpt.ShardPlan(layouts, targets)
        self.shards[way] = rl_ckpt.ShardedSender(
            plan, self.rank, lambda target: pattern.format(rank=self.rank, target=target), timeout_s=TIMEOUT_S
        )
        return self.run(self.shards[way].prepare())

    def stage(self, way, version, num_replicas):
        work = self.shards[way].stage(self.engine.get_local_shards, version=version, num_replicas=num_replicas)
        return self.run(work)

    def commit(self, way, version, digest):
        return self.run(self.shards[way].commit(digest, version))

    def abort(self, way, why):
        self.run(self.shards[way].abort(why))

    def gathered(self, address, version, num_receivers):
        weights, _ = self.engine.get_per_tensor_param()
        if self.rank:
            for _ in weights:
                pass
            return None
        if self.sender is None:
            self.sender = rl_ckpt.connect(address, role="send", timeout_s=TIMEOUT_S)
        return self.run(self.sender.send_weights(weights, version=version, num_peers=num_receivers))

    def reset(self):
        self.before, self.cpu = status_bytes("VmRSS"), time.process_time()
        reset_peak()

    def grown(self):
        return status_bytes("VmHWM") - self.before, time.process_time() - self.cpu


def be_rank(pipe, rank, port, model, source):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS[source])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    end = RankEnd(rank, model, source)
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = getattr(end, name)(*arguments)
        except Exception as error:  # noqa: BLE001 - an answer
            print(f"rank {rank}: {error!r}", file=sys.stderr)
            answer = RuntimeError(f"rank {rank}: {error!r}")
        pipe.send(answer)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
