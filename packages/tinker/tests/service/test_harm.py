"""Requests that fail, and what they leave to others: models without weights, full disks, names that are used again."""

import asyncio
import sqlite3

import msgspec
import pytest
from packages.tinker.tests.service.test_durability import MODEL, body, new_model, operation, scheduled, step
from packages.tinker.tests.support import FakeGroup

from rl_bench.waiting import until
from rl_tinker import journal as db
from rl_tinker.errors import CommandError
from rl_tinker.service.scheduler import Scheduler
from rl_tinker.service.store import Store
from rl_tinker.types import Kind, Model, Session, Status, Verb

OTHER = "s:train:1"
NO_SUCH = msgspec.json.encode({"path": "tinker://x/weights/y", "optimizer": True})


async def ended(store, scheduler, *operations):
    """Outcomes of operations, submitted together."""
    for each in operations:
        await scheduler.submit(each, *([new_model(each.model)] if each.seq == 0 else []))
    for each in operations:
        assert await store.wait_for(store.operations[each.id], 10.0)
    return [store.operations[each.id].status for each in operations]


def saved(seq, name, kind=Kind.SAVE, **more):
    return operation(seq, kind, msgspec.json.encode({"model_id": MODEL, "path": name, **more}))


@pytest.mark.parametrize("kind", [Kind.SAVE, Kind.SAVE_FOR_SAMPLER, Kind.SAVE_EXTERNAL])
def test_a_model_without_weights_saves_nothing(tmp_path, kind):
    """Its state has no folder; the checkpoint would be of the folder of all models, of every tenant."""

    async def run():
        async with scheduled(tmp_path / "s", FakeGroup()) as (store, scheduler):
            await ended(store, scheduler, operation(0, Kind.CREATE, b"", OTHER))
            done = await ended(store, scheduler, operation(0, Kind.LOAD, NO_SUCH), saved(1, "all", kind))
            assert done == [Status.FAILED, Status.FAILED]
            assert not list((tmp_path / "s/checkpoints").iterdir())
            assert b"no weights" in store.operations[f"{MODEL}:1"].result

    asyncio.run(run())


class Gated(FakeGroup):
    """Processes whose forward passes wait, so that requests gather in the queue."""

    def __init__(self):
        super().__init__()
        self.gate = asyncio.Event()

    async def call(self, command):
        if command.verb == Verb.FORWARD:
            await self.gate.wait()
        return await super().call(command)


def test_a_model_without_weights_fails_alone(tmp_path):
    async def run():
        group = Gated()
        async with scheduled(tmp_path / "s", group) as (store, scheduler):
            await ended(store, scheduler, operation(0, Kind.CREATE, b"", OTHER), operation(0, Kind.LOAD, NO_SUCH))
            await scheduler.submit(operation(1, Kind.FORWARD, body(1.0, OTHER), OTHER))
            passes = [operation(1, Kind.FORWARD, body(1.0)), operation(2, Kind.FORWARD, body(1.0, OTHER), OTHER)]
            for each in passes:
                await scheduler.submit(each)
            group.gate.set()
            assert await ended(store, scheduler, *passes) == [Status.FAILED, Status.DONE]
            assert b'"category":"user"' in store.operations[f"{MODEL}:1"].result

    asyncio.run(run())


class FullDisk(FakeGroup):
    """Processes that step a model, and cannot write it."""

    async def call(self, command):
        answer = await super().call(command)
        if command.verb == Verb.OPTIM_STEP and len(self.calls) < 4:
            raise CommandError("no space left on device")
        return answer


def test_a_step_that_could_not_be_saved_has_no_effect(tmp_path):
    async def run():
        group = FullDisk()
        async with scheduled(tmp_path / "s", group) as (store, scheduler):
            done = await ended(
                store, scheduler,
                operation(0, Kind.CREATE, b""),
                operation(1, Kind.FORWARD_BACKWARD, body(2.0)), operation(2, Kind.OPTIM_STEP, step(1.0)),
                operation(3, Kind.FORWARD_BACKWARD, body(1.0)), operation(4, Kind.OPTIM_STEP, step(1.0)),
            )  # fmt: skip
            assert [each == Status.DONE for each in done] == [True, True, False, True, True]
            assert group.values[MODEL] == 7.0 + 1.0

    asyncio.run(run())


