"""Suite of tied weights, for backends with a transaction: sent once, and bound under every name."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from rl_ckpt import tree_digest
from rl_ckpt.errors import DigestError, TensorError
from rl_ckpt.testing.helpers import Pair, Suite, assert_same, failure, receive_all, with_pair

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from rl_ckpt.types import SyncReport

NUM_ELEMENTS = 700
"""Elements of each tensor, float32: several buckets of 1 KiB."""


def bind(memories: Sequence[int | None], tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """A name for each that is said to have one of these memories; None: it is not there."""
    return {f"t{i}": tensors[memory] for i, memory in enumerate(memories) if memory is not None}


def drawn(count: int, seed: int) -> list[Tensor]:
    """Random memories."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUM_ELEMENTS, generator=generator) for _ in range(count)]


class _Lazy(Mapping[str, "Tensor"]):
    """Makes what it is asked for in one buffer, by writes that torch does not count."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def __getitem__(self, name: str) -> Tensor:
        self._buffer.data.fill_(int(name[1:]))
        return self._buffer

    def __iter__(self) -> Iterator[str]:
        return (f"t{i}" for i in range(len(self)))

    def __len__(self) -> int:
        return 4


class AliasSuite(Suite):
    """Tied weights: over any pattern of ties that changes from one sync to the next, whatever the receivers tie."""

    def test_ties_that_come_and_go(self) -> None:
        """Parts of the model as well; to receivers that iterate, stage, and have memory for each or as the sender."""
        chance = random.Random(0)
        self.check_ties([[chance.choice([0, 1, 2, 2, None]) for _ in range(5)] + [5] for _ in range(4)])

    def check_ties(self, syncs: Sequence[Sequence[int | None]]) -> None:
        """Send one version for each list of memories, and compare what every kind of receiver has."""

        async def work(pair: Pair) -> None:
            sender = await pair.send_end()
            own, staged, mapped_source, iterating = [await pair.receive_end() for _ in range(4)]
            mine = {f"t{i}": torch.zeros(NUM_ELEMENTS) for i in range(len(syncs[0]))}
            theirs = {name: tensor.clone() for name, tensor in mine.items()}
            for version, memories in enumerate(syncs):
                weights = bind(memories, drawn(len(memories), version))
                alike = bind(memories, [torch.zeros(NUM_ELEMENTS) for _ in memories])
                kept = {name: tensor.clone() for name, tensor in mine.items()}
                report, *_, got = await asyncio.gather(
                    sender.send_weights(weights.items(), version=version, num_peers=pair.peers(4)),
                    own.receive_into(mine, strict=False),
                    staged.receive_into(theirs, strict=False, staged=True),
                    mapped_source.receive_into(alike),
                    receive_all(iterating),
                )
                for into in (mine, theirs):
                    assert_same(into, kept | weights)
                assert_same(alike, weights)
                assert_same(got, weights)
                _require_sent_once(report, weights)
                pair.require_receipts(report, len(weights), 4)
                assert report.digest == tree_digest(weights)

        self.run(work, bucket_bytes=1024)

    @with_pair()
    async def test_a_registered_source_is_tied_as_well(self, pair: Pair) -> None:
        """A source is tied also where a stream carries it in place; views that overlap are not."""
        embed = torch.randn(1 << 10, 1 << 10)
        weights = {"embed": embed, "norm": torch.ones(3), "half": embed[: 1 << 9], "head": embed, "t": embed.t()}
        weights["bits"] = embed.view(torch.int32)
        sender, receiver = await pair.send_end(), await pair.receive_end()
        sender.register_source(weights)
        into = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}
        into["head"] = torch.zeros(1 << 10, 1 << 10).t()
        for version in (1, 2):
            embed.add_(1)
            report, _ = await asyncio.gather(sender.send_weights(version=version), receiver.receive_into(into))
            assert_same(into, weights)
            assert (report.num_tensors, report.digest) == (len(weights), tree_digest(weights))
            assert report.num_wire_bytes < report.num_bytes - embed.nbytes + 4096

    @with_pair()
    async def test_what_an_iterator_yields_is_never_taken_for_tied(self, pair: Pair) -> None:
        """A buffer that is filled again for each tensor is as many tensors."""
        sender, receiver = await pair.send_end(), await pair.receive_end()
        buffer = torch.zeros(100)
        source = ((f"t{i}", buffer.data.fill_(i)) for i in range(4))
        for version, weights in enumerate([source, _Lazy(buffer).items()]):
            got, _ = await asyncio.gather(receive_all(receiver), sender.send_weights(weights, version=version))
            assert_same(got, {f"t{i}": torch.full((100,), float(i)) for i in range(4)})

    @with_pair()
    async def test_a_tied_target_is_checked_before_anything_is_committed(self, pair: Pair) -> None:
        """A target that is missing, of another shape, or a part of the other's memory."""
        embed = torch.randn(40, 30)
        sender, receiver = await pair.send_end(), await pair.receive_end()
        memory = torch.zeros(41, 30)
        overlapping = {"embed": memory[:40], "head": memory[1:]}
        for version, into in enumerate(
            ({"embed": torch.zeros(40, 30)}, {"embed": embed * 0, "head": torch.zeros(30, 40)}, overlapping)
        ):
            sending = asyncio.ensure_future(
                sender.send_weights({"embed": embed, "head": embed}.items(), version=version)
            )
            error = await failure(Exception, receiver.receive_into(into))
            assert isinstance(error, TensorError | DigestError), repr(error)
            await pair.hears_of_it(sending)
            assert receiver.version is None


