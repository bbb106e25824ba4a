"""Ends of a session in processes of their own, to be killed, and what suites between processes share."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import torch

from rl_ckpt import connect
from rl_ckpt.errors import CkptError
from rl_ckpt.protocol.channel import Observer, observers
from rl_ckpt.testing.helpers import assert_same, named_after, receive_all
from rl_ckpt.types import ReceiverState, Role

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection

    from torch import Tensor

    from rl_ckpt.base import CheckpointEngine, WeightReceiver, WeightSender
    from rl_ckpt.protocol.messages import Message
    from rl_ckpt.types import SyncReport

BUCKET_BYTES = 1024
TIMEOUT_S = 120.0
"""Deadline of every end: a test that waits for it has failed, however busy the machine is."""
_SHARED_MEMORY = Path("/dev/shm")


def weights_of(version: int, num_tensors: int = 12) -> dict[str, Tensor]:
    """Tensors each of which fills a bucket."""
    return {
        f"t{i}": torch.full((BUCKET_BYTES,), (version * 20 + i) % 256, dtype=torch.uint8) for i in range(num_tensors)
    }


SetUp: TypeAlias = "Callable[[], object]"
Hold: TypeAlias = "Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]"


class ChildProcess:
    """A process that says things, and may be killed.

    Args:
        main: Function that it runs, with a pipe to say things through, `arguments` and `options`.
    """

    def __init__(self, main: Callable[..., None], *arguments: object, **options: object) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rl_ckpt.testing.ends"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, *arguments), kwargs=options, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id."""
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

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.is_alive()

    async def dies(self) -> None:
        """Wait until it has killed itself."""
        await asyncio.to_thread(self._process.join, 2 * TIMEOUT_S)
        assert self._process.exitcode == -signal.SIGKILL, (
            f"pid {self.pid} lives, or ended with {self._process.exitcode}"
        )

    def close(self) -> None:
        """End it if it is still there."""
        self._process.kill()
        self._process.join(TIMEOUT_S)
        self._process.close()
        self._pipe.close()


class EndProcess(ChildProcess):
    """A process with one end of a session. It says `open`, `stopped` (and is then to be killed), or its result.

    Args:
        address: URL of the session.
        role: `send` does one sync of `weights_of(version)`; `receive` takes one and says `(version, sum of all bytes)`.
        version: Version of the sync to send.
        num_tensors: In it.
        num_peers: Receivers to wait for before sending.
        die_at: A message of WIRE.md like `Buckets`, and a moment: it kills itself `before` or `after` the first.
        stop_after: Number of tensors after which it stops in the middle of a sync; None does not stop, -1 stops before.
        token: Token of the session.
        place: Set-up of the process and of its weights; see `BetweenProcesses`.
    """

    def __init__(self, address: str, role: Role, **options: Any) -> None:
        super().__init__(_main, address, role, **options)


def _main(
    pipe: Connection,
    address: str,
    role: Role,
    *,
    version: int = 0,
    num_tensors: int = 12,
    num_peers: int = 1,
    stop_after: int | None = None,
    die_at: tuple[str, str] | None = None,
    token: str | None = None,
    place: tuple[SetUp | None, Hold | None] = (None, None),
) -> None:
    torch.set_num_threads(1)
    set_up, hold = place
    if set_up is not None:
        set_up()
    if die_at is not None:
        die_at_message(*die_at)
    try:
        with connect(address, role=role, timeout_s=TIMEOUT_S, bucket_bytes=BUCKET_BYTES, token=token) as engine:
            asyncio.run(_open(engine, role))
            pipe.send("open")
            if stop_after == -1:
                _stop(pipe)
            if role is Role.SEND:
                pipe.send(_send(engine, pipe, (version, num_tensors, num_peers), stop_after, hold))
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


def _send(
    engine: WeightSender, pipe: Connection, plan: tuple[int, int, int], stop_after: int | None, hold: Hold | None
) -> int:
    version, num_tensors, num_peers = plan

    def source() -> Iterator[tuple[str, Tensor]]:
        for i, item in enumerate(weights_of(version, num_tensors).items()):
            if i == stop_after:
                _stop(pipe)
            yield item

    asyncio.run(engine.connect(num_peers))
    if hold is not None:
        engine.register_source(hold(weights_of(version, num_tensors)))
    return len(engine.send(source() if hold is None else None, version=version).receipts)


def _take(engine: WeightReceiver, pipe: Connection, stop_after: int | None) -> tuple[int | None, int]:
    total = 0
    for i, (_, tensor) in enumerate(engine.recv(), start=1):
        total += int(tensor.sum())
        if i == stop_after:
            _stop(pipe)
    return engine.version, total


