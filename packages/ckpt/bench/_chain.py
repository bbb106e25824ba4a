"""Many receivers through links of a network's speed: what a chain of relays adds to one transfer."""

import asyncio
import itertools
import os

import torch
from packages.ckpt.bench._child import TOKEN, Child, tensors

import rl_ckpt


class Chain:
    """A sender, and `count` receivers of which each serves the next."""

    def __init__(self, stack, size, count, cores):
        self._engine = stack.enter_context(rl_ckpt.connect("tcp://127.0.0.1:0", role="send", token=TOKEN))
        asyncio.run(self._engine.prepare())
        self._versions, self._children = itertools.count(), []
        address = self._engine.address
        for i in range(count):
            is_last = i == count - 1
            where = address if is_last else f"{address} tcp://127.0.0.1:0"
            child = Child("ckpt-into" if is_last else "relay", size, where, cores)
            stack.callback(child.close)
            address = None if is_last else child.hear()
            child.wait()
            self._children.append(child)

    def __call__(self, weights):
        for child in self._children:
            child.tell()
        self._engine.send(weights.items(), version=next(self._versions), num_peers=1)
        for child in self._children:
            child.hear()


class Fan:
    """A sender and `count` receivers of its own."""

    def __init__(self, stack, size, count, cores):
        self._engine = stack.enter_context(rl_ckpt.connect("tcp://127.0.0.1:0", role="send", token=TOKEN))
        asyncio.run(self._engine.prepare())
        self._versions = itertools.count()
        self._children = [Child("ckpt-into", size, self._engine.address, cores) for _ in range(count)]
        for child in self._children:
            stack.callback(child.close)
            child.wait()

    def __call__(self, weights):
        for child in self._children:
            child.tell()
        self._engine.send(weights.items(), version=next(self._versions), num_peers=len(self._children))
        for child in self._children:
            child.hear()


def measure(run, stack):
    """In small on any machine; each process with all cores, and each link with the speed that `pace` sets."""
    size, cores = (4, 9_496), range(os.cpu_count())
    weights = tensors(size, torch.randn)
    one, fan, chain = Fan(stack, size, 1, cores), Fan(stack, size, 3, cores), Chain(stack, size, 3, cores)
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    run.compare(
        f"{num_bytes / 1e6:.0f} MB through tcp links of 0.3 GB/s",
        {"chain of 3 relays": lambda: chain(weights), "3 receivers of the sender": lambda: fan(weights)},
        limit={"one receiver": lambda: one(weights)},
        unit="ms",
    )