class AliasDeltaSuite(Suite):
    """The same by differences."""

    def test_differences_of_ties_that_come_and_go(self) -> None:
        """The bits are right whatever was tied at the version before, and ties cost nothing."""
        chance = random.Random(1)
        self.check_differences([[chance.choice([0, 1, 2, 2]) for _ in range(5)] + [None] for _ in range(4)])

    def check_differences(self, syncs: Sequence[Sequence[int | None]]) -> None:
        """The same with a sender that sends differences, and a late receiver."""

        async def work(pair: Pair) -> None:
            sender, receiver, late = await pair.send_end(), await pair.receive_end(), await pair.receive_end()
            mine = {f"t{i}": torch.zeros(NUM_ELEMENTS) for i in range(len(syncs[0]))}
            theirs = {name: tensor.clone() for name, tensor in mine.items()}
            made = drawn(len(syncs[0]), 0)
            for version, memories in enumerate(syncs):
                for i, memory in enumerate(made):
                    memory[version :: 50 + i] += version
                weights = bind(memories, made)
                expected = {name: tensor.clone() for name, tensor in (mine | weights).items()}
                report, _ = await asyncio.gather(
                    sender.send_weights(weights.items(), version=version, num_peers=1),
                    receiver.receive_into(mine, strict=False),
                )
                assert_same(mine, expected)
                _require_sent_once(report, weights)
                assert {r.digest for r in report.receipts} == {report.digest} == {tree_digest(weights)}
            receiving = asyncio.ensure_future(late.receive_into(theirs, strict=False))
            async with asyncio.timeout(self.long_s):
                while await sender.resend_current() is None:  # noqa: ASYNC110  # it is the poll that is tested
                    await asyncio.sleep(0.02)
            await receiving
            assert_same(theirs, mine)

        self.run(work, bucket_bytes=1024, delta=True)


def _require_sent_once(report: SyncReport, weights: dict[str, Tensor]) -> None:
    memories = {tensor.data_ptr(): tensor.nbytes for tensor in weights.values()}
    assert report.num_tensors == len(weights)
    assert report.num_bytes == sum(tensor.nbytes for tensor in weights.values())
    assert report.num_wire_bytes <= sum(num_bytes + 256 for num_bytes in memories.values())
