"""The process that takes weights, by any of the systems of the benchmark, and what both processes agree on."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

import rl_ckpt
import rl_csrc

TIMEOUT = timedelta(seconds=60)
TOKEN = "of the benchmark"
PACE = "RL_BENCH_PACE"
"""Variable for the processes of a benchmark: see `pace`."""
SO_MAX_PACING_RATE = 47


def shapes(num_layers, vocab_size):
    """Qwen3: hidden 1024, 16 query and 8 key-value heads of 128, intermediate 3072. The 0.6B has 28 layers."""
    layer = {
        "self_attn.q_proj": (2048, 1024),
        "self_attn.k_proj": (1024, 1024),
        "self_attn.v_proj": (1024, 1024),
        "self_attn.o_proj": (1024, 2048),
        "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,),
        "mlp.gate_proj": (3072, 1024),
        "mlp.up_proj": (3072, 1024),
        "mlp.down_proj": (1024, 3072),
        "input_layernorm": (1024,),
        "post_attention_layernorm": (1024,),
    }
    layers = {f"model.layers.{i}.{name}.weight": shape for i in range(num_layers) for name, shape in layer.items()}
    return {"model.embed_tokens.weight": (vocab_size, 1024), **layers, "model.norm.weight": (1024,)}


def tensors(size, make):
    return {name: make(shape, dtype=torch.bfloat16) for name, shape in shapes(*size).items()}


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


class Child:
    """This file as a process that takes weights by one system: a line to it starts a sync, a line back ends it."""

    def __init__(self, system, size, where, cores):
        command = [sys.executable, __file__, system, *map(str, size), str(where), *map(str, cores)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.cpu_ms = []
        """Time of its processor, for each sync that it has ended."""

    def wait(self):
        """Until it has its tensors and its connection."""
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the receiving process {self.process.args} died")

    def tell(self, what="go"):
        self.process.stdin.write(f"{what}\n")

    def hear(self):
        if not (said := self.process.stdout.readline().strip()):
            raise RuntimeError(f"the receiving process {self.process.args} died")
        if said.startswith("done"):
            self.cpu_ms.append(float(said.split()[1]))
        return said

    def resident_bytes(self):
        """Memory that is its own."""
        self.tell("memory")
        return int(self.hear())

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)


def resident_bytes():
    """Memory of this process that is its own: anonymous pages."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    return 0


def child(system, num_layers, vocab_size, where, *cores):
    """Take a sync for every `go` on stdin, into tensors of this process."""
    os.sched_setaffinity(0, map(int, cores))
    torch.set_num_threads(1)
    if PACE in os.environ:
        pace(int(os.environ[PACE]))
    mine = tensors((int(num_layers), int(vocab_size)), torch.zeros)
    if system.startswith("ckpt"):
        token = TOKEN if where.startswith("tcp") else None
        engine = rl_ckpt.connect(where, role="receive", token=token)
    elif system == "slices":
        receiver = rl_ckpt.ShardedReceiver(rl_ckpt.Addresses.from_json(where).of(0), token=TOKEN)
        runner = asyncio.Runner()
    elif system == "gloo":
        dist = join_group(1, where)
    elif system == "socket":
        connection = dial(where)
    elif system == "copy":
        others = tensors((int(num_layers), int(vocab_size)), torch.randn)
    print("ready", flush=True)
    for line in sys.stdin:
        if line == "memory\n":  # takes as long as a fifth of a sync, so not with each
            print(resident_bytes(), flush=True)
            continue
        since = time.process_time()
        if system == "ckpt-into":
            engine.recv_into(mine)
        elif system == "slices":
            runner.run(receiver.receive_into(mine))
        elif system == "ckpt-iterate":
            copy_into(mine, engine.recv())
        elif system == "gloo":
            for tensor in mine.values():
                dist.recv(tensor, src=0)
        elif system == "socket":
            for tensor in mine.values():
                view = raw(tensor)
                while view:
                    view = view[connection.recv_into(view) :]
        elif system == "copy":
            copy_into(mine, others.items())
        elif system == "read":
            digest(mine)
        else:
            from safetensors.torch import load_file

            copy_into(mine, load_file(where).items())
        print("done", 1e3 * (time.process_time() - since), flush=True)


def queue_child(queue, done, size, cores):
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    mine = tensors(size, torch.zeros)
    since = time.process_time()
    while (items := queue.get()) is not None:
        copy_into(mine, items.items())
        since, before = time.process_time(), since
        done.put(1e3 * (since - before))


def pace(bytes_per_s):
    """Let the kernel send no faster on any connection that is accepted from now on in this process, or in `child`s."""
    os.environ[PACE] = str(bytes_per_s)
    listen = socket.socket.listen

    def paced(self, backlog=0):
        if self.family == socket.AF_INET:
            self.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)
        listen(self, backlog)

    socket.socket.listen = paced
    return lambda: (os.environ.pop(PACE), setattr(socket.socket, "listen", listen))


if __name__ == "__main__":
    child(*sys.argv[1:])
