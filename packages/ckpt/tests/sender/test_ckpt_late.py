"""Who comes late, or falls out, gets the committed version without waiting for the next."""

import asyncio

import pytest
import torch

from rl_ckpt import ReceiverState, SyncAbortedError, UsageError, connect
from rl_ckpt.testing import assert_same, failure, new_name, receive_all


def run(work, url="shm://{}", **options):
    async def main():
        address = url.format(new_name())
        async with connect(address, role="send", timeout_s=30, bucket_bytes=4096, **options) as sender:
            await sender.prepare()
            ends = [connect(address, role="receive", timeout_s=30) for _ in range(3)]
            try:
                return await work(sender, *ends)
            finally:
                for end in ends:
                    await end.close()

    return asyncio.run(main())


async def late(sender):
    """Serve until somebody was."""
    async with asyncio.timeout(30):
        while (report := await sender.resend_current()) is None:  # noqa: ASYNC110  # it is the poll that is tested
            await asyncio.sleep(0.02)
    return report


@pytest.mark.process
def test_a_joiner_after_a_sync_of_a_part_gets_the_whole():
    async def work(sender, first, joiner, _):
        weights, part = {"base": torch.randn(500), "lora": torch.randn(50)}, {"lora": torch.randn(50)}
        await asyncio.gather(sender.send_weights(weights.items(), version=1), receive_all(first))
        await asyncio.gather(sender.send_weights(part.items(), version=2), receive_all(first))
        receiving = asyncio.ensure_future(receive_all(joiner))
        report = await late(sender)
        assert report.version == 2
        assert_same(await receiving, weights | part)
        waiting = asyncio.ensure_future(receive_all(joiner))
        await asyncio.sleep(0.05)
        assert await sender.resend_current() is None  # it has it, under the digest of the whole
        got, *_ = await asyncio.gather(
            waiting, receive_all(first), sender.send_weights(weights.items(), version=3, num_peers=2)
        )
        assert_same(got, weights)

    run(work, delta=True)


def test_a_receiver_that_fell_out_recovers_without_the_others():
    """It left in the middle of being served late, is poisoned, and is served again; the other one is not disturbed."""

    async def work(sender, well, ill, _):
        weights = {f"t{i}": torch.full((4096,), i, dtype=torch.uint8) for i in range(6)}
        await asyncio.gather(sender.send_weights(weights.items(), version=1), receive_all(well))
        landing = ill.receive_weights()
        first = asyncio.ensure_future(anext(landing))
        serving = asyncio.ensure_future(late(sender))
        await first
        await landing.aclose()
        await failure(SyncAbortedError, serving)
        assert (ill.state, ill.version) == (ReceiverState.POISONED, None)
        assert (well.state, well.version, sender.version) == (ReceiverState.COMMITTED, 1, 1)
        receiving = asyncio.ensure_future(receive_all(ill))
        await late(sender)
        assert_same(await receiving, weights)
        assert (ill.state, ill.version, ill.digest) == (ReceiverState.COMMITTED, 1, well.digest)

    run(work, delta=True)


def test_without_a_copy_and_after_a_failed_sync_it_says_so():
    async def no_copy(sender, *_):
        assert "keeps no copy" in str(await failure(UsageError, sender.resend_current()))

    run(no_copy)

    async def failed(sender, first, joiner, _):
        weights = {"a": torch.ones(10), "b": torch.ones(10)}

        def broken():
            yield "a", torch.zeros(10)
            raise RuntimeError("the export broke")

        await asyncio.gather(sender.send_weights(weights.items(), version=1), receive_all(first))
        gone = asyncio.ensure_future(receive_all(first))
        await failure(SyncAbortedError, sender.send_weights(broken(), version=2))
        await asyncio.gather(gone, return_exceptions=True)
        receiving = asyncio.ensure_future(receive_all(joiner))
        error = await failure(UsageError, late(sender))
        assert "not whole" in str(error)
        again = asyncio.ensure_future(receive_all(first))
        await sender.send_weights(weights.items(), version=2, num_peers=2)
        assert_same(await receiving, weights)
        assert_same(await again, weights)

    run(failed, delta=True)