@pytest.mark.parametrize("kind", [Kind.SAVE, Kind.SAVE_FOR_SAMPLER])
def test_a_checkpoint_saved_again_leaves_no_folder(tmp_path, kind):
    async def run():
        async with scheduled(tmp_path / "s", FakeGroup()) as (store, scheduler):
            more = {"overwrite": True} if kind == Kind.SAVE else {}
            again = [saved(seq, "same", kind, **more) for seq in (1, 2, 3)]
            sent = operation(0, Kind.CREATE, b""), *again, operation(4, Kind.FORWARD, body(1.0))
            assert set(await ended(store, scheduler, *sent)) == {Status.DONE}
            (checkpoint,) = store.checkpoints.values()
            assert [each.name for each in (tmp_path / "s/checkpoints").iterdir()] == [checkpoint.folder]

    asyncio.run(run())


def test_bodies_of_an_ended_session_leave_memory(tmp_path):
    async def run():
        async with scheduled(tmp_path / "s", FakeGroup()) as (store, scheduler):
            passed = operation(1, Kind.FORWARD_BACKWARD, body(1.0))
            await ended(store, scheduler, operation(0, Kind.CREATE, b""), passed)
            scheduler.unload("s")
            await ended(store, scheduler, operation(0, Kind.CREATE, b"", OTHER))
            assert store.models[MODEL].is_unloaded
            assert not any(each.body for each in store.operations.values())

    asyncio.run(run())


def test_the_scheduler_outlives_a_journal_that_fails_twice(tmp_path, monkeypatch):
    """Once for the outcome of an operation, and again for that of an operation that is given up."""
    monkeypatch.setattr("rl_tinker.service.scheduler.RETRY_S", (0.0, 0.0))

    async def run():
        group = FakeGroup()
        async with scheduled(tmp_path / "s", group) as (store, scheduler):
            await ended(store, scheduler, operation(0, Kind.CREATE, b""))
            commit, left = store.journal.commit, [4]

            def failing(statements):
                if left[0] and any(each[0].startswith("UPDATE") for each in statements):
                    left[0] -= 1
                    return sqlite3.OperationalError("disk is full")
                return commit(statements)

            monkeypatch.setattr(store.journal, "commit", failing)
            group.lose_next = 3
            done = await ended(store, scheduler, operation(1, Kind.FORWARD, body(1.0)))
            assert (done, left) == ([Status.DONE], [0])

    asyncio.run(run())


def test_a_loss_that_is_not_finite_leaves_the_page(tmp_path):
    async def run():
        async with scheduled(tmp_path / "s", FakeGroup()) as (store, _):
            losses = (6.0, float("nan"), float("inf"), 3.0)
            await store.journal.write(*(db.add_point(MODEL, step, 0.0, loss, 3) for step, loss in enumerate(losses)))
            assert store.journal.curve(MODEL) == [(0, 2.0), (3, 1.0)]

    asyncio.run(run())


def test_an_ended_run_leaves_no_state_and_later_no_record(tmp_path, monkeypatch):
    """Its state goes with the session, its records after a while, unless it has a checkpoint."""

    async def run():
        folder = tmp_path / "s"
        async with scheduled(folder, FakeGroup()) as (store, scheduler):
            store.apply([Session(id="t", tenant="a", created=0.0, seen=0.0, finished="done")])
            other = "t:train:0"
            gone = msgspec.structs.replace(new_model(other), session="t")
            await scheduler.submit(operation(0, Kind.CREATE, b"", other), gone)
            await ended(store, scheduler, operation(0, Kind.CREATE, b""), saved(1, "kept"))
            await ended(store, scheduler, operation(1, Kind.FORWARD_BACKWARD, body(1.0, other), other))
            for session in ("s", "t"):
                store.sessions[session].finished = "done"
                scheduler.unload(session)
            await asyncio.to_thread(until, lambda: not list((folder / "models").iterdir()))
            assert store.body_bytes == {"a": 0}
            monkeypatch.setattr("rl_tinker.service.store.ENDED_S", 3600.0)
            await store.expire()
            assert set(store.models) == {MODEL}
            assert set(store.sessions) == {"s"}
            assert store.journal.records(Model).keys() == {MODEL}
            assert not store.journal.curve(other)
            await store.remove_checkpoints(list(store.checkpoints.values()))
            store.sessions["s"].seen = 0.0
            await store.expire()
            assert not store.models
            assert not store.journal.records(Session)

    asyncio.run(run())


