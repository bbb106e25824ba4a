"""A sync beside two copies at once, over several pairs of processes: what the memory of the machine allows.

Where two cores share the way to memory, two processes that copy at once leave each other little more than half, and so
do the two ends of a sync. On a virtual machine that differs from one pair of processes to the next.
"""

import statistics
import time
import uuid
from contextlib import ExitStack

import torch
from packages.ckpt.bench._child import Child, copy_into, tensors

NUM_PAIRS = 7
NUM_ROUNDS = 8


def measure(run, sending, size, cores):
    """`sending` as `ckpt.Sending`; each pair has tensors of its own."""
    for pair in range(1, NUM_PAIRS + 1):
        with ExitStack() as stack:
            shares = shares_of_a_copy(sending, stack, size, cores)
        for system, share in shares.items():
            run.record(f"pair {pair} of processes: of a copy alone", system, [share], unit="share")


def shares_of_a_copy(sending, stack, size, cores):
    weights, mine = tensors(size, torch.randn), tensors(size, torch.zeros)
    send = sending(stack, "ckpt-into", size, f"shm://bench-{uuid.uuid4().hex[:8]}", cores)
    other = Child("copy", size, "", cores)
    stack.callback(other.close)
    other.wait()

    def alone():
        copy_into(mine, weights.items())

    def both():
        other.tell()
        alone()
        other.hear()

    systems = {
        "a copy": alone,
        "a copy in each process at once": both,
        "rl-ckpt shm, receive_into": lambda: send(weights),
    }
    times = {system: [] for system in systems}
    for _ in range(NUM_ROUNDS):
        for system, work in systems.items():
            since = time.perf_counter()
            work()
            times[system].append(time.perf_counter() - since)
    medians = {system: statistics.median(taken[1:]) for system, taken in times.items()}
    limit = medians.pop("a copy")
    return {system: limit / taken for system, taken in medians.items()}
