"""What a session refuses, and how it ends, inside one process."""

import asyncio
import threading
import time

import pytest
import torch
from ckpt_faults import Fault, inject

import rl_ckpt
from rl_ckpt import (
    AddressError,
    DigestError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
    ReceiverState,
    SyncAbortedError,
    TensorError,
    UsageError,
    WeightReceiver,
    WeightSender,
    connect,
)
from rl_ckpt.sender.packer import NUM_SLOTS
from rl_ckpt.testing import assert_same, failure, new_name, receive_all, sample_weights

WEIGHTS = {f"t{i}": torch.full((1024,), i, dtype=torch.uint8) for i in range(8)}


async def exchange(sender, receivers, version, weights=WEIGHTS):
    """The outcome of every end, errors as values: [sender, receiver, ...]."""
    return await asyncio.gather(
        sender.send_weights(weights.items(), version=version),
        *(receive_all(receiver) for receiver in receivers),
        return_exceptions=True,
    )


def run(work, address=None, num_receivers=1, timeout_s=60.0, bucket_bytes=1024):
    async def main():
        url = address or f"inproc://{new_name()}"
        async with (
            connect(url, role="send", timeout_s=timeout_s, bucket_bytes=bucket_bytes) as sender,
            connect(url, role="receive", timeout_s=timeout_s) as first,
            connect(url, role="receive", timeout_s=timeout_s) as second,
        ):
            receivers = [first, second][:num_receivers]
            await sender.prepare()
            for receiver in receivers:
                await receiver.connect()
            await sender.connect(num_receivers)
            return await work(sender, *receivers)

    return asyncio.run(main())


@pytest.mark.process
def test_a_report_says_where_the_time_went():
    async def work(sender, receiver):
        def source():
            for item in WEIGHTS.items():
                time.sleep(0.02)
                yield item

        async def take():
            async for _ in receiver.receive_weights():
                await asyncio.sleep(0.03)

        report, _ = await asyncio.gather(sender.send_weights(source(), version=1), take())
        assert 0.16 <= report.export_s < report.wall_s
        assert 0.24 <= report.install_s < report.wall_s

    run(work)


def test_a_source_may_wait_for_what_receivers_do_with_items():
    """Buckets that could be announced together are announced before the next item is asked for."""

    async def work(sender, *receivers):
        taken = threading.Semaphore(0)

        def source():
            for i, item in enumerate(WEIGHTS.items(), 1):
                yield item  # a bucket
                for _ in range(2 * NUM_SLOTS if i == NUM_SLOTS else 0):  # no slot had to be waited for so far
                    assert taken.acquire(timeout=20), "a bucket was filled and not announced"

        async def take(receiver):
            async for _ in receiver.receive_weights():
                taken.release()

        await asyncio.gather(sender.send_weights(source(), version=1), *map(take, receivers))

    run(work, num_receivers=2)


SHORT_S = 2.0
"""Deadline of what must pass it. All else in these tests is quicker."""


def deadline_of(fault, on):
    """Some messages are waited for in vain; and who loses its sender before it was given anything waits for another."""
    is_awaited = fault is Fault.DROP and on in {"ready", "seal", "staged", "commit", "committed"}
    return SHORT_S if is_awaited or (fault, on) == (Fault.KILL, "buckets") else 60.0


# What a fault leads to: kind of message, fault, cause of the sender's error (None: it committed), error and state of
# the receiver that it happens to.
FAULTS = [
    ("ready", Fault.DROP, PeerTimeoutError, (PeerTimeoutError,), ReceiverState.IDLE),
    ("begin", Fault.DROP, ProtocolError, (ProtocolError,), ReceiverState.IDLE),
    ("begin", Fault.FLIP, ProtocolError, (ProtocolError,), ReceiverState.IDLE),
    ("manifest", Fault.DROP, ProtocolError, (ProtocolError,), ReceiverState.IDLE),
    ("buckets", Fault.DROP, ProtocolError, (ProtocolError,), ReceiverState.IDLE),
    ("buckets", Fault.FLIP, DigestError, (DigestError,), ReceiverState.IDLE),
    ("buckets", Fault.KILL, PeerLostError, (PeerLostError, PeerTimeoutError), ReceiverState.IDLE),
    ("free", Fault.DROP, ProtocolError, (PeerLostError, SyncAbortedError), ReceiverState.POISONED),
    ("free", Fault.KILL, PeerLostError, (PeerLostError,), ReceiverState.POISONED),
    ("free", Fault.FLIP, ProtocolError, (PeerLostError, SyncAbortedError), ReceiverState.POISONED),
    ("seal", Fault.DROP, PeerTimeoutError, (PeerTimeoutError, PeerLostError), ReceiverState.POISONED),
    ("seal", Fault.KILL, PeerLostError, (PeerLostError,), ReceiverState.POISONED),
    ("staged", Fault.DROP, PeerTimeoutError, (PeerTimeoutError, PeerLostError), ReceiverState.POISONED),
    ("staged", Fault.KILL, PeerLostError, (PeerLostError,), ReceiverState.POISONED),
    ("commit", Fault.DROP, None, (PeerTimeoutError, PeerLostError), ReceiverState.POISONED),
    ("commit", Fault.KILL, None, (PeerLostError,), ReceiverState.POISONED),
    ("committed", Fault.DROP, None, None, ReceiverState.COMMITTED),
    ("committed", Fault.KILL, None, None, ReceiverState.COMMITTED),
]


