"""Suite of votes, for backends whose sender knows its receivers: all commit a version, or none does."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import torch

from rl_ckpt.errors import AttestationError, CkptError, PeerLostError, PeerTimeoutError, SyncAbortedError
from rl_ckpt.testing.helpers import (
    Pair,
    Suite,
    assert_same,
    blank,
    exhaust,
    failure,
    receive_all,
    sample_weights,
    staged_targets,
    staged_weights,
    step,
    sync,
    until,
    with_pair,
    works,
)
from rl_ckpt.types import ReceiverState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from torch import Tensor

    from rl_ckpt.base import WeightReceiver, WeightSender


class VoteSuite(Suite):
    """Receipts, the vote of every receiver, what an abort leaves, and deadlines that name who did not answer."""

    @with_pair()
    async def test_receipts(self, pair: Pair) -> None:
        """Receipts of every receiver that took part, with what it attests."""
        sender, receiver = await pair.send_end(), await pair.receive_end()
        for version in (1, 2):
            weights = sample_weights(version)
            _, report = await sync(sender, receiver, weights, version)
            assert [(r.version, r.num_tensors) for r in report.receipts] == [(version, len(weights))]
            assert (report.receipts[0].digest, report.lost) == (report.digest, ())

    @with_pair()
    async def test_many_receivers_one_joining_late(self, pair: Pair) -> None:
        """Receivers get the same bits, and the late one takes part from the next sync on."""
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

    @with_pair(bucket_bytes=4096)
    async def test_who_comes_in_the_middle_of_a_sync_waits_for_the_next(self, pair: Pair) -> None:
        """A late receiver is given nothing of the sync under way, not even its end, and all of the next."""
        sender, first, late = await pair.send_end(), await pair.receive_end(), await pair.receive_end()
        old, new = ({f"t{i}": torch.full((1024,), value) for i in range(20)} for value in (1.0, 2.0))
        sending = asyncio.ensure_future(sender.send_weights(old.items(), version=1))
        tensors = _generator(first)
        await anext(tensors)
        waiting = asyncio.ensure_future(receive_all(late))
        await asyncio.sleep(0.2)
        await exhaust(tensors)
        report = await sending
        assert (len(report.receipts), report.lost) == (1, ())
        assert not waiting.done()
        assert (late.version, late.state) == (None, ReceiverState.IDLE)
        got, _ = await asyncio.gather(receive_all(first), sender.send_weights(new.items(), version=2, num_peers=2))
        assert_same(got, new)
        assert_same(await waiting, new)

    @with_pair()
    async def test_nobody_commits_before_everybody_has_everything(self, pair: Pair) -> None:
        """A receiver that is done waits for one that is not, and both are called off if that one leaves."""
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

    @with_pair(bucket_bytes=1024)
    async def test_a_raising_source_aborts_everywhere_and_the_next_works(self, pair: Pair) -> None:
        """The receivers that were handed tensors are poisoned until then."""
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
        await works(sender, receiver, 1)

    @with_pair(bucket_bytes=1024)
    async def test_a_consumer_that_leaves_aborts_the_sync(self, pair: Pair) -> None:
        """The receiver is poisoned, the sender names it, the rest of the source is drained, and the next sync works."""
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
        await works(sender, receiver, 1)

    @with_pair(bucket_bytes=1024)
    async def test_waits_end_at_the_deadline_and_name_who_did_not_answer(self, pair: Pair) -> None:
        """No sender; no receiver; a receiver that does not receive; a consumer that stops taking."""
        hasty = await pair.receive_end(timeout_s=self.short_s)
        error = await failure(PeerTimeoutError, receive_all(hasty))
        assert pair.address in str(error), error
        assert hasty.state is ReceiverState.IDLE
        sender = await pair.send_end(timeout_s=self.short_s)
        error = await failure(PeerTimeoutError, sender.connect())
        assert "0 of 1" in str(error), error
        receiver = await pair.receive_end()
        await receiver.connect()
        await _raises(sender, "did not call receive_weights")
        stalling = asyncio.ensure_future(_stall(receiver))
        while not stalling.done():
            await _raises(sender, "did not take")
        await failure(CkptError, exhaust(await stalling))
        assert receiver.state is ReceiverState.POISONED
        await sender.close()
        await works(await pair.send_end(), receiver, 0)

    @with_pair(bucket_bytes=1024)
    async def test_cancelling_either_end(self, pair: Pair) -> None:
        """Ends the call, aborts the sync for the other, and harms no later one."""
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
        await failure(SyncAbortedError, exhaust(stalled))
        await works(sender, receiver, 0)

    @with_pair()
    async def test_engine_contents_are_attested_or_nothing_is_committed(self, pair: Pair) -> None:
        """A loader that copies is believed; one that skips a tensor, or rounds it, stops the sync everywhere."""
        weights = {"a": torch.randn(1000), "b": torch.randn(30, 30)}
        sender, good, bad = await pair.send_end(), await pair.receive_end(), await pair.receive_end()
        mine, theirs = blank(weights), blank(weights)
        held = {name: tensor.clone() for name, tensor in theirs.items()}
        good.attest_with(lambda: mine | {"rotary": torch.ones(2)})
        bad.attest_with(lambda: theirs)
        report = await pair.exchange(sender, {good: mine, bad: theirs}, weights, 1)
        assert {(r.is_attested, r.num_bound, r.num_expected) for r in report.receipts} == {(True, 2, 3), (True, 2, 2)}
        bad.attest_with(lambda: held)  # an engine that serves from a copy that nobody updates
        receiving = [asyncio.ensure_future(good.receive_into(mine)), asyncio.ensure_future(bad.receive_into(theirs))]
        error = await failure(SyncAbortedError, sender.send_weights(weights.items(), version=2, num_peers=2))
        assert isinstance(error.__cause__, AttestationError)
        assert "holds 2 of them" in str(error), error
        for end in receiving:
            await failure(Exception, end)
        assert (good.version, bad.version, sender.version) == (1, 1, 1)
        assert (good.state, bad.state) == (ReceiverState.POISONED, ReceiverState.POISONED)
        bad.attest_with(lambda: theirs)
        await pair.exchange(sender, {good: mine, bad: theirs}, step(weights), 2)

    @with_pair(bucket_bytes=1024)
    async def test_a_failed_sync_leaves_staged_tensors_as_they_were(self, pair: Pair) -> None:
        """Syncs fail in the middle, by a receiver's no, by what the engine holds, by a tensor that is missing."""
        first, second = staged_weights(1), staged_weights(2)
        sender, receiver, other = await pair.send_end(), await pair.receive_end(), await pair.receive_end()
        mine, theirs = staged_targets(first), staged_targets(first)
        looked: list[bool] = []

        def held() -> dict[str, Tensor]:
            looked.append(torch.equal(mine["wide"], second["wide"]))
            return mine

        receiver.attest_with(held)

        async def sync(weights: object, version: int, *, is_vetoed: bool = False) -> BaseException | None:
            other.attest_with((lambda: 1 / 0) if is_vetoed else None)  # pyright: ignore[reportArgumentType]
            sent, got, _ = await asyncio.gather(
                sender.send_weights(weights, version=version, num_peers=2),  # pyright: ignore[reportArgumentType]
                receiver.receive_into(mine, staged=True),
                other.receive_into(theirs),
                return_exceptions=True,
            )
            assert isinstance(got, BaseException) == isinstance(sent, BaseException), (sent, got)
            return sent if isinstance(sent, BaseException) else None

        def broken() -> Iterator[tuple[str, Tensor]]:
            yield from list(second.items())[:-1]
            raise RuntimeError("the export failed")

        assert await sync(first.items(), 1) is None
        assert_same(mine, first)
        looked.clear()
        for weights, is_vetoed in ((broken(), False), (second.items(), True), (list(second.items())[1:], False)):
            error = await sync(weights, 2, is_vetoed=is_vetoed)
            assert isinstance(error, SyncAbortedError), error
            assert_same(mine, first)
            assert (receiver.version, receiver.state) == (1, ReceiverState.COMMITTED), error
        assert all(looked)  # it may have been installed when another voted no, and was then put back
        assert await sync(second.items(), 2) is None
        assert_same(mine, second)

    @with_pair()
    async def test_who_has_voted_and_hears_no_verdict_refuses(self, pair: Pair) -> None:
        """The receiver keeps its version, but others may have committed."""
        first, second = staged_weights(1), staged_weights(2)
        sender, receiver, slow = await pair.send_end(), await pair.receive_end(), await pair.receive_end()
        mine = staged_targets(first)
        await asyncio.gather(
            sender.send_weights(first.items(), version=1, num_peers=2),
            receiver.receive_into(mine, staged=True),
            receive_all(slow),
        )
        sending = asyncio.ensure_future(sender.send_weights(second.items(), version=2, num_peers=2))
        receiving = asyncio.ensure_future(receiver.receive_into(mine, staged=True))
        waiting = slow.receive_weights()
        await anext(waiting)
        await until(lambda: receiver.state is ReceiverState.STAGED)
        receiving.cancel()
        await asyncio.wait([receiving])
        assert_same(mine, first)
        assert (receiver.version, receiver.state) == (1, ReceiverState.POISONED)
        await failure(SyncAbortedError, sending)


async def _raises(sender: WeightSender, text: str) -> None:
    """Wait for a sync to fail at a deadline for this reason; where the machine is busy, another deadline may pass."""
    async with asyncio.timeout(Suite.long_s):
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
