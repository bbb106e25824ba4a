"""What only shared memory between processes has: isolation, trust, and memory that goes away by itself."""

import asyncio
import fcntl
import gc
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from rl_ckpt import AddressError, ProtocolError, Role, SessionConfig, connect
from rl_ckpt.protocol.channel import Channel
from rl_ckpt.protocol.messages import Session
from rl_ckpt.testing import assert_same, failure, new_name, receive_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm:// needs Linux")

BUCKET_BYTES = 4096


def weights_of(version):
    return {f"t{i}": torch.full((BUCKET_BYTES,), version * 20 + i, dtype=torch.uint8) for i in range(8)}


def test_a_consumer_that_writes_to_views_changes_no_weights():
    async def work():
        address = f"shm://{new_name()}"
        async with (
            connect(address, role="send", bucket_bytes=BUCKET_BYTES) as sender,
            connect(address, role="receive") as writer,
            connect(address, role="receive") as reader,
        ):
            await sender.prepare()
            await writer.connect()
            await reader.connect()
            await sender.connect(2)
            for version in range(3):
                sending = asyncio.ensure_future(sender.send_weights(weights_of(version).items(), version=version))
                reading = asyncio.ensure_future(receive_all(reader))
                written = {}
                async for name, tensor in writer.receive_weights():
                    written[name] = tensor.clone()
                    tensor.fill_(255)
                await sending
                assert_same(written, weights_of(version))
                assert_same(await reading, weights_of(version))

    asyncio.run(work())


@pytest.mark.process
def test_nothing_stays_open_or_mapped():
    def num_descriptors():
        return len(list(Path("/proc/self/fd").iterdir()))

    async def work():
        address = f"shm://{new_name()}"
        async with connect(address, role="send") as sender, connect(address, role="receive") as receiver:
            await asyncio.gather(sender.send_weights(weights_of(0).items(), version=0), receive_all(receiver))

    def rings():
        return set(re.findall(r"/memfd:rl-ckpt\S*", Path("/proc/self/maps").read_text()))

    gc.collect()  # errors of other tests keep the frames alive that they came through
    others = rings()
    asyncio.run(work())
    before = num_descriptors()
    for _ in range(3):
        asyncio.run(work())
    assert num_descriptors() <= before  # fewer: what other tests left was collected meanwhile
    assert rings() <= others


def test_fifty_syncs_declare_their_tensors_once():
    async def work():
        address = f"shm://{new_name()}"
        async with connect(address, role="send") as sender, connect(address, role="receive") as receiver:
            for version in range(50):
                await asyncio.gather(
                    sender.send_weights(weights_of(version % 8).items(), version=version), receive_all(receiver)
                )
            assert len(receiver.connector.connection.specs) == len(sender._manifest.specs) == 8

    asyncio.run(work())


def receive_transport():
    from rl_ckpt.backends.shm import ShmReceive

    return ShmReceive(SessionConfig(address="shm://x", name="x", role=Role.RECEIVE, timeout_s=1, bucket_bytes=4096))


@pytest.mark.parametrize(
    ("num_bytes", "seals"),
    [(8192, 0), (4096, fcntl.F_SEAL_SHRINK), (0, fcntl.F_SEAL_SHRINK), (None, 0)],
    ids=["unsealed", "short", "empty", "missing"],
)
def test_a_ring_that_is_not_what_it_says_is_refused(num_bytes, seals):
    ours, theirs = socket.socketpair()
    channel = Channel(ours, "sender pid 1")
    if num_bytes is not None:
        memory = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(memory, num_bytes)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
        channel.descriptors.append(memory)
    with pytest.raises(ProtocolError, match="sender pid 1 shared"):
        receive_transport().map_slots(Session(4096, 2), channel)
    assert channel.descriptors == []
    channel.close()
    theirs.close()


@pytest.mark.process
@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_a_sender_of_another_user_is_not_trusted():
    name = new_name()
    code = f"""
        import os, socket
        os.setuid(65534)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\\0rl-ckpt-shm-0-{name}")
        listener.listen()
        print("open", flush=True)
        input()
    """
    stranger = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert stranger.stdout.readline() == "open\n"

    async def work():
        async with connect(f"shm://{name}", role="receive") as receiver:
            return await failure(AddressError, receive_all(receiver))

    error = asyncio.run(work())
    stranger.communicate("\n")
    assert f"process {stranger.pid} of user 65534" in str(error)


@pytest.mark.process
@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_a_receiver_of_another_user_is_turned_away():
    name = new_name()
    code = f"""
        import os, socket
        os.setuid(65534)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect("\\0rl-ckpt-shm-0-{name}")
        print(connection.recv(1))
    """

    async def work():
        address = f"shm://{name}"
        async with connect(address, role="send") as sender, connect(address, role="receive") as receiver:
            await sender.prepare()
            stranger = await asyncio.create_subprocess_exec(
                sys.executable, "-c", textwrap.dedent(code), stdout=subprocess.PIPE
            )
            await asyncio.sleep(0.3)
            _, report = await asyncio.gather(
                receive_all(receiver), sender.send_weights(weights_of(0).items(), version=0)
            )
            said, _ = await stranger.communicate()
            return said, report

    said, report = asyncio.run(work())
    assert said == b"b''\n"
    assert len(report.receipts) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_tensors_on_a_device_arrive_on_the_cpu():
    weights = {"a": torch.randn(1000, device="cuda"), "b": torch.randn(64, 32, device="cuda").t().to(torch.bfloat16)}

    async def work():
        address = f"shm://{new_name()}"
        async with connect(address, role="send") as sender, connect(address, role="receive") as receiver:
            got, _ = await asyncio.gather(receive_all(receiver), sender.send_weights(weights.items(), version=0))
            assert_same(got, {name: tensor.cpu() for name, tensor in weights.items()})

    asyncio.run(work())
