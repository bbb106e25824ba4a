"""Forked children of an end: they must not keep its session open when it is gone."""

import asyncio
import multiprocessing
import os
import subprocess
import sys
import textwrap

import pytest

from rl_ckpt import PeerLostError, connect
from rl_ckpt.testing import failure, new_name, receive_all

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs fork, and shm:// needs Linux"),
    pytest.mark.process,
]

SENDER = """
    import asyncio, os, signal, sys, time
    import torch
    import rl_ckpt

    def weights():
        yield "a", torch.ones(4)
        yield "b", torch.ones(1 << 21)
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        print(child, flush=True)
        signal.pause()

    with rl_ckpt.connect(sys.argv[1], role="send", timeout_s=60, bucket_bytes=1 << 20) as engine:
        engine.send(weights(), version=1)
"""


@pytest.mark.parametrize("scheme", ["shm", "uds"])
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded")
def test_a_killed_sender_is_replaced_although_its_child_lives(scheme):
    address = f"{scheme}://{new_name()}"
    sender = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SENDER), address], stdout=subprocess.PIPE, text=True
    )

    async def work():
        async with connect(address, role="receive", timeout_s=60) as receiver:
            receiving = asyncio.ensure_future(receive_all(receiver))
            child = int(await asyncio.to_thread(sender.stdout.readline))
            try:
                sender.kill()
                sender.wait(30)
                error = await failure(PeerLostError, receiving)
                assert f"pid {sender.pid}" in str(error)
                async with connect(address, role="send", timeout_s=60) as successor:
                    await successor.prepare()
            finally:
                os.kill(child, 9)

    try:
        asyncio.run(work())
    finally:
        sender.kill()
        sender.communicate()


def test_the_child_of_a_session_leaves_it_unharmed():
    import torch

    context = multiprocessing.get_context("fork")

    async def work():
        address = f"shm://{new_name()}"
        async with connect(address, role="send") as sender, connect(address, role="receive") as receiver:
            weights = {"a": torch.ones(10)}
            for version in range(2):
                got, _ = await asyncio.gather(
                    receive_all(receiver), sender.send_weights(weights.items(), version=version)
                )
                assert torch.equal(got["a"], weights["a"])
                child = context.Process(target=os.getpid)
                child.start()
                child.join(60)
                assert child.exitcode == 0

    asyncio.run(work())
