"""Sharing a GPU's memory: everything but the calls to CUDA, with both ends in one process."""

import asyncio
import contextlib
import sys
import time

import pytest
import torch
from ckpt_gpu import fake_gpu

import rl_ckpt
from rl_ckpt import BackendError, DigestError, ReceiverState, SyncAbortedError
from rl_ckpt.protocol.channel import Channel
from rl_ckpt.protocol.messages import HANDLE_BYTES
from rl_ckpt.testing import CheckpointEngineSuite, VersionSuite, assert_same, failure, new_name, receive_all
from rl_ckpt.transports.cuda_driver import CudaDriver

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract UNIX sockets need Linux")
pytestmark = on_linux


@pytest.fixture
def cuda():
    with fake_gpu(has_all=True) as driver:
        yield driver


@pytest.mark.slow
@pytest.mark.contract
@pytest.mark.usefixtures("cuda")
class TestCudaIpc(CheckpointEngineSuite, VersionSuite):
    def new_address(self):
        return f"cuda-ipc://{new_name()}"


def run(work, **options):
    async def main():
        url = f"cuda-ipc://{new_name()}"
        async with rl_ckpt.connect(url, role="send", timeout_s=30, **options) as sender:
            await sender.prepare()
            async with rl_ckpt.connect(url, role="receive", timeout_s=30) as receiver:
                return await work(sender, receiver)

    return asyncio.run(main())


def model(num_layers=6):
    """Parameters that are views of two storages, as those of a sharded trainer, and a small one of its own."""
    flat = [torch.randn(40_000), torch.randn(40_000).bfloat16()]
    weights = {f"layers.{i}": flat[i % 2][i * 5000 : (i + 1) * 5000].view(50, 100) for i in range(num_layers)}
    return weights | {"scale": torch.tensor(3.0)}


@pytest.mark.process
def test_one_handle_for_each_allocation_and_once(cuda):
    """And once more only when the source is registered anew; then the mappings before are given back."""

    async def work(sender, receiver):
        weights = model()
        sender.register_source(weights)
        into = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        for version in range(1, 4):
            for tensor in weights.values():
                tensor.mul_(-1.5)
            _, report = await asyncio.gather(receiver.receive_into(into), sender.send_weights(version=version))
            assert_same(into, weights)
            assert (report.num_tensors, report.digest) == (7, rl_ckpt.tree_digest(weights))
            assert len(cuda.exported) == len(cuda.opened) == 1 + 3  # the ring, two flat ones, and the scalar
        weights |= model(4)
        sender.register_source(weights)
        into = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        await asyncio.gather(receiver.receive_into(into), sender.send_weights(version=4))
        assert_same(into, weights)
        assert len(cuda.opened) == 1 + 5
        await receiver.close()
        assert cuda.opened == []

    run(work)


def test_nothing_of_a_mapped_source_goes_through_the_ring(cuda):
    """But what cannot be read as bytes does, in the order of the source."""
    del cuda

    async def work(sender, receiver):
        weights = model()
        weights = {"turned": torch.randn(30, 20).t()} | weights | {"empty": torch.empty(0), "last": torch.ones(7)}
        sender.register_source(weights)
        into = {name: torch.zeros_like(tensor).contiguous() for name, tensor in weights.items()}
        await asyncio.gather(receiver.receive_into(into), sender.send_weights(version=1))
        ring = [slot.clone() for slot in sender.slots]
        weights["layers.1"].add_(1)
        await asyncio.gather(receiver.receive_into(into), sender.send_weights(version=2))
        assert_same(into, weights)
        assert all(map(torch.equal, ring, sender.slots))
        assert_same((await asyncio.gather(receive_all(receiver), sender.send_weights(version=3)))[0], weights)

    run(work, bucket_bytes=1 << 16)


@pytest.mark.process
def test_what_a_consumer_writes_to_is_its_own(cuda):
    """Also where a tensor was never packed."""
    del cuda

    async def work(sender, receiver):
        weights = model()
        kept = {name: tensor.clone() for name, tensor in weights.items()}
        sender.register_source(weights)
        for version, given in ((1, None), (2, weights.items())):
            sending = asyncio.ensure_future(sender.send_weights(given, version=version))
            async for _, tensor in receiver.receive_weights():
                tensor.fill_(0)
            await sending
            assert_same(weights, kept)

    run(work)