@pytest.mark.process
@pytest.mark.parametrize(("on", "fault", "cause", "error", "state"), FAULTS, ids=lambda value: str(value)[:20])
def test_a_fault_never_passes_for_success(on, fault, cause, error, state):
    address = f"inproc://{new_name()}"

    async def work(sender, receiver):
        sent, got = await exchange(sender, [receiver], 1)
        assert injector.has_struck
        if cause is None:
            assert sender.version == 1
            assert (sent.receipts, len(sent.lost)) == ((), 1), "a receiver that did not confirm is no success"
        else:
            assert isinstance(sent, SyncAbortedError), sent
            assert isinstance(sent.__cause__, cause), repr(sent.__cause__)
            assert sender.version is None
        if error is None:
            assert_same(got, WEIGHTS)
        else:
            assert isinstance(got, error), repr(got)
        assert receiver.state is state
        sent, got = await exchange(sender, [receiver], 2)
        assert_same(got, WEIGHTS)
        assert (receiver.version, receiver.state, len(sent.receipts)) == (2, ReceiverState.COMMITTED, 1)

    with inject(address, fault, on=on) as injector:
        run(work, address, timeout_s=deadline_of(fault, on))


@pytest.mark.promise("A version is committed on all receivers or on none")
@pytest.mark.process
@pytest.mark.parametrize("on", ["buckets", "free", "staged"])
@pytest.mark.parametrize("fault", Fault)
def test_what_happens_to_one_receiver_calls_the_sync_off_for_all(on, fault):
    address = f"inproc://{new_name()}"

    async def work(sender, *receivers):
        sent, *got = await exchange(sender, receivers, 1)
        assert injector.has_struck
        assert isinstance(sent, SyncAbortedError)
        assert all(isinstance(outcome, Exception) for outcome in got), got
        assert {receiver.version for receiver in receivers} == {None}
        sent, *got = await exchange(sender, receivers, 1)
        assert len(sent.receipts) == 2
        for tensors in got:
            assert_same(tensors, WEIGHTS)

    with inject(address, fault, on=on, nth=1) as injector:
        run(work, address, num_receivers=2, timeout_s=deadline_of(fault, on))


@pytest.mark.promise("A corrupt bucket is found on arrival")
def test_a_corrupt_bucket_hands_nothing_out():
    address = f"inproc://{new_name()}"

    async def work(sender, receiver):
        seen = []

        async def consume():
            async for name, _ in receiver.receive_weights():
                seen.append(name)

        sending = asyncio.ensure_future(sender.send_weights(WEIGHTS.items(), version=1))
        error = await failure(DigestError, consume())
        assert "bucket 3 of version 1" in str(error)
        assert seen == ["t0", "t1", "t2"]
        assert receiver.state is ReceiverState.POISONED
        await failure(SyncAbortedError, sending)

    with inject(address, Fault.FLIP, on="buckets", nth=3):
        run(work, address)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "yielded no tensor"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "'a' twice"),
        ({"a": torch.ones(1)}, "yielded 'a'; it must yield .name, tensor., as .items.. of a state dict does"),
        ([("a", 3)], "must yield .str, torch.Tensor."),
        ([(5, torch.ones(1))], "must yield .str, torch.Tensor."),
        ([("a", torch.ones(2, device="meta"))], "on meta"),
        ([("a", torch.eye(2).to_sparse())], "torch.sparse_coo"),
        ([("a", torch.zeros(2, dtype=torch.uint8).view(torch.bits8))], "dtype torch.bits8"),
    ],
    ids=["empty", "twice", "mapping", "no-tensor", "no-name", "meta", "sparse", "bits"],
)
def test_sources_that_are_refused(items, message):
    async def work(sender, receiver):
        receiving = asyncio.ensure_future(receive_all(receiver))
        error = await failure(SyncAbortedError, sender.send_weights(items, version=1))
        assert isinstance(error.__cause__, TensorError)
        await failure(SyncAbortedError, receiving)
        return str(error)

    with pytest.raises(AssertionError, match=message):
        raise AssertionError(run(work))


def test_a_name_is_taken_once_and_free_again_after_close():
    address = f"inproc://{new_name()}"

    async def work():
        async with connect(address, role="send") as sender, connect(address, role="send") as second:
            await sender.prepare()
            await sender.prepare()
            await failure(AddressError, second.prepare())
        async with connect(address, role="send") as third:
            await third.prepare()
            await third.close()
            await failure(UsageError, third.prepare())

    asyncio.run(work())


