"""The queue over shared memory and TCP, beside TransferQueue, `ray.put`, safetensors, zmq, a raw socket and memcpy.

text = 256 rows of {ragged int64, ragged float32}, 512-4096 values; images = 256 rows of 1 MB; scalars = 256 rows x 32.
The server is a process of its own. Put and get are measured from two clients of one other process. TransferQueue is
measured where it is installed; this leaves torch as it is: `uv pip install --no-deps TransferQueue==0.1.11 pyzmq
hydra-core omegaconf msgspec psutil prometheus_client antlr4-python3-runtime==4.9.3`.
"""

from __future__ import annotations

import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

import rl_tq
from rl_bench import Role, Run, missing
from rl_tq.types import Buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def main(run: Run) -> None:
    num_rows = 32 if run.quick else 256
    run.parameters(num_rows=num_rows, torch_threads=torch.get_num_threads())
    torch.manual_seed(0)
    payloads = {"text": text(num_rows), "images": images(num_rows), "scalars": scalars(num_rows)}
    with server() as (shm, tcp, plain_port, zmq_port):
        with rl_tq.connect(shm) as queue, rl_tq.connect(shm) as peer:
            with ray_store() as ray, transfer_queue(ray) as other:
                for name, data in payloads.items():
                    values(run, name, data, queue, peer, ray, other)
                if not isinstance(other, str):
                    other_rows(run, other)
            one_row(run, queue, peer)
            control(run, queue, peer)
            parked(run, queue, peer)
        cleared(run, payloads["images"])
        restart(run)
        loopback(run, payloads["images"], tcp, plain_port, zmq_port)
    if torch.cuda.is_available():
        gpu(run)


def gpu(run: Run) -> None:
    """Ragged and shuffled rows to a GPU."""
    num_rows = 32 if run.quick else 256
    with server() as (shm, *_), rl_tq.connect(shm) as queue, rl_tq.connect(shm) as peer:
        to_device(run, {"text": text(num_rows), "images": images(num_rows)}, queue, peer)


SERVER = """
import gc, os, select, socket, sys, threading
import torch, rl_tq
torch.set_num_threads(1)
shm, tcp = rl_tq.serve("shm://"), rl_tq.serve("tcp://127.0.0.1:0")
gc.collect()
gc.freeze()  # else each full collection walks all that torch's import left
listener = socket.create_server(("127.0.0.1", 0))
data = bytearray(os.urandom(1 << 20) * 256)
def plain():
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while request := connection.recv(8):
            connection.sendall(memoryview(data)[:int.from_bytes(request, "little")])
threading.Thread(target=plain, daemon=True).start()
port = 0
try:
    import zmq
    replier = zmq.Context.instance().socket(zmq.REP)
    port = replier.bind_to_random_port("tcp://127.0.0.1")
    def answer():
        while True:
            size = int.from_bytes(replier.recv(), "little")
            replier.send_multipart([b"head", memoryview(data)[:size]], copy=False)
    threading.Thread(target=answer, daemon=True).start()
except ImportError:
    pass
echo = socket.socket(socket.AF_UNIX)
echo.bind(chr(0) + f"rl-tq-bench-{os.getpid()}")
echo.listen(1)
def repeat():
    buffer = memoryview(bytearray(1 << 16))
    while True:
        connection, _ = echo.accept()
        poll = select.epoll()
        poll.register(connection, select.EPOLLIN)
        while poll.poll() and (size := connection.recvmsg_into([buffer], 64)[0]):
            connection.send(buffer[:size])
threading.Thread(target=repeat, daemon=True).start()
print(shm.address, tcp.address, listener.getsockname()[1], port, flush=True)
sys.stdin.read()
os._exit(0)
"""