def test_checkpoints_without_a_name_end_with_their_session(tmp_path):
    async def run():
        async with scheduled(tmp_path / "s", FakeGroup()) as (store, scheduler):
            unnamed = msgspec.json.encode({"model_id": MODEL, "sampling_session_seq_id": 1})
            sent = operation(0, Kind.CREATE, b""), operation(1, Kind.SAVE_FOR_SAMPLER, unnamed)
            named = saved(2, "kept", Kind.SAVE_FOR_SAMPLER), saved(3, "ephemeral-9", Kind.SAVE_FOR_SAMPLER)
            assert await ended(store, scheduler, *sent, *named) == [Status.DONE] * 3 + [Status.FAILED]
            assert len(store.checkpoints) == 2
            scheduler.unload("s")
            await asyncio.to_thread(until, lambda: len(list(store.checkpoints_folder.iterdir())) == 1)
            assert list(store.checkpoints) == [f"tinker://{MODEL}/sampler_weights/kept"]

    asyncio.run(run())


def test_a_killed_server_frees_models_of_ended_sessions(tmp_path):
    """The session's end is on disk, and that of its models is not."""

    async def run():
        async with scheduled(tmp_path / "s", FakeGroup()) as (store, scheduler):
            await ended(store, scheduler, operation(0, Kind.CREATE, b""))
            store.sessions["s"].finished = "done"
            await store.journal.write(db.put(store.sessions["s"]))
        store = Store(tmp_path / "s")
        scheduler = Scheduler(store, FakeGroup(), max_adapters=4)
        scheduler.start()
        await asyncio.to_thread(until, lambda: store.models[MODEL].is_unloaded)
        await asyncio.to_thread(until, lambda: not list((tmp_path / "s/models").iterdir()))
        await scheduler.stop()
        store.close()

    asyncio.run(run())


@pytest.mark.process
def test_disk_use_does_not_grow_over_ended_runs(tmp_path, monkeypatch):
    """Runs with steps and checkpoints, each of whose sessions ends and whose checkpoint is deleted."""
    monkeypatch.setattr("rl_tinker.service.store.ENDED_S", 0.0)
    monkeypatch.setattr("rl_tinker.service.store.RESULT_S", -1.0)

    async def run():
        folder, sizes = tmp_path / "s", []
        async with scheduled(folder, FakeGroup()) as (store, scheduler):
            for number in range(24):
                name, session = f"{number}:train:0", str(number)
                store.apply([Session(id=session, tenant="a", created=0.0, seen=0.0)])
                created = msgspec.structs.replace(new_model(name), session=session)
                await scheduler.submit(operation(0, Kind.CREATE, b"", name), created)
                content = msgspec.json.encode({"model_id": name, "path": "kept"})
                work = [(Kind.FORWARD_BACKWARD, body(1.0, name)), (Kind.OPTIM_STEP, step(1.0)), (Kind.SAVE, content)]
                sent = [operation(seq, *each, name) for seq, each in enumerate(work, 1)]
                assert set(await ended(store, scheduler, *sent)) == {Status.DONE}
                store.sessions[session].finished = "done"
                scheduler.unload(session)
                await asyncio.to_thread(until, lambda: not list((folder / "models").iterdir()))
                await store.remove_checkpoints(list(store.checkpoints.values()))
                await store.expire()
                assert (len(store.models), set(store.sessions), len(store.operations)) == (0, {"s"}, 0)
                assert not store.body_bytes.total()
                sizes.append(sum(each.stat().st_size for each in folder.rglob("*.sqlite")))
        assert not list((folder / "checkpoints").iterdir())
        assert sizes[-1] <= max(sizes[:8])

    asyncio.run(run())
