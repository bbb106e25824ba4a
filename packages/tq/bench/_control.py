"""The control path: small publishes and claims, and claims out of many rows."""

from __future__ import annotations

import socket
import time
from typing import Any

import torch
from tensordict import TensorDict

import rl_tq
from rl_bench import Role, Run


def one_row(run: Run, queue: rl_tq.TransferQueue, peer: rl_tq.TransferQueue) -> None:
    """Put and get of one row of a few hundred tokens."""
    row = {"token_ids": [torch.arange(300)], "rewards": torch.ones(1)}
    repeats = 100 if run.quick else 500
    alone = timed_rows(queue, peer, row, repeats)
    run.record("one row put, p50", "rl-tq shm", alone[0], unit="ms", goal="<= 0.25 ms")
    run.record("one row get, p50", "rl-tq shm", alone[1], unit="ms", goal="<= 0.15 ms")


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
    """Small publishes and claims, and a claim out of many rows."""
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
