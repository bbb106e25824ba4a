"""What a sender does per bucket and receiver: few messages, few calls into the kernel."""

import asyncio
from collections import Counter

import pytest
import torch

import rl_ckpt
from rl_ckpt.sender.peers import Peers
from rl_ckpt.testing import new_port, receive_all
from rl_ckpt.transports.streams import StreamWriter

pytestmark = pytest.mark.process

NUM_RECEIVERS, NUM_BUCKETS, BUCKET_BYTES = 4, 96, 1 << 20


@pytest.fixture
def calls(monkeypatch):
    """How often the sender sends a message, and how often it hands payload to a receiver's streams."""
    counted = Counter()
    for owner, name in ((Peers, "send"), (StreamWriter, "put")):
        function = getattr(owner, name)

        def call(*given, function=function, name=name):
            counted[name] += 1
            return function(*given)

        monkeypatch.setattr(owner, name, call)
    return counted


def test_buckets_share_messages_and_calls(calls):
    """0.4 messages and 0.2 calls; with one for each bucket, 1 and 1."""
    weights = {f"t{i}": torch.full((BUCKET_BYTES,), i, dtype=torch.uint8) for i in range(NUM_BUCKETS)}

    async def sync():
        address, token = f"tcp://127.0.0.1:{new_port()}", "known to both"
        sender = rl_ckpt.connect(address, role="send", token=token, timeout_s=60, bucket_bytes=BUCKET_BYTES)
        async with sender:
            await sender.prepare()
            receivers = [
                rl_ckpt.connect(address, role="receive", token=token, timeout_s=60) for _ in range(NUM_RECEIVERS)
            ]
            receiving = [asyncio.ensure_future(receive_all(receiver)) for receiver in receivers]
            report = await sender.send_weights(weights.items(), version=0, num_peers=NUM_RECEIVERS)
            for got in await asyncio.gather(*receiving):
                assert got["t7"][0] == 7
            for receiver in receivers:
                await receiver.close()
            return report

    report = asyncio.run(sync())
    each = NUM_RECEIVERS * NUM_BUCKETS
    assert len(report.receipts) == NUM_RECEIVERS
    assert calls["send"] / each < 0.6, calls
    assert calls["put"] / each < 0.6, calls
