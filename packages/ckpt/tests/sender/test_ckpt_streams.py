"""How a sender writes payload to streams, and how many buckets it announces together."""

import asyncio
import gc
import os
import select
import socket
import time
import weakref
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from rl_ckpt import PeerTimeoutError, SyncAbortedError, connect
from rl_ckpt.protocol.channel import Observer, observers
from rl_ckpt.protocol.messages import Buckets
from rl_ckpt.sender.packer import BATCH_SHARE, MAX_BATCH, MIN_BATCH_RECEIVERS
from rl_ckpt.testing import failure, new_name, new_port, receive_all, until
from rl_ckpt.transports.streams import StreamWriter
from rl_csrc.ipc import Waker

PAYLOAD = torch.arange(16 << 20, dtype=torch.uint8)


def pair(kind):
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        return mine, server.accept()[0]


def stream_threads():
    """Native threads that write streams."""
    names = [comm.read_text().strip() for comm in Path("/proc/self/task").glob("*/comm") if comm.exists()]
    return [name for name in names if name == "rl-stream"]


@contextmanager
def writer_of(connection):
    """A writer with one stream, and its waker."""
    waker = Waker()
    writer = StreamWriter(waker)
    writer.attach(0, 1, connection)
    try:
        yield writer, waker
    finally:
        writer.close()
        waker.close()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_writer_closes_in_the_middle_of_a_write(kind):
    mine, theirs = pair(kind)
    before = len(stream_threads())
    with theirs, writer_of(mine) as (writer, _):
        writer.put([(0, [(PAYLOAD, 0, len(PAYLOAD))])])
        theirs.recv(1)  # it has begun, and the kernel has no room for all of it
        assert not writer.wake_when_empty()
        since = time.monotonic()
        writer.close()
        assert time.monotonic() - since < 30, "nobody reads on: a wait for the write has no end"
        assert writer.error() is None  # who closes wants to hear of none
        asyncio.run(until(lambda: len(stream_threads()) == before, 20))


def is_awake(waker):
    poll = select.poll()  # takes descriptors of any number, as a worker of a whole run has them
    poll.register(waker, select.POLLIN)
    return bool(poll.poll(20_000))


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_writer_puts_all_runs_on_the_stream_in_order(kind):
    mine, theirs = pair(kind)
    cuts = [0, 1, 3_000_000, 3_000_001, 9_999_999, len(PAYLOAD)]
    with theirs, writer_of(mine) as (writer, waker):
        runs = [(PAYLOAD, start, end - start) for start, end in pairwise(cuts)]
        writer.put([(0, runs[:2]), (1, runs[2:])])
        got = bytearray(len(PAYLOAD))
        left = memoryview(got)
        while left:
            left = left[theirs.recv_into(left, min(len(left), 700_001)) :]
        while not writer.wake_when_empty():
            assert is_awake(waker)
        assert got == memoryview(PAYLOAD.numpy())


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_stream_whose_other_end_is_gone_is_reported(kind):
    mine, theirs = pair(kind)
    with writer_of(mine) as (writer, waker):
        writer.put([(0, [(PAYLOAD, 0, len(PAYLOAD))])])
        theirs.close()
        assert is_awake(waker)
        assert isinstance(writer.error(), ConnectionError)


class Batches(Observer):
    def __init__(self):
        self.sizes = {}

    def sending(self, message):
        if isinstance(message, Buckets):
            self.sizes[message.buckets[0].sequence] = len(message.buckets)


@pytest.mark.process
@pytest.mark.parametrize("num_receivers", [1, 4])
def test_more_buckets_are_announced_together_as_a_sync_grows(num_receivers):
    weights = {f"t{i}": torch.full((1024,), i % 256, dtype=torch.uint8) for i in range(400)}
    batches = Batches()

    async def main():
        async with connect(f"shm://{new_name()}", role="send", bucket_bytes=1024) as sender:
            await sender.prepare()
            receivers = [connect(sender.address, role="receive") for _ in range(num_receivers)]
            observers.append(batches)
            try:
                receiving = [asyncio.ensure_future(receive_all(receiver)) for receiver in receivers]
                await sender.send_weights(weights.items(), version=1, num_peers=num_receivers)
                await asyncio.gather(*receiving)
            finally:
                observers.remove(batches)
                for receiver in receivers:
                    await receiver.close()

    asyncio.run(main())
    assert sum(batches.sizes.values()) == len(weights)
    assert batches.sizes[0] == 1
    assert MAX_BATCH // 2 <= max(batches.sizes.values()) <= MAX_BATCH, "a receiver that waits is not kept waiting"
    counted = max(num_receivers, MIN_BATCH_RECEIVERS)
    for first, size in batches.sizes.items():
        assert size <= 1 + (first + size) * counted // BATCH_SHARE  # who receives waits for no more than a share
    assert len(batches.sizes) <= 45  # each takes the interpreter lock several times


@pytest.mark.process
def test_a_receiver_that_stops_reading_is_named_and_cleaned_up():
    weights = {f"t{i}": torch.full((64 << 20,), i, dtype=torch.uint8) for i in range(3)}

    async def main():
        async with connect(f"tcp://127.0.0.1:{new_port()}", role="send", token="t", timeout_s=2) as sender:
            await sender.prepare()
            async with connect(sender.address, role="receive", token="t", timeout_s=30) as receiver:
                receiving = receiver.receive_weights()
                first = asyncio.ensure_future(anext(receiving))
                error = await failure(SyncAbortedError, sender.send_weights(weights.items(), version=1))
                assert isinstance(error.__cause__, PeerTimeoutError)
                assert str(os.getpid()) in str(error)
                await first
                await until(lambda: not stream_threads(), 20)

    asyncio.run(main())


@pytest.mark.process
@pytest.mark.parametrize("scheme", ["tcp", "uds"])
def test_a_writer_keeps_no_tensor_after_a_sync(scheme):
    """A gathered parameter is as large as a model's embedding; nobody wants it alive until the next sync."""
    alive = weakref.WeakSet()

    def source():
        for i in range(3):
            tensor = torch.full((3 << 20,), i, dtype=torch.uint8)
            alive.add(tensor.untyped_storage())
            yield f"t{i}", tensor

    async def main():
        url, token = (f"tcp://127.0.0.1:{new_port()}", "t") if scheme == "tcp" else (f"uds://{new_name()}", None)
        async with connect(url, role="send", token=token) as sender:
            await sender.prepare()
            async with connect(url, role="receive", token=token) as receiver:
                await asyncio.gather(receive_all(receiver), sender.send_weights(source(), version=1))
                gc.collect()
                assert not list(alive)
                assert stream_threads()

    asyncio.run(main())


@pytest.mark.process
def test_a_source_may_reuse_a_large_tensor_at_the_next_request():
    """Streams are written from where it is; so the sender waits until the kernel has all of it."""
    memory = torch.zeros(24 << 20, dtype=torch.uint8)

    def source():
        for i in range(4):
            memory.fill_(i + 1)
            yield f"t{i}", memory

    async def main():
        async with connect(f"tcp://127.0.0.1:{new_port()}", role="send", token="t", timeout_s=60) as sender:
            await sender.prepare()
            async with connect(sender.address, role="receive", token="t") as receiver:
                sending = asyncio.ensure_future(sender.send_weights(source(), version=1))
                got = {}
                async for name, tensor in receiver.receive_weights():
                    await asyncio.sleep(0.1)
                    got[name] = tuple(tensor.unique().tolist())
                await sending
                assert got == {f"t{i}": (i + 1,) for i in range(4)}

    asyncio.run(main())