class _Killer(Observer):
    """Kills this process at the first message of a kind."""

    def __init__(self, kind: str, moment: str) -> None:
        self._kind = kind
        self._is_before = moment == "before"
        self._is_due = False

    def sending(self, message: Message) -> None:
        is_kind = type(message).__name__ == self._kind
        if self._is_due or (is_kind and self._is_before):
            os.kill(os.getpid(), signal.SIGKILL)
        self._is_due = is_kind

    def pausing(self) -> None:
        if self._is_due:
            os.kill(os.getpid(), signal.SIGKILL)


def die_at_message(kind: str, moment: str) -> None:
    """Have this process kill itself at the first message of a kind: before it is sent, or at the next look after it."""
    observers.append(_Killer(kind, moment))


class BetweenProcesses(ABC):
    """A suite whose ends run in processes that may be killed."""

    token: str | None = None
    """Token of the sessions, where the backend wants one."""
    set_up: ClassVar[SetUp | None] = None
    """A function of a module that every process of an end calls first."""
    hold: ClassVar[Hold | None] = None
    """Another, that puts weights where they are registered from; None: senders pass their weights to every call."""

    @abstractmethod
    def new_address(self) -> str:
        """A URL that is not in use."""

    def run_processes(self, work: Callable[[Bench], Awaitable[None]]) -> None:
        """Run a coroutine function that may start ends here and elsewhere; all are closed, and leaks are looked for."""

        async def main() -> None:
            async with AsyncExitStack() as stack:
                set_up = type(self).set_up  # pyright: ignore[reportAttributeAccessIssue]  # seen as a method; it is none
                await work(Bench(self.new_address(), self.token, stack, set_up, type(self).hold))

        with _nothing_left():
            asyncio.run(main())


class Bench:
    """Opens ends of one session, here or in processes of their own, which are closed with the stack."""

    def __init__(
        self, address: str, token: str | None, stack: AsyncExitStack, set_up: SetUp | None, hold: Hold | None
    ) -> None:
        self.address = address
        self._token = token
        self._stack = stack
        self._place = set_up, hold

    def process(self, role: Role, **options: Any) -> EndProcess:
        """An end in its own process."""
        process = EndProcess(self.address, role, token=self._token, place=self._place, **options)
        self._stack.callback(process.close)
        return process

    async def end(self, role: Role) -> Any:
        """An end here, prepared."""
        engine = connect(self.address, role=role, timeout_s=TIMEOUT_S, bucket_bytes=BUCKET_BYTES, token=self._token)
        await self._stack.enter_async_context(engine)
        await engine.prepare()
        return engine

    async def offer(self, sender: WeightSender, version: int, *, num_peers: int | None = None) -> SyncReport:
        """Send `weights_of(version)` from here, as the processes do."""
        hold = self._place[1]
        if hold is None:
            return await sender.send_weights(weights_of(version).items(), version=version, num_peers=num_peers)
        sender.register_source(hold(weights_of(version)))
        return await sender.send_weights(version=version, num_peers=num_peers)

    async def succeed(
        self,
        version: int,
        receivers: list[WeightReceiver],
        receiving: Sequence[asyncio.Future[dict[str, Tensor]]] | None = None,
    ) -> None:
        """Send one sync from a new sender."""
        await self.send(await self.end(Role.SEND), version, receivers, receiving)

    async def send(
        self,
        sender: WeightSender,
        version: int,
        receivers: list[WeightReceiver],
        receiving: Sequence[asyncio.Future[dict[str, Tensor]]] | None = None,
    ) -> None:
        """Send one sync that must reach all receivers."""
        running = receiving or [asyncio.ensure_future(receive_all(receiver)) for receiver in receivers]
        await sender.connect(len(receivers))
        report = await self.offer(sender, version)
        assert (len(report.receipts), report.lost) == (len(receivers), ())
        for got, receiver in zip(running, receivers, strict=True):
            assert_same(await got, weights_of(version))
            assert (receiver.version, receiver.state) == (version, ReceiverState.COMMITTED)


AnySuite = TypeVar("AnySuite", bound=BetweenProcesses)


def with_bench(work: Callable[[AnySuite, Bench], Awaitable[None]]) -> Callable[[AnySuite], None]:
    """Decorator that makes a test of a coroutine method, which `BetweenProcesses.run_processes` gives a `Bench`."""

    def test(self: AnySuite) -> None:
        self.run_processes(lambda bench: work(self, bench))

    return named_after(work, test)


@contextmanager
def _nothing_left() -> Generator[None]:
    """Fail if a file of ours is left in /dev/shm, or this process still maps a ring."""
    yield
    gc.collect()  # errors keep the frames alive that they came through
    left = [path.name for path in _SHARED_MEMORY.glob("*") if "ckpt" in path.name]
    assert not left, f"left in {_SHARED_MEMORY}: {left}"
    maps = Path("/proc/self/maps")
    assert not maps.is_file() or "rl-ckpt" not in maps.read_text(), "a ring is still mapped after every end was closed"
