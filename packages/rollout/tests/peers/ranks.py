"""Two ranks of a trainer in this process, which send the rows that each holds."""

import asyncio
import uuid

import rl_ckpt
from rl_ckpt import ShardedSender, ShardPlan, join_addresses, join_digest

NUM_RANKS = 2


def shards_of(weights, rank):
    """Rows, as FSDP cuts them."""
    for name, tensor in weights.items():
        axis = 0 if tensor.ndim else None
        spec = rl_ckpt.ShardSpec.on_mesh(
            name, tuple(tensor.shape), mesh=(NUM_RANKS,), placements=(axis,), coordinate=(rank,)
        )
        yield spec, tensor[spec.offsets[0] : spec.offsets[0] + spec.sizes[0]] if tensor.ndim else tensor


class Ranks:
    """The ranks of a trainer, in this process."""

    def __init__(self, weights, *, delta=False, targets=None):
        self.plan = ShardPlan([[spec for spec, _ in shards_of(weights, rank)] for rank in range(NUM_RANKS)], targets)
        name = f"rollout-slices-{uuid.uuid4().hex}"
        option = "?delta=1" if delta else ""
        self.senders = [
            ShardedSender(self.plan, rank, lambda to, r=rank: f"shm://{name}-{r}-{to}{option}", timeout_s=60)
            for rank in range(NUM_RANKS)
        ]

    async def open(self):
        addresses = [await sender.prepare() for sender in self.senders]
        return join_addresses(addresses, self.plan.num_targets).to_json()

    async def send(self, weights, version, num_replicas=1):
        staging = [
            sender.stage(lambda r=rank: shards_of(weights, r), version=version, num_replicas=num_replicas)
            for rank, sender in enumerate(self.senders)
        ]
        shares = await asyncio.gather(*staging, return_exceptions=True)
        if errors := [share for share in shares if isinstance(share, BaseException)]:
            await asyncio.gather(*(sender.abort(str(errors[0])) for sender in self.senders))
            raise errors[0]
        digest = join_digest(shares)
        assert digest == rl_ckpt.tree_digest(weights)
        return await asyncio.gather(*(sender.commit(digest, version) for sender in self.senders))

    async def close(self):
        for sender in self.senders:
            await sender.close()
