"""Weights from one process into another process's tensors: rl-ckpt's transports, and how else it is done.

Every system moves the same tensors, in the shapes of Qwen3-0.6B, and is done when the other process holds them in
tensors of its own and has said so. The limit is one copy of the same tensors inside one process. Sockets have a limit
of their own: the same tensors through one bare socket, read into the receiver's tensors, verified by nobody. The two
processes have half of the cores each.
"""

import asyncio
import itertools
import os
import socket
import tempfile
import uuid
from contextlib import ExitStack
from pathlib import Path

import torch
from packages.ckpt.bench import _fanout, _loop
from packages.ckpt.bench._child import (
    TOKEN,
    Child,
    copy_into,
    digest,
    halves,
    join_group,
    listen,
    pace,
    queue_child,
    raw,
    tensors,
)

import rl_ckpt
import rl_csrc
from rl_bench import missing
from rl_ckpt.tensors.digest import LEAF_BYTES

CHANGED = 0.01
"""Part of the elements that differ, for differences."""
LINK = 1_250_000_000
"""What a link between machines carries, bytes per second; loopback is as quick as a core copies."""


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
    _loop.measure(run, size)
    _fanout.measure(run, cores)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rl-bench-") as folder, ExitStack() as stack:
        shared_memory(run, stack, Path(folder), size, cores, weights, memcpy, num_bytes)
    for scheme in ("uds", "tcp"):
        with ExitStack() as stack:
            sockets(run, stack, scheme, size, cores, weights, num_bytes)
    with ExitStack() as stack:
        differences(run, stack, size, cores, weights, "tcp")
    with ExitStack() as stack:
        stack.callback(pace(LINK))
        differences(run, stack, size, cores, weights, "a tcp link of 10 Gbit/s")
    with ExitStack() as stack:
        beside_nixl(run, stack, size, cores, weights, num_bytes)
    if torch.cuda.is_available():
        gpu(run)


def gpu(run):
    """The rows of two processes on one GPU."""
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
        pair = _nixl.Pair([tensor.nbytes for tensor in weights.values()], os.sched_getaffinity(0), cores)
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
    record_cpu(
        run, "weights into another process", {"rl-ckpt shm, receive_into": into, "rl-ckpt shm, iterate": iterate}
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
        by_queue.cpu_ms.append(done.get(timeout=60))

    by_queue.cpu_ms = []

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
    takers = {"gloo send/recv": gloo, "safetensors in /dev/shm": files, "torch.multiprocessing queue": by_queue}
    record_cpu(run, "weights into another process, beside others", takers)


def record_cpu(run, metric, takers):
    """What the receiving processes have worked for each sync but the first; that of the sender is in its own rows."""
    for system, taker in takers.items():
        cpu_ms = taker.child.cpu_ms if isinstance(taker, Sending) else taker.cpu_ms
        run.record(f"{metric}: CPU time of the receiving process", system, cpu_ms[1:], unit="ms")


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

    def by_socket_with_digests():
        bare.tell()
        for tensor in weights.values():
            for leaf in tensor.view(-1).view(torch.uint8).split(LEAF_BYTES):
                rl_csrc.digest(leaf)
                connection.sendall(raw(leaf))
        bare.hear()

    metric, limit = f"weights over {scheme}", f"bare {scheme} socket"
    for name, limit_name, by in (
        (
            f"{metric}, beside a sender that reads them for digests",
            f"{limit}, digests of what is sent",
            by_socket_with_digests,
        ),
        (metric, limit, by_socket),
    ):
        into.child.cpu_ms, bare.cpu_ms = [], []
        run.compare(
            name,
            {f"rl-ckpt {scheme}, receive_into": lambda: into(weights)},
            limit={limit_name: by},
            unit="GB/s",
            amount=num_bytes / 1e9,
            goal=">= 0.9 of limit",
        )
    record_cpu(run, metric, {f"rl-ckpt {scheme}, receive_into": into, limit: bare})


def differences(run, stack, size, cores, weights, over):
    dense = Sending(stack, "ckpt-into", size, "tcp://127.0.0.1:0", cores)
    delta = Sending(stack, "ckpt-into", size, "tcp://127.0.0.1:0", cores, delta=True)
    delta(weights)

    def step():
        while len(delta.reports) >= step.changed:  # one change for each difference, whoever's turn it is
            change(weights, step.changed)
            step.changed += 1

    copies = {name: tensor.clone() for name, tensor in weights.items()}
    reader = Child("read", size, "", cores)
    stack.callback(reader.close)
    reader.wait()

    def read():
        reader.tell()
        digest(weights)
        digest(copies)
        reader.hear()

    step.changed = 1
    run.compare(
        f"1% changed, over {over}",
        {"rl-ckpt delta": lambda: delta(weights)},
        peers={"rl-ckpt dense": lambda: dense(weights)},
        limit={"reading the weights and a copy of them, while the other process reads its own": read},
        unit="ms",
        before=step,
        goal=">= 8 of best peer",
    )
    record_cpu(run, f"1% changed, over {over}", {"rl-ckpt delta": delta, "rl-ckpt dense": dense})
    sent = [report.num_wire_bytes / report.num_bytes for report in delta.reports[1:] if report.num_deltas]
    run.record(f"bytes sent, of the weights, over {over}", "rl-ckpt delta", sent, unit="share", goal="<= 0.02 share")
