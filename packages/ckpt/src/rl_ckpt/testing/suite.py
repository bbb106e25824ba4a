"""Suite that every backend must pass, a stranger's too. Both ends run in one process."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_ckpt import connect, tree_digest
from rl_ckpt.errors import AddressError, SyncAbortedError, TensorError, UsageError, VersionError
from rl_ckpt.testing.helpers import (
    Pair,
    Suite,
    assert_same,
    failure,
    receive_all,
    refusal,
    sample_weights,
    sync,
    with_pair,
    works,
)
from rl_ckpt.testing.views import ViewSuite
from rl_ckpt.testing.votes import VoteSuite
from rl_ckpt.types import Capability, ReceiverState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator

    from torch import Tensor

    from rl_ckpt.base import CheckpointEngine, WeightReceiver, WeightSender

LARGE = 3 << 20
"""Bytes of a tensor that streams carry from where it is."""
REFUSED_STATUS = 7
"""Exit status of a child that got the expected error."""


class SessionSuite(Suite):
    """Sessions of any backend: opened and closed, versions that rise, every kind of tensor bit for bit, sources."""

    @with_pair()
    async def test_a_closed_end_says_so(self, pair: Pair) -> None:
        """Opening again and closing again are nothing."""
        sender, receiver = await pair.send_end(), await pair.receive_end()
        assert await sender.prepare() == await sender.prepare()
        assert (sender.digest, receiver.digest) == (None, None)
        _, report = await sync(sender, receiver, sample_weights(), 0)
        assert report.digest == sender.digest == receiver.digest
        for end in (sender, receiver):
            await end.close()
            await end.close()
        await failure(UsageError, sender.send_weights(sample_weights().items(), version=1))
        await failure(UsageError, receive_all(receiver))

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_an_end_is_of_one_process(self) -> None:
        """An end does not pickle; a forked child must open its own, may close it, and the session goes on."""

        async def work(pair: Pair) -> None:
            sender, receiver = await pair.send_end(), await pair.receive_end()
            for version in (0, 1):
                got, _ = await sync(sender, receiver, sample_weights(), version)
                assert_same(got, sample_weights())
                child = os.fork()
                if not child:
                    _use_as_a_child(sender, receiver)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == REFUSED_STATUS  # noqa: ASYNC222  # it has an alarm
            for end in (sender, receiver):
                refusal(TypeError, lambda end=end: pickle.dumps(end))

        self.run(work)

    def test_the_synchronous_twins(self) -> None:
        """`send` and `recv`, each in a thread without an event loop."""
        address, got = self.new_address(), dict[str, "Tensor"]()

        def receive() -> None:
            with connect(address, role="receive", timeout_s=self.long_s, token=self.token) as receiver:
                got.update((name, tensor.clone()) for name, tensor in receiver.recv())

        thread = threading.Thread(target=receive)
        thread.start()
        with connect(address, role="send", timeout_s=self.long_s, token=self.token) as sender:
            sender.send(sample_weights().items(), version=0)
        thread.join()
        assert_same(got, sample_weights())

    @with_pair()
    async def test_what_a_backend_does_not_promise_is_refused(self, pair: Pair) -> None:
        """The error of a capability that is missing says which backend lacks what; nothing is ignored in silence."""
        asked: list[tuple[Capability, dict[str, Any]]] = [
            (Capability.DELTA, {"role": "send", "delta": True}),
            (Capability.DELTA, {"role": "send", "delta": True, "zstd": True}),
            (Capability.VIEWS, {"role": "receive", "debug": True}),
        ]
        for capability, options in asked:

            def ask(options: dict[str, Any] = options) -> CheckpointEngine:
                return connect(pair.address, timeout_s=self.long_s, token=self.token, **options)

            if capability in pair.capabilities:
                await ask().close()
            else:
                assert f"no {capability.value}" in str(refusal(AddressError, ask))
        if Capability.VOTES not in pair.capabilities:
            sender = await pair.send_end()
            weights = sample_weights().items()
            for use in sender.connect(1), sender.send_weights(weights, version=0, num_peers=1):
                assert "no votes" in str(await failure(UsageError, use))

    @with_pair()
    async def test_every_kind_of_tensor_arrives_bit_for_bit(self, pair: Pair) -> None:
        """Empty, scalar, strided, tied, float8 and all the others."""
        weights = sample_weights()
        sender, receiver = await pair.send_end(), await pair.receive_end()
        got, report = await sync(sender, receiver, weights, 3)
        assert_same(got, weights)
        assert report.num_tensors == len(weights)
        assert report.num_bytes == sum(tensor.numel() * tensor.itemsize for tensor in weights.values())

    @with_pair(bucket_bytes=1024)
    async def test_tensors_larger_than_a_bucket_are_put_together(self, pair: Pair) -> None:
        """And so are many small ones around them, through more buckets than there are slots."""
        sizes = [100, 5000, 3, 1024, 1025, 2048, 40_000, 1, 0, 9999]
        weights = {f"t{i}": torch.randint(0, 256, (n,), dtype=torch.uint8) for i, n in enumerate(sizes)}
        sender, receiver = await pair.send_end(), await pair.receive_end()
        got, _ = await sync(sender, receiver, weights, 0)
        assert_same(got, weights)

    @with_pair()
    async def test_versions_and_states(self, pair: Pair) -> None:
        """Over three syncs of changing tensors."""
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
            assert receiver.digest == report.digest == tree_digest(weights)
            pair.require_receipts(report, len(weights), 1)

    @with_pair(bucket_bytes=1024)
    async def test_equal_weights_have_equal_digests(self, pair: Pair) -> None:
        """Whatever was in the ring before; other weights have another digest."""
        sender, receiver = await pair.send_end(), await pair.receive_end()
        digests: list[int] = []
        for version, seed in enumerate((1, 2, 1)):
            _, report = await sync(sender, receiver, sample_weights(seed), version)
            digests.append(report.digest)
        assert digests[0] == digests[2] != digests[1]

    @with_pair()
    async def test_a_receiver_may_come_before_the_sender(self, pair: Pair) -> None:
        """And waits for it."""
        receiver = await pair.receive_end()
        receiving = asyncio.ensure_future(receive_all(receiver))
        await asyncio.sleep(0.1)
        sender = await pair.send_end()
        await sender.send_weights(sample_weights().items(), version=0)
        assert_same(await receiving, sample_weights())

    @with_pair()
    async def test_there_is_one_sender_of_a_session(self, pair: Pair) -> None:
        """A second is refused, and the first goes on as if it had never been."""
        sender, receiver = await pair.send_end(), await pair.receive_end()
        await works(sender, receiver, 0)
        await failure(AddressError, pair.send_end())
        await works(sender, receiver, 1)

    @with_pair()
    async def test_an_interrupt_while_a_session_is_opened(self, pair: Pair) -> None:
        """The name is free again, for this end as well."""
        async with connect(pair.address, role="send", timeout_s=self.long_s, token=self.token) as sender:
            with _InterruptedCopy(), pytest.raises(KeyboardInterrupt):
                sender.send(sample_weights().items(), version=0)
            await works(sender, await pair.receive_end(), 0)

    @with_pair()
    async def test_versions_must_rise(self, pair: Pair) -> None:
        """The same or an older one is refused, without side effects."""
        sender, receiver = await pair.send_end(), await pair.receive_end()
        await works(sender, receiver, 5)
        for version in (5, 4, -1):
            error = await failure(SyncAbortedError, sender.send_weights(sample_weights().items(), version=version))
            assert isinstance(error.__cause__, VersionError)
        await works(sender, receiver, 6)

    @with_pair()
    async def test_the_event_loop_goes_on(self, pair: Pair) -> None:
        """While an end waits for its peer, and while a slow source is drained."""
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

    @with_pair()
    async def test_an_async_source(self, pair: Pair) -> None:
        """Is iterated on the caller's own event loop."""
        loop = asyncio.get_running_loop()

        async def source() -> AsyncIterator[tuple[str, Tensor]]:
            for item in sample_weights().items():
                await asyncio.sleep(0)
                assert asyncio.get_running_loop() is loop
                yield item

        sender, receiver = await pair.send_end(), await pair.receive_end()
        got, _ = await asyncio.gather(receive_all(receiver), sender.send_weights(source(), version=0))
        assert_same(got, sample_weights())

    @with_pair()
    async def test_a_registered_source_is_sent_as_it_is_at_each_sync(self, pair: Pair) -> None:
        """Tensors of all kinds, with large ones in between that are not copied aside; in-place updates are sent."""
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

    @with_pair()
    async def test_a_storage_that_was_replaced_is_an_error_and_not_sent(self, pair: Pair) -> None:
        """The sync commits nothing; registering again repairs it; and a sender without a source says so."""
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

    @with_pair(bucket_bytes=1024)
    async def test_a_source_that_changes_is_not_sent_as_two_versions(self, pair: Pair) -> None:
        """The committed version is that of the beginning, or else nothing is committed and the error says why."""
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


class CheckpointEngineSuite(SessionSuite, VoteSuite, ViewSuite):
    """Suite of backends with a transaction that hand out views of their buckets."""


class _InterruptedCopy(TorchDispatchMode):
    """An interrupt at the first copy in this thread: the one that an opening sender measures, or of a first tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def _use_as_a_child(sender: WeightSender, receiver: WeightReceiver) -> NoReturn:
    """Be refused, close, and exit; killed if any of it hangs."""
    signal.alarm(60)
    status = 1
    try:
        for use in (
            sender.send_weights(sample_weights().items(), version=9), receive_all(receiver), sender.connect(),
            receiver.connect(),
        ):  # fmt: skip
            assert "does not survive a fork" in str(asyncio.run(failure(UsageError, use)))
        for end in (sender, receiver):
            asyncio.run(end.close())
        status = REFUSED_STATUS
    finally:
        os._exit(status)


async def _refused(sending: Awaitable[object]) -> BaseException:
    error = await failure(SyncAbortedError, sending)
    assert isinstance(error.__cause__, TensorError | UsageError), error
    return error
