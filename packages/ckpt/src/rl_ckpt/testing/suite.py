"""What every backend must do, whoever wrote it. Both ends run in one process."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_ckpt import connect
from rl_ckpt.errors import AddressError, CkptError, PeerLostError, PeerTimeoutError, SyncAbortedError, VersionError
from rl_ckpt.testing.helpers import assert_same, failure, receive_all, sample_weights, until
from rl_ckpt.testing.opening import OpeningSuite
from rl_ckpt.testing.sources import SourceSuite
from rl_ckpt.testing.views import ViewSuite
from rl_ckpt.types import ReceiverState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from torch import Tensor

    from rl_ckpt.base import WeightReceiver, WeightSender
    from rl_ckpt.testing.helpers import Pair
    from rl_ckpt.types import SyncReport


class CheckpointEngineSuite(OpeningSuite, ViewSuite, SourceSuite):
    """What every backend must do. Both ends run in this process, on one event loop or in threads."""

    def test_every_kind_of_tensor_arrives_bit_for_bit(self) -> None:
        """Empty, scalar, strided, tied, float8 and all the others."""

        async def work(pair: Pair) -> None:
            weights = sample_weights()
            sender, receiver = await pair.send_end(), await pair.receive_end()
            got, report = await asyncio.gather(receive_all(receiver), sender.send_weights(weights.items(), version=3))
            assert_same(got, weights)
            assert report.num_tensors == len(weights)
            assert report.num_bytes == sum(tensor.numel() * tensor.itemsize for tensor in weights.values())

        self.run(work)

    def test_tensors_larger_than_a_bucket_are_put_together(self) -> None:
        """And so are many small ones around them, through more buckets than there are slots."""

        async def work(pair: Pair) -> None:
            sizes = [100, 5000, 3, 1024, 1025, 2048, 40_000, 1, 0, 9999]
            weights = {f"t{i}": torch.randint(0, 256, (n,), dtype=torch.uint8) for i, n in enumerate(sizes)}
            sender, receiver = await pair.send_end(), await pair.receive_end()
            got, _ = await asyncio.gather(receive_all(receiver), sender.send_weights(weights.items(), version=0))
            assert_same(got, weights)

        self.run(work, bucket_bytes=1024)

    def test_versions_states_and_receipts(self) -> None:
        """Over three syncs of changing tensors."""

        async def work(pair: Pair) -> None:
            sender, receiver = await pair.send_end(), await pair.receive_end()
            assert (sender.version, receiver.version, receiver.state) == (None, None, ReceiverState.IDLE)
            for version in (1, 2, 7):
                weights = sample_weights(version) | {f"only_in_{version}": torch.ones(version)}
                sending = asyncio.ensure_future(sender.send_weights(weights.items(), version=version))
                landing = [(receiver.version, receiver.state) async for _ in receiver.receive_weights()]
                report = await sending
                assert set(landing) == {(version, ReceiverState.PREPARING)}
                assert (receiver.version, receiver.state) == (version, ReceiverState.COMMITTED)
                assert (sender.version, sender.state) == (version, ReceiverState.COMMITTED)
                assert [(r.version, r.num_tensors) for r in report.receipts] == [(version, len(weights))]
                assert report.lost == ()

        self.run(work)

    def test_equal_weights_have_equal_digests(self) -> None:
        """Whatever was in the ring before; other weights have another digest."""

        async def work(pair: Pair) -> None:
            sender, receiver = await pair.send_end(), await pair.receive_end()
            digests: list[int] = []
            for version, seed in enumerate((1, 2, 1)):
                _, report = await asyncio.gather(
                    receive_all(receiver), sender.send_weights(sample_weights(seed).items(), version=version)
                )
                digests.append(report.receipts[0].digest)
            assert digests[0] == digests[2] != digests[1]

        self.run(work, bucket_bytes=1024)

    def test_a_receiver_may_come_before_the_sender(self) -> None:
        """And waits for it."""

        async def work(pair: Pair) -> None:
            receiver = await pair.receive_end()
            receiving = asyncio.ensure_future(receive_all(receiver))
            await asyncio.sleep(0.1)
            sender = await pair.send_end()
            await sender.send_weights(sample_weights().items(), version=0)
            assert_same(await receiving, sample_weights())

        self.run(work)

    def test_there_is_one_sender_of_a_session(self) -> None:
        """A second is refused, and the first goes on as if it had never been."""

        async def work(pair: Pair) -> None:
            sender, receiver = await pair.send_end(), await pair.receive_end()
            await self._works(sender, receiver, 0)
            await failure(AddressError, pair.send_end())
            await self._works(sender, receiver, 1)

        self.run(work)

    def test_an_interrupt_while_a_session_is_opened(self) -> None:
        """The name is free again, for this end as well."""

        async def work(pair: Pair) -> None:
            sender = connect(pair.address, role="send", timeout_s=self.long_s, token=self.token)
            with _InterruptedCopy(), suppress(KeyboardInterrupt):
                sender.send(sample_weights().items(), version=0)
            await self._works(sender, await pair.receive_end(), 0)
            await sender.close()

        self.run(work)

    def test_many_receivers_one_joining_late(self) -> None:
        """All get the same bits, and the late one takes part from the next sync on."""

        async def work(pair: Pair) -> None:
            sender = await pair.send_end()
            receivers = [await pair.receive_end() for _ in range(2)]
            for version in (0, 1):
                if version == 1:
                    receivers.append(await pair.receive_end())
                receiving = [asyncio.ensure_future(receive_all(receiver)) for receiver in receivers]
                await sender.connect(len(receivers))
                report = await sender.send_weights(sample_weights(version).items(), version=version)
                assert len(report.receipts) == len(receivers)
                assert len({receipt.digest for receipt in report.receipts}) == 1
                for got in receiving:
                    assert_same(await got, sample_weights(version))

        self.run(work)

    def test_who_comes_in_the_middle_of_a_sync_waits_for_the_next(self) -> None:
        """It is given nothing of the one that is under way, not even its end, and all of the next."""

        async def work(pair: Pair) -> None:
            sender, first, late = await pair.send_end(), await pair.receive_end(), await pair.receive_end()
            old, new = ({f"t{i}": torch.full((1024,), value) for i in range(20)} for value in (1.0, 2.0))
            sending = asyncio.ensure_future(sender.send_weights(old.items(), version=1))
            tensors = _generator(first)
            await anext(tensors)
            waiting = asyncio.ensure_future(receive_all(late))
            await asyncio.sleep(0.2)
            await _exhaust(tensors)
            report = await sending
            assert (len(report.receipts), report.lost) == (1, ())
            assert not waiting.done()
            assert (late.version, late.state) == (None, ReceiverState.IDLE)
            got, _ = await asyncio.gather(receive_all(first), sender.send_weights(new.items(), version=2, num_peers=2))
            assert_same(got, new)
            assert_same(await waiting, new)

        self.run(work, bucket_bytes=4096)

    def test_nobody_commits_before_everybody_has_everything(self) -> None:
        """A receiver that is done waits for one that is not, and both are called off if that one leaves."""

        async def work(pair: Pair) -> None:
            sender = await pair.send_end()
            quick, slow = await pair.receive_end(), await pair.receive_end()
            done = asyncio.ensure_future(receive_all(quick))
            await sender.connect(1)
            waiting = _generator(slow)
            first = asyncio.ensure_future(anext(waiting))
            await sender.connect(2)
            sending = asyncio.ensure_future(sender.send_weights(sample_weights().items(), version=4))
            await first
            await until(lambda: quick.state is ReceiverState.STAGED)
            assert not done.done()
            assert (quick.version, sender.version) == (4, None)
            await waiting.aclose()
            await failure(SyncAbortedError, sending)
            await failure(SyncAbortedError, done)
            assert (quick.state, slow.state) == (ReceiverState.POISONED, ReceiverState.POISONED)
            assert (sender.version, quick.version, slow.version) == (None, None, None)

        self.run(work)

    def test_a_source_that_raises_aborts_everywhere_and_the_next_sync_works(self) -> None:
        """The receivers that were handed tensors are poisoned until then."""

        async def work(pair: Pair) -> None:
            sender, receiver = await pair.send_end(), await pair.receive_end()

            def broken() -> Iterator[tuple[str, Tensor]]:
                for i in range(8):
                    yield f"t{i}", torch.ones(1024, dtype=torch.uint8)
                raise RuntimeError("the export broke")

            receiving = asyncio.ensure_future(receive_all(receiver))
            error = await failure(SyncAbortedError, sender.send_weights(broken(), version=1))
            assert isinstance(error.__cause__, RuntimeError)
            heard = await failure(SyncAbortedError, receiving)
            assert "the export broke" in str(heard)
            assert receiver.version is None
            await self._works(sender, receiver, 1)

        self.run(work, bucket_bytes=1024)

    def test_a_consumer_that_leaves_aborts_the_sync(self) -> None:
        """It is poisoned, the sender says who it was, the rest of the source is drained, and the next sync works."""

        async def work(pair: Pair) -> None:
            sender, receiver = await pair.send_end(), await pair.receive_end()
            taken: list[int] = []

            def source() -> Iterator[tuple[str, Tensor]]:
                for i in range(50):
                    taken.append(i)
                    yield f"t{i}", torch.ones(1024, dtype=torch.uint8)

            sending = asyncio.ensure_future(sender.send_weights(source(), version=1))
            async with aclosing(_generator(receiver)) as tensors:
                async for _ in tensors:
                    break
            error = await failure(SyncAbortedError, sending)
            assert "receiver" in str(error), error
            assert taken == list(range(50))
            assert (receiver.state, receiver.version) == (ReceiverState.POISONED, None)
            await self._works(sender, receiver, 1)

        self.run(work, bucket_bytes=1024)

    def test_waits_end_at_the_deadline_and_name_who_did_not_answer(self) -> None:
        """No sender; no receiver; a receiver that does not receive; a consumer that stops taking."""

        async def work(pair: Pair) -> None:
            hasty = await pair.receive_end(timeout_s=self.short_s)
            error = await failure(PeerTimeoutError, receive_all(hasty))
            assert pair.address in str(error), error
            assert hasty.state is ReceiverState.IDLE
            sender = await pair.send_end(timeout_s=self.short_s)
            error = await failure(PeerTimeoutError, sender.connect())
            assert "0 of 1" in str(error), error
            receiver = await pair.receive_end()
            await receiver.connect()
            await _is_told(sender, "did not call receive_weights")
            stalling = asyncio.ensure_future(_stall(receiver))
            while not stalling.done():
                await _is_told(sender, "did not take")
            await failure(CkptError, _exhaust(await stalling))
            assert receiver.state is ReceiverState.POISONED
            await sender.close()
            await self._works(await pair.send_end(), receiver, 0)

        self.run(work, bucket_bytes=1024)

    def test_versions_must_rise(self) -> None:
        """The same or an older one is refused, and nobody is harmed."""

        async def work(pair: Pair) -> None:
            sender, receiver = await pair.send_end(), await pair.receive_end()
            await self._works(sender, receiver, 5)
            for version in (5, 4, -1):
                error = await failure(SyncAbortedError, sender.send_weights(sample_weights().items(), version=version))
                assert isinstance(error.__cause__, VersionError)
            await self._works(sender, receiver, 6)

        self.run(work)

    def test_the_event_loop_goes_on(self) -> None:
        """While an end waits for its peer, and while a slow source is drained."""

        async def work(pair: Pair) -> None:
            sender, receiver = await pair.send_end(), await pair.receive_end()
            gate = threading.Event()

            def source() -> Iterator[tuple[str, Tensor]]:
                assert gate.wait(self.long_s)
                yield "t", torch.ones(3)

            receiving = asyncio.ensure_future(receive_all(receiver))
            sending = asyncio.ensure_future(sender.send_weights(source(), version=0))
            await asyncio.sleep(0.05)
            assert not sending.done()
            gate.set()  # only a loop that is not blocked gets here
            await asyncio.gather(receiving, sending)

        self.run(work)

    def test_an_async_source(self) -> None:
        """Is iterated on the caller's own event loop."""

        async def work(pair: Pair) -> None:
            loop = asyncio.get_running_loop()

            async def source() -> AsyncIterator[tuple[str, Tensor]]:
                for item in sample_weights().items():
                    await asyncio.sleep(0)
                    assert asyncio.get_running_loop() is loop
                    yield item

            sender, receiver = await pair.send_end(), await pair.receive_end()
            got, _ = await asyncio.gather(receive_all(receiver), sender.send_weights(source(), version=0))
            assert_same(got, sample_weights())

        self.run(work)

    def test_cancelling_either_end(self) -> None:
        """Ends the call, aborts the sync for the other, and harms no later one."""

        async def work(pair: Pair) -> None:
            sender, receiver = await pair.send_end(), await pair.receive_end()
            waiting = asyncio.ensure_future(receive_all(receiver))
            await asyncio.sleep(0.05)
            waiting.cancel()
            await failure(asyncio.CancelledError, waiting)
            assert receiver.state is ReceiverState.IDLE
            stalled = receiver.receive_weights()
            sending = asyncio.ensure_future(sender.send_weights(sample_weights().items(), version=0))
            await anext(stalled)
            sending.cancel()
            await failure(asyncio.CancelledError, sending)
            await failure(SyncAbortedError, _exhaust(stalled))
            await self._works(sender, receiver, 0)

        self.run(work, bucket_bytes=1024)

    @staticmethod
    async def _works(sender: WeightSender, receiver: WeightReceiver, version: int) -> SyncReport:
        weights = sample_weights(version)
        got, report = await asyncio.gather(receive_all(receiver), sender.send_weights(weights.items(), version=version))
        assert_same(got, weights)
        assert (receiver.version, receiver.state) == (version, ReceiverState.COMMITTED)
        return report


class _InterruptedCopy(TorchDispatchMode):
    """An interrupt at the first copy in this thread: the one that an opening sender measures."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


async def _is_told(sender: WeightSender, text: str) -> None:
    """Wait for a sync to fail at a deadline for this reason; where the machine is busy, another deadline may pass."""
    async with asyncio.timeout(CheckpointEngineSuite.long_s):
        while True:
            error = await failure(SyncAbortedError, sender.send_weights(sample_weights().items(), version=0))
            assert isinstance(error.__cause__, PeerTimeoutError), repr(error.__cause__)
            assert "receiver" in str(error), error
            if text in str(error):
                return


async def _stall(receiver: WeightReceiver) -> AsyncIterator[tuple[str, Tensor]]:
    """A sync of which one tensor was taken; where the machine is busy, not of the first that began."""
    while True:
        tensors = receiver.receive_weights()
        with suppress(SyncAbortedError, PeerLostError):
            await anext(tensors)
            return tensors


def _generator(engine: WeightReceiver) -> Any:
    """The iterator of `receive_weights`, which is an async generator in all but its declared type."""
    return engine.receive_weights()


async def _exhaust(iterator: AsyncIterator[tuple[str, Tensor]]) -> None:
    async for _ in iterator:
        pass