def test_each_end_does_its_own_half_only():
    async def work(sender, receiver):
        await failure(UsageError, receiver.connect(2))
        await failure(UsageError, sender.connect(0))
        assert isinstance(sender, WeightSender)
        assert isinstance(receiver, WeightReceiver)
        for name in ("send", "send_weights", "register_source", "resend_current"):
            assert hasattr(sender, name)
            assert not hasattr(receiver, name)
        for name in ("recv", "receive_weights", "receive_into", "attest_with", "hold"):
            assert hasattr(receiver, name)
            assert not hasattr(sender, name)

    run(work)


def test_a_sync_that_was_given_up_cannot_be_continued():
    async def work(sender, receiver):
        sending = asyncio.ensure_future(sender.send_weights(WEIGHTS.items(), version=1))
        first = receiver.receive_weights()
        await anext(first)
        got = asyncio.ensure_future(receive_all(receiver))
        error = await failure(SyncAbortedError, sending)
        assert "began anew" in str(error)
        await failure(UsageError, anext(first))
        await sender.send_weights(WEIGHTS.items(), version=1)
        assert_same(await got, WEIGHTS)
        assert receiver.state is ReceiverState.COMMITTED

    run(work)


@pytest.mark.process
def test_the_sender_requires_as_many_receivers_as_it_connected():
    async def work(sender, *receivers):
        await receivers[1].close()
        sent, got = await exchange(sender, receivers[:1], 1)
        assert isinstance(sent, SyncAbortedError)
        assert "of 2 receivers came" in str(sent)
        assert isinstance(got, Exception)
        receiving = asyncio.ensure_future(receive_all(receivers[0]))
        await sender.connect(1)
        await sender.send_weights(WEIGHTS.items(), version=1)
        assert_same(await receiving, WEIGHTS)

    run(work, num_receivers=2, timeout_s=SHORT_S)


def test_the_source_is_drained_by_one_thread():
    threads = []

    def source():
        for item in WEIGHTS.items():
            threads.append(threading.current_thread())
            yield item

    async def work(sender, receiver):
        for version in (1, 2):
            await asyncio.gather(sender.send_weights(source(), version=version), receive_all(receiver))

    run(work)
    assert len(threads) == 16
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()


def test_send_drains_the_source_in_the_calling_thread():
    threads, address = set(), f"inproc://{new_name()}"

    def source():
        for item in WEIGHTS.items():
            threads.add(threading.current_thread())
            yield item

    with connect(address, role="send") as sender, connect(address, role="receive") as receiver:
        consumer = threading.Thread(target=lambda: list(receiver.recv()))
        consumer.start()
        sender.send(source(), version=1)
        consumer.join()
    assert threads == {threading.current_thread()}


def test_closing_ends_a_call_that_waits():
    async def work(sender, receiver):
        waiting = asyncio.ensure_future(receive_all(receiver))
        await asyncio.sleep(0.05)
        await receiver.close()
        await failure(SyncAbortedError, waiting)

    run(work)


def test_weights_that_require_grad_leave_no_graph():
    async def work(sender, receiver):
        layer = torch.nn.Linear(4, 4)
        weights = ((name, parameter * 2) for name, parameter in layer.named_parameters())
        got, _ = await asyncio.gather(receive_all(receiver), sender.send_weights(weights, version=1))
        assert not any(tensor.requires_grad for tensor in got.values())
        assert torch.equal(got["weight"], layer.weight * 2)

    run(work)


def test_samples_are_what_they_say():
    weights = sample_weights()
    assert not weights["transposed"].is_contiguous()
    assert weights["embed.weight"].data_ptr() == weights["lm_head.weight"].data_ptr()
    assert weights["complex"].is_conj()


def test_a_trainer_can_refuse_samples_of_an_uncommitted_digest():
    """Of a server that fell out and kept the version before, and of one whose weights were changed behind its back."""

    async def main():
        url = f"inproc://{new_name()}"
        async with (
            rl_ckpt.connect(url, role="send", timeout_s=30) as sender,
            rl_ckpt.connect(url, role="receive", timeout_s=30) as server,
        ):
            held = {"w": torch.zeros(4, 4)}
            committed_versions = []
            for version in (1, 2):
                weights = {"w": torch.full((4, 4), float(version))}
                stamp = server.digest
                report, _ = await asyncio.gather(
                    sender.send_weights(weights.items(), version=version), server.receive_into(held)
                )
                committed_versions = [report.digest]
                assert stamp not in committed_versions  # sampled before: under nothing, then under version 1
                assert server.digest in committed_versions
            held["w"][0, 0] += 1
            assert rl_ckpt.tree_digest(held) not in committed_versions

    asyncio.run(main())


@pytest.mark.process
def test_a_session_may_say_more_in_a_message_than_a_stranger():
    """A manifest is one message for thousands of names; who is not in a session may send 64 KiB."""
    weights = {"layer." * 20 + str(i): torch.zeros(1, dtype=torch.uint8) for i in range(2000)}

    async def work(sender, receiver):
        sent, got = await exchange(sender, [receiver], 1, weights)
        assert sent.num_tensors == len(weights) == len(got)

    run(work, bucket_bytes=1 << 20)
