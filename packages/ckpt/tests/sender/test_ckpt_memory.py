"""Tensors that look like any other, and whose elements are nowhere, or two in one place: refused, and not believed."""

import asyncio

import numpy
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from rl_ckpt import SyncAbortedError, TensorError, VersionError, connect, tree_digest
from rl_ckpt.testing import assert_same, failure, new_name, new_port

VALUES = torch.arange(12.0).view(3, 4)


def freed():
    """As FSDP, an offload or a sleeping engine leave a parameter: its shape is there, and its memory is not."""
    tensor = VALUES.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def freed_view():
    flat = torch.zeros(100)
    tensor = flat[20:32].view(3, 4)
    flat.untyped_storage().resize_(0)
    return tensor


def freed_turned():
    tensor = torch.zeros(4, 3).t()
    tensor.untyped_storage().resize_(0)
    return tensor


def cut_short():
    tensor = VALUES.clone()
    tensor.untyped_storage().resize_(40)
    return tensor


def asynchronous():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(VALUES.clone())


WITHOUT_MEMORY = {
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "freed": freed,
    "freed view": freed_view,
    "cut short": cut_short,
    "freed and turned": freed_turned,
    "wrapper": lambda: TwoTensor(VALUES.clone(), VALUES.clone()),
    "asynchronous": asynchronous,
}
OTHERS = ["shm://{name}", "tcp://127.0.0.1:{port}", "file://{folder}"]


def run(work, url="shm://{name}", folder=""):
    address = url.format(name=new_name(), port=new_port(), folder=folder)
    token = "t" if address.startswith("tcp") else None

    async def main():
        async with (
            connect(address, role="send", timeout_s=30, token=token) as sender,
            connect(address, role="receive", timeout_s=30, token=token) as receiver,
        ):
            await sender.prepare()
            await work(sender, receiver)

    asyncio.run(main())


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_a_source_whose_memory_is_not_there_is_refused(kind):
    """Before anything of it is read; by its name, and the session goes on."""

    async def work(sender, receiver):
        receiving = asyncio.ensure_future(receiver.receive_into({"w": torch.zeros(3, 4)}))
        error = await failure(SyncAbortedError, sender.send_weights({"w": WITHOUT_MEMORY[kind]()}.items(), version=1))
        assert isinstance(error.__cause__, TensorError)
        assert "'w'" in str(error)
        await failure(SyncAbortedError, receiving)
        into = {"w": torch.zeros(3, 4)}
        await asyncio.gather(receiver.receive_into(into), sender.send_weights({"w": VALUES}.items(), version=1))
        assert_same(into, {"w": VALUES})

    run(work)
    with pytest.raises(TensorError, match="'w'"):
        tree_digest({"w": WITHOUT_MEMORY[kind]()})


@pytest.mark.parametrize("url", OTHERS)
@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_a_target_whose_memory_is_not_there_is_refused(kind, url, tmp_path):
    """A model on the meta device has received nothing, whatever torch says of a copy to it."""

    async def work(sender, receiver):
        for version, is_staged in enumerate([False, True], 1):
            sending = asyncio.ensure_future(sender.send_weights({"w": VALUES}.items(), version=version))
            await failure(TensorError, receiver.receive_into({"w": WITHOUT_MEMORY[kind]()}, staged=is_staged))
            if not url.startswith("file"):
                await failure(SyncAbortedError, sending)
            else:
                await sending
            assert receiver.version is None

    run(work, url, tmp_path)


def test_an_uninitialized_parameter_is_refused():
    async def work(sender, receiver):
        lazy = torch.nn.LazyLinear(3).state_dict().items()
        receiving = asyncio.ensure_future(receiver.receive_into({}))
        assert "not initialized" in str(await failure(SyncAbortedError, sender.send_weights(lazy, version=1)))
        await failure(SyncAbortedError, receiving)

    run(work)


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_self_overlapping_target_is_exact_or_uncommitted(is_staged):
    """torch writes to it, and the last of them stays; it is refused only where a whole axis is one element."""

    async def work(sender, receiver):
        window = torch.zeros(8).as_strided((3, 4), (2, 1))
        sending = asyncio.ensure_future(sender.send_weights({"w": VALUES}.items(), version=1))
        error = await failure(TensorError, receiver.receive_into({"w": window}, staged=is_staged))
        assert "elements of 'w' share memory" in str(error)
        await failure(SyncAbortedError, sending)
        same = torch.arange(8.0).as_strided((3, 4), (2, 1))
        gaps = torch.zeros(60).as_strided((3, 4), (20, 2))
        await asyncio.gather(
            receiver.receive_into({"w": window, "gaps": gaps}, staged=is_staged),
            sender.send_weights({"w": same, "gaps": VALUES}.items(), version=1),
        )
        assert_same({"w": window, "gaps": gaps}, {"w": same, "gaps": VALUES})

    run(work)


def test_targets_that_came_to_share_memory_are_noticed():
    """Where they begin is what it was at the sync before."""

    async def work(sender, receiver):
        memory = torch.zeros(8)
        for version, size in enumerate([4, 8], 1):
            into = {"a": memory[:size], "b": memory[4:]}
            weights = {"a": torch.ones(size), "b": torch.full((4,), 2.0)}
            sending = asyncio.ensure_future(sender.send_weights(weights.items(), version=version))
            receiving = asyncio.ensure_future(receiver.receive_into(into))
            if size == 4:
                await asyncio.gather(sending, receiving)
            else:
                await failure(TensorError, receiving)
                await failure(SyncAbortedError, sending)

    run(work)


@pytest.mark.parametrize("url", ["shm://{name}", "file://{folder}"])
def test_a_version_is_an_integer(url, tmp_path):
    """Of whatever kind; and a plain one from then on."""

    async def work(sender, receiver):
        for version in (1.5, "1", None):
            error = await failure(SyncAbortedError, sender.send_weights({"w": VALUES}.items(), version=version))
            assert isinstance(error.__cause__, VersionError)
        _, report = await asyncio.gather(
            receiver.receive_into({"w": torch.zeros(3, 4)}),
            sender.send_weights({"w": VALUES}.items(), version=numpy.int64(3)),
        )
        assert {type(version) for version in (report.version, sender.version, receiver.version)} == {int}

    run(work, url, tmp_path)
