"""Every moment at which the server or its training processes can end, over fake processes."""

import asyncio
import contextlib
import shutil
import struct
import time

import msgspec
import pytest
from packages.tinker.tests.support import FakeGroup

from rl_tinker.errors import JournalError
from rl_tinker.service.scheduler import Scheduler
from rl_tinker.service.store import Store
from rl_tinker.types import AdapterSpec, Kind, Model, Operation, Session, Status
from rl_tinker.wire.protobuf import message

MODEL = "s:train:0"


def body(weight, model=MODEL):
    request = message("ForwardBackwardRequest")(model_id=model, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = b"\5\0\0\0"
    targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
    targets.dtype, targets.dense = 2, (6).to_bytes(8, "little")
    weights.dtype, weights.dense = 1, struct.pack("<f", weight)
    return request.SerializeToString()


def step(rate):
    return msgspec.json.encode({"model_id": MODEL, "adam_params": {"learning_rate": rate}})


SCRIPT = [
    (Kind.CREATE, b""),
    (Kind.FORWARD_BACKWARD, body(1.0)),
    (Kind.FORWARD_BACKWARD, body(2.0)),
    (Kind.OPTIM_STEP, step(0.5)),
    (Kind.FORWARD, body(1.0)),
    (Kind.SAVE, msgspec.json.encode({"model_id": MODEL, "path": "one"})),
    (Kind.FORWARD_BACKWARD, body(4.0)),
    (Kind.OPTIM_STEP, step(0.25)),
    (Kind.SAVE_FOR_SAMPLER, msgspec.json.encode({"model_id": MODEL, "sampling_session_seq_id": 3})),
    (Kind.LOAD, msgspec.json.encode({"model_id": MODEL, "path": f"tinker://{MODEL}/weights/one", "optimizer": True})),
    (Kind.FORWARD_BACKWARD, body(8.0)),
    (Kind.OPTIM_STEP, step(1.0)),
]
VALUE = 7.0 + 0.5 * 3 + 8.0
"""Of the model in the end: its seed, the step before the checkpoint, and the one after the load."""


def operation(seq, kind, body, model=MODEL, tenant="a"):
    return Operation(
        id=f"{model}:{seq}", model=model, tenant=tenant, seq=seq, kind=kind, body=body, created=float(seq), tokens=1
    )


def new_model(name=MODEL, tenant="a", seed=7):
    adapter = AdapterSpec(seed=seed)
    return Model(id=name, session="s", tenant=tenant, created=0.0, last_request=0.0, adapter=adapter)


@contextlib.asynccontextmanager
async def scheduled(folder, group, max_adapters=4):
    folder.mkdir(exist_ok=True)
    store = Store(folder)
    store.apply([Session(id="s", tenant="a", created=0.0, seen=time.time())])
    scheduler = Scheduler(store, group, max_adapters=max_adapters)
    scheduler.start()
    try:
        yield store, scheduler
    finally:
        await scheduler.stop()
        store.close()


async def run_script(store, scheduler):
    """What a client does, again after each loss: it sends what it has no answer to, and polls every future."""
    for seq, (kind, content) in enumerate(SCRIPT):
        await scheduler.submit(operation(seq, kind, content), *([new_model()] if seq == 0 else []))
    results = []
    for seq in range(len(SCRIPT)):
        assert await store.wait_for(store.operations[f"{MODEL}:{seq}"], 10.0)
        ended = store.operations[f"{MODEL}:{seq}"]
        assert ended.status == Status.DONE, ended.result
        results.append(ended.result or store.journal.result(ended.id))
    return results


async def undisturbed(folder):
    group = FakeGroup()
    async with scheduled(folder, group) as (store, scheduler):
        results = await run_script(store, scheduler)
    assert group.values[MODEL] == VALUE
    return results, len(group.calls)


@pytest.mark.process
def test_processes_may_be_lost_in_every_command(tmp_path):
    async def run():
        results, num_calls = await undisturbed(tmp_path / "twin")
        for lost in range(num_calls):
            group = FakeGroup()
            group.lose_at = lost
            async with scheduled(tmp_path / str(lost), group) as (store, scheduler):
                assert await run_script(store, scheduler) == results, lost
                assert group.values[MODEL] == VALUE, lost

    asyncio.run(run())


@pytest.mark.process
@pytest.mark.promise("Nothing that was acknowledged is lost when the server is killed")
def test_the_server_may_end_before_and_after_every_commit(tmp_path, monkeypatch):
    images = []

    def image():
        target = tmp_path / f"image-{len(images)}"
        with contextlib.suppress(shutil.Error):  # folders that the journal does not name may go while they are copied
            shutil.copytree(tmp_path / "first", target)
        images.append(target)

    async def run():
        async with scheduled(tmp_path / "first", FakeGroup()) as (store, scheduler):
            commit = store.journal.commit

            def imaged(statements):
                image()
                error = commit(statements)
                image()
                return error

            monkeypatch.setattr(store.journal, "commit", imaged)
            results = await run_script(store, scheduler)
        assert len(images) > 2 * len(SCRIPT)
        for each in images:
            group = FakeGroup()
            async with scheduled(each, group) as (store, scheduler):
                assert await run_script(store, scheduler) == results, each.name
                state = store.models[MODEL].state
                assert (each / "models" / state / "adapter.json").read_text() == str(VALUE), each.name
            Store(each).close()
            assert len(list((each / "models").iterdir())) == 1, "folders that nothing names are removed at the start"

    asyncio.run(run())


def test_an_operation_that_ends_the_processes_fails_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_tinker.service.scheduler.RETRY_S", (0.0,))

    async def run():
        group = FakeGroup()
        async with scheduled(tmp_path / "s", group) as (store, scheduler):
            await scheduler.submit(operation(0, Kind.CREATE, b""), new_model())
            assert await store.wait_for(store.operations[f"{MODEL}:0"], 10.0)
            group.lose_next = 3
            await scheduler.submit(operation(1, Kind.FORWARD_BACKWARD, body(1.0)))
            await scheduler.submit(operation(2, Kind.OPTIM_STEP, step(1.0)))
            assert await store.wait_for(store.operations[f"{MODEL}:2"], 10.0)
            assert store.operations[f"{MODEL}:1"].status == Status.FAILED
            assert b'"category":"server"' in store.operations[f"{MODEL}:1"].result
            assert store.operations[f"{MODEL}:2"].status == Status.DONE
            assert group.values[MODEL] == 7.0

    asyncio.run(run())


def test_models_beyond_the_bound_come_back_with_their_gradients(tmp_path):
    names = [f"s:train:{index}" for index in range(5)]

    async def run():
        group = FakeGroup()
        async with scheduled(tmp_path / "s", group, max_adapters=2) as (store, scheduler):
            for index, name in enumerate(names):
                await scheduler.submit(operation(0, Kind.CREATE, b"", name), new_model(name, seed=index))
                await scheduler.submit(operation(1, Kind.FORWARD_BACKWARD, body(1.0, name), name))
            for name in names:
                content = msgspec.json.encode({"model_id": name, "adam_params": {"learning_rate": 1.0}})
                await scheduler.submit(operation(2, Kind.OPTIM_STEP, content, name))
                await scheduler.submit(operation(3, Kind.FORWARD, body(1.0, name), name))
            for name in names:
                assert await store.wait_for(store.operations[f"{name}:3"], 10.0)
            states = [(tmp_path / "s/models" / store.models[name].state / "adapter.json").read_text() for name in names]
            assert states == [str(index + 1.0) for index in range(5)]
            assert len(group.values) <= 2

    asyncio.run(run())


def test_a_tenant_with_many_requests_does_not_delay_another(tmp_path):
    async def run():
        store = Store(tmp_path)
        scheduler = Scheduler(store, FakeGroup(), max_adapters=4)
        for tenant, count in (("flood", 50), ("small", 1)):
            name = f"s:train:{tenant}"
            store.apply([new_model(name, tenant)])
            store.models[name].next_seq = 1
            for seq in range(1, count + 1):
                await scheduler.submit(operation(seq, Kind.FORWARD_BACKWARD, body(1.0, name), name, tenant))
        first = scheduler.next_batch()
        assert {each.tenant for each in first} == {"flood", "small"}
        store.close()

    asyncio.run(run())


def test_operations_wait_for_the_ones_before_them(tmp_path):
    async def run():
        group = FakeGroup()
        async with scheduled(tmp_path / "s", group) as (store, scheduler):
            for seq in (2, 1, 0):
                kind, content = SCRIPT[seq]
                store.apply([new_model()])
                await scheduler.submit(operation(seq, kind, content))
            assert await store.wait_for(store.operations[f"{MODEL}:2"], 10.0)
            assert [name for name, _ in group.calls] == ["create", "backward", "backward"]

    asyncio.run(run())


def test_a_fault_of_the_journal_ends_the_wait_of_its_writer(tmp_path, monkeypatch):
    async def run():
        async with scheduled(tmp_path / "s", FakeGroup()) as (store, _):

            def fail(statements):
                raise RuntimeError("no room")

            with monkeypatch.context() as patch:
                patch.setattr(store.journal, "commit", fail)
                with pytest.raises(JournalError, match="cannot be written: no room"):
                    await asyncio.wait_for(store.journal.write(("DELETE FROM curves", ())), 10.0)
            await asyncio.wait_for(store.journal.write(("DELETE FROM curves", ())), 10.0)

    asyncio.run(run())
