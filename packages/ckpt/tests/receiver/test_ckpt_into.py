"""Receiving into tensors of one's own, what the engine then attests, and differences instead of tensors."""

import asyncio

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_hooks

from rl_ckpt import AttestationError, ReceiverState, SyncAbortedError, TensorError, connect, tree_digest
from rl_ckpt.receiver.unpacker import is_plain_on
from rl_ckpt.testing import assert_same, new_name, sample_weights

BUCKET_BYTES = 1 << 16
TRANSPORTS = ["inproc://{}", "shm://{}", "uds://{}", "uds://{}?streams=2"]


def blank(weights):
    """Tensors of the same kinds with other bits."""
    return {name: torch.empty_like(t, memory_format=torch.contiguous_format).fill_(1) for name, t in weights.items()}


def test_memory_with_another_view_is_not_written_as_bytes():
    plain = torch.zeros(3, dtype=torch.complex64)
    views = [plain, plain.conj(), plain.conj().imag, torch.zeros(2, 3).t()]
    assert [is_plain_on(view) for view in views] == [True, False, False, False]


def large(seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = {"embed": (700, 333), "a": (5,), "b": (3, 50_000), "empty": (0, 4), "scalar": (), "c": (300_000,)}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def run(work, url="shm://{}", num_receivers=1, **options):
    async def main():
        address = url.format(new_name())
        sender = connect(address, role="send", timeout_s=30, **({"bucket_bytes": BUCKET_BYTES} | options))
        receivers = [connect(address, role="receive", timeout_s=30) for _ in range(num_receivers)]
        async with sender:
            await sender.prepare()
            try:
                return await work(sender, *receivers)
            finally:
                for receiver in receivers:
                    await receiver.close()

    return asyncio.run(main())


async def exchange(sender, receivers, weights, targets, version, **options):
    """The outcome of every end, errors as values."""
    return await asyncio.gather(
        sender.send_weights(weights.items(), version=version, num_peers=len(receivers)),
        *(receiver.receive_into(into, **options) for receiver, into in zip(receivers, targets, strict=True)),
        return_exceptions=True,
    )


@pytest.mark.parametrize("url", TRANSPORTS)
@pytest.mark.parametrize("bucket_bytes", [1 << 16, 1 << 20, 8 << 20])
def test_every_tensor_lands_where_it_belongs(url, bucket_bytes):
    async def work(sender, *receivers):
        for version, weights in enumerate([sample_weights(), large(), large(1)]):
            targets = [blank(weights) for _ in receivers]
            report, *versions = await exchange(sender, receivers, weights, targets, version)
            assert versions == [version, version], versions
            for target in targets:
                assert_same(target, weights)
            assert {r.digest for r in report.receipts} == {report.digest} == {tree_digest(weights)}
            assert sender.digest == receivers[0].digest == report.digest

    run(work, url, num_receivers=2, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("url", TRANSPORTS)
def test_one_iterates_and_one_receives_into(url):
    async def work(sender, first, second):
        weights, targets = large(), blank(large())

        async def iterate():
            return {name: tensor async for name, tensor in first.receive_weights(clone=True)}

        _, got, _ = await asyncio.gather(
            sender.send_weights(weights.items(), version=1, num_peers=2), iterate(), second.receive_into(targets)
        )
        assert_same(got, weights)
        assert_same(targets, weights)

    run(work, url, num_receivers=2, bucket_bytes=1 << 20)


@pytest.mark.parametrize("staged", [False, True])
def test_targets_that_are_not_plain_memory(staged):
    weights = {"w": torch.randn(6, 5), "v": torch.randn(4), "one": torch.randn(1), "none": torch.empty(0)}
    targets = {
        "w": torch.zeros(5, 6).t(),
        "v": torch.nn.Parameter(torch.zeros(8))[::2],
        "one": torch.zeros(4)[::4],
        "none": torch.zeros(2, 2)[0:0, 0],
    }

    async def work(sender, receiver):
        assert (await exchange(sender, [receiver], weights, [targets], 1, staged=staged))[1] == 1

    run(work)
    assert all(torch.equal(targets[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"w": torch.zeros(3)}, "'v' came, and the consumer has no tensor"),
        ({"w": torch.zeros(3), "v": torch.zeros(4, 1)}, "'v' came as torch.float32 .4.; the consumer's tensor is"),
        ({"w": torch.zeros(3), "v": torch.zeros(4).half()}, "the consumer's tensor is torch.float16"),
        ({"w": torch.zeros(3), "v": torch.zeros(4), "u": torch.zeros(1)}, "1 tensors .* did not come, 'u'"),
    ],
)
def test_a_target_that_does_not_fit_calls_the_sync_off_for_all(targets, message):
    async def work(sender, receiver, other):
        weights = {"w": torch.ones(3), "v": torch.ones(4)}
        sent, got, _ = await exchange(sender, [receiver, other], weights, [targets, blank(weights)], 1)
        assert isinstance(got, TensorError)
        with pytest.raises(TensorError, match=message):
            raise got
        assert isinstance(sent, SyncAbortedError)
        assert (sender.version, receiver.version, other.version) == (None, None, None)
        fitting = [blank(weights), blank(weights)]
        assert (await exchange(sender, [receiver, other], weights, fitting, 1))[1:] == [1, 1]
        assert_same(fitting[0], weights)

    run(work, num_receivers=2)


def test_a_part_of_the_model_is_a_sync_like_any_other():
    """LoRA: the adapters alone, on the base that stays."""
    base = {f"layer.{i}.weight": torch.randn(64, 64) for i in range(4)}
    lora = {f"layer.{i}.lora_{x}": torch.randn(4, 64) for i in range(4) for x in "AB"}

    async def work(sender, receiver):
        targets = blank(base | lora)
        receiver.attest_with(lambda: targets)
        report, version = await exchange(sender, [receiver], base | lora, [targets], 1)
        assert (version, report.receipts[0].num_bound, report.receipts[0].num_expected) == (1, 12, 12)
        fresh = {name: torch.randn_like(tensor) for name, tensor in lora.items()}
        report, version = await exchange(sender, [receiver], fresh, [targets], 2, strict=False)
        assert (version, report.num_bytes) == (2, 8 * 4 * 64 * 4)
        assert (report.receipts[0].num_bound, report.receipts[0].num_expected) == (8, 12)
        assert report.digest == tree_digest(fresh)
        assert_same(targets, base | fresh)

    run(work)


# Attestation: what a loader may do wrong, and what the sender must say of it.
def keep_old(engine, name, tensor):
    if name != "t2":
        engine[name].copy_(tensor)


def drop_new(engine, name, tensor):
    engine.pop("t2", None)
    if name in engine:
        engine[name].copy_(tensor)


def round_off(engine, name, tensor):
    engine[name].copy_(tensor.bfloat16())


@pytest.mark.parametrize(("load", "bound"), [(keep_old, 4), (drop_new, 3), (round_off, 4)])
def test_an_engine_without_the_received_data_commits_nothing(load, bound):
    async def work(sender, receiver):
        weights = {f"t{i}": torch.randn(100) for i in range(4)}
        engine = blank(weights)
        receiver.attest_with(lambda: engine)

        async def consume(load):
            async for name, tensor in receiver.receive_weights():
                load(engine, name, tensor)

        sent, got = await asyncio.gather(
            sender.send_weights(weights.items(), version=1), consume(load), return_exceptions=True
        )
        assert isinstance(sent, SyncAbortedError)
        assert isinstance(sent.__cause__, AttestationError)
        assert f"its engine holds {bound} of them" in str(sent)
        assert isinstance(got, SyncAbortedError)
        assert "its engine holds" in str(got)
        assert (sender.version, receiver.version, receiver.state) == (None, None, ReceiverState.POISONED)
        engine.update(blank(weights))
        report, _ = await asyncio.gather(
            sender.send_weights(weights.items(), version=1),
            consume(lambda engine, name, tensor: engine[name].copy_(tensor)),
        )
        assert [(r.is_attested, r.num_bound, r.digest) for r in report.receipts] == [(True, 4, tree_digest(engine))]

    run(work)


def test_views_of_a_fused_tensor_attest():
    async def work(sender, receiver):
        weights = {"q": torch.randn(4, 8), "k": torch.randn(2, 8), "v": torch.randn(2, 8)}
        fused = torch.zeros(8, 8)
        held = dict(zip(weights, fused.split([4, 2, 2]), strict=True))
        receiver.attest_with(lambda: held)
        report, _ = await exchange(sender, [receiver], weights, [held], 1)
        assert report.receipts[0].is_attested
        assert torch.equal(fused, torch.cat(list(weights.values())))

    run(work)


def changed(weights, every=100):
    fresh = {}
    for name, tensor in weights.items():
        fresh[name] = tensor.clone()
        fresh[name].view(-1)[::every] += 1
    return fresh


def test_whoever_does_not_hold_the_base_gets_everything():
    """A newcomer, other tensors to receive into, an iterator, a large change; and then differences again."""

    async def work(sender, first, second):
        weights = large()
        mine, theirs = blank(weights), blank(weights)
        expected = []

        async def sync(receivers, targets, is_delta, every=100):
            nonlocal weights
            weights = changed(weights, every)
            expected.append(is_delta)
            report, *_ = await exchange(sender, receivers, weights, targets, len(expected))
            assert (report.num_deltas > 0) is is_delta, len(expected)
            for target in targets:
                assert_same(target, weights)

        await sync([first], [mine], is_delta=False)
        await sync([first], [mine], is_delta=True)
        await sync([first, second], [mine, theirs], is_delta=False)
        await sync([first, second], [mine, theirs], is_delta=True)
        await sync([first, second], [mine, blank(weights)], is_delta=False)
        await sync([first, second], [mine, theirs], is_delta=False)
        weights = {name: tensor + 1 for name, tensor in weights.items()}
        report, *_ = await exchange(sender, [first, second], weights, [mine, theirs], 7)
        assert report.num_bytes > report.num_wire_bytes * 0.9
        assert_same(mine, weights)
        expected.append(True)
        await sync([first, second], [mine, theirs], is_delta=True)

    run(work, num_receivers=2, bucket_bytes=1 << 20, delta=True)


def test_a_successor_with_lower_versions_is_followed_safely():
    """A trainer that goes on from an older checkpoint: versions go back, and numbers come again for other weights."""

    async def work(old, first, second):
        weights, other = large(), large(1)
        mine, theirs = blank(weights), blank(weights)
        for version in (1, 2):
            await exchange(old, [first], weights, [mine], version)
        await old.close()
        async with connect(old.address, role="send", timeout_s=30, bucket_bytes=BUCKET_BYTES, delta=True) as new:
            for version in (1, 2):
                other = changed(other)
                await exchange(new, [second], other, [theirs], version)
            assert (first.version, second.version, first.digest == second.digest) == (2, 2, False)
            other = changed(other)  # `first` says that it holds version 2, which is what differences would be told from
            report, *versions = await exchange(new, [first, second], other, [mine, theirs], 3)
            assert (report.num_deltas, versions) == (0, [3, 3])
            assert_same(mine, other)
        async with connect(old.address, role="send", timeout_s=30) as third:
            await exchange(third, [first, second], weights, [mine, theirs], 0)
        assert (first.version, first.digest, first.state) == (0, tree_digest(weights), ReceiverState.COMMITTED)
        assert_same(mine, weights)

    run(work, num_receivers=2, delta=True)


@pytest.mark.parametrize("kind", [{"foreach": True}, {"fused": True}], ids=str)
def test_training_while_its_weights_are_sent_is_an_error(kind):
    """Or a sampler would serve layers of two steps as one version, and nobody would know."""
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters(), **kind)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    async def work(sender, receiver):
        sender.register_source(model.named_parameters)
        for weights in (None, model.state_dict().items()):
            sending = asyncio.ensure_future(sender.send_weights(weights, version=1))
            tensors = receiver.receive_weights()
            name, tensor = await anext(tensors)
            assert torch.equal(tensor, before[name])
            model(torch.ones(1, 128)).sum().backward()
            optimizer.step()
            with pytest.raises(SyncAbortedError, match="was written to while the sync was under way"):
                async for _ in tensors:
                    pass
            with pytest.raises(SyncAbortedError) as error:
                await sending
            assert isinstance(error.value.__cause__, TensorError)
            assert (sender.version, receiver.version, receiver.state) == (None, None, ReceiverState.POISONED)
            before.update(model.state_dict())
            before.update({name: tensor.clone() for name, tensor in before.items()})
        targets = blank(before)
        await asyncio.gather(sender.send_weights(version=1), receiver.receive_into(targets))
        assert_same(targets, dict(model.named_parameters()))

    hooks = len(optimizer_hooks)
    run(work)
    assert len(optimizer_hooks) == hooks, "a sync that has ended looks at no optimizer any more"


def test_the_synchronous_twin():
    import threading

    address, weights = f"shm://{new_name()}", sample_weights()
    targets, versions = blank(weights), []
    with connect(address, role="send") as sender, connect(address, role="receive") as receiver:
        consumer = threading.Thread(target=lambda: versions.append(receiver.recv_into(targets)))
        consumer.start()
        sender.send(weights.items(), version=5)
        consumer.join()
    assert versions == [5]
    assert_same(targets, weights)
