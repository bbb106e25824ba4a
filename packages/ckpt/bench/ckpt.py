"""Weights from one process into another process's tensors: rl-ckpt's transports, and how else it is done.

Every system moves the same tensors, in the shapes of Qwen3-0.6B, and is done when the other process holds them in
tensors of its own and has said so. The limit is one copy of the same tensors inside one process. Sockets have a limit
of their own: the same tensors through one bare socket, read into the receiver's tensors, verified by nobody. The two
processes have half of the cores each.

Further rows: a pure-Python loop on another thread of the sending process, compared with the same loop while another
process sends the same syncs (what is lost then the machine lacks, and no interpreter lock takes); and the processor
time of a sender with 1, 8 and (over shm) 64 receivers, whose difference is what a further receiver costs it for each
bucket.
"""

import asyncio
import itertools
import multiprocessing
import os
import pickle
import socket
import tempfile
import threading
import time
import uuid
from contextlib import ExitStack
from pathlib import Path

import torch
from packages.ckpt.bench._child import (
    TOKEN,
    copy_into,
    digest,
    halves,
    join_group,
    listen,
    pace,
    queue_child,
    raw,
    start,
    tensors,
)

import rl_ckpt
import rl_csrc
from rl_bench import has_card, missing
from rl_ckpt.tensors.digest import LEAF_BYTES, digests_of

CHANGED = 0.01
"""Part of the elements that differ, for differences."""
LINK = 1_250_000_000
"""What a link between machines carries, bytes per second; loopback is as quick as a core copies."""
GROWTH_SYNCS, LOOP_SYNCS = 50, 4
NUM_RECEIVERS = {"shm": (1, 8, 64), "tcp": (1, 8)}
"""By transport; over tcp each receiver has what it takes in memory of its own."""


def address(scheme):
    return "tcp://127.0.0.1:0" if scheme == "tcp" else f"{scheme}://bench-{uuid.uuid4().hex[:8]}"


class Sending:
    """One sync after the other through rl-ckpt to a child."""

    def __init__(self, stack, system, size, scheme, cores=(), *, num_peers=None, **options):
        token = TOKEN if scheme == "tcp" else None
        connect = rl_ckpt.connect(address(scheme), role="send", token=token, timeout_s=300, **options)
        self.engine = stack.enter_context(connect)
        self.bucket_bytes = asyncio.run(self.engine.prepare()).bucket_bytes
        where = self.engine.address + (f"#{num_peers}" if num_peers else "")
        self.child = start(stack, system, *size, where, cores)
        self.child.hear("ready")
        self.versions, self.reports, self.num_peers = itertools.count(), [], num_peers

    def __call__(self, weights=None):
        self.child.tell()
        items = None if weights is None else weights.items()
        self.reports.append(self.engine.send(items, version=next(self.versions), num_peers=self.num_peers))
        self.child.hear()

    def growth(self, weights=None):
        """What the receiving process has more of its own after further syncs, bytes."""
        before = int(self.child.ask("memory", "memory"))
        for _ in range(GROWTH_SYNCS):
            self(weights)
        return max(0, int(self.child.ask("memory", "memory")) - before)


def change(weights, step):
    """Other bits in 1% of the elements, as a small step of an optimizer leaves them."""
    for tensor in weights.values():
        tensor.view(-1)[step % 100 :: int(1 / CHANGED)].mul_(-1)


def main(run):
    before = os.sched_getaffinity(0)
    size = ("0.6B", 4 if run.quick else 28)  # with a shorter vocabulary: 1.13 GB
    loop_beside(run, size)
    mine, theirs = halves()
    os.sched_setaffinity(0, mine)
    try:
        measure(run, size, theirs)
    finally:
        os.sched_setaffinity(0, before)


def measure(run, size, cores):
    weights, mine = tensors(*size, torch.randn), tensors(*size, torch.zeros)
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    run.parameters(
        num_bytes=num_bytes, num_tensors=len(weights), shapes="Qwen3-0.6B", dtype="bfloat16", changed=CHANGED
    )  # fmt: skip
    memcpy = {"memcpy, one process": lambda: copy_into(mine, weights.items())}
    fan_out(run, size, weights, num_bytes, cores)
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


