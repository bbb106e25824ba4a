"""What the thread of an end takes over from its caller."""

import asyncio
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import torch

from rl_ckpt import PeerLostError, SyncAbortedError, connect
from rl_ckpt.protocol.call_worker import Worker
from rl_ckpt.protocol.messages import Begin, Buckets, Commit, Decoder, Free, Hello, Manifest, Ready, Seal, Staged
from rl_ckpt.testing import assert_same, new_name


def test_work_on_a_gpu_goes_to_the_stream_of_the_caller(monkeypatch):
    """On another it would not wait for what the caller has begun: an optimizer's step, or a loader's copy."""
    current = ["the caller's"]

    @contextmanager
    def stream(other):
        before, current[0] = current[0], f"{other}, in the thread"
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "stream", stream)

    async def main():
        worker = Worker("a test")
        seen = await worker.run(lambda: current[0])
        worker.close(lambda: None, 10)
        return seen

    assert asyncio.run(main()) == "the caller's, in the thread"


def test_a_call_cancelled_twice_does_not_delay_the_next():
    """As by a timeout and whoever gives up at the same moment: the second does not wait until the thread is free."""

    async def main():
        worker, begun, may_end = Worker("a test"), threading.Event(), threading.Event()

        def work():
            begun.set()
            assert may_end.wait(60)

        call = asyncio.ensure_future(worker.run(work))
        await asyncio.to_thread(begun.wait, 60)
        call.cancel()
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        following = asyncio.ensure_future(worker.run(lambda: worker.canceller.is_cancelled))
        await asyncio.sleep(0.05)
        assert not following.done()
        may_end.set()
        assert await following is False
        worker.close(lambda: None, 10)

    asyncio.run(main())


@pytest.mark.parametrize("kind", [Hello, Ready, Free, Staged, Begin, Manifest, Buckets, Seal, Commit])
def test_an_interrupted_receive_costs_at_most_one_sync(monkeypatch, kind):
    """Ctrl-C at either end, in the moment in which what the other has said is off the socket and not acted on."""
    url, interrupted, feed = f"shm://{new_name()}", [], Decoder.feed
    weights = {f"t{i}": torch.full((3000,), float(i)) for i in range(5)}
    into = {name: torch.zeros(3000) for name in weights}

    def heard(self, data):
        messages = feed(self, data)
        if not interrupted and any(isinstance(message, kind) for _, message in messages):
            interrupted.append(kind)
            raise KeyboardInterrupt
        return messages

    monkeypatch.setattr(Decoder, "feed", heard)
    sender = connect(url, role="send", timeout_s=60, bucket_bytes=4096)

    def receive():
        with connect(url, role="receive", timeout_s=60) as receiver:
            while receiver.version is None or sum(tensor.sum() for tensor in into.values()) == 0:
                with suppress(KeyboardInterrupt, SyncAbortedError, PeerLostError):
                    receiver.recv_into(into)

    with sender:
        asyncio.run(sender.prepare())
        thread = threading.Thread(target=receive)
        thread.start()
        since = time.monotonic()
        for version in range(1, 4):
            with suppress(KeyboardInterrupt, SyncAbortedError):
                if not sender.send(weights.items(), version=version).lost:  # it may not have heard of the commit
                    break
        thread.join(60)
        assert interrupted == [kind]
        assert not thread.is_alive()
        assert version <= 2
        assert time.monotonic() - since < 30, "somebody waited for an answer to what was lost"
    assert_same(into, weights)
