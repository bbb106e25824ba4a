"""Suites of backends between processes: SIGKILL of either end, at states of a sync and at every message."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rl_ckpt.errors import CkptError, PeerLostError, SyncAbortedError
from rl_ckpt.testing.ends import Bench, BetweenProcesses, weights_of, with_bench
from rl_ckpt.testing.helpers import assert_same, exhaust, failure, receive_all, until
from rl_ckpt.types import ReceiverState, Role

if TYPE_CHECKING:
    from torch import Tensor

    from rl_ckpt.base import WeightReceiver

MOMENTS = ("before", "after")


class ProcessSuite(BetweenProcesses):
    """Suite of backends between processes: SIGKILL of either end at any state of the protocol.

    Nobody waits until a deadline, the next sync works, and nothing is left behind.
    """

    @with_bench
    async def test_between_two_processes(self, bench: Bench) -> None:
        """The bytes, the version and the receipt."""
        sender, receiver = bench.process(Role.SEND, version=3), bench.process(Role.RECEIVE)
        assert [await sender.says(), await receiver.says()] == ["open", "open"]
        assert await sender.says() == 1
        assert await receiver.says() == (3, sum(int(tensor.sum()) for tensor in weights_of(3).values()))

    @with_bench
    async def test_the_sender_is_killed_before_a_sync(self, bench: Bench) -> None:
        """A receiver that waits for it gets its sync from the successor."""
        sender = bench.process(Role.SEND, stop_after=-1)
        assert [await sender.says(), await sender.says()] == ["open", "stopped"]
        receiver = await bench.end(Role.RECEIVE)
        await receiver.connect()
        receiving = asyncio.ensure_future(receive_all(receiver))
        await asyncio.sleep(0.05)
        sender.kill()
        await bench.succeed(1, [receiver], [receiving])

    @with_bench
    async def test_the_sender_is_killed_in_the_middle_of_a_sync(self, bench: Bench) -> None:
        """Receivers say so at once, name it, refuse to serve, and take the next sync."""
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

    @with_bench
    async def test_the_sender_is_killed_while_it_collects_the_votes(self, bench: Bench) -> None:
        """A receiver that has voted gets no verdict."""
        sender = bench.process(Role.SEND, num_tensors=1, num_peers=2)
        quick, slow = await bench.end(Role.RECEIVE), await bench.end(Role.RECEIVE)
        waiting = slow.receive_weights()
        first = asyncio.ensure_future(anext(waiting))
        done = asyncio.ensure_future(receive_all(quick))
        assert await sender.says() == "open"
        await first
        await until(lambda: quick.state is ReceiverState.STAGED)
        sender.kill()
        await failure(CkptError, done)
        await failure(CkptError, exhaust(waiting))
        assert quick.version is None
        await bench.succeed(1, [quick, slow])

    @with_bench
    async def test_a_receiver_is_killed_between_syncs(self, bench: Bench) -> None:
        """The sender goes on with the others."""
        sender = await bench.end(Role.SEND)
        gone = bench.process(Role.RECEIVE, stop_after=-1)
        assert [await gone.says(), await gone.says()] == ["open", "stopped"]
        await sender.connect(1)
        gone.kill()
        await bench.send(sender, 1, [await bench.end(Role.RECEIVE)])

    @with_bench
    async def test_a_receiver_is_killed_in_the_middle_of_a_sync(self, bench: Bench) -> None:
        """The sync is called off for all, the sender names it, and its successor takes the next."""
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

    @with_bench
    async def test_a_receiver_is_killed_after_its_vote(self, bench: Bench) -> None:
        """While another has not voted: nothing is committed."""
        sender, slow = await bench.end(Role.SEND), await bench.end(Role.RECEIVE)
        killed = bench.process(Role.RECEIVE)
        assert await killed.says() == "open"
        await slow.connect()
        await sender.connect(2)
        sending = asyncio.ensure_future(sender.send_weights(weights_of(1, 1).items(), version=1))
        waiting = slow.receive_weights()
        await anext(waiting)
        await asyncio.sleep(0.3)  # by now the other has taken the only bucket and voted
        killed.kill()
        error = await failure(SyncAbortedError, sending)
        assert f"pid {killed.pid}" in str(error), error
        await failure(SyncAbortedError, exhaust(waiting))
        await bench.send(sender, 1, [slow])


class KillSuite(BetweenProcesses):
    """Suite of SIGKILL before and after each kind of message of an end: none hangs or is mixed, the next sync works.

    Class attributes say which messages a backend has; those of `shm` and `uds` are the least.
    """

    sender_messages: tuple[str, ...] = ("Hello", "Session", "Begin", "Manifest", "Buckets", "Seal", "Commit")
    """Messages that a sender sends in its first sync."""
    receiver_messages: tuple[str, ...] = ("Hello", "Ready", "Free", "Staged", "Committed")
    """Messages that a receiver sends in its first sync."""

    def test_the_sender_is_killed_at_every_message(self) -> None:
        """Two receivers end on the version or on none, say which, and take the next sync from its successor."""
        for kind in self.sender_messages:
            for moment in MOMENTS:
                self.run_processes(lambda bench, at=(kind, moment): self._kill_sender(bench, at))

    def test_a_receiver_is_killed_at_every_message(self) -> None:
        """The sender and another receiver agree on whether the version is committed, and the next sync works."""
        for kind in self.receiver_messages:
            for moment in MOMENTS:
                self.run_processes(lambda bench, at=(kind, moment): self._kill_receiver(bench, at))

    async def _kill_sender(self, bench: Bench, at: tuple[str, str]) -> None:
        killed = bench.process(Role.SEND, version=1, num_peers=2, die_at=at)
        receivers = [await bench.end(Role.RECEIVE), await bench.end(Role.RECEIVE)]
        receiving = [asyncio.ensure_future(self._receive_from_both(receiver, at)) for receiver in receivers]
        await killed.dies()
        await bench.send(await bench.end(Role.SEND), 2, receivers, receiving)

    async def _receive_from_both(self, receiver: WeightReceiver, at: tuple[str, str]) -> dict[str, Tensor]:
        """The successor's sync: the next one, after what a receiver has heard of the end of the first."""
        first = asyncio.ensure_future(receive_all(receiver))
        await asyncio.wait([first])
        if receiver.version == 2:  # it was not in the sync of the sender that died, and has waited on
            return first.result()
        self._examine(receiver, first, at)
        return await receive_all(receiver)

    async def _kill_receiver(self, bench: Bench, at: tuple[str, str]) -> None:
        sender, other = await bench.end(Role.SEND), await bench.end(Role.RECEIVE)
        killed = bench.process(Role.RECEIVE, die_at=at)
        receiving = asyncio.ensure_future(receive_all(other))
        is_early = at[0] in {"Hello", "Proof", "Ready"}  # then it may be gone before it takes part
        num_peers = 1 if is_early else 2
        sending = asyncio.ensure_future(bench.offer(sender, 1, num_peers=num_peers))
        if not is_early:
            await killed.dies()
        try:
            report = await sending
        except SyncAbortedError as error:
            assert f"pid {killed.pid}" in str(error), (at, error)  # noqa: PT017  # the error is one of two outcomes
            assert sender.version is None
        else:
            assert sender.version == 1
            assert len(report.receipts) == 1 or at == ("Committed", "after"), (at, report)
            assert len(report.lost) == (0 if is_early or len(report.receipts) == 2 else 1), (at, report)
        await asyncio.wait([receiving])
        self._examine(other, receiving, at)
        assert other.version == sender.version, at
        version = 2
        while killed.is_alive():  # a sender answers greetings during syncs, and these are short
            sending = bench.offer(sender, version)
            await asyncio.gather(sending, receive_all(other), return_exceptions=True)  # it may die in this one
            version += 1
        await killed.dies()
        await bench.send(sender, version, [other])

    @staticmethod
    def _examine(receiver: WeightReceiver, received: asyncio.Future[dict[str, Tensor]], at: tuple[str, str]) -> None:
        """A receiver has all of the version, or says that it has not."""
        error = received.exception()
        if error is None:
            assert_same(received.result(), weights_of(1))
            assert (receiver.version, receiver.state) == (1, ReceiverState.COMMITTED), at
        else:
            assert isinstance(error, CkptError), (at, error)
            assert receiver.version is None, at
            assert receiver.state in {ReceiverState.IDLE, ReceiverState.POISONED}, at
