"""What every backend must do with a source that is registered once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch

from rl_ckpt.errors import SyncAbortedError, TensorError, UsageError
from rl_ckpt.testing.helpers import Pair, Suite, assert_same, failure, receive_all, refusal, sample_weights

if TYPE_CHECKING:
    from collections.abc import Awaitable

LARGE = 3 << 20
"""Bytes of a tensor that streams carry from where it is."""


class SourceSuite(Suite):
    """Registered sources: sent again and again as they are, and never from a storage that was replaced."""

    def test_a_registered_source_is_sent_as_it_is_at_each_sync(self) -> None:
        """Of all kinds, with large ones in between that are not copied aside; in place updates are what is sent."""

        async def work(pair: Pair) -> None:
            weights = sample_weights() | {f"large{i}": torch.randn(LARGE // 4) for i in range(4)}
            weights["turned"] = torch.randn(1024, LARGE // 4096).t()
            sender, receiver = await pair.send_end(), await pair.receive_end()
            sender.register_source(weights)
            for version in (1, 2):
                with torch.no_grad():
                    weights["large1"].add_(1)
                    weights["strided"].add_(1)
                got, report = await asyncio.gather(receive_all(receiver), sender.send_weights(version=version))
                assert_same(got, weights)
                assert (report.num_tensors, report.version) == (len(weights), version)
            into = {name: torch.empty_like(tensor).contiguous() for name, tensor in weights.items()}
            await asyncio.gather(receiver.receive_into(into), sender.send_weights(version=3))
            assert_same(into, weights)

        self.run(work)

    def test_a_storage_that_was_replaced_is_an_error_and_not_sent(self) -> None:
        """Nothing is committed; registering again mends it; and what a sender was not given it says."""

        async def work(pair: Pair) -> None:
            model = torch.nn.Linear(8, 4)
            sender, receiver = await pair.send_end(), await pair.receive_end()
            assert "register_source" in str(await _refused(sender.send_weights(version=1)))
            sender.register_source(model.named_parameters)
            await asyncio.gather(receive_all(receiver), sender.send_weights(version=1))
            model.weight.data = torch.randn(4, 8)
            assert "storage is another" in str(await _refused(sender.send_weights(version=2)))
            assert sender.version == 1
            sender.register_source(model.named_parameters)
            got, _ = await asyncio.gather(receive_all(receiver), sender.send_weights(version=2))
            assert_same(got, dict(model.named_parameters()))
            del model.bias
            assert "2 tensors were registered and there are 1" in str(await _refused(sender.send_weights(version=3)))
            twice = [("a", torch.ones(1)), ("a", torch.ones(1))]
            assert "twice" in str(refusal(TensorError, lambda: sender.register_source(lambda: twice)))

        self.run(work)

    def test_a_source_that_changes_meanwhile_is_not_sent_as_two_versions(self) -> None:
        """What is committed is what it was when the sync began, or else nothing is and the error says why."""

        async def work(pair: Pair) -> None:
            sender, receiver = await pair.send_end(), await pair.receive_end()
            for version in (1, 2):
                weights = {f"t{i}": torch.zeros(256) for i in range(50)}
                if version == 1:
                    sender.register_source(weights)
                items = None if version == 1 else weights.items()
                sending = asyncio.ensure_future(sender.send_weights(items, version=version))
                got: dict[str, torch.Tensor] = {}
                try:
                    async for name, tensor in receiver.receive_weights(clone=True):
                        if not got:
                            for mine in weights.values():
                                mine.add_(1)
                        got[name] = tensor
                except SyncAbortedError:
                    error = await failure(SyncAbortedError, sending)
                    assert isinstance(error.__cause__, TensorError), repr(error.__cause__)
                    assert "was written to while the sync was under way" in str(error), error
                    assert sender.version != version
                else:
                    await sending
                    assert_same(got, {name: torch.zeros(256) for name in weights})

        self.run(work, bucket_bytes=1024)


async def _refused(sending: Awaitable[object]) -> BaseException:
    error = await failure(SyncAbortedError, sending)
    assert isinstance(error.__cause__, TensorError | UsageError), error
    return error