@contextmanager
def server() -> Iterator[tuple[str, str, int, int]]:
    """A process that serves queues, and the same bytes by a raw socket and by zmq."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        shm, tcp, port, zmq_port = process.stdout.readline().split()
        yield shm, tcp, int(port), int(zmq_port)
    finally:
        process.stdin.close()
        process.wait(30)


def loopback(run: Run, data: TensorDict, address: str, plain_port: int, zmq_port: int) -> None:
    """The images over TCP of this host: a get of them, and as many bytes by a raw socket and by zmq."""
    nbytes = data["images"].nbytes
    target = torch.empty(nbytes, dtype=torch.uint8)
    with rl_tq.connect(address) as queue, socket.create_connection(("127.0.0.1", plain_port)) as plain_socket:
        meta = queue.put(data, partition="bench")

        def raw(out: torch.Tensor = target) -> None:
            plain_socket.sendall(nbytes.to_bytes(8, "little"))
            view = memoryview(out.numpy())
            while view:
                view = view[plain_socket.recv_into(view) :]

        zmq_get: Any = missing("zmq")
        if zmq_port:
            import zmq

            requester = zmq.Context.instance().socket(zmq.REQ)
            requester.connect(f"tcp://127.0.0.1:{zmq_port}")

            def zmq_get() -> None:
                requester.send(nbytes.to_bytes(8, "little"))
                assert len(requester.recv_multipart(copy=False)[1]) == nbytes

        run.compare(
            "get images, TCP loopback",
            {"rl-tq tcp": lambda: queue.get(meta), "rl-tq tcp, used buffer": lambda: queue.get(meta, out=target)},
            peers={
                "zmq": zmq_get or "zmq is not installed",
                "raw socket, new memory": lambda: raw(torch.empty(nbytes, dtype=torch.uint8)),
            },
            limit={"raw socket, used buffer": raw},
            unit="GB/s",
            amount=nbytes / 1e9,
            goal=">= 0.85 of limit",
            can_tell=not run.quick,
        )
        if zmq_port:
            requester.close(0)


# What is moved


def text(num_rows: int) -> TensorDict:
    lengths = torch.randint(512, 4097, (num_rows,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])
    columns = {
        "token_ids": torch.nested.nested_tensor_from_jagged(torch.randint(0, 151_936, (total,)), offsets),
        "rollout_logprobs": torch.nested.nested_tensor_from_jagged(-torch.rand(total), offsets.clone()),
    }
    return TensorDict(columns, batch_size=[num_rows])


def images(num_rows: int) -> TensorDict:
    return TensorDict({"images": torch.randint(0, 256, (num_rows, 1 << 20), dtype=torch.uint8)}, batch_size=[num_rows])


def scalars(num_rows: int) -> TensorDict:
    return TensorDict({f"column_{i}": torch.rand(num_rows) for i in range(32)}, batch_size=[num_rows])


def plain(data: TensorDict) -> dict[str, torch.Tensor]:
    """Every column as ordinary tensors, for systems that know no others."""
    found: dict[str, torch.Tensor] = {}
    for name, value in data.items():
        if value.is_nested:
            found |= {f"{name}.values": value.values(), f"{name}.offsets": value.offsets()}
        else:
            found[name] = value
    return found


def copied(data: TensorDict, out: torch.Tensor) -> TensorDict:
    """What a get into a buffer returns, by torch's own functions: values in `out`, and a batch of views of it."""
    views: dict[str, torch.Tensor] = {}
    start = 0
    for name, column in data.items():
        values = column.values() if column.is_nested else column
        place = out[start : start + values.nbytes].view(values.dtype).view(values.shape)
        start += values.nbytes + -values.nbytes % 64
        place.copy_(values)
        if column.is_nested:
            place = torch.nested.nested_tensor_from_jagged(place, column.offsets().clone())
        views[name] = place
    return TensorDict(views, batch_size=data.batch_size)


# The systems


