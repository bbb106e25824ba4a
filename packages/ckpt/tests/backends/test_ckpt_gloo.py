"""What is particular to `gloo://`: groups are kept, made anew, and nobody else's."""

import asyncio

import pytest
import torch
import torch.distributed as dist

from rl_ckpt import AddressError, ReceiverState, SyncAbortedError, connect
from rl_ckpt.testing import assert_same, failure, receive_all

TOKEN = "known to both"
WEIGHTS = {f"t{i}": torch.full((2048,), i, dtype=torch.uint8) for i in range(6)}


def run(work, num_receivers=1, timeout_s=30):
    async def main():
        sender = connect("gloo://127.0.0.1:0", role="send", token=TOKEN, timeout_s=timeout_s, bucket_bytes=1024)
        async with sender:
            await sender.prepare()
            ends = [
                connect(sender.address, role="receive", token=TOKEN, timeout_s=timeout_s) for _ in range(num_receivers)
            ]
            try:
                return await work(sender, *ends)
            finally:
                for end in ends:
                    await end.close()

    return asyncio.run(main())


async def sync(sender, receivers, version):
    got, _ = await asyncio.gather(
        asyncio.gather(*map(receive_all, receivers)),
        sender.send_weights(WEIGHTS.items(), version=version, num_peers=len(receivers)),
    )
    for weights in got:
        assert_same(weights, WEIGHTS)


@pytest.mark.process
def test_a_group_is_kept_while_the_same_take_part():
    async def work(sender, first, second):
        generations = []
        for version, receivers in enumerate([[first], [first], [first, second], [first, second]]):
            await sync(sender, receivers, version)
            generations.append(sender._transport._generation)
        assert generations == [1, 1, 2, 2]
        assert not dist.is_initialized()

    run(work, num_receivers=2)


@pytest.mark.process
def test_a_failed_sync_makes_a_new_group_and_ignores_broadcasts():
    """The sender had broadcasts under way that the receiver has left: they end where nobody looks."""

    async def work(sender, receiver):
        await sync(sender, [receiver], 0)
        for version in (1, 2, 3):
            sending = asyncio.ensure_future(sender.send_weights(WEIGHTS.items(), version=version))
            landing = receiver.receive_weights()
            await anext(landing)
            await landing.aclose()
            await failure(SyncAbortedError, sending)
            assert receiver.state is ReceiverState.POISONED
            await sync(sender, [receiver], version)
        assert sender._transport._generation == 4

    run(work)


def test_it_needs_a_token_and_has_no_options(monkeypatch):
    monkeypatch.delenv("RL_CKPT_TOKEN", raising=False)
    with pytest.raises(AddressError, match="needs a token"):
        connect("gloo://127.0.0.1:0", role="send")
    with pytest.raises(AddressError, match="options of this backend: none"):
        connect("gloo://127.0.0.1:0?streams=2", role="send", token=TOKEN)
    with pytest.raises(AddressError, match="write gloo://host:port"):
        connect("gloo://somewhere", role="send", token=TOKEN)
