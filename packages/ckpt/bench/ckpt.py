"""Weights from one process into another process's tensors: rl-ckpt's transports, and how else it is done.

Every system moves the same tensors, in the shapes of Qwen3-0.6B, and is done when the other process holds them in
tensors of its own and has said so. The limit is one copy of the same tensors inside one process. Sockets have a limit
of their own: the same tensors through one bare socket, read into the receiver's tensors, verified by nobody. The two
processes have half of the cores each.
"""

import asyncio
import itertools
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch

import rl_ckpt
from rl_bench import missing
from rl_ckpt.relay import Relay

TIMEOUT = timedelta(seconds=60)
TOKEN = "of the benchmark"
PACE = "RL_BENCH_PACE"
"""Variable for the processes of a benchmark: see `pace`."""
SO_MAX_PACING_RATE = 47
CHANGED = 0.01
"""Part of the elements that differ, for differences."""


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

    def wait(self):
        """Until it has its tensors and its connection."""
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the receiving process {self.process.args} died")

    def tell(self, what="go"):
        self.process.stdin.write(f"{what}\n")

    def hear(self):
        if not (said := self.process.stdout.readline().strip()):
            raise RuntimeError(f"the receiving process {self.process.args} died")
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
    elif system == "relay":
        relay = Relay(*where.split(), token=TOKEN)
        runner = asyncio.Runner()
        runner.run(relay.prepare())
        print(relay.address, flush=True)
    elif system == "gloo":
        dist = join_group(1, where)
    elif system == "socket":
        connection = dial(where)
    print("ready", flush=True)
    for line in sys.stdin:
        if line == "memory\n":  # takes as long as a fifth of a sync, so not with each
            print(resident_bytes(), flush=True)
            continue
        if system == "ckpt-into":
            engine.recv_into(mine)
        elif system == "relay":
            runner.run(relay.receive_into(mine))
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
        else:
            from safetensors.torch import load_file

            copy_into(mine, load_file(where).items())
        print("done", flush=True)


def queue_child(queue, done, size, cores):
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    mine = tensors(size, torch.zeros)
    while (items := queue.get()) is not None:
        copy_into(mine, items.items())
        done.put(True)


class Sending:
    """One sync after the other through rl-ckpt to a child."""

    def __init__(self, stack, system, size, url, cores, **options):
        token = TOKEN if url.startswith("tcp") else None
        self.engine = stack.enter_context(rl_ckpt.connect(url, role="send", token=token, **options))
        asyncio.run(self.engine.prepare())
        self.child = Child(system, size, self.engine.address, cores)
        stack.callback(self.child.close)
        self.child.wait()
        self.versions, self.reports = itertools.count(), []

    def __call__(self, weights):
        self.child.tell()
        self.reports.append(self.engine.send(weights.items(), version=next(self.versions)))
        self.child.hear()


def change(weights, step):
    """Other bits in 1% of the elements, as a small step of an optimizer leaves them."""
    for tensor in weights.values():
        tensor.view(-1)[step % 100 :: int(1 / CHANGED)].mul_(-1)


def main(run):
    before = os.sched_getaffinity(0)
    mine, theirs = halves()
    os.sched_setaffinity(0, mine)
    try:
        measure(run, theirs)
    finally:
        os.sched_setaffinity(0, before)


def measure(run, cores):
    size = (4, 9_496) if run.quick else (28, 122_880)  # with the shorter vocabulary: 1 GiB
    weights, mine = tensors(size, torch.randn), tensors(size, torch.zeros)
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    run.parameters(
        num_bytes=num_bytes, num_tensors=len(weights), shapes="Qwen3-0.6B", dtype="bfloat16", changed=CHANGED
    )  # fmt: skip
    memcpy = {"memcpy, one process": lambda: copy_into(mine, weights.items())}
    from packages.ckpt.bench import _parts

    _parts.measure(run, weights, mine, num_bytes)
    _parts.verification(run, weights)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rl-bench-") as folder, ExitStack() as stack:
        shared_memory(run, stack, Path(folder), size, cores, weights, memcpy, num_bytes)
    for scheme in ("uds", "tcp"):
        with ExitStack() as stack:
            sockets(run, stack, scheme, size, cores, weights, num_bytes)
    with ExitStack() as stack:
        differences(run, stack, size, cores, weights)
    with ExitStack() as stack:
        from packages.ckpt.bench import _chain

        stack.callback(pace(300_000_000))
        _chain.measure(run, stack)
    with ExitStack() as stack:
        beside_nixl(run, stack, size, cores, weights, num_bytes)
    if torch.cuda.is_available():
        from packages.ckpt.bench import _gpu

        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rl-bench-") as folder:
            _gpu.measure(run, Path(folder))


def beside_nixl(run, stack, size, cores, weights, num_bytes):
    into = Sending(stack, "ckpt-into", size, f"shm://bench-{uuid.uuid4().hex[:8]}", cores)
    run.compare(
        "weights into another process, beside NIXL",
        {"rl-ckpt shm, receive_into": lambda: into(weights)},
        peers={"NIXL default": nixl_peer(stack, weights, cores)},
        unit="GB/s",
        amount=num_bytes / 1e9,
        goal=">= 2 of best peer",
    )


