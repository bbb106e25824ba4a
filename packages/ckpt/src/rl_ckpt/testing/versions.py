"""Suite of backends that send differences: the sender's bits, by few bytes, also for late receivers."""

from __future__ import annotations

import asyncio

import torch

from rl_ckpt import tree_digest
from rl_ckpt.errors import DigestError, SyncAbortedError, UsageError
from rl_ckpt.testing.aliases import AliasDeltaSuite, AliasSuite
from rl_ckpt.testing.helpers import Pair, assert_same, blank, failure, sample_weights, step, with_pair
from rl_ckpt.testing.into import IntoSuite
from rl_ckpt.types import ReceiverState

LEAF_ELEMENTS = (4 << 20) // 4
"""Elements of float32 in the unit of differences."""


class DeltaSuite(AliasDeltaSuite):
    """Differences, and the committed version for late receivers. Every receiver here uses `receive_into`."""

    @with_pair(bucket_bytes=1024, delta=True)
    async def test_differences_of_every_kind_of_tensor(self, pair: Pair) -> None:
        """Small buckets; the bytes are few, the bits are those of the sender, and what has no difference is sent."""
        weights = {name: tensor.detach().clone().contiguous() for name, tensor in sample_weights().items()}
        weights["wide"] = torch.randn(40_000)
        sender = await pair.send_end()
        receivers = {await pair.receive_end(): blank(weights) for _ in range(2)}
        dense = await pair.exchange(sender, receivers, weights, 1)
        assert dense.num_deltas == 0
        for version in (2, 3):
            weights = step(weights)
            report = await pair.exchange(sender, receivers, weights, version)
            assert report.num_deltas > 0
            assert report.num_wire_bytes < dense.num_wire_bytes / 5

    def test_leaves_are_sent_as_they_changed(self) -> None:
        """Leaves: one unchanged, one changed a little, one that is sent whole, and a short one at the end."""
        self._leaves({})

    def test_compressed_differences(self) -> None:
        """The same bits by fewer bytes."""
        plain, squeezed = self._leaves({}), self._leaves({"zstd": True})
        assert squeezed < plain

    def _leaves(self, options: dict[str, bool]) -> int:
        """Bytes of the difference."""

        async def work(pair: Pair) -> int:
            weights = {"t": torch.randn(3 * LEAF_ELEMENTS + 1000), "frozen": torch.randn(LEAF_ELEMENTS // 2)}
            sender, receiver = await pair.send_end(), await pair.receive_end()
            into = blank(weights)
            await pair.exchange(sender, {receiver: into}, weights, 1)
            sent = 0
            for version in (2, 3):
                fresh = {name: tensor.clone() for name, tensor in weights.items()}
                fresh["t"][LEAF_ELEMENTS : 2 * LEAF_ELEMENTS : 50] *= -1
                fresh["t"][2 * LEAF_ELEMENTS : 3 * LEAF_ELEMENTS] += 1
                fresh["t"][-1] += version
                report = await pair.exchange(sender, {receiver: into}, fresh, version)
                assert report.num_deltas == 2
                assert 4 << 20 < report.num_wire_bytes < 5 << 20
                sent, weights = report.num_wire_bytes, fresh
            return sent

        return self.run(work, delta=True, **options)

    @with_pair(delta=True)
    async def test_a_base_that_was_tampered_with_is_found_and_replaced(self, pair: Pair) -> None:
        """A difference on other bits than the sender's: no commit, and the next sync is whole."""
        weights = {"a": torch.randn(50_000), "b": torch.randn(100)}
        sender, receiver = await pair.send_end(), await pair.receive_end()
        into = blank(weights)
        await pair.exchange(sender, {receiver: into}, weights, 1)
        into["a"][7] += 1  # an optimizer, a sleep, a bug; in an element that the update leaves alone
        fresh = step(weights)
        receiving = asyncio.ensure_future(receiver.receive_into(into))
        await failure(SyncAbortedError, sender.send_weights(fresh.items(), version=2))
        await failure(DigestError, receiving)
        assert (receiver.version, receiver.state) == (1, ReceiverState.POISONED)
        report = await pair.exchange(sender, {receiver: into}, fresh, 2)
        assert report.num_deltas == 0

    @with_pair(delta=True)
    async def test_latecomers_get_the_current_version_then_differences(self, pair: Pair) -> None:
        """Present receivers are not involved."""
        weights = {name: tensor.detach().clone().contiguous() for name, tensor in sample_weights().items()}
        weights["wide"] = torch.randn(40_000)
        sender, first, late = await pair.send_end(), await pair.receive_end(), await pair.receive_end()
        mine, theirs = blank(weights), blank(weights)
        await pair.exchange(sender, {first: mine}, weights, 1)
        assert await sender.resend_current() is None
        receiving = asyncio.ensure_future(late.receive_into(theirs))
        async with asyncio.timeout(self.long_s):
            while (report := await sender.resend_current()) is None:  # noqa: ASYNC110  # it is the poll that is tested
                await asyncio.sleep(0.02)
        assert (await receiving, report.version, len(report.receipts)) == (1, 1, 1)
        assert_same(theirs, weights)
        assert late.digest == first.digest == sender.digest == tree_digest(weights)
        report = await pair.exchange(sender, {first: mine, late: theirs}, step(weights), 2)
        assert report.num_deltas > 0

    @with_pair()
    async def test_without_a_copy_nobody_can_be_served_late(self, pair: Pair) -> None:
        """And it says what to do."""
        sender = await pair.send_end()
        assert "delta=True" in str(await failure(UsageError, sender.resend_current()))


class VersionSuite(IntoSuite, AliasSuite, DeltaSuite):
    """Suite of differences between versions, in tensors of the consumer's own."""
