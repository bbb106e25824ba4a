"""New weights from two FSDP ranks to an embedded server: from shard to shard beside gathered, in the same run.

The ranks are processes with a real engine, the server is `rl-serve` in a process of its own, and what is called is what
rl-train calls. Peaks are what the resident memory of a process grows by during a sync, shared buffers included.
"""

import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import torch

import rl_ckpt
from rl_bench import Role, Run
from rl_engine import EngineConfig, Precision, create_engine
from rl_rollout import CkptReceiver, ServerConfig, launch_server
from rl_rollout.testing import write_tiny_model

NUM_RANKS = 2
TIMEOUT_S = 120
CHANGED = 0.01
WAYS = ("gathered", "sharded", "differences")
LINK_BYTES_PER_S = 125e6
"""1 Gbit/s."""


def main(run: Run) -> None:
    num_layers, rounds = (4, 3) if run.quick else (30, 3)
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": num_layers, "head_dim": 128}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 64}
    run.parameters(num_layers=num_layers, ranks=NUM_RANKS, rounds=rounds, transport="shm")
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny_model(Path(folder) / "model", **sizes))
        taken = asyncio.run(measure(model, rounds))
        report(run, taken, sum(file.stat().st_size for file in Path(model).glob("*.safetensors")) / 2)


async def measure(model, rounds, *, option="", ways=WAYS):
    """By way, a sample of each round after the first; `option` goes into the address of every session."""
    name = f"bench-weights-{uuid.uuid4().hex[:12]}"
    ranks = Ranks(model, f"shm://{name}-gathered{option}")
    server = launch_server("embedded", ServerConfig(model_path=model, dtype="bfloat16", timeout_s=TIMEOUT_S))
    try:
        pid = (await server.start()).pid
        layouts = ranks.call("layout")
        delta = f"{option}&delta=1" if option else "?delta=1"
        receivers = {
            "gathered": CkptReceiver(f"shm://{name}-gathered{option}"),
            "sharded": CkptReceiver(ranks.open("sharded", layouts, f"shm://{name}-{{rank}}-{{target}}{option}")),
            "differences": CkptReceiver(ranks.open("differences", layouts, f"shm://{name}-d{{rank}}{delta}")),
        }
        version, taken = 0, {way: [] for way in ways}
        for turn in range(rounds + 1):
            for way in ways:
                for _ in range(2 if way == "differences" else 1):  # the first is whole: the ways before took its base
                    version += 1
                    ranks.call("touch", CHANGED if way == "differences" else 1.0)
                    sample = await sync(ranks, server, pid, receivers[way], way, version)
                if turn:
                    taken[way].append(sample)
        return taken
    finally:
        await server.stop()
        ranks.close()


async def sync(ranks, server, pid, receiver, kind, version):
    """One sync as the controller drives it; its figures."""
    ranks.call("reset")
    before = resident(pid)
    reset_peak(pid)
    since, cpu = time.perf_counter(), cpu_s(pid)
    sent = asyncio.to_thread(ranks.send, kind, version)
    report, _ = await asyncio.gather(sent, server.update_weights(receiver, version))
    wall = time.perf_counter() - since
    grown = ranks.call("grown")  # before the digest, for which whole tensors are gathered
    return {
        "wall": wall,
        "wire": report.num_wire_bytes,
        "digest": report.digest == ranks.call("digest")[0],
        "server": peak(pid) - before,
        "server_cpu": cpu_s(pid) - cpu,
        "ranks": grown,
    }


