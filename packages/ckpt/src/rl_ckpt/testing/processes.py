"""Ends of a session in processes of their own, to be killed, and what every backend between processes must survive."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_ckpt import connect
from rl_ckpt.errors import CkptError, PeerLostError, SyncAbortedError
from rl_ckpt.testing.helpers import assert_same, failure, receive_all, until
from rl_ckpt.types import ReceiverState, Role

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterator
    from multiprocessing.connection import Connection

    from torch import Tensor

    from rl_ckpt.base import CheckpointEngine

BUCKET_BYTES = 1024
TIMEOUT_S = 20.0
"""Of every end: a test that waits for it has failed."""
_SHARED_MEMORY = Path("/dev/shm")


def weights_of(version: int, num_tensors: int = 12) -> dict[str, Tensor]:
    """Tensors each of which fills a bucket."""
    return {f"t{i}": torch.full((BUCKET_BYTES,), version * 20 + i, dtype=torch.uint8) for i in range(num_tensors)}


class EndProcess:
    """A process with one end of a session. It says `open`, `stopped` (and is then to be killed), or its result.

    Args:
        address: URL of the session.
        role: `send` does one sync of `weights_of(version)`; `receive` takes one and says `(version, sum of all bytes)`.
        version: Of the sync to send.
        num_tensors: In it.
        num_peers: Receivers to wait for before sending.
        stop_after: Number of tensors after which it stops in the middle of a sync; None does not stop, -1 stops before.
        token: Of the session.
    """

    def __init__(
        self,
        address: str,
        role: Role,
        *,
        version: int = 0,
        num_tensors: int = 12,
        num_peers: int = 1,
        stop_after: int | None = None,
        token: str | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        plan = (version, num_tensors, num_peers)
        arguments = (theirs, address, token, role, plan, stop_after)
        self._process = context.Process(target=_main, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid or 0

    async def says(self) -> Any:
        """The next thing it says; an error if it is silent or dead."""
        assert await asyncio.to_thread(self._pipe.poll, 2 * TIMEOUT_S), f"pid {self.pid} said nothing"
        return self._pipe.recv()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(TIMEOUT_S)
        assert self._process.exitcode == -signal.SIGKILL

    def close(self) -> None:
        """End it if it is still there."""
        self._process.kill()
        self._process.join(TIMEOUT_S)
        self._process.close()
        self._pipe.close()


def _main(
    pipe: Connection,
    address: str,
    token: str | None,
    role: Role,
    plan: tuple[int, int, int],
    stop_after: int | None,
) -> None:
    torch.set_num_threads(1)
    try:
        with connect(address, role=role, timeout_s=TIMEOUT_S, bucket_bytes=BUCKET_BYTES, token=token) as engine:
            asyncio.run(_open(engine, role))
            pipe.send("open")
            if stop_after == -1:
                _stop(pipe)
            if role is Role.SEND:
                pipe.send(_send(engine, pipe, plan, stop_after))
            else:
                pipe.send(_take(engine, pipe, stop_after))
    except CkptError as error:
        pipe.send(error)


async def _open(engine: CheckpointEngine, role: Role) -> None:
    await engine.prepare()
    if role is Role.RECEIVE:
        await engine.connect()


def _stop(pipe: Connection) -> None:
    pipe.send("stopped")
    signal.pause()


def _send(engine: CheckpointEngine, pipe: Connection, plan: tuple[int, int, int], stop_after: int | None) -> int:
    version, num_tensors, num_peers = plan

    def source() -> Iterator[tuple[str, Tensor]]:
        for i, item in enumerate(weights_of(version, num_tensors).items()):
            if i == stop_after:
                _stop(pipe)
            yield item

    asyncio.run(engine.connect(num_peers))
    return len(engine.send(source(), version=version).receipts)


def _take(engine: CheckpointEngine, pipe: Connection, stop_after: int | None) -> tuple[int | None, int]:
    total = 0
    for i, (_, tensor) in enumerate(engine.recv(), start=1):
        total += int(tensor.sum())
        if i == stop_after:
            _stop(pipe)
    return engine.version, total


class ProcessSuite(ABC):
    """What a backend between processes must survive: SIGKILL of either end at any state of the protocol.

    Nobody waits until a deadline, the next sync works, and nothing is left behind.
    """

    token: str | None = None
    """Of the sessions, where the backend wants one."""

    @abstractmethod
    def new_address(self) -> str:
        """A URL that nobody else uses."""

    def run_processes(self, work: Callable[[_Bench], Awaitable[None]]) -> None:
        """Run a coroutine function that may start ends here and elsewhere; all are closed, and leaks are looked for."""

        async def main() -> None:
            async with AsyncExitStack() as stack:
                await work(_Bench(self.new_address(), self.token, stack))

        with _nothing_left():
            asyncio.run(main())

    def test_between_two_processes(self) -> None:
        """The bytes, the version and the receipt."""

        async def work(bench: _Bench) -> None:
            sender, receiver = bench.process(Role.SEND, version=3), bench.process(Role.RECEIVE)
            assert [await sender.says(), await receiver.says()] == ["open", "open"]
            assert await sender.says() == 1
            assert await receiver.says() == (3, sum(int(tensor.sum()) for tensor in weights_of(3).values()))

        self.run_processes(work)

    def test_the_sender_is_killed_before_a_sync(self) -> None:
        """A receiver that waits for it gets its sync from the successor."""

        async def work(bench: _Bench) -> None:
            sender = bench.process(Role.SEND, stop_after=-1)
            assert [await sender.says(), await sender.says()] == ["open", "stopped"]
            receiver = await bench.end(Role.RECEIVE)
            await receiver.connect()
            receiving = asyncio.ensure_future(receive_all(receiver))
            await asyncio.sleep(0.05)
            sender.kill()
            await bench.succeed(1, [receiver], [receiving])

        self.run_processes(work)

    def test_the_sender_is_killed_in_the_middle_of_a_sync(self) -> None:
        """Receivers say so at once, name it, refuse to serve, and take the next sync."""

        async def work(bench: _Bench) -> None:
            sender = bench.process(Role.SEND, stop_after=8)
            receiver = await bench.end(Role.RECEIVE)
            receiving = asyncio.ensure_future(receive_all(receiver))
            assert [await sender.says(), await sender.says()] == ["open", "stopped"]
            await until(lambda: receiver.state is ReceiverState.PREPARING)
            sender.kill()
            error = await failure(PeerLostError, receiving)
            assert f"pid {sender.pid}" in str(error), error
            assert (receiver.state, receiver.version) == (ReceiverState.POISONED, None)
            await bench.succeed(1, [receiver])

        self.run_processes(work)

    def test_the_sender_is_killed_while_it_collects_the_votes(self) -> None:
        """A receiver that has voted has nobody to tell it the verdict."""

        async def work(bench: _Bench) -> None:
            sender = bench.process(Role.SEND, num_tensors=3, num_peers=2)
            quick, slow = await bench.end(Role.RECEIVE), await bench.end(Role.RECEIVE)
            waiting = slow.receive_weights()
            first = asyncio.ensure_future(anext(waiting))
            done = asyncio.ensure_future(receive_all(quick))
            assert await sender.says() == "open"
            await first
            await until(lambda: quick.state is ReceiverState.STAGED)
            sender.kill()
            await failure(CkptError, done)
            await failure(CkptError, _exhaust(waiting))
            assert quick.version is None
            await bench.succeed(1, [quick, slow])

        self.run_processes(work)

    def test_a_receiver_is_killed_between_syncs(self) -> None:
        """The sender goes on with the others."""

        async def work(bench: _Bench) -> None:
            sender = await bench.end(Role.SEND)
            gone = bench.process(Role.RECEIVE, stop_after=-1)
            assert [await gone.says(), await gone.says()] == ["open", "stopped"]
            await sender.connect(1)
            gone.kill()
            await bench.send(sender, 1, [await bench.end(Role.RECEIVE)])

        self.run_processes(work)

    def test_a_receiver_is_killed_in_the_middle_of_a_sync(self) -> None:
        """The sync is called off for all, the sender names it, and its successor takes the next."""

        async def work(bench: _Bench) -> None:
            sender, other = await bench.end(Role.SEND), await bench.end(Role.RECEIVE)
            killed = bench.process(Role.RECEIVE, stop_after=2)
            assert await killed.says() == "open"
            await other.connect()
            await sender.connect(2)
            sending = asyncio.ensure_future(sender.send_weights(weights_of(1).items(), version=1))
            receiving = asyncio.ensure_future(receive_all(other))
            assert await killed.says() == "stopped"
            killed.kill()
            error = await failure(SyncAbortedError, sending)
            assert isinstance(error.__cause__, PeerLostError)
            assert f"pid {killed.pid}" in str(error), error
            await failure(SyncAbortedError, receiving)
            assert (sender.version, other.version) == (None, None)
            await bench.send(sender, 1, [other, await bench.end(Role.RECEIVE)])

        self.run_processes(work)

    def test_a_receiver_is_killed_after_its_vote(self) -> None:
        """While another has not voted: nothing is committed."""

        async def work(bench: _Bench) -> None:
            sender, slow = await bench.end(Role.SEND), await bench.end(Role.RECEIVE)
            killed = bench.process(Role.RECEIVE)
            assert await killed.says() == "open"
            await slow.connect()
            await sender.connect(2)
            sending = asyncio.ensure_future(sender.send_weights(weights_of(1, 2).items(), version=1))
            waiting = slow.receive_weights()
            await anext(waiting)
            await asyncio.sleep(0.3)  # two buckets go into the ring at once: by now the other has taken both and voted
            killed.kill()
            error = await failure(SyncAbortedError, sending)
            assert f"pid {killed.pid}" in str(error), error
            await failure(SyncAbortedError, _exhaust(waiting))
            await bench.send(sender, 1, [slow])

        self.run_processes(work)


class _Bench:
    """Opens ends of one session, here or in processes of their own, which are closed with the stack."""

    def __init__(self, address: str, token: str | None, stack: AsyncExitStack) -> None:
        self.address = address
        self._token = token
        self._stack = stack

    def process(self, role: Role, **options: Any) -> EndProcess:
        process = EndProcess(self.address, role, token=self._token, **options)
        self._stack.callback(process.close)
        return process

    async def end(self, role: Role) -> CheckpointEngine:
        engine = connect(self.address, role=role, timeout_s=TIMEOUT_S, bucket_bytes=BUCKET_BYTES, token=self._token)
        await self._stack.enter_async_context(engine)
        await engine.prepare()
        return engine

    async def succeed(
        self,
        version: int,
        receivers: list[CheckpointEngine],
        receiving: list[asyncio.Future[dict[str, Tensor]]] | None = None,
    ) -> None:
        """Send one sync from a new sender."""
        await self.send(await self.end(Role.SEND), version, receivers, receiving)

    async def send(
        self,
        sender: CheckpointEngine,
        version: int,
        receivers: list[CheckpointEngine],
        receiving: list[asyncio.Future[dict[str, Tensor]]] | None = None,
    ) -> None:
        """Send one sync that must reach all receivers."""
        running = receiving or [asyncio.ensure_future(receive_all(receiver)) for receiver in receivers]
        await sender.connect(len(receivers))
        report = await sender.send_weights(weights_of(version).items(), version=version)
        assert (len(report.receipts), report.lost) == (len(receivers), ())
        for got, receiver in zip(running, receivers, strict=True):
            assert_same(await got, weights_of(version))
            assert (receiver.version, receiver.state) == (version, ReceiverState.COMMITTED)


async def _exhaust(iterator: Any) -> None:
    async for _ in iterator:
        pass


@contextmanager
def _nothing_left() -> Generator[None]:
    """Fail if something of ours lies in /dev/shm afterwards, or this process still maps a ring."""
    yield
    gc.collect()  # errors keep the frames alive that they came through
    left = [path.name for path in _SHARED_MEMORY.glob("*") if "ckpt" in path.name]
    assert not left, f"left in {_SHARED_MEMORY}: {left}"
    maps = Path("/proc/self/maps")
    assert not maps.is_file() or "rl-ckpt" not in maps.read_text(), "a ring is still mapped after every end was closed"
