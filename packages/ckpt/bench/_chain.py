"""Many receivers through links of a network's speed: what a chain of relays adds to one transfer."""

import asyncio
import itertools
import os

import torch
from packages.ckpt.bench._child import TOKEN, Child, shapes, tensors

import rl_ckpt
from rl_ckpt.testing import new_port


class Chain:
    """A sender, and `count` receivers of which each sends on to the next."""

    def __init__(self, stack, size, count, cores):
        whole = [
            rl_ckpt.ShardSpec(name=name, shape=shape, offsets=(0,) * len(shape), sizes=shape)
            for name, shape in shapes(*size).items()
        ]
        self._specs = {spec.name: spec for spec in whole}
        self._runner = stack.enter_context(asyncio.Runner())
        self._sender = rl_ckpt.ShardedSender(rl_ckpt.ShardPlan([whole]), 0, lambda _: "tcp://127.0.0.1:0", token=TOKEN)
        stack.callback(lambda: self._runner.run(self._sender.close()))
        urls = [self._runner.run(self._sender.prepare())[0]]
        urls += [f"tcp://127.0.0.1:{new_port()}" for _ in range(count - 1)]
        self._versions, self._children = itertools.count(), []
        for address in [*(rl_ckpt.relay_address(*pair, 1) for pair in itertools.pairwise(urls)), urls[-1]]:
            child = Child("slices", size, rl_ckpt.join_addresses([{0: address}], 1).to_json(), cores)
            stack.callback(child.close)
            child.wait()
            self._children.append(child)

    def __call__(self, weights):
        for child in self._children:
            child.tell()
        self._runner.run(self._send(weights, next(self._versions)))
        for child in self._children:
            child.hear()

    async def _send(self, weights, version):
        shards = [(self._specs[name], tensor) for name, tensor in weights.items()]
        shares = await self._sender.stage(lambda: shards, version=version)
        await self._sender.commit(rl_ckpt.join_digest([shares]), version=version)


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