@contextmanager
def ray_store() -> Iterator[Any]:
    """Ray with zero-copy tensors, or the sentence that says why not."""
    why_not = missing("ray")
    if why_not:
        yield why_not
        return
    os.environ["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = "1"
    import ray

    ray.init(
        "local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=2 << 30,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def transfer_queue(ray: Any) -> Iterator[Any]:
    """TransferQueue with two storage units, or the sentence that says why not."""
    why_not = ray if isinstance(ray, str) else missing("transfer_queue")
    if why_not:
        yield why_not
        return
    logging.disable(logging.WARNING)
    import transfer_queue

    transfer_queue.init()
    try:
        yield transfer_queue
    finally:
        transfer_queue.close()


def values(
    run: Run,
    name: str,
    data: TensorDict,
    queue: rl_tq.TransferQueue,
    peer: rl_tq.TransferQueue,
    ray: Any,
    other: Any,
) -> None:
    """Put, get, and get into a buffer that is used again."""
    tensors = plain(data)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    run.parameters(**{f"{name}_bytes": nbytes})
    source = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()])
    target = torch.empty(len(source) + 4096, dtype=torch.uint8)
    kept = data.clone()
    safetensors = missing("safetensors")
    refs: list[Any] = []
    keys = [f"row{i}" for i in range(len(data))]
    is_there: list[bool] = []

    def put_other() -> None:
        other.kv_batch_put(keys=keys, partition_id="bench", fields=data)
        is_there.append(True)

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = str(Path(folder) / "batch.safetensors")

        def reset() -> None:
            queue.clear("bench")
            refs.clear()
            if is_there:
                other.kv_clear(keys=keys, partition_id="bench")
                is_there.clear()
            target.fill_(0xAA)

        run.compare(
            f"put {name}",
            {"rl-tq shm": lambda: queue.put(data, partition="bench")},
            peers={
                "TransferQueue": other if isinstance(other, str) else put_other,
                "ray.put": ray if isinstance(ray, str) else lambda: refs.append(ray.put(tensors)),
                "safetensors /dev/shm": safetensors or (lambda: save(tensors, path)),
            },
            limit={"memcpy, warm": lambda: target[: len(source)].copy_(source)},
            unit="GB/s" if nbytes > 1 << 20 else "us",
            amount=nbytes / 1e9 if nbytes > 1 << 20 else None,
            before=reset,
            goal={"text": ">= 0.6 of limit", "images": ">= 0.65 of limit"}.get(name),
            can_tell=not run.quick,
        )
        reset()
        meta = queue.put(data, partition="bench")
        ref = None if isinstance(ray, str) else ray.put(tensors)
        getters: dict[str, Callable[[], dict[str, torch.Tensor]]] = {}
        if ref is not None:
            getters["ray.get"] = lambda: ray.get(ref)
        if not isinstance(other, str):
            put_other()
            getters["TransferQueue"] = lambda: plain(other.kv_batch_get(keys=keys, partition_id="bench"))
        if not safetensors:
            save(tensors, path)
            getters["safetensors /dev/shm"] = lambda: load(path)
        absent = {
            which: why
            for which, why in (("ray.get", ray), ("TransferQueue", other), ("safetensors /dev/shm", safetensors))
            if isinstance(why, str)
        }
        run.compare(
            f"get {name}",
            {"rl-tq shm": lambda: peer.get(meta)},
            peers={**getters, **absent},
            unit="ms",
            goal="<= 0.25 ms" if name == "scalars" else "<= 0.8 ms",
            can_tell=not run.quick,
        )

        def land(got: dict[str, torch.Tensor]) -> None:
            start = 0
            for tensor in got.values():
                part = tensor.reshape(-1).view(torch.uint8)
                target[start : start + len(part)].copy_(part)
                start += len(part)

        shuffled = meta.reorder(torch.randperm(len(meta)).tolist())
        run.compare(f"get {name}, shuffled", {"rl-tq shm": lambda: peer.get(shuffled)}, unit="ms")
        if nbytes > 1 << 20:
            for where, out in (("a used buffer", target), ("a Buffer, rows as long as before", Buffer(target))):
                run.compare(
                    f"get {name} into {where}",
                    {"rl-tq shm": lambda out=out: peer.get(meta, out=out)},
                    peers={
                        **{which: lambda get=get: land(get()) for which, get in getters.items()},
                        "torch alone, of a copy in this process": lambda: copied(kept, target),
                        **absent,
                    },
                    limit={"memcpy, warm": lambda: target[: len(source)].copy_(source)},
                    unit="GB/s",
                    amount=nbytes / 1e9,
                    before=lambda: target.fill_(0xAA),
                    goal=">= 0.8 of limit",
                    can_tell=not run.quick,
                )
        reset()


