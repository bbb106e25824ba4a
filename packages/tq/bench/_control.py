"""The control path: small publishes and claims, beside who waits and out of many rows, and references' arithmetic."""

from __future__ import annotations

import os
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

import rl_tq
from rl_bench import Role, Run

if TYPE_CHECKING:
    from collections.abc import Iterator


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
        "reorder": lambda: meta.reorder(range(size - 1, -1, -1)),
        "select_columns": lambda: meta.select_columns(["b"]),
        "split": lambda: meta.split(30),
        "union, other order": lambda: meta.union(other),
    }.items():
        run.compare(f"256 rows: {name}", {"rl-tq": work}, unit="us", inner=20, goal="<= 50 us")
