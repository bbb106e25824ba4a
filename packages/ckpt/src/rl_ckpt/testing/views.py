"""Suite of views: how long the tensors that a backend hands out are valid, and for whom."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch

from rl_ckpt.errors import UsageError
from rl_ckpt.testing.helpers import Pair, Suite, assert_same, refusal, sample_weights, sync, with_pair

if TYPE_CHECKING:
    from torch import Tensor

    from rl_ckpt.base import Hold


class ViewSuite(Suite):
    """Views, holds, batches, and the debug mode."""

    @with_pair(bucket_bytes=1024)
    async def test_a_view_stays_until_the_iterator_advances(self, pair: Pair) -> None:
        """However far ahead the sender is, and whatever a consumer wrote to an earlier one."""
        weights = {f"t{i}": torch.full((1024,), i, dtype=torch.uint8) for i in range(20)}
        sender, receiver = await pair.send_end(), await pair.receive_end()
        sending = asyncio.ensure_future(sender.send_weights(weights.items(), version=0))
        async for name, tensor in receiver.receive_weights():
            await asyncio.sleep(0.005)
            assert torch.equal(tensor, weights[name]), name
        await sending

    @with_pair(bucket_bytes=1024)
    async def test_held_tensors_stay_and_the_sync_goes_on(self, pair: Pair) -> None:
        """Through more buckets than the ring has; at most all but one can be held."""
        weights = {f"t{i}": torch.full((1024,), i, dtype=torch.uint8) for i in range(20)} | {
            "split": torch.arange(2000),
            "last": torch.arange(1000),
        }
        sender, receiver = await pair.send_end(), await pair.receive_end()
        assert "under way" in str(refusal(UsageError, receiver.hold))
        sending = asyncio.ensure_future(sender.send_weights(weights.items(), version=0))
        held: dict[str, Tensor] = {}
        holds: list[Hold] = []
        async for name, tensor in receiver.receive_weights():
            if name in {"t1", "t5", "split"}:
                held[name] = tensor
                holds.append(receiver.hold())
            if name == "t9":
                holds[0].release()
                del held["t1"]
            for kept, value in held.items():
                assert torch.equal(value, weights[kept]), (kept, name)
        await sending

    @with_pair(bucket_bytes=1024)
    async def test_every_hold_keeps_its_own_tensors(self, pair: Pair) -> None:
        """Two tensors share a bucket; letting go of one, twice even, leaves the other."""
        weights = {f"t{i}": torch.full((300,), i, dtype=torch.uint8) for i in range(30)}
        sender, receiver = await pair.send_end(), await pair.receive_end()
        sending = asyncio.ensure_future(sender.send_weights(weights.items(), version=0))
        held: dict[str, Tensor] = {}
        holds: list[Hold] = []
        async for name, tensor in receiver.receive_weights():
            if name in {"t0", "t1"}:
                held[name] = tensor
                holds.append(receiver.hold())
            if name == "t4":
                holds[0].release()
                holds[0].release()
                del held["t0"]
            assert all(torch.equal(value, weights[kept]) for kept, value in held.items()), name
        await sending

    @with_pair(bucket_bytes=1024)
    async def test_too_many_holds_are_refused(self, pair: Pair) -> None:
        """A bucket must be left for the rest of the sync."""
        weights = {f"t{i}": torch.full((1024,), i, dtype=torch.uint8) for i in range(20)}
        sender, receiver = await pair.send_end(), await pair.receive_end()
        sending = asyncio.ensure_future(sender.send_weights(weights.items(), version=0))
        taken = 0
        holds: list[Hold] = []
        async for _ in receiver.receive_weights():
            taken += 1
            if taken > 3:
                assert "release one" in str(refusal(UsageError, receiver.hold))
                oldest = holds.pop(0)
                oldest.release()
                oldest.release()
            holds.append(receiver.hold())
        await sending

    @with_pair(bucket_bytes=1024)
    async def test_batches(self, pair: Pair) -> None:
        """The same tensors, as many at a time as landed together."""
        sender, receiver = await pair.send_end(), await pair.receive_end()
        weights = sample_weights()

        async def receive() -> list[list[tuple[str, Tensor]]]:
            return [batch async for batch in receiver.receive_batches(clone=True)]

        batches, report = await asyncio.gather(receive(), sender.send_weights(weights.items(), version=0))
        assert_same(dict(item for batch in batches for item in batch), weights)
        assert 1 < len(batches) < len(weights)
        times = (report.export_s, report.pack_s, report.wire_s, report.verify_s, report.install_s)
        assert all(0 <= time <= report.wall_s for time in times), report
        assert 0 < report.pause_s <= report.wall_s
        assert report.fraction_of_limit is None or report.fraction_of_limit > 0

    @with_pair(bucket_bytes=1024)
    async def test_debug_poisons_what_must_not_be_looked_at_any_more(self, pair: Pair) -> None:
        """A consumer that keeps views is found out; what it holds is left alone until it is released."""
        weights = {f"t{i}": torch.full((256,), float(i)) for i in range(12)}
        sender, receiver = await pair.send_end(), await pair.receive_end(debug=True)
        sending = asyncio.ensure_future(sender.send_weights(weights.items(), version=0))
        kept: dict[str, Tensor] = {}
        hold: Hold | None = None
        async for name, tensor in receiver.receive_weights():
            assert torch.equal(tensor, weights[name])
            assert all(value.isnan().all() for other, value in kept.items() if other != "t3"), name
            kept[name] = tensor
            hold = receiver.hold() if name == "t3" else hold
            assert "t3" not in kept or torch.equal(kept["t3"], weights["t3"])
        assert hold is not None
        await sending
        got, _ = await sync(sender, receiver, weights, 1)
        assert_same(got, weights)
