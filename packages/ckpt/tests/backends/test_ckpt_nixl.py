"""What NIXL's transport does beyond the conformance suites: digests guard the pull, and UCX leaves nothing behind."""

import asyncio
import importlib.util
import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

import rl_ckpt
from rl_ckpt.testing import EndProcess, assert_same, failure, receive_all
from rl_ckpt.types import Role

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("nixl"), reason="nixl is not installed: it is for Linux"),
    pytest.mark.process,
]

TOKEN = "known to both"
ADDRESS = "nixl://127.0.0.1:0"


async def open_ends(stack, num_receivers, **options):
    sender = rl_ckpt.connect(ADDRESS, role="send", token=TOKEN, **options)
    await stack.enter_async_context(sender)
    await sender.prepare()
    ends = [rl_ckpt.connect(sender.address, role="receive", token=TOKEN) for _ in range(num_receivers)]
    return sender, [await stack.enter_async_context(end) for end in ends]


def test_a_flipped_ring_bit_is_found_and_the_next_sync_works(monkeypatch):
    """The sender's memory is another than it was when it was announced: the digests were made before."""
    from rl_ckpt.backends import nixl

    async def main():
        async with AsyncExitStack() as stack:
            sender, (receiver,) = await open_ends(stack, 1, bucket_bytes=1 << 20)
            weights = {f"t{i}": torch.randn(300, 1000) for i in range(8)}
            start = nixl.Reader.start

            def damaged(self, slot, num_bytes):
                sender.slots[slot][12345] ^= 1
                start(self, slot, num_bytes)

            monkeypatch.setattr(nixl.Reader, "start", damaged)
            receiving = asyncio.ensure_future(receive_all(receiver))
            error = await failure(rl_ckpt.SyncAbortedError, sender.send_weights(weights.items(), version=1))
            assert isinstance(error.__cause__, rl_ckpt.DigestError)
            await failure(rl_ckpt.DigestError, receiving)
            monkeypatch.setattr(nixl.Reader, "start", start)
            targets = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
            await asyncio.gather(receiver.receive_into(targets), sender.send_weights(weights.items(), version=1))
            assert_same(targets, weights)

    asyncio.run(main())


def test_what_is_held_stays_while_many_more_buckets_are_pulled():
    """Slots come in any order, and each has its own place at the receiver."""

    async def main():
        async with AsyncExitStack() as stack:
            sender, (receiver,) = await open_ends(stack, 1, bucket_bytes=1 << 20)
            weights = {f"t{i}": torch.randint(0, 256, (1 << 20,), dtype=torch.uint8) for i in range(30)}
            sending = asyncio.ensure_future(sender.send_weights(weights.items(), version=1))
            held, got = {}, {}
            async for name, tensor in receiver.receive_weights():
                if name in {"t2", "t9"}:
                    held[name] = (receiver.hold(), tensor)
                got[name] = tensor.clone()
                for other, (_, kept) in held.items():
                    assert torch.equal(kept, weights[other]), (other, name)
            assert_same(got, weights)
            await sending

    asyncio.run(main())


def test_a_read_that_never_ends_is_given_up_at_the_deadline(monkeypatch):
    """The error names the sender, and the read may go on in memory that nobody uses any more."""
    from rl_ckpt.backends import nixl

    async def main():
        async with AsyncExitStack() as stack:
            sender = await stack.enter_async_context(rl_ckpt.connect(ADDRESS, role="send", token=TOKEN))
            await sender.prepare()
            receiver = rl_ckpt.connect(sender.address, role="receive", token=TOKEN, timeout_s=3)
            await stack.enter_async_context(receiver)
            is_done = nixl.Reader.is_done
            monkeypatch.setattr(nixl.Reader, "is_done", lambda self: False)
            weights = {"t": torch.randn(3000)}
            sending = asyncio.ensure_future(sender.send_weights(weights.items(), version=1))
            error = await failure(rl_ckpt.PeerTimeoutError, receive_all(receiver))
            assert "sender pid" in str(error)
            assert "let nothing be read of its memory within 3 s" in str(error)
            await failure(rl_ckpt.SyncAbortedError, sending)
            monkeypatch.setattr(nixl.Reader, "is_done", is_done)
            got, _ = await asyncio.gather(receive_all(receiver), sender.send_weights(weights.items(), version=1))
            assert_same(got, weights)

    asyncio.run(main())


def test_killed_processes_leave_nothing_in_shared_memory():
    """Neither we nor UCX, whose segments are files there while they are used."""

    def in_shared_memory():
        return {path.name for path in Path("/dev/shm").iterdir() if "ucx" in path.name or "ckpt" in path.name}

    async def main():
        async with AsyncExitStack() as stack:
            sender = rl_ckpt.connect(ADDRESS, role="send", token=TOKEN, bucket_bytes=1024)
            await stack.enter_async_context(sender)
            await sender.prepare()
            killed = EndProcess(sender.address, Role.RECEIVE, token=TOKEN, stop_after=2)
            stack.callback(killed.close)
            assert await killed.says() == "open"
            weights = {f"t{i}": torch.randn(200) for i in range(12)}
            sending = asyncio.ensure_future(sender.send_weights(weights.items(), version=1))
            assert await killed.says() == "stopped"
            killed.kill()
            await failure(rl_ckpt.SyncAbortedError, sending)

    before = in_shared_memory()
    asyncio.run(main())
    assert in_shared_memory() <= before


BOTH_ENDS = """
import asyncio, torch, rl_ckpt
from rl_csrc.testing import listening_addresses
async def main():
    async with rl_ckpt.connect("nixl://127.0.0.1:0", role="send", token="t") as sender:
        await sender.prepare()
        async with rl_ckpt.connect(sender.address, role="receive", token="t") as receiver:
            async def take():
                return [(name, tensor.clone()) async for name, tensor in receiver.receive_weights()]
            await asyncio.gather(sender.send_weights([("a", torch.ones(4))], version=1), take())
            print(*listening_addresses())
asyncio.run(main())
"""


def test_on_loopback_nothing_listens_beyond_it():
    """UCX's own listeners ask nobody for a token."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", BOTH_ENDS], capture_output=True, text=True, check=True, env=environment
    )
    found = done.stdout.splitlines()[-1].split()
    assert len(found) >= 3, "UCX is not among them: the test shows nothing"
    assert set(found) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
