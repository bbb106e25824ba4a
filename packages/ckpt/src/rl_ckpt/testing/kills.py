"""What every backend between processes must survive: SIGKILL of either end at every message of the protocol."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rl_ckpt.errors import CkptError, SyncAbortedError
from rl_ckpt.testing.ends import Bench, BetweenProcesses, weights_of
from rl_ckpt.testing.helpers import assert_same, receive_all
from rl_ckpt.types import ReceiverState, Role

if TYPE_CHECKING:
    from torch import Tensor

    from rl_ckpt.base import WeightReceiver

MOMENTS = ("before", "after")


class KillSuite(BetweenProcesses):
    """Before and after each kind of message that an end sends. Nobody hangs, nobody is mixed, and the next sync works.

    Class attributes say which messages a backend has; those of `shm` and `uds` are the least.
    """

    sender_messages: tuple[str, ...] = ("Hello", "Session", "Begin", "Manifest", "Buckets", "Seal", "Commit")
    """What a sender sends in its first sync."""
    receiver_messages: tuple[str, ...] = ("Hello", "Ready", "Free", "Staged", "Committed")
    """What a receiver sends in its first sync."""

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
