"""A pure-Python loop on another thread of the sending process, and how fast it runs while syncs are sent.

The limit is the same loop while another process sends the same syncs to the same receiver: what is lost then is what
the machine lacks, not what the interpreter lock takes. Three processes' worth of work shares the machine in both
cases; the kernel schedules it. `share` is the loop's turns for each second of a sync, compared with the limit's.

The loop allocates nothing. One over `range` makes an iterator and integers on the heap, whose addresses depend on what
the sending thread allocates: where one spans two cache lines, a turn takes 10 to 20% more processor time, in an idle
process too.
"""

import asyncio
import json
import multiprocessing
import statistics
import sys
import threading
import time
import uuid
from contextlib import ExitStack

import torch
from packages.ckpt.bench._child import TOKEN, Child, tensors

import rl_ckpt

NUM_ROUNDS = 5
NUM_SYNCS = 4
ALL_CORES = range(2)


class Loop:
    """A thread that counts."""

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

    def close(self):
        self._is_over = True
        self._thread.join()


class Pair:
    """A sender and its receiver's process."""

    def __init__(self, stack, scheme, size):
        token = TOKEN if scheme == "tcp" else None
        url = "tcp://127.0.0.1:0" if token else f"{scheme}://loop-{uuid.uuid4().hex[:8]}"
        self._engine = stack.enter_context(rl_ckpt.connect(url, role="send", token=token))
        asyncio.run(self._engine.prepare())
        self._child = Child("ckpt-into", size, self._engine.address, ALL_CORES)
        stack.callback(self._child.close)
        self._child.wait()
        self._version = 0
        self._weights = tensors(size, torch.randn)
        self.num_bytes = sum(tensor.nbytes for tensor in self._weights.values())

    def send(self):
        """Seconds of some syncs, one after the other."""
        since = time.perf_counter()
        for _ in range(NUM_SYNCS):
            self._child.tell()
            self._engine.send(self._weights.items(), version=self._version)
            self._version += 1
            self._child.hear()
        return time.perf_counter() - since


def other_process(connection, scheme, size):
    """Another process that sends when it is told to."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        pair = Pair(stack, scheme, size)
        pair.send()
        connection.send(0.0)
        while connection.recv():
            connection.send(pair.send())


def speeds(send):
    """Turns of a loop a second while `send` runs, and the seconds that it takes."""
    loop = Loop()
    time.sleep(0.05)
    before = loop.count
    seconds = send()
    rate = (loop.count - before) / seconds
    loop.close()
    return rate, seconds


def sample(scheme, size, num_rounds=NUM_ROUNDS):
    """Rows of both, in turns: rates of the loop and seconds of a sync, and of a sync with no loop."""
    rows = {"same": [], "other": [], "alone": []}
    with ExitStack() as stack:
        here, there = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=other_process, args=(there, scheme, size), daemon=True
        )
        process.start()
        stack.callback(process.join, 30)
        stack.callback(here.send, False)
        here.recv()
        pair = Pair(stack, scheme, size)
        pair.send()

        def by_other():
            here.send(True)
            return here.recv()

        for _ in range(num_rounds):
            rows["other"].append(speeds(by_other))
            rows["same"].append(speeds(pair.send))
            rows["alone"].append((0.0, pair.send()))
        return rows, pair.num_bytes * NUM_SYNCS


def measure(run, size):
    """Rows for shm and tcp."""
    for scheme in ("shm", "tcp"):
        rows, num_bytes = sample(scheme, size)
        metric = f"a Python loop beside a sync over {scheme}"
        shares = [mine / limit for (mine, _), (limit, _) in zip(rows["same"], rows["other"], strict=True)]
        run.record(f"{metric}: its share of the limit's speed", "rl-ckpt", shares, unit="share", goal=">= 0.9 share")
        for name, what in (("same", "with the loop"), ("other", "of another process"), ("alone", "without a loop")):
            rates = [num_bytes / seconds / 1e9 for _, seconds in rows[name]]
            run.record(f"{metric}: the sync", f"rl-ckpt, {what}", rates, unit="GB/s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for scheme in sys.argv[1:] or ("shm", "tcp"):
        rows, num_bytes = sample(scheme, (28, 122_880))
        middle = {name: [statistics.median(column) for column in zip(*row, strict=True)] for name, row in rows.items()}
        gb_per_s = {name: num_bytes / seconds / 1e9 for name, (_, seconds) in middle.items()}
        shares = sorted(mine / limit for (mine, _), (limit, _) in zip(rows["same"], rows["other"], strict=True))
        print(json.dumps({"scheme": scheme, "share": shares, "GB/s": gb_per_s}), flush=True)