@pytest.mark.process
def test_a_bit_that_changes_after_the_digest_is_found(cuda, monkeypatch):
    """The sender's weights change under the receiver's hands: no commit, and who had something written refuses."""
    from rl_ckpt.sender import transaction as _sync

    async def work(sender, receiver):
        weights = model()
        sender.register_source(weights)
        into = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        digests_of = _sync.digests_of

        def damaged(contents):
            found = digests_of(contents)
            weights["layers.3"].data[7, 7] += 1
            return found

        monkeypatch.setattr(_sync, "digests_of", damaged)
        receiving = asyncio.ensure_future(receiver.receive_into(into))
        error = await failure(SyncAbortedError, sender.send_weights(version=1))
        assert isinstance(error.__cause__, DigestError)
        assert "'layers.3'" in str(await failure(DigestError, receiving))
        assert receiver.state is ReceiverState.POISONED
        monkeypatch.setattr(_sync, "digests_of", digests_of)
        await asyncio.gather(receiver.receive_into(into), sender.send_weights(version=1))
        assert_same(into, weights)

    run(work)


@pytest.mark.process
def test_memory_reallocated_at_its_address_is_mapped_anew(cuda):
    """Its address says that nothing has happened, and who mapped it before sees the memory of before."""

    async def work(sender, receiver):
        weights = model()
        sender.register_source(weights)
        into = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        opening = cuda.open
        cuda.open = lambda handle, size: opening(handle, size).clone()
        cuda.close = lambda mapped: None  # nobody opened the clones
        await asyncio.gather(receiver.receive_into(into), sender.send_weights(version=1))
        cuda.open = opening
        weights["layers.3"].add_(1)
        receiving = asyncio.ensure_future(receiver.receive_into(into))
        error = await failure(SyncAbortedError, sender.send_weights(version=2))
        assert isinstance(error.__cause__, DigestError)
        await failure(DigestError, receiving)
        await asyncio.gather(receiver.receive_into(into), sender.send_weights(version=2))
        assert_same(into, weights)

    run(work)


class Library:
    """The calls of libcuda for memory of an expandable segment: it is mapped, and none that IPC can share."""

    def cuPointerGetAttribute(self, into, attribute, pointer):  # noqa: N802
        assert pointer.value
        into._obj.value = {10: 0, 13: 1}[attribute]  # IS_LEGACY_CUDA_IPC_CAPABLE, MAPPED
        return 0


def test_the_driver_is_asked_whether_memory_can_be_shared():
    """By the attribute of that meaning in cuda.h: of expandable segments the others are true."""
    driver = object.__new__(CudaDriver)
    driver._library, driver._context = Library(), contextlib.nullcontext
    with pytest.raises(BackendError, match="expandable_segments:False"):
        driver.allocation_of(torch.ones(1))


@pytest.mark.process
def test_targets_that_moved_are_noticed(cuda):
    """The route of a mapped tensor is kept from sync to sync, as long as both ends of it stay."""
    del cuda

    async def work(sender, receiver):
        weights = model()
        sender.register_source(weights)
        into = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        await asyncio.gather(receiver.receive_into(into), sender.send_weights(version=1))
        kept = into["layers.2"]
        into["layers.2"] = torch.zeros_like(kept)
        into["layers.3"] = torch.zeros(100, 50, dtype=torch.bfloat16).t()
        weights["layers.2"].add_(1)
        await asyncio.gather(receiver.receive_into(into), sender.send_weights(version=2))
        assert_same(into, weights)
        assert not torch.equal(kept, weights["layers.2"])

    run(work)


@pytest.mark.process
def test_a_reinterpreted_target_is_written_as_it_is_now(cuda):
    """At the same address: a square matrix and its transpose, in either order."""
    del cuda

    async def work(sender, receiver):
        weights = {"square": torch.arange(9.0).view(3, 3), "bias": torch.ones(3)}
        sender.register_source(weights)
        memory, bias = torch.zeros(3, 3), torch.zeros(3)
        for version, turned in enumerate([memory, memory.t(), memory]):
            weights["square"].add_(1)
            into = {"square": turned, "bias": bias}
            await asyncio.gather(receiver.receive_into(into), sender.send_weights(version=version))
            assert_same(into, weights)

    run(work)


@pytest.mark.process
def test_the_device_is_waited_for_before_its_data_is_vouched(cuda):
    """An optimizer's kernels, on whatever stream, may have been begun and not have ended."""

    async def work(sender, receiver):
        weights = model()
        sender.register_source(weights)
        into = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        cuda.synchronize = lambda: weights["layers.3"].data.fill_(7)  # the kernel ends
        await asyncio.gather(receiver.receive_into(into), sender.send_weights(version=1))
        assert_same(into, weights)
        assert into["layers.3"][0, 0] == 7

    run(work)