def to_device(run: Run, payloads: dict[str, TensorDict], queue: rl_tq.TransferQueue, peer: rl_tq.TransferQueue) -> None:
    """Ragged and shuffled rows to a GPU, beside one copy of as many bytes from pinned memory."""
    for name, data in payloads.items():
        nbytes = sum(tensor.nbytes for tensor in plain(data).values())
        meta = queue.put(data, partition="device")
        shuffled = meta.reorder(torch.randperm(len(meta)).tolist())
        out = torch.empty(nbytes + (1 << 20), dtype=torch.uint8, device="cuda")
        source = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
        run.compare(
            f"get {name} shuffled to a GPU",
            {"rl-tq shm": lambda shuffled=shuffled, out=out: peer.get(shuffled, out=out)},
            limit={"one pinned copy": lambda out=out, source=source: out[: len(source)].copy_(source)},
            unit="GB/s",
            amount=nbytes / 1e9,
            sync=torch.cuda.synchronize,
            goal=">= 40 GB/s",
            can_tell=not run.quick,
        )
        queue.clear("device")


def save(tensors: dict[str, torch.Tensor], path: str) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)


def load(path: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


# The control path


def one_row(run: Run, queue: rl_tq.TransferQueue, peer: rl_tq.TransferQueue) -> None:
    """Put and get of one row of a few hundred tokens."""
    row = {"token_ids": [torch.arange(300)], "rewards": torch.ones(1)}
    repeats = 100 if run.quick else 500
    alone = timed_rows(queue, peer, row, repeats)
    run.record("one row put, p50", "rl-tq shm", alone[0], unit="ms", goal="<= 0.25 ms")
    run.record("one row get, p50", "rl-tq shm", alone[1], unit="ms", goal="<= 0.15 ms")


def parked(run: Run, queue: rl_tq.TransferQueue, peer: rl_tq.TransferQueue) -> None:
    """One row again, in turns with and without 64 consumers parked on another partition."""
    row = {"token_ids": [torch.arange(300)], "rewards": torch.ones(1)}
    repeats = 20 if run.quick else 100
    alone: tuple[list[float], list[float]] = ([], [])
    beside: tuple[list[float], list[float]] = ([], [])
    slower: tuple[list[float], list[float]] = ([], [])
    for _ in range(2 if run.quick else 7):
        without = timed_rows(queue, peer, row, repeats)
        with waiters(queue, 64):
            among = timed_rows(queue, peer, row, repeats)
        for i in range(2):
            alone[i].extend(without[i])
            beside[i].extend(among[i])
            slower[i].append(statistics.median(among[i]) / statistics.median(without[i]))
    for i, what in enumerate(("put", "get")):
        run.record(f"one row {what} beside 64 waiters", "rl-tq shm", beside[i], unit="ms")
        run.record(f"one row {what} beside none, in turns", "rl-tq shm", alone[i], unit="ms")
        run.record(
            f"one row {what}, times as long beside 64 waiters", "rl-tq shm", slower[i], unit="x", goal="<= 1.05 x",
            can_tell=not run.quick,
        )  # fmt: skip


@contextmanager
def waiters(queue: rl_tq.TransferQueue, count: int) -> Iterator[None]:
    """Threads whose claims wait for what nobody puts."""
    with ThreadPoolExecutor(count) as pool, rl_tq.connect(queue.address) as others:
        for i in range(count):
            pool.submit(wait_in_vain, others, f"task-{i}")
        while queue.stats()["waiters_elsewhere"].get("nowhere", 0) < count:
            time.sleep(0.01)
        yield
        others.close()


def wait_in_vain(client: rl_tq.TransferQueue, task: str) -> None:
    try:
        client.get_meta(partition="nowhere", columns=["a"], batch_size=1, task=task, timeout_s=600)
    except rl_tq.ServerLostError:
        return


def timed_rows(
    queue: rl_tq.TransferQueue, peer: rl_tq.TransferQueue, row: dict[str, Any], repeats: int
) -> tuple[list[float], list[float]]:
    puts: list[float] = []
    gets: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        meta = queue.put(row, partition="rows")
        middle = time.perf_counter()
        peer.get(meta)
        gets.append(1e3 * (time.perf_counter() - middle))
        puts.append(1e3 * (middle - start))
    queue.clear("rows")
    return puts, gets


def other_rows(run: Run, other: Any) -> None:
    """The same rows one by one through TransferQueue."""
    data = TensorDict({"token_ids": torch.arange(300)[None], "rewards": torch.ones(1)}, batch_size=[1])
    puts: list[float] = []
    gets: list[float] = []
    for i in range(100):
        start = time.perf_counter()
        put = other.kv_batch_put(keys=[f"one{i}"], partition_id="rows", fields=data)
        middle = time.perf_counter()
        other.kv_batch_get_by_meta(put)
        gets.append(1e3 * (time.perf_counter() - middle))
        puts.append(1e3 * (middle - start))
    run.record("one row put, p50", "TransferQueue", puts, unit="ms", role=Role.PEER)
    run.record("one row get, p50", "TransferQueue", gets, unit="ms", role=Role.PEER)
    pairs = [1e3 / (put + get) for put, get in zip(puts, gets, strict=True)]
    run.record("publish + claim", "TransferQueue", pairs, unit="pairs/s", role=Role.PEER, note="put and get by key")


def control(run: Run, queue: rl_tq.TransferQueue, peer: rl_tq.TransferQueue) -> None:
    """Small publishes and claims, a claim out of many rows, and the arithmetic of references."""
    row = {"a": torch.ones(1)}
    pairs = 50 if run.quick else 200

    def publish_and_claim() -> None:
        for _ in range(pairs):
            queue.put(row, partition="pairs")
            peer.get_meta(partition="pairs", columns=["a"], batch_size=1, task="t")

    server_pid = queue.stats()["server_pid"]
    with socket.socket(socket.AF_UNIX) as echo:
        echo.connect(f"\0rl-tq-bench-{server_pid}")
        buffer = memoryview(bytearray(1 << 16))

        def ask_twice() -> None:
            for _ in range(2 * pairs):
                echo.send(buffer[:250])  # about what a put and a claim say
                echo.recvmsg_into([buffer], 64)

        limit = {"an echo in Python, two questions": ask_twice}
        run.compare(
            "publish + claim", {"rl-tq shm": publish_and_claim}, limit=limit, unit="pairs/s", amount=pairs,
            goal=">= 10000 pairs/s", before=lambda: queue.clear("pairs"),
        )  # fmt: skip
        with one_core(server_pid):
            run.compare(
                "publish + claim, server and client on one core", {"rl-tq shm": publish_and_claim}, limit=limit,
                unit="pairs/s", amount=pairs, goal=">= 10000 pairs/s", before=lambda: queue.clear("pairs"),
            )  # fmt: skip
    with rl_tq.serve("inproc://") as alone:

        def in_one_process() -> None:
            for _ in range(pairs):
                alone.put(row, partition="pairs")
                alone.get_meta(partition="pairs", columns=["a"], batch_size=1, task="t")

        run.compare(
            "publish + claim, in one process", {"rl-tq inproc": in_one_process}, unit="pairs/s", amount=pairs,
            goal=">= 10000 pairs/s", before=lambda: alone.clear("pairs"),
        )  # fmt: skip
    many = 20_000 if run.quick else 1_000_000
    for _ in range(many // 10_000):
        queue.put({"a": torch.ones(10_000)}, partition="many")
    claim: dict[str, Any] = {"partition": "many", "columns": ["a"], "batch_size": 256, "task": "t"}
    run.compare(f"claim 256 of {many} rows", {"rl-tq shm": lambda: peer.get_meta(**claim)}, unit="ms", goal="<= 0.2 ms")
    queue.clear("many")
    arithmetic(run)


@contextmanager
def one_core(server_pid: int) -> Iterator[None]:
    """Both processes, with all their threads, on the same core."""
    before = {
        int(task.name): os.sched_getaffinity(int(task.name))
        for pid in (os.getpid(), server_pid)
        for task in Path(f"/proc/{pid}/task").iterdir()
    }
    core = min(os.sched_getaffinity(0))
    for task in before:
        os.sched_setaffinity(task, {core})
    try:
        yield
    finally:
        for task, cores in before.items():
            if Path(f"/proc/{task}").exists():
                os.sched_setaffinity(task, cores)


def arithmetic(run: Run) -> None:
    """What a controller does with a reference to 256 rows in 32 groups."""
    size = 256
    lengths = torch.randint(1, 4097, (size,)).tolist()
    meta = rl_tq.BatchMeta(
        partition="p", sample_ids=tuple(f"row{i}" for i in range(size)), columns=("a", "b"), generation=1, task="t",
        rows=tuple(range(size)), leases=(1,) * size,
        tags=tuple({"group_id": i // 8, "num_tokens": length} for i, length in enumerate(lengths)),
    )  # fmt: skip
    other = meta.reorder(range(size - 1, -1, -1))
    parts = meta.chunk(8)
    for name, work in {
        "balanced over 8": lambda: meta.balanced(8),
        "chunk by 8": lambda: meta.chunk(8),
        "concat of 8": lambda: rl_tq.BatchMeta.concat(parts),
        "filter": lambda: meta.filter(lambda tags: tags["num_tokens"] > 2048),
        "groupby into 32": lambda: meta.groupby("group_id"),
        "pad_to": lambda: meta.pad_to(100),
        "reorder": lambda: meta.reorder(range(size - 1, -1, -1)),
        "select_columns": lambda: meta.select_columns(["b"]),
        "sort_by": lambda: meta.sort_by("num_tokens"),
        "split": lambda: meta.split(30),
        "union, other order": lambda: meta.union(other),
    }.items():
        run.compare(f"256 rows: {name}", {"rl-tq": work}, unit="us", inner=20, goal="<= 50 us")


# Memory, and the journal


def cleared(run: Run, data: TensorDict) -> None:
    """What is left of memory once all rows but one are cleared and the host's agent has done its work."""
    live = data["images"].nbytes / len(data)
    with rl_tq.serve("shm://") as queue:
        meta = queue.put(data, partition="left")
        queue.clear(meta.reorder(range(1, len(meta))))
        deadline = time.monotonic() + 20  # the producer keeps spare memory for ten seconds, for its next put
        while (resident := queue.stats()["resident_bytes"]) > 1.1 * live and time.monotonic() < deadline:
            time.sleep(0.1)
    metric = f"memory after clearing {len(data) - 1} of {len(data)} rows, to what is live"
    run.record(metric, "rl-tq shm", [resident / live], unit="x", goal="<= 1.1 x")


def restart(run: Run) -> None:
    """Serving a directory again that holds 100,000 rows."""
    num_rows = 10_240 if run.quick else 102_400
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        address = f"file://{folder}/queue"
        with rl_tq.serve(address) as queue:
            for i in range(num_rows // 256):
                tags = [{"group_id": 32 * i + j // 8, "weight_version_min": 1} for j in range(256)]
                queue.put({"a": torch.ones(256), "b": torch.zeros(256)}, partition="p", tags=tags)
        times: list[float] = []
        for _ in range(7):
            start = time.perf_counter()
            queue = rl_tq.serve(address)
            times.append(time.perf_counter() - start)
            queue.close()
    run.record(f"restart with {num_rows} rows", "rl-tq file", times, unit="s", goal="<= 1 s", can_tell=not run.quick)
