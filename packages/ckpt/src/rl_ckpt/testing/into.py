"""Suite of `receive_into`: all of a version arrives in the consumer's own tensors, or it raises."""

from __future__ import annotations

import asyncio
import itertools

import torch

from rl_ckpt.errors import AttestationError, CkptError, DigestError, TensorError
from rl_ckpt.session import capabilities
from rl_ckpt.testing.helpers import (
    Pair,
    Suite,
    assert_same,
    blank,
    failure,
    receive_all,
    sample_weights,
    staged_targets,
    staged_weights,
    with_pair,
)
from rl_ckpt.types import Capability, ReceiverState


class IntoSuite(Suite):
    """Suite of tensors of every kind, staged or not, a part of the model; what does not fit is refused."""

    @with_pair(bucket_bytes=1024)
    async def test_receiving_into_tensors_of_every_kind(self, pair: Pair) -> None:
        """Two receivers; what does not fit is refused in a sentence before anything is committed."""
        weights = {name: tensor.detach() for name, tensor in sample_weights().items()}
        sender = await pair.send_end()
        receivers = {await pair.receive_end(): blank(weights) for _ in range(2)}
        await pair.exchange(sender, receivers, weights, 1)
        first, other = receivers
        for version, wrong in enumerate(({"scale": torch.zeros(2)}, {"another": torch.zeros(3)}), 2):
            sending = asyncio.ensure_future(
                sender.send_weights([("scale", torch.tensor(2.0))], version=version, num_peers=pair.peers(2))
            )
            waiting = asyncio.ensure_future(receive_all(other))
            await failure(TensorError, first.receive_into(wrong))
            await pair.hears_of_it(sending)
            await pair.hears_of_it(waiting)
            assert first.version == 1
            assert sender.version == (version if pair.peers(1) is None else 1)

    @with_pair()
    async def test_targets_sharing_memory_get_each_value_or_nothing(self, pair: Pair) -> None:
        """A head that is tied here and not at the source cannot be received: the last one would be served as both."""
        alias, fused = torch.zeros(40, 30), torch.zeros(8, 30)
        into = {"embed": alias, "head": alias, "qkv": fused, "q": fused[:4], "v": fused[6:], "norm": torch.zeros(3)}
        sender, receiver = await pair.send_end(), await pair.receive_end()
        embed, qkv = torch.randn(40, 30), torch.randn(8, 30)
        weights = {"embed": embed, "head": embed, "qkv": qkv, "q": qkv[:4], "v": qkv[6:], "norm": torch.ones(3)}
        wrong = [({"head": -embed}, "'embed', 'head'"), ({"v": -qkv[6:]}, "'q', 'qkv', 'v'")]
        versions = itertools.count(1)
        for other, names in wrong:
            version = next(versions)
            await pair.exchange(sender, {receiver: into}, weights, version)
            for is_staged, state in (True, ReceiverState.COMMITTED), (False, ReceiverState.POISONED):
                sending = asyncio.ensure_future(sender.send_weights((weights | other).items(), version=next(versions)))
                error = await failure(Exception, receiver.receive_into(into, staged=is_staged))
                if not isinstance(error, DigestError):  # where one was read over the other before it was verified
                    assert isinstance(error, TensorError), repr(error)
                    assert f"{names} share memory" in str(error), error
                await pair.hears_of_it(sending)
                assert (receiver.version, receiver.state) == (version, state)
                if is_staged:
                    assert_same(into, weights)

    @with_pair()
    async def test_a_part_of_the_model(self, pair: Pair) -> None:
        """LoRA adapters alone, over and over: the base stays, the bytes are those of the adapters."""
        base = {"base.weight": torch.randn(300, 300)}
        lora = {"lora_A.weight": torch.randn(8, 300), "lora_B.weight": torch.zeros(300, 8)}
        sender, receiver = await pair.send_end(), await pair.receive_end()
        into = blank(base | lora)
        await pair.exchange(sender, {receiver: into}, base | lora, 1)
        for version in (2, 3):
            lora = {name: torch.randn(tensor.shape) for name, tensor in lora.items()}
            report = await pair.exchange(sender, {receiver: into}, lora, version, strict=False)
            assert report.num_tensors == 2
            assert report.num_bytes == 2 * 8 * 300 * 4
            assert_same(into, base | lora)
        receiving = asyncio.ensure_future(receiver.receive_into(into))
        await pair.hears_of_it(sender.send_weights(lora.items(), version=4))
        error = await failure(TensorError, receiving)
        assert "'base.weight'" in str(error), error

    @with_pair()
    async def test_an_engine_that_holds_something_else_is_put_back(self, pair: Pair) -> None:
        """Attestation looks at what was installed."""
        first, second = staged_weights(1), staged_weights(2)
        sender, receiver = await pair.send_end(), await pair.receive_end()
        mine = staged_targets(first)
        await asyncio.gather(receiver.receive_into(mine, staged=True), sender.send_weights(first.items(), version=1))
        receiver.attest_with(lambda: first)
        receiving = asyncio.ensure_future(receiver.receive_into(mine, staged=True))
        await pair.hears_of_it(sender.send_weights(second.items(), version=2), AttestationError)
        await failure(CkptError, receiving)
        assert_same(mine, first)
        assert (receiver.version, receiver.state) == (1, ReceiverState.COMMITTED)

    def test_a_part_is_staged_and_what_does_not_fit_is_refused(self) -> None:
        """Tensors that did not come stay; and differences are not asked for."""

        async def work(pair: Pair) -> None:
            weights = staged_weights(1)
            sender, receiver = await pair.send_end(), await pair.receive_end()
            mine = staged_targets(weights)
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
            await pair.hears_of_it(sender.send_weights([("wide", torch.ones(3))], version=4))
            await failure(TensorError, receiving)
            assert_same(mine, {**weights, **part})

        self.run(work, delta=Capability.DELTA in capabilities(self.new_address()))