def nixl_peer(stack, weights, cores):
    """NIXL's default use by hand, or a sentence that says why not."""
    if why := missing("nixl"):
        return why
    from packages.ckpt.bench import _nixl

    try:
        pair = _nixl.Pair([tensor.nbytes for tensor in weights.values()], "each", os.sched_getaffinity(0), cores)
    except (TimeoutError, RuntimeError) as error:
        return str(error)
    stack.callback(pair.close)
    return pair


def shared_memory(run, stack, folder, size, cores, weights, memcpy, num_bytes):
    def address():
        return f"shm://bench-{uuid.uuid4().hex[:8]}"

    into = Sending(stack, "ckpt-into", size, address(), cores)
    iterate = Sending(stack, "ckpt-iterate", size, address(), cores)
    run.compare(
        "weights into another process",
        {"rl-ckpt shm, receive_into": lambda: into(weights), "rl-ckpt shm, iterate": lambda: iterate(weights)},
        limit=memcpy,
        unit="GB/s",
        amount=num_bytes / 1e9,
        goal=">= 0.75 of limit",
    )
    for name, sending in (("receive_into", into), ("iterate", iterate)):
        system = f"rl-ckpt shm, {name}"
        run.record("first sync, memory touched for the first time", system, [sending.reports[0].wall_s], unit="s")
    growth = growth_of(into, weights, 50)
    run.record("receiver's memory growth over 50 syncs", "rl-ckpt shm, receive_into", [growth], unit="bytes")

    file, store = folder / "weights.safetensors", folder / "store"
    gloo, files = Child("gloo", size, store, cores), Child("files", size, file, cores)
    stack.callback(gloo.close)
    stack.callback(files.close)
    dist = join_group(0, str(store))
    gloo.wait()
    files.wait()
    stack.callback(dist.destroy_process_group)
    context = torch.multiprocessing.get_context("spawn")
    queue, done = context.Queue(), context.Queue()
    taker = context.Process(target=queue_child, args=(queue, done, size, cores), daemon=True)
    taker.start()
    stack.callback(taker.join, 30)
    stack.callback(queue.put, None)

    def by_gloo():
        gloo.tell()
        for tensor in weights.values():
            dist.send(tensor, dst=1)
        gloo.hear()

    def by_files():
        from safetensors.torch import save_file

        save_file(weights, file)
        files.tell()
        files.hear()

    def by_queue():
        queue.put({name: tensor.clone() for name, tensor in weights.items()})  # it moves its tensors to shared memory
        done.get(timeout=60)

    run.compare(
        "weights into another process, beside others",
        {"rl-ckpt shm, receive_into": lambda: into(weights)},
        peers={
            "gloo send/recv": by_gloo,
            "safetensors in /dev/shm": by_files,
            "torch.multiprocessing queue": by_queue,
        },
        unit="GB/s",
        amount=num_bytes / 1e9,
        goal=">= 1.5 of best peer",
    )


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


def growth_of(sending, weights, count):
    """What the receiving process has more of its own after `count` further syncs, bytes."""
    before = sending.child.resident_bytes()
    for _ in range(count):
        sending(weights)
    return max(0, sending.child.resident_bytes() - before)


def sockets(run, stack, scheme, size, cores, weights, num_bytes):
    url = "tcp://127.0.0.1:0" if scheme == "tcp" else f"uds://bench-{uuid.uuid4().hex[:8]}"
    into = Sending(stack, "ckpt-into", size, url, cores)
    where = f"{scheme}-bench-{uuid.uuid4().hex[:8]}"
    server = stack.enter_context(listen(where))
    bare = Child("socket", size, f"tcp:{server.getsockname()[1]}" if scheme == "tcp" else where, cores)
    stack.callback(bare.close)
    connection = stack.enter_context(server.accept()[0])
    bare.wait()
    if scheme == "uds":  # as rl-ckpt does; TCP finds its own size
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)

    def by_socket():
        bare.tell()
        for tensor in weights.values():
            connection.sendall(raw(tensor))
        bare.hear()

    run.compare(
        f"weights over {scheme}",
        {f"rl-ckpt {scheme}, receive_into": lambda: into(weights)},
        limit={f"bare {scheme} socket": by_socket},
        unit="GB/s",
        amount=num_bytes / 1e9,
        goal=">= 0.9 of limit",
    )


def differences(run, stack, size, cores, weights):
    dense = Sending(stack, "ckpt-into", size, "tcp://127.0.0.1:0", cores)
    delta = Sending(stack, "ckpt-into", size, "tcp://127.0.0.1:0", cores, delta=True)
    delta(weights)

    def step():
        while len(delta.reports) >= step.changed:  # one change for each difference, whoever's turn it is
            change(weights, step.changed)
            step.changed += 1

    from packages.ckpt.bench import _parts

    copies = {name: tensor.clone() for name, tensor in weights.items()}

    def read():
        _parts.digest(weights)
        _parts.digest(copies)

    step.changed = 1
    run.compare(
        "1% changed, over tcp",
        {"rl-ckpt delta": lambda: delta(weights)},
        peers={"rl-ckpt dense": lambda: dense(weights)},
        limit={"reading the weights and a copy of them": read},
        unit="ms",
        before=step,
        goal=">= 8 of best peer",
    )
    sent = [report.num_wire_bytes / report.num_bytes for report in delta.reports[1:] if report.num_deltas]
    run.record("bytes sent, of the weights", "rl-ckpt delta", sent, unit="share", goal="<= 0.02 share")


if __name__ == "__main__" and multiprocessing.parent_process() is None:
    child(*sys.argv[1:])
