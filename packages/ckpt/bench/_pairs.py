"""A sync beside two copies at once, over several pairs of processes: what the memory of the machine allows.

Both ends of a sync copy, and both at the same time. Two processes that only copy, each of its own and both at once, are
the bound of any sync in which each byte goes through memory that the two share. Where two cores share the way to memory
that is less than a copy alone; on a virtual machine it differs from one pair of processes to the next.
"""

import uuid
from contextlib import ExitStack

import torch
from packages.ckpt.bench._child import Child, copy_into, tensors

NUM_PAIRS = 7


def measure(run, sending, size, cores):
    """`sending` as `ckpt.Sending`; each pair has tensors of its own."""
    for pair in range(1, NUM_PAIRS + 1):
        with ExitStack() as stack:
            beside_two_copies(run, pair, sending, stack, size, cores)


def beside_two_copies(run, pair, sending, stack, size, cores):
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

    run.compare(
        f"pair {pair} of processes",
        {"rl-ckpt shm, receive_into": lambda: send(weights)},
        limit={"a copy in each process at once": both},
        peers={"a copy in one process": alone},
        unit="GB/s",
        amount=sum(tensor.nbytes for tensor in weights.values()) / 1e9,
        goal=">= 0.9 of limit",
    )