def fan_out(run, size, weights, num_bytes, cores):
    for scheme, counts in NUM_RECEIVERS.items():
        spent = {}
        for count in counts:
            with ExitStack() as stack:
                sending, taken = Sending(stack, "many", size, scheme, cores, num_peers=count), []
                for _ in range(run.repetitions + 1):
                    since = time.process_time()
                    sending(weights)
                    taken.append(time.process_time() - since)
            spent[count] = taken[1:]
            run.record(f"sender's CPU, {count} receivers, {scheme}", "rl-ckpt", spent[count], unit="s")
        num_buckets = -(-num_bytes // sending.bucket_bytes)
        for count in counts[1:]:
            each = [
                (more - one) / (count - 1) / num_buckets * 1e6 for more, one in zip(spent[count], spent[1], strict=True)
            ]
            metric = f"a further receiver's CPU per bucket of {sending.bucket_bytes >> 20} MiB, of {count}, {scheme}"
            goal = "<= 5 us" if scheme == "shm" else None  # over tcp the kernel copies the payload for each
            run.record(metric, "rl-ckpt", each, unit="us", goal=goal)


class Loop:
    """A thread that counts, and allocates nothing: integers on the heap are slower where they span cache lines."""

    def __init__(self):
        self.count, self._is_over = 0, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._is_over:
            for _ in range(4):
                steps = 250  # small integers are shared
                while steps:
                    steps -= 1
            self.count += 1

    def during(self, work):
        """Turns a second while `work` runs, and the seconds that it takes; ends the loop."""
        time.sleep(0.05)
        before, since = self.count, time.perf_counter()
        work()
        seconds = time.perf_counter() - since
        rate = (self.count - before) / seconds
        self._is_over = True
        self._thread.join()
        return rate, seconds


def syncs(stack, scheme, size):
    """What makes some syncs, one after the other, to a child on any core."""
    sending, weights = Sending(stack, "into", size, scheme), tensors(*size, torch.randn)
    sending(weights)
    return lambda: [sending(weights) for _ in range(LOOP_SYNCS)]


def other_process(connection, scheme, size):
    """Another process that sends when it is asked to."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        work = syncs(stack, scheme, size)
        connection.send(True)
        while connection.recv():
            work()
            connection.send(True)


def loop_beside(run, size):
    for scheme in ("shm", "tcp"):
        with ExitStack() as stack:
            here, there = multiprocessing.get_context("spawn").Pipe()
            other = multiprocessing.get_context("spawn").Process(target=other_process, args=(there, scheme, size))
            other.start()
            stack.callback(other.join, 30)
            stack.callback(here.send, False)
            here.recv()
            mine = syncs(stack, scheme, size)

            def by_other(here=here):
                here.send(True)
                here.recv()

            works = {"with the loop": mine, "of another process": by_other}
            found = run.collect({name: lambda work=work: Loop().during(work) for name, work in works.items()})
        metric, num_bytes = f"a Python loop beside a sync over {scheme}", bytes_of(size) * LOOP_SYNCS
        shares = [own / limit for (own, _), (limit, _) in zip(*found.values(), strict=True)]
        run.record(f"{metric}: its share of the limit's speed", "rl-ckpt", shares, unit="share", goal=">= 0.9 share")
        for name, rows in found.items():
            rates = [num_bytes / seconds / 1e9 for _, seconds in rows]
            run.record(f"{metric}: the sync", f"rl-ckpt, {name}", rates, unit="GB/s")


def bytes_of(size):
    return sum(tensor.nbytes for tensor in tensors(*size, torch.empty).values())


def beside_nixl(run, stack, size, cores, weights, num_bytes):
    into = Sending(stack, "into", size, "shm", cores)
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
    ways = {f"rl-ckpt shm, {name}": Sending(stack, system, size, "shm", cores) for name, system in
            {"receive_into": "into", "iterate": "iterate"}.items()}  # fmt: skip
    run.compare(
        "weights into another process",
        {name: lambda sending=sending: sending(weights) for name, sending in ways.items()},
        limit=memcpy,
        unit="GB/s",
        amount=num_bytes / 1e9,
        goal=">= 0.75 of limit",
    )
    record_cpu(run, "weights into another process", {name: sending.child for name, sending in ways.items()})
    for name, sending in ways.items():
        metric = "first sync, memory touched for the first time"
        run.record(metric, name, [sending.reports[0].wall_s], unit="s")
    ours, into = next(iter(ways.items()))
    run.record(f"receiver's memory growth over {GROWTH_SYNCS} syncs", ours, [into.growth(weights)], unit="bytes")

    file, store = folder / "weights.safetensors", folder / "store"
    gloo, files = start(stack, "gloo", *size, store, cores), start(stack, "files", *size, file, cores)
    dist = join_group(0, str(store))
    gloo.hear("ready")
    files.hear("ready")
    stack.callback(dist.destroy_process_group)
    context = torch.multiprocessing.get_context("spawn")
    queue, done = context.Queue(), context.Queue()
    taker = context.Process(target=queue_child, args=(queue, done, *size, cores), daemon=True)
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
        files.ask()

    def by_queue():
        queue.put({name: tensor.clone() for name, tensor in weights.items()})  # it moves its tensors to shared memory
        by_queue.cpu_ms.append(done.get(timeout=60))

    by_queue.cpu_ms = []
    peers = {"gloo send/recv": by_gloo, "safetensors in /dev/shm": by_files, "torch.multiprocessing queue": by_queue}
    run.compare(
        "weights into another process, beside others",
        {ours: lambda: into(weights)},
        peers=peers,
        unit="GB/s",
        amount=num_bytes / 1e9,
        goal=">= 1.5 of best peer",
    )
    takers = dict(zip(peers, (gloo, files, by_queue), strict=True))
    record_cpu(run, "weights into another process, beside others", takers)


def record_cpu(run, metric, takers):
    """What the receiving processes have worked for each sync but the first; that of the sender is in its own rows."""
    for system, taker in takers.items():
        run.record(f"{metric}: CPU time of the receiving process", system, taker.cpu_ms[1:], unit="ms")


def sockets(run, stack, scheme, size, cores, weights, num_bytes):
    into = Sending(stack, "into", size, scheme, cores)
    where = f"{scheme}-bench-{uuid.uuid4().hex[:8]}"
    server = stack.enter_context(listen(where))
    bare = start(stack, "socket", *size, f"tcp:{server.getsockname()[1]}" if scheme == "tcp" else where, cores)
    connection = stack.enter_context(server.accept()[0])
    bare.hear("ready")
    if scheme == "uds":  # as rl-ckpt does; TCP finds its own size
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)

    def by_socket(*, reads=False):
        bare.tell()
        for tensor in weights.values():
            for leaf in tensor.view(-1).view(torch.uint8).split(LEAF_BYTES) if reads else (tensor,):
                if reads:
                    rl_csrc.digest(leaf)
                connection.sendall(raw(leaf))
        bare.hear()

    metric, limit, ours = f"weights over {scheme}", f"bare {scheme} socket", f"rl-ckpt {scheme}, receive_into"
    for name, limit_name, reads in (
        (f"{metric}, beside a sender that reads them for digests", f"{limit}, digests of what is sent", True),
        (metric, limit, False),
    ):
        into.child.cpu_ms, bare.cpu_ms = [], []
        run.compare(
            name,
            {ours: lambda: into(weights)},
            limit={limit_name: lambda reads=reads: by_socket(reads=reads)},
            unit="GB/s",
            amount=num_bytes / 1e9,
            goal=">= 0.9 of limit",
        )
    record_cpu(run, metric, {ours: into.child, limit: bare})


def differences(run, stack, size, cores, weights, over):
    dense = Sending(stack, "into", size, "tcp", cores)
    delta = Sending(stack, "into", size, "tcp", cores, delta=True)
    delta(weights)

    def step():
        while len(delta.reports) >= step.changed:  # one change for each difference, whoever's turn it is
            change(weights, step.changed)
            step.changed += 1

    copies = {name: tensor.clone() for name, tensor in weights.items()}
    reader = start(stack, "read", *size, "", cores)
    reader.hear("ready")

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
    record_cpu(run, f"1% changed, over {over}", {"rl-ckpt delta": delta.child, "rl-ckpt dense": dense.child})
    sent = [report.num_wire_bytes / report.num_bytes for report in delta.reports[1:] if report.num_deltas]
    run.record(f"bytes sent, of the weights, over {over}", "rl-ckpt delta", sent, unit="share", goal="<= 0.02 share")


def gpu(run):
    """The rows of two processes on one GPU, from the tensors of one into those of the other."""
    quick, total = run.quick, torch.cuda.get_device_properties(0).total_memory
    num_layers = 48 if total > 130 * 2**30 else 24  # both processes hold the weights
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rl-bench-") as folder:
        for label, what, size, goal, copying_goal in (
            ("Qwen3-8B, 16.4 GB, one GPU", "8B", 1 if quick else 36, None, "<= 8 ms"),
            ("8 GiB, one GPU", "blocks", 1 if quick else 8, "<= 5.5 ms", None),
            (f"Qwen3-30B-A3B, {num_layers} layers, one GPU", "experts", 1 if quick else num_layers, "<= 300 ms", None),
        ):
            with ExitStack() as stack:
                on_gpu(run, stack, label, (what, size), goal, copying_goal, Path(folder) / "handles")
            torch.cuda.empty_cache()


def on_gpu(run, stack, label, size, goal, copying_goal, file):
    can_tell, system = has_card("H200") and not run.quick, "rl-ckpt cuda-ipc, registered"
    weights = tensors(*size, torch.randn, "cuda")
    ours = Sending(stack, "into", size, "cuda-ipc")
    ours.engine.register_source(weights)
    by_handles, limit = "no memory for it", None
    if size[0] != "experts":  # with 18,900 tensors there is no memory for a third copy
        other = start(stack, "handles", *size, f"handles:{file}", ())
        other.hear("ready")
        copies = tensors(*size, torch.zeros, "cuda")
        limit = {"copy, one process": lambda: copy_into(copies, weights.items())}

        def by_handles():
            from torch.multiprocessing.reductions import reduce_tensor

            torch.cuda.synchronize()
            file.write_bytes(pickle.dumps({name: reduce_tensor(tensor) for name, tensor in weights.items()}))
            other.ask()

    peers = {
        "torch IPC, a handle for each tensor": by_handles,
        "checkpoint-engine 0.4.2": missing("checkpoint_engine") or "its server and a vLLM worker are not started here",
    }
    run.compare(
        label, {system: ours}, peers=peers, limit=limit, goal=goal, sync=torch.cuda.synchronize, can_tell=can_tell
    )  # fmt: skip
    reports = ours.reports[1:]
    digests = [digest_seconds(weights) for _ in reports]
    installs, walls = [r.install_s for r in reports], [r.wall_s for r in reports]
    for metric, samples, unit, bound in (
        ("wire", [wall - each for wall, each in zip(walls, installs, strict=True)], "s", 0.15),
        ("install", installs, "s", 0.15),
        ("digests of one end, of a sync", [d / wall for d, wall in zip(digests, walls, strict=True)], "share", 0.15),
    ):
        run.record(f"{label}: {metric}", system, samples, unit=unit, goal=f"<= {bound} {unit}", can_tell=can_tell)
    copying = [1e3 * (wall - 2 * each) for wall, each in zip(walls, digests, strict=True)]
    metric = f"{label}: copying, the sync less the digests of both ends"
    run.record(metric, system, copying, unit="ms", goal=copying_goal, can_tell=can_tell)
    metric = f"{label}: reserved memory's growth over {GROWTH_SYNCS} syncs"
    run.record(metric, system, [ours.growth()], unit="bytes", goal="<= 0 bytes")


def digest_seconds(weights):
    """What the digests of one end take."""
    torch.cuda.synchronize()
    since = time.perf_counter()
    digests_of([tensor.view(-1).view(torch.uint8) for tensor in weights.values()])
    return time.perf_counter() - since
