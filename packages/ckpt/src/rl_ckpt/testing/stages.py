"""What every backend with a transaction must do for receivers that stage a version before they install it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch

from rl_ckpt.errors import AttestationError, SyncAbortedError, TensorError
from rl_ckpt.testing.helpers import Pair, Suite, assert_same, failure, receive_all, sample_weights, until
from rl_ckpt.types import ReceiverState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class StageSuite(Suite):
    """A failure anywhere leaves the tensors of `receive_into(staged=True)` bit for bit as they were."""

    def test_a_failed_sync_leaves_staged_tensors_as_they_were(self) -> None:
        """In the middle of it, by a receiver that votes no, by what the engine holds, by a tensor that is missing."""

        async def work(pair: Pair) -> None:
            first, second = _weights(1), _weights(2)
            sender, receiver, other = await pair.send_end(), await pair.receive_end(), await pair.receive_end()
            mine, theirs = _blank(first), _blank(first)
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

        self.run(work, bucket_bytes=1024)

    def test_an_engine_that_holds_something_else_is_put_back(self) -> None:
        """Attestation looks at what was installed."""

        async def work(pair: Pair) -> None:
            first, second = _weights(1), _weights(2)
            sender, receiver = await pair.send_end(), await pair.receive_end()
            mine = _blank(first)
            await asyncio.gather(
                receiver.receive_into(mine, staged=True), sender.send_weights(first.items(), version=1)
            )
            receiver.attest_with(lambda: first)
            receiving = asyncio.ensure_future(receiver.receive_into(mine, staged=True))
            error = await failure(SyncAbortedError, sender.send_weights(second.items(), version=2))
            assert isinstance(error.__cause__, AttestationError)
            await failure(SyncAbortedError, receiving)
            assert_same(mine, first)
            assert (receiver.version, receiver.state) == (1, ReceiverState.COMMITTED)

        self.run(work)

    def test_a_part_is_staged_and_what_does_not_fit_is_refused(self) -> None:
        """Tensors that did not come stay; and differences are not asked for."""

        async def work(pair: Pair) -> None:
            weights = _weights(1)
            sender, receiver = await pair.send_end(), await pair.receive_end()
            mine = _blank(weights)
            for version in (1, 2):
                weights["wide"].view(-1)[version] += 1
                report, _ = await asyncio.gather(
                    sender.send_weights(weights.items(), version=version), receiver.receive_into(mine, staged=True)
                )
                assert report.num_deltas == 0
                assert_same(mine, weights)
            part = {"wide": torch.randn(weights["wide"].shape)}
            receiving = asyncio.ensure_future(receiver.receive_into(mine, strict=False, staged=True))
            await sender.send_weights(part.items(), version=3)
            await receiving
            assert_same(mine, {**weights, **part})
            receiving = asyncio.ensure_future(receiver.receive_into(mine, staged=True))
            await failure(SyncAbortedError, sender.send_weights([("wide", torch.ones(3))], version=4))
            await failure(TensorError, receiving)
            assert_same(mine, {**weights, **part})

        self.run(work, delta=True)

    def test_who_has_voted_and_hears_no_verdict_refuses(self) -> None:
        """It holds what it held, but others may have committed."""

        async def work(pair: Pair) -> None:
            first, second = _weights(1), _weights(2)
            sender, receiver, slow = await pair.send_end(), await pair.receive_end(), await pair.receive_end()
            mine = _blank(first)
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

        self.run(work)


def _weights(seed: int) -> dict[str, Tensor]:
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in sample_weights(seed).items()}
    weights["wide"] = torch.randn(400, 30, generator=torch.Generator().manual_seed(seed))
    return weights


def _blank(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the same names, dtypes and shapes; one is not contiguous, and two are one."""
    blank = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    blank["wide"] = torch.zeros(30, 400).t()
    blank["lm_head.weight"] = blank["embed.weight"]
    return blank
