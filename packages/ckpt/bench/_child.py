"""The process that takes weights, by any of the systems of the benchmark, and what both processes agree on."""

import os
import pickle
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch

import rl_ckpt
import rl_csrc
from rl_bench.processes import Child, say
from rl_bench.shapes import qwen3, weight_shapes

TIMEOUT = timedelta(seconds=60)
TOKEN = "of the benchmark"
PACE = "RL_BENCH_PACE"
"""Variable for the processes of a benchmark: see `pace`."""
SO_MAX_PACING_RATE = 47


def shapes(what, size):
    """Shapes by a word and a size: the layers of a model, or the number of tensors of 1 GiB."""
    if what == "blocks":
        return {f"block.{i}": (1 << 29,) for i in range(size)}
    if what == "experts":  # Qwen3-30B-A3B
        sizes = {"hidden_size": 2048, "intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4}
        return weight_shapes(qwen3("8B", num_hidden_layers=size, **sizes), num_experts=128)
    if what == "8B":
        return weight_shapes(qwen3("8B", num_hidden_layers=size))
    return weight_shapes(qwen3("0.6B", num_hidden_layers=size, vocab_size=122_880 if size == 28 else 9_496))


def tensors(what, size, make, device="cpu"):
    return {name: make(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes(what, int(size)).items()}


def copy_into(mine, items):
    for name, tensor in items:
        mine[name].copy_(tensor)


def digest(named):
    """Read every byte once."""
    for tensor in named.values():
        rl_csrc.digest(tensor.view(-1).view(torch.uint8))


def halves():
    """The cores of the sending and of the receiving process."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    return cores[:half], cores[half:] or cores


def raw(tensor):
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")


def join_group(rank, file):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2, timeout=TIMEOUT)
    return dist


def listen(where):
    if where.startswith("tcp"):
        return socket.create_server(("127.0.0.1", 0))
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"\0{where}")
    server.listen()
    return server


def dial(where):
    if where.startswith("tcp"):
        return socket.create_connection(("127.0.0.1", int(where.rpartition(":")[2])))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"\0{where}")
    return connection


def start(stack, system, what, size, where, cores):
    """A child that takes weights, closed with the stack."""
    child = Child(__file__, system, what, size, where, *cores)
    stack.callback(child.close)
    return child


def anonymous_bytes():
    """Memory of this process that is its own, so much as it has touched."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


class Systems:
    """Ways to take a sync into tensors of this process: each is a method that makes one."""

    def __init__(self, what, size, where):
        self.where, self.device = where, "cuda" if where.startswith(("cuda", "handles")) else "cpu"
        self.mine = tensors(what, size, torch.zeros, self.device)

    def connect(self):
        return rl_ckpt.connect(self.where, role="receive", token=TOKEN if self.where.startswith("tcp") else None)

    def into(self):
        engine = self.connect()
        return lambda: engine.recv_into(self.mine)

    def iterate(self):
        engine = self.connect()
        return lambda: copy_into(self.mine, engine.recv())

    def many(self):
        """As many receivers as the address says behind `#`, on threads, which verify and keep nothing."""
        self.where, _, count = self.where.partition("#")
        engines, pool = [self.connect() for _ in range(int(count))], ThreadPoolExecutor(int(count))
        return lambda: [*pool.map(lambda engine: sum(1 for _ in engine.recv()), engines)]

    def gloo(self):
        dist = join_group(1, self.where)
        return lambda: [dist.recv(tensor, src=0) for tensor in self.mine.values()]

    def socket(self):
        connection = dial(self.where)

        def take():
            for tensor in self.mine.values():
                view = raw(tensor)
                while view:
                    view = view[connection.recv_into(view) :]

        return take

    def read(self):
        return lambda: digest(self.mine)

    def files(self):
        from safetensors.torch import load_file

        return lambda: copy_into(self.mine, load_file(self.where).items())

    def handles(self):
        """torch's own IPC on a GPU: one handle for each tensor, pickled."""

        def take():
            for name, (rebuild, arguments) in pickle.loads(Path(self.where.partition(":")[2]).read_bytes()).items():
                self.mine[name].copy_(rebuild(*arguments))
            torch.cuda.synchronize()

        return take


def serve(system, what, size, where, *cores):
    """Take a sync for every `go` on stdin."""
    if cores:
        os.sched_setaffinity(0, map(int, cores))
    torch.set_num_threads(1)
    if PACE in os.environ:
        pace(int(os.environ[PACE]))
    systems = Systems(what, size, where)
    take = getattr(systems, system)()
    say("ready")
    for line in sys.stdin:
        if line == "memory\n":  # takes as long as a fifth of a sync, so not with each
            say("memory", torch.cuda.memory_reserved() if systems.device == "cuda" else anonymous_bytes())
            continue
        since = time.process_time()
        take()
        say("done", 1e3 * (time.process_time() - since))


def queue_child(queue, done, what, size, cores):
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    mine = tensors(what, size, torch.zeros)
    since = time.process_time()
    while (items := queue.get()) is not None:
        copy_into(mine, items.items())
        since, before = time.process_time(), since
        done.put(1e3 * (since - before))


def pace(bytes_per_s):
    """Let the kernel send no faster on any connection that is accepted from now on in this process and in children."""
    os.environ[PACE] = str(bytes_per_s)
    listen = socket.socket.listen

    def paced(self, backlog=0):
        if self.family == socket.AF_INET:
            self.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)
        listen(self, backlog)

    socket.socket.listen = paced
    return lambda: (os.environ.pop(PACE), setattr(socket.socket, "listen", listen))


if __name__ == "__main__":
    serve(*sys.argv[1:])
