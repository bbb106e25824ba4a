"""What every backend with a transaction must do with versions: prove them, send their differences, serve them late."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch

from rl_ckpt import tree_digest
from rl_ckpt.errors import AttestationError, DigestError, SyncAbortedError, TensorError, UsageError
from rl_ckpt.testing.aliases import AliasSuite
from rl_ckpt.testing.helpers import assert_same, failure, receive_all, sample_weights
from rl_ckpt.testing.stages import StageSuite
from rl_ckpt.types import ReceiverState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from rl_ckpt.base import WeightReceiver, WeightSender
    from rl_ckpt.testing.helpers import Pair
    from rl_ckpt.types import SyncReport

LEAF_ELEMENTS = (4 << 20) // 4
"""Elements of float32 in the unit that differences are told of."""


def blank(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors of the same names, dtypes and shapes with other bits."""
    return {
        name: torch.full(tensor.shape, 1, dtype=torch.uint8).to(tensor.dtype)
        if tensor.dtype.itemsize > 1
        else torch.ones(tensor.shape, dtype=torch.uint8).view(tensor.dtype)
        for name, tensor in weights.items()
    }


def step(weights: Mapping[str, Tensor], every: int = 100) -> dict[str, Tensor]:
    """The weights after a small update: other bits in one element of `every`."""
    fresh = {name: tensor.clone().contiguous() for name, tensor in weights.items()}
    for tensor in fresh.values():
        tensor.view(-1).view(torch.uint8)[:: every * tensor.itemsize] ^= 1
    return fresh