@pytest.mark.process
def test_a_handle_that_cannot_be_opened_leaves_no_mapping_behind(cuda):
    """Those that were opened before it are closed with the session, and not opened again."""

    async def work(sender, receiver):
        sender.register_source(model())
        await asyncio.gather(receive_all(receiver), sender.send_weights(version=1))
        sender.register_source(weights := model())
        opening, opened = cuda.open, []

        def second_fails(handle, size):
            opened.append(handle)
            return opening(bytes(HANDLE_BYTES) if len(opened) == 2 else handle, size)

        cuda.open = second_fails
        receiving = asyncio.ensure_future(receive_all(receiver))
        await failure(SyncAbortedError, sender.send_weights(version=2))
        await failure(BackendError, receiving)
        got, _ = await asyncio.gather(receive_all(receiver), sender.send_weights(version=2))
        assert_same(got, weights)
        assert len(cuda.opened) == 1 + 3
        await receiver.close()
        assert cuda.opened == []

    run(work)


@pytest.mark.process
def test_declarations_behind_an_unmappable_source_are_known(cuda):
    """Or the next sync would fail as well, for a tensor that had never come."""

    async def work(sender, receiver):
        weights = {"layer": torch.randn(50), "turned": torch.randn(30, 20).t()}
        sender.register_source(weights)
        ring, opening = set(cuda.exported), cuda.open
        cuda.open = lambda handle, size: opening(handle if handle in ring else bytes(HANDLE_BYTES), size)
        exporting, heard = cuda.export, Channel.receive

        def slowly(address):  # the receiver has heard of the sync before
            time.sleep(0.3)
            return exporting(address)

        cuda.export = slowly

        def in_one(channel):  # and hears all the rest at once
            if channel is not receiver.connector.connection.channel or len(cuda.exported) == len(ring):
                return heard(channel)
            time.sleep(0.3)
            return heard(channel)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Channel, "receive", in_one)
            receiving = asyncio.ensure_future(receive_all(receiver))
            await failure(SyncAbortedError, sender.send_weights(version=1))
            await failure(BackendError, receiving)
        assert receiver.connector.connection is not None
        cuda.open = opening
        got, _ = await asyncio.gather(receive_all(receiver), sender.send_weights(version=1))
        assert_same(got, weights)

    run(work)


@pytest.mark.process
def test_memory_of_expandable_segments_is_refused(cuda):
    """By the tensor's name, with what to set; nothing is committed."""

    async def work(sender, receiver):
        weights = model()
        cuda.expandable.add(weights["layers.1"].untyped_storage().data_ptr())
        sender.register_source(weights)
        receiving = asyncio.ensure_future(receive_all(receiver))
        error = await failure(SyncAbortedError, sender.send_weights(version=1))
        assert isinstance(error.__cause__, BackendError)
        assert "'layers.1' cannot be shared" in str(error)
        assert "expandable_segments:False" in str(error)
        await failure(SyncAbortedError, receiving)

    run(work)


@pytest.mark.process
def test_a_handle_that_fails_to_open_ends_only_the_sync(cuda):
    """As when a driver refuses: the error is the receiver's, and the next sync works."""

    async def work(sender, receiver):
        weights = model()
        await asyncio.gather(receive_all(receiver), sender.send_weights(weights.items(), version=1))
        sender.register_source(weights)
        ring = set(cuda.exported)
        opening = cuda.open
        cuda.open = lambda handle, size: opening(handle if handle in ring else bytes(HANDLE_BYTES), size)
        receiving = asyncio.ensure_future(receive_all(receiver))
        await failure(SyncAbortedError, sender.send_weights(version=2))
        assert "cuIpcOpenMemHandle" in str(await failure(BackendError, receiving))
        cuda.open = opening
        got, _ = await asyncio.gather(receive_all(receiver), sender.send_weights(version=2))
        assert_same(got, weights)

    run(work)


@pytest.mark.process
def test_without_a_gpu_it_says_so():
    """In a sentence, before anything starts."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")

    async def main():
        async with rl_ckpt.connect(f"cuda-ipc://{new_name()}", role="send") as sender:
            assert "use shm instead" in str(await failure(BackendError, sender.prepare()))

    asyncio.run(main())