def report(run, taken, num_bytes):
    def medians(way, key):
        return statistics.median(sample[key] for sample in taken[way])

    roles = {"gathered": Role.PEER, "sharded": Role.OURS, "differences": Role.OURS}
    gigabytes = num_bytes / 1e9
    base = medians("gathered", "wall")
    for way, role in roles.items():
        walls = [sample["wall"] for sample in taken[way]]
        note = f"{gigabytes:.2f} GB"
        run.record("wall time of a sync", way, walls, unit="s", role=role, note=note)
    for way in ("sharded", "differences"):
        ratios = [sample["wall"] / base for sample in taken[way]]
        goal = "<= 0.6 x" if way == "sharded" else None
        run.record("wall time over gathered", way, ratios, unit="x", goal=goal)
    for way, role in roles.items():
        wire = [sample["wire"] / num_bytes for sample in taken[way]]
        goal = {"sharded": "<= 1.01 x", "differences": "<= 0.02 x"}.get(way)
        run.record("bytes over the model's", way, wire, unit="x", role=role, goal=goal)
    link = [sample["wire"] / LINK_BYTES_PER_S for sample in taken["differences"]]
    whole = medians("gathered", "wire") / LINK_BYTES_PER_S
    run.record("bytes at 1 Gbit/s over gathered", "differences", [s / whole for s in link], unit="x", goal="<= 0.1 x")
    for rank in range(NUM_RANKS):
        for way, role in roles.items():
            grown = [sample["ranks"][rank] / 2**20 for sample in taken[way]]
            run.record(f"memory that rank {rank} grows by", way, grown, unit="MiB", role=role)
    for way, role in roles.items():
        grown = [sample["server"] / 2**20 for sample in taken[way]]
        run.record("memory that the server grows by", way, grown, unit="MiB", role=role)
        spent = [sample["server_cpu"] / gigabytes for sample in taken[way]]
        goal = "<= 0.4 s/GB" if way == "sharded" else None
        run.record("CPU of the server", way, spent, unit="s/GB", role=role, goal=goal)
        equal = [float(sample["digest"]) for sample in taken[way]]
        run.record("syncs whose digest is that of the whole model", way, equal, unit="share", goal=">= 1 share")


class Ranks:
    """The ranks of a trainer as processes, and the calls that its controller makes."""

    def __init__(self, model, address):
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(NUM_RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=be_rank, args=(theirs, rank, port, model, address), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        self.call("layout")

    def call(self, *command):
        for pipe in self.pipes:
            pipe.send(command)
        answers = [pipe.recv() for pipe in self.pipes]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def open(self, kind, layouts, pattern):
        return rl_ckpt.join_addresses(self.call("open", kind, layouts, pattern), 1)

    def send(self, kind, version):
        if kind == "gathered":
            return self.call("gathered", version)[0]
        digest = rl_ckpt.join_digest(self.call("stage", kind, version))
        return rl_ckpt.merge_reports(self.call("commit", kind, version, digest), version=version, digest=digest)

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(20)
            process.kill()


class RankEnd:
    """What a rank does at each call."""

    def __init__(self, rank, model, address):
        self.rank, self.address = rank, address
        config = EngineConfig(model_path=model, precision=Precision.BFLOAT16, optimizer=None)
        self.engine = create_engine("fsdp", config)
        self.engine.initialize()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.sender, self.shards, self.before = None, {}, 0

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(TIMEOUT_S)

    def layout(self):
        return [spec for spec, _ in self.engine.get_local_shards()]

    def digest(self):
        return rl_ckpt.tree_digest((name, tensor.clone()) for name, tensor in self.engine.get_per_tensor_param()[0])

    def touch(self, share):
        step = round(1 / share)
        for _, tensor in self.engine.get_local_shards():
            tensor.view(torch.int16).view(-1)[::step] ^= 1
        return

    def open(self, kind, layouts, pattern):
        plan = rl_ckpt.ShardPlan(layouts)
        self.shards[kind] = rl_ckpt.ShardedSender(
            plan, self.rank, lambda target: pattern.format(rank=self.rank, target=target), timeout_s=TIMEOUT_S
        )
        return self.run(self.shards[kind].prepare())

    def stage(self, kind, version):
        return self.run(self.shards[kind].stage(self.engine.get_local_shards, version=version))

    def commit(self, kind, version, digest):
        return self.run(self.shards[kind].commit(digest, version))

    def gathered(self, version):
        weights, _ = self.engine.get_per_tensor_param()
        if self.rank:
            for _ in weights:
                pass
            return None
        if self.sender is None:
            self.sender = rl_ckpt.connect(self.address, role="send", timeout_s=TIMEOUT_S)
        return self.run(self.sender.send_weights(weights, version=version, num_peers=1))

    def reset(self):
        self.before = resident(os.getpid())
        reset_peak(os.getpid())

    def grown(self):
        return peak(os.getpid()) - self.before


def be_rank(pipe, rank, port, model, address):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    end = RankEnd(rank, model, address)
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
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def status_of(pid, key):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def resident(pid):
    return status_of(pid, "VmRSS:")


def peak(pid):
    return status_of(pid, "VmHWM:")


def reset_peak(pid):
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