class VersionSuite(StageSuite, AliasSuite):
    """Attestation, differences, parts of a model, ties, and late receivers. Every receiver here uses `receive_into`."""

    @staticmethod
    async def exchange(
        sender: WeightSender,
        receivers: Mapping[WeightReceiver, dict[str, Tensor]],
        weights: Mapping[str, Tensor],
        version: int,
        *,
        strict: bool = True,
    ) -> SyncReport:
        """One sync into the tensors of every receiver, which then hold it and say so."""
        report, versions = await asyncio.gather(
            sender.send_weights(weights.items(), version=version, num_peers=len(receivers)),
            asyncio.gather(*(receiver.receive_into(into, strict=strict) for receiver, into in receivers.items())),
        )
        assert versions == [version] * len(receivers)
        for into in receivers.values():
            assert_same({name: into[name] for name in weights}, dict(weights))
        assert {receipt.digest for receipt in report.receipts} == {report.digest} == {tree_digest(weights)}
        return report

    def test_receiving_into_tensors_of_every_kind(self) -> None:
        """Of two receivers; and what does not fit is refused in a sentence before anything is committed."""

        async def work(pair: Pair) -> None:
            weights = {name: tensor.detach() for name, tensor in sample_weights().items()}
            sender = await pair.send_end()
            receivers = {await pair.receive_end(): blank(weights) for _ in range(2)}
            await self.exchange(sender, receivers, weights, 1)
            first = next(iter(receivers))
            for wrong in ({"scale": torch.zeros(2)}, {"another": torch.zeros(3)}):
                sending = asyncio.ensure_future(
                    sender.send_weights([("scale", torch.tensor(2.0))], version=2, num_peers=2)
                )
                waiting = [asyncio.ensure_future(receive_all(other)) for other in receivers if other is not first]
                await failure(TensorError, first.receive_into(wrong))
                await failure(SyncAbortedError, sending)
                for other in waiting:
                    await failure(SyncAbortedError, other)
                assert (sender.version, first.version) == (1, 1)

        self.run(work, bucket_bytes=1024)

    def test_targets_that_share_memory_hold_what_was_sent_for_each_or_nothing_is_committed(self) -> None:
        """A head that is tied here and not at the source cannot be received: the last one would be served as both."""

        async def work(pair: Pair) -> None:
            alias, fused = torch.zeros(40, 30), torch.zeros(8, 30)
            into = {"embed": alias, "head": alias, "qkv": fused, "q": fused[:4], "v": fused[6:], "norm": torch.zeros(3)}
            sender, receiver = await pair.send_end(), await pair.receive_end()
            embed, qkv = torch.randn(40, 30), torch.randn(8, 30)
            weights = {"embed": embed, "head": embed, "qkv": qkv, "q": qkv[:4], "v": qkv[6:], "norm": torch.ones(3)}
            wrong = [({"head": -embed}, "'embed', 'head'"), ({"v": -qkv[6:]}, "'q', 'qkv', 'v'")]
            for version, (other, names) in enumerate(wrong, 1):
                await self.exchange(sender, {receiver: into}, weights, version)
                for is_staged, state in (True, ReceiverState.COMMITTED), (False, ReceiverState.POISONED):
                    sending = asyncio.ensure_future(sender.send_weights((weights | other).items(), version=9))
                    error = await failure(Exception, receiver.receive_into(into, staged=is_staged))
                    if not isinstance(error, DigestError):  # where one was read over the other before it was verified
                        assert isinstance(error, TensorError), repr(error)
                        assert f"{names} share memory" in str(error), error
                    await failure(SyncAbortedError, sending)
                    assert (sender.version, receiver.version, receiver.state) == (version, version, state)
                    if is_staged:
                        assert_same(into, weights)

        self.run(work)

    def test_what_the_engine_holds_is_attested_or_nothing_is_committed(self) -> None:
        """A loader that copies is believed; one that skips a tensor, or rounds it, stops the sync everywhere."""

        async def work(pair: Pair) -> None:
            weights = {"a": torch.randn(1000), "b": torch.randn(30, 30)}
            sender, good, bad = await pair.send_end(), await pair.receive_end(), await pair.receive_end()
            mine, theirs = blank(weights), blank(weights)
            held = {name: tensor.clone() for name, tensor in theirs.items()}
            good.attest_with(lambda: mine | {"rotary": torch.ones(2)})
            bad.attest_with(lambda: theirs)
            report = await self.exchange(sender, {good: mine, bad: theirs}, weights, 1)
            assert {(r.is_attested, r.num_bound, r.num_expected) for r in report.receipts} == {
                (True, 2, 3),
                (True, 2, 2),
            }
            bad.attest_with(lambda: held)  # an engine that serves from a copy that nobody updates
            receiving = [
                asyncio.ensure_future(good.receive_into(mine)),
                asyncio.ensure_future(bad.receive_into(theirs)),
            ]
            error = await failure(SyncAbortedError, sender.send_weights(weights.items(), version=2, num_peers=2))
            assert isinstance(error.__cause__, AttestationError)
            assert "holds 2 of them" in str(error), error
            for end in receiving:
                await failure(Exception, end)
            assert (good.version, bad.version, sender.version) == (1, 1, 1)
            assert (good.state, bad.state) == (ReceiverState.POISONED, ReceiverState.POISONED)
            bad.attest_with(lambda: theirs)
            await self.exchange(sender, {good: mine, bad: theirs}, step(weights), 2)

        self.run(work)

    def test_differences_of_every_kind_of_tensor(self) -> None:
        """Small buckets; the bytes are few, the bits are those of the sender, and what has no difference is sent."""

        async def work(pair: Pair) -> None:
            weights = {name: tensor.detach().clone().contiguous() for name, tensor in sample_weights().items()}
            weights["wide"] = torch.randn(40_000)
            sender = await pair.send_end()
            receivers = {await pair.receive_end(): blank(weights) for _ in range(2)}
            dense = await self.exchange(sender, receivers, weights, 1)
            assert dense.num_deltas == 0
            for version in (2, 3):
                weights = step(weights)
                report = await self.exchange(sender, receivers, weights, version)
                assert report.num_deltas > 0
                assert report.num_wire_bytes < dense.num_wire_bytes / 5

        self.run(work, bucket_bytes=1024, delta=True)

    def test_leaves_are_sent_as_they_changed(self) -> None:
        """One unchanged, one changed a little, one so much that it is sent whole, and a short one at the end."""
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
            await self.exchange(sender, {receiver: into}, weights, 1)
            sent = 0
            for version in (2, 3):
                fresh = {name: tensor.clone() for name, tensor in weights.items()}
                fresh["t"][LEAF_ELEMENTS : 2 * LEAF_ELEMENTS : 50] *= -1
                fresh["t"][2 * LEAF_ELEMENTS : 3 * LEAF_ELEMENTS] += 1
                fresh["t"][-1] += version
                report = await self.exchange(sender, {receiver: into}, fresh, version)
                assert report.num_deltas == 2
                assert 4 << 20 < report.num_wire_bytes < 5 << 20
                sent, weights = report.num_wire_bytes, fresh
            return sent

        return self.run(work, delta=True, **options)

    def test_a_base_that_was_tampered_with_is_found_and_replaced(self) -> None:
        """A difference on other bits than the sender's: no commit, and the next sync is whole."""

        async def work(pair: Pair) -> None:
            weights = {"a": torch.randn(50_000), "b": torch.randn(100)}
            sender, receiver = await pair.send_end(), await pair.receive_end()
            into = blank(weights)
            await self.exchange(sender, {receiver: into}, weights, 1)
            into["a"][7] += 1  # an optimizer, a sleep, a bug; in an element that the update leaves alone
            fresh = step(weights)
            receiving = asyncio.ensure_future(receiver.receive_into(into))
            await failure(SyncAbortedError, sender.send_weights(fresh.items(), version=2))
            await failure(DigestError, receiving)
            assert (receiver.version, receiver.state) == (1, ReceiverState.POISONED)
            report = await self.exchange(sender, {receiver: into}, fresh, 2)
            assert report.num_deltas == 0

        self.run(work, delta=True)

    def test_a_part_of_the_model(self) -> None:
        """LoRA adapters alone, over and over: the base stays, the bytes are those of the adapters."""

        async def work(pair: Pair) -> None:
            base = {"base.weight": torch.randn(300, 300)}
            lora = {"lora_A.weight": torch.randn(8, 300), "lora_B.weight": torch.zeros(300, 8)}
            sender, receiver = await pair.send_end(), await pair.receive_end()
            into = blank(base | lora)
            await self.exchange(sender, {receiver: into}, base | lora, 1)
            for version in (2, 3):
                lora = {name: torch.randn(tensor.shape) for name, tensor in lora.items()}
                report = await self.exchange(sender, {receiver: into}, lora, version, strict=False)
                assert report.num_tensors == 2
                assert report.num_bytes == 2 * 8 * 300 * 4
                assert_same(into, base | lora)
            receiving = asyncio.ensure_future(receiver.receive_into(into))
            await failure(SyncAbortedError, sender.send_weights(lora.items(), version=4))
            error = await failure(TensorError, receiving)
            assert "'base.weight'" in str(error), error

        self.run(work)

    def test_who_comes_late_gets_the_version_in_force_and_then_differences(self) -> None:
        """Whoever was there has nothing to do with it."""

        async def work(pair: Pair) -> None:
            weights = {name: tensor.detach().clone().contiguous() for name, tensor in sample_weights().items()}
            weights["wide"] = torch.randn(40_000)
            sender, first, late = await pair.send_end(), await pair.receive_end(), await pair.receive_end()
            mine, theirs = blank(weights), blank(weights)
            await self.exchange(sender, {first: mine}, weights, 1)
            assert await sender.resend_current() is None
            receiving = asyncio.ensure_future(late.receive_into(theirs))
            async with asyncio.timeout(self.long_s):
                while (report := await sender.resend_current()) is None:  # noqa: ASYNC110  # it is the poll that is tested
                    await asyncio.sleep(0.02)
            assert (await receiving, report.version, len(report.receipts)) == (1, 1, 1)
            assert_same(theirs, weights)
            assert late.digest == first.digest == sender.digest == tree_digest(weights)
            report = await self.exchange(sender, {first: mine, late: theirs}, step(weights), 2)
            assert report.num_deltas > 0

        self.run(work, delta=True)

    def test_without_a_copy_nobody_can_be_served_late(self) -> None:
        """And it says what to do."""

        async def work(pair: Pair) -> None:
            sender = await pair.send_end()
            assert "delta=True" in str(await failure(UsageError, sender.resend_current()))

        self.run(work)
