"""The bookkeeping without any host: hand-made sequences, then random ones against a model too simple to be wrong."""

import itertools
import json
from collections import Counter

import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from rl_tq.columns.schema import ColumnKind, ColumnSchema, Schema
from rl_tq.errors import LeaseLostError, MissingDataError, SchemaError, StaleReferenceError, WaitTimeoutError
from rl_tq.metadata.requests import Batch, Claim, Put
from rl_tq.metadata.rows import Row
from rl_tq.metadata.state import dump
from rl_tq.metadata.store import MetadataStore
from rl_tq.types.policy import ReadyRows

FLOAT = ColumnSchema(kind=ColumnKind.DENSE, dtype="float32", shape=())
EXTENTS = itertools.count(1)
KEYS = itertools.count(10_000)


def put(store: MetadataStore, columns: str, ids: list[str] | int, tags=None, **options) -> Batch | None:
    num_rows = ids if isinstance(ids, int) else len(ids)
    options = {"partition": "p", "deadline": 1e9, "key": next(KEYS), **options}
    return store.put(
        Put(
            num_rows=num_rows, schema=Schema(dict.fromkeys(columns, FLOAT)), extent=next(EXTENTS), nbytes=100,
            sample_ids=None if isinstance(ids, int) else ids, tags=tags, **options,
        )
    )  # fmt: skip


def publish(store: MetadataStore, columns: str, ids: list[str] | int, tags=None, **options) -> Batch:
    batch = put(store, columns, ids, tags, **options)
    assert batch is not None
    return batch


def claim(key: object, size: int, columns: str = "a", task: str = "t", deadline: float = 10.0, **more) -> Claim:
    return Claim(key=key, partition="p", columns=tuple(columns), task=task, batch_size=size, deadline=deadline, **more)


def expire(store: MetadataStore, now: float) -> None:
    store.now = now
    store.expire()


def ids(batch: object) -> list[str]:
    assert isinstance(batch, Batch)
    return [row.sample_id for row in batch.rows]


def test_runs_follow_the_batch():
    store = MetadataStore(lambda _: next(EXTENTS))
    first = publish(store, "a", ["x", "y", "z"])
    second = publish(store, "a", ["u", "v"])
    numbers = [row.number for row in (*first.rows, *second.rows)]
    extent_1, extent_2 = first.rows[0].pieces[0][0].number, second.rows[0].pieces[0][0].number
    located = store.locate(partition="p", columns=["a"], rows=[numbers[i] for i in (1, 2, 3, 4, 0, 0)])
    assert located.runs[located.columns["a"][1]] == [
        (extent_1, 1, 2),
        (extent_2, 0, 2),
        (extent_1, 0, 1),
        (extent_1, 0, 1),
    ]
    assert located.extents == {extent_1, extent_2}


def test_waiters_are_answered_in_order_and_small_ones_at_once():
    store = MetadataStore(lambda _: next(EXTENTS))
    assert store.claim(claim("big", 3)) is None
    assert store.claim(claim("small", 1)) is None
    assert store.claim(claim("late", 1)) is None
    publish(store, "a", ["x"])
    settled, _ = store.drain()
    assert [(w.key, ids(answer)) for w, answer in settled] == [("small", ["x"])]
    publish(store, "a", ["y", "z", "u", "v"])
    settled, _ = store.drain()
    assert [(w.key, ids(answer)) for w, answer in settled] == [("big", ["y", "z", "u"]), ("late", ["v"])]
    assert store.drain() == ([], [])


def test_deadlines():
    store = MetadataStore(lambda _: next(EXTENTS))
    assert store.timers.earliest is None
    store.claim(claim("one", 1, deadline=5.0))
    store.claim(claim("two", 1, deadline=3.0))
    store.claim(claim("gone", 1, deadline=1.0))
    store.withdraw("gone")
    assert store.timers.earliest == 3.0
    expire(store, 2.9)
    assert store.drain() == ([], [])
    expire(store, 3.0)
    [(waiter, error)], _ = store.drain()
    assert waiter.key == "two"
    assert isinstance(error, WaitTimeoutError)
    publish(store, "a", 1)
    [(waiter, _)], _ = store.drain()
    assert waiter.key == "one"


def test_a_waiter_outlives_a_clear():
    store = MetadataStore(lambda _: next(EXTENTS))
    publish(store, "a", ["x"])
    store.claim(claim("w", 2))
    store.clear_partition("p")
    publish(store, "a", ["y"])
    assert store.drain()[0] == []
    publish(store, "a", ["z"])
    [(_, answer)], _ = store.drain()
    assert ids(answer) == ["y", "z"]


def test_a_choice_is_claimed_whole_or_not_at_all():
    store = MetadataStore(lambda _: next(EXTENTS))
    rows = [row.number for row in publish(store, "a", 3).rows]
    store.claim(claim("w", 1))
    choose = claim("c", 2)
    assert store.claim_rows(choose, rows) is None
    assert store.claim_rows(choose, []) is None
    assert store.claim_rows(choose, [rows[1]] * 2) is None
    chosen = store.claim_rows(choose, [rows[2], rows[1]])
    assert chosen is not None
    assert [row.number for row in chosen.rows] == [rows[2], rows[1]]
    assert store.claim_rows(choose, [rows[1]]) is None
    assert store.stats()["partitions"]["p"]["consumed"] == {"t": 3}


def test_a_listing_waits_for_news():
    store = MetadataStore(lambda _: next(EXTENTS))
    version = publish(store, "a", 2).version
    listing = {"partition": "p", "columns": ("a",), "task": "t", "batch_size": 2, "deadline": 9.0, "is_claim": False}
    assert isinstance(store.claim(Claim(key=1, **listing)), Batch)
    assert store.claim(Claim(key=2, after=version, **listing)) is None
    publish(store, "b", ["other"])
    [(waiter, answer)], _ = store.drain()
    assert waiter.key == 2
    assert len(ids(answer)) == 2


def test_extents_are_freed_with_their_last_row():
    store = MetadataStore(lambda _: next(EXTENTS))
    both = publish(store, "a", ["x", "y"])
    extent = both.rows[0].pieces[0][0].number
    added = publish(store, "b", ["x"]).rows[0].pieces[1][0].number
    store.clear_rows(partition="p", sample_ids=["x"])
    assert store.drain()[1] == [added]
    store.clear_partition("p")
    assert store.drain()[1] == [extent]
    assert store.stats()["bytes"] == 0


def test_what_was_cleared_during_a_move_is_waste_of_the_copy():
    store = MetadataStore(lambda _: next(EXTENTS))
    batch = publish(store, "a", "uvw")
    [old] = store.state.extents
    store.state.take_shrunk()
    numbers = [row.number for row in batch.rows]
    for cleared, shrunk in (([], set()), (numbers[:1], {"copy"}), (numbers[1:], set())):
        if cleared:
            store.clear_rows(partition="p", rows=cleared)
            store.state.take_shrunk()
        new = next(EXTENTS)
        store.move(extent=new, nbytes=50, old=[old], rows=numbers)
        assert store.state.take_shrunk() == ({new} if shrunk else set())
        old = new


def test_cleared_rows_count_as_given_to_nobody():
    store = MetadataStore(lambda _: next(EXTENTS))
    publish(store, "a", ["x", "y"])
    store.claim(claim("w", 2))
    store.clear_rows(partition="p", sample_ids=["y"])
    assert store.stats()["partitions"]["p"]["consumed"] == {"t": 1}


def test_a_refused_publish_changes_nothing():
    store = MetadataStore(lambda _: next(EXTENTS))
    publish(store, "a", ["x"])
    before = store.stats()
    with pytest.raises(SchemaError):
        publish(store, "ba", ["y", "x"])
    assert store.stats() == before
    with pytest.raises(SchemaError):
        publish(store, "a", [], partition="new")
    assert store.stats() == before


def test_a_fresh_id_is_not_one_that_somebody_chose():
    store = MetadataStore(lambda _: next(EXTENTS))
    publish(store, "a", ["row2"])
    assert ids(publish(store, "a", 1)) == ["row2+"]


def test_a_row_that_a_caller_named_has_no_other_name():
    store = MetadataStore(lambda _: next(EXTENTS))
    publish(store, "a", 1)
    publish(store, "a", ["x"])
    home = store.state.partitions["p"]
    found = {name: home.find(name) for name in ("x", "row1", "row2", "row01", "row3")}
    assert {name: row.number for name, row in found.items() if row} == {"x": 2, "row1": 1}


def test_leases_that_ended_are_forgotten():
    store = MetadataStore(lambda _: next(EXTENTS))
    for i in range(1000):
        batch = publish(store, "a", 1)
        claimed = store.claim(claim(str(i), 1))
        store.ack(
            partition="p", generation=batch.generation, task="t", rows=claimed.numbers, leases=[claimed.lease], step=0
        )
    [owned] = store._leases._owned.values()
    assert len(owned) < 100


def row(number: int, **tags) -> Row:
    return Row(number, None, tags, frozenset("a"))


def test_ready_rows_forget_what_left():
    ready = ReadyRows()
    for number in (5, 3, *range(10, 1000), 3):
        ready.add(row(number))
    ready.discard(range(4, 990))
    assert ready.oldest() == [3, *range(990, 1000)]
    assert (3 in ready.members, 5 in ready.members, len(ready)) == (True, False, 11)
    assert ready.take(2) == [3, 990]
    assert len(ready._fifo) < 100


class StoreAgainstModel(RuleBasedStateMachine):
    """The model: a list of rows in order of age, each a dict. Every answer is found by looking through all of them.

    Clients A and B put, claim, ack, nack, die and leave; leases expire; the server dies and starts again from its
    journal or from a snapshot. At the end everything is claimed and acked, and the rows acked are the rows published.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = MetadataStore(lambda _: next(EXTENTS))
        self.store.state.log = []
        self.journal: list = []
        self.rows: list[dict] = []
        self.dead: list[tuple[int, int]] = []
        self.waiting: dict[int, Claim] = {}
        self.batches: list[tuple[str, Batch, str]] = []
        self.keys = itertools.count()
        self.live_extents: set[int] = set()
        self.acks: Counter[tuple[str, int]] = Counter()
        self.cleared: Counter[tuple[str, int]] = Counter()
        """Task and step to the rows that were acked then and cleared since."""

    # The model

    def _free(self, row: dict, task: str) -> bool:
        return task not in row["lease"] and task not in row["acked"] and task not in row["letters"]

    def _ready(self, request: Claim) -> list[dict]:
        needs = set(request.columns)
        return [r for r in self.rows if self._free(r, request.task) and needs <= r["columns"].keys()]

    def _answered(self, request: Claim, answer: object) -> None:
        expected = self._ready(request)[: request.batch_size]
        assert [row["id"] for row in expected] == ids(answer)
        for row in expected:
            row["lease"][request.task] = (answer.lease, request.owner, request.lease_s)
        self.batches.append((request.task, answer, request.owner))

    def _back(self, row: dict, task: str, *, counted: bool) -> None:
        del row["lease"][task]
        row["attempts"][task] = row["attempts"].get(task, 0) + counted
        if row["attempts"][task] >= 3:
            row["letters"].add(task)

    def _drain(self) -> None:
        settled, freed = self.store.drain()
        for waiter, answer in settled:
            del self.waiting[waiter.key]
            self._answered(waiter, answer)
        self.journal += json.loads(json.dumps(self.store.state.log))
        self.store.state.log.clear()
        in_use = {extent for row in self.rows for extent in row["columns"].values()}
        assert set(freed) == self.live_extents - in_use
        self.live_extents = in_use
        assert all(len(self._ready(waiter)) < waiter.batch_size for waiter in self.waiting.values())

    # What may happen

    @rule(
        names=st.lists(st.sampled_from("uvwxyz"), unique=True, max_size=4),
        columns=st.sets(st.sampled_from("abc"), min_size=1),
    )
    def publish(self, names: list[str], columns: set[str]) -> None:
        by_id = {row["id"]: row for row in self.rows}
        filled = any(columns & by_id[name]["columns"].keys() for name in names if name in by_id)
        if filled or not names:
            with pytest.raises(SchemaError):
                publish(self.store, "".join(columns), names)
        else:
            batch = publish(self.store, "".join(columns), names)
            [extent] = {row.pieces[-1][0].number for row in batch.rows}
            self.live_extents.add(extent)
            for name, row in zip(names, batch.rows, strict=True):
                if name not in by_id:
                    by_id[name] = {
                        "id": name, "number": row.number, "generation": batch.generation, "columns": {}, "lease": {},
                        "acked": {}, "attempts": {}, "letters": set(),
                    }  # fmt: skip
                    self.rows.append(by_id[name])
                assert by_id[name]["number"] == row.number
                by_id[name]["columns"].update(dict.fromkeys(columns, extent))
        self._drain()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """Rows of some extents of like columns are copied together; some may have been cleared since."""
        extents = self.store.state.extents
        like = extents[data.draw(st.sampled_from(sorted(self.live_extents)))].columns
        alike = [number for number, extent in extents.items() if extent.columns == like]
        old = data.draw(st.lists(st.sampled_from(alike), unique=True, min_size=1))
        new = next(EXTENTS)
        self.live_extents.add(new)
        self.store.move(extent=new, nbytes=50, old=old, rows=[n for each in old for n in extents[each].rows])
        for row in self.rows:
            row["columns"] = {name: new if extent in old else extent for name, extent in row["columns"].items()}
        self._drain()

    @rule(
        columns=st.sets(st.sampled_from("abc"), min_size=1),
        task=st.sampled_from(["s", "t"]),
        size=st.integers(1, 4),
        wait_s=st.integers(0, 5),
        owner=st.sampled_from("AB"),
        lease_s=st.sampled_from([None, 1.0, 4.0]),
    )
    def claim(self, columns: set[str], task: str, size: int, wait_s: int, owner: str, lease_s: float | None) -> None:
        request = claim(
            next(self.keys), size, "".join(sorted(columns)), task, self.store.now + wait_s, owner=owner, lease_s=lease_s
        )
        answer = self.store.claim(request)
        if answer is None:
            self.waiting[request.key] = request
            assert len(self._ready(request)) < size
        else:
            self._answered(request, answer)
        self._drain()

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), what=st.sampled_from(["ack", "ack", "nack"]), step=st.integers(1, 4))
    def settle(self, data: st.DataObject, what: str, step: int) -> None:
        task, batch, _ = data.draw(st.sampled_from(self.batches))
        part = data.draw(st.lists(st.sampled_from(batch.rows), min_size=1, unique_by=lambda row: row.number))
        known = {row["number"]: row for row in self.rows}
        mine = [known.get(row.number) for row in part]
        held = [row for row in mine if row and row["lease"].get(task, (0,))[0] == batch.lease]
        again = [row for row in mine if row and row["acked"].get(task, (0, 0))[1] == batch.lease]
        reference = {
            "partition": "p", "generation": batch.generation, "task": task, "rows": [row.number for row in part],
            "leases": [batch.lease] * len(part),
        }  # fmt: skip
        is_fine = len(held) + (len(again) if what == "ack" else 0) == len(part)
        call = (lambda: self.store.ack(**reference, step=step)) if what == "ack" else (
            lambda: self.store.nack(**reference, reason="of a test")
        )  # fmt: skip
        if not is_fine:
            with pytest.raises(LeaseLostError):
                call()
            return
        call()
        for row in held:
            if what == "ack":
                del row["lease"][task]
                row["acked"][task] = (step, batch.lease)
                self.acks[task, row["number"]] += 1
            else:
                self._back(row, task, counted=True)
        self._drain()

    @rule(owner=st.sampled_from("AB"), dies=st.booleans())
    def leave(self, owner: str, dies: bool) -> None:
        for key in [key for key, request in self.waiting.items() if request.owner == owner]:
            self.store.withdraw(key)
            del self.waiting[key]
        self.store.owner_left(owner, "of a test", is_counted=dies)
        for row in self.rows:
            for task in [task for task, lease in row["lease"].items() if lease[1] == owner]:
                self._back(row, task, counted=dies)
        self._drain()

    @rule(step=st.integers(0, 4), task=st.sampled_from(["s", "t", None]))
    def restore(self, step: int, task: str | None) -> None:
        report = self.store.restore("p", step, task)
        returned = revoked = 0
        for row in self.rows:
            for each in [each for each in "st" if task in (None, each)]:
                if each in row["lease"]:
                    self._back(row, each, counted=False)
                    revoked += 1
                elif row["acked"].get(each, (0, 0))[0] > step:
                    del row["acked"][each]
                    self.acks[each, row["number"]] -= 1
                    returned += 1
        cleared = sum(times for (each, at), times in self.cleared.items() if task in (None, each) and at > step)
        assert (report.num_returned, report.num_cleared, report.num_revoked) == (returned, cleared, revoked)
        self._drain()

    @rule(later=st.integers(0, 3))
    def pass_time(self, later: int) -> None:
        """Only what is due ends; then whoever waited may be answered by what came back."""
        now = self.store.now + later
        leases = {
            (task, lease[0])
            for row in self.rows
            for task, lease in row["lease"].items()
            if lease[2] is not None and self.due.get(lease[0], 1e9) <= now
        }
        assume(not leases or not any(w.deadline <= now for w in self.waiting.values()))
        late = {key for key, waiter in self.waiting.items() if waiter.deadline <= now}
        assume(len(leases) <= 1)  # the order among several is not the model's to know
        self.store.now = now
        self.store.expire()
        for row in self.rows:
            for task in [task for task, lease in row["lease"].items() if (task, lease[0]) in leases]:
                self._back(row, task, counted=True)
        if late:
            settled, _ = self.store.drain()
            assert {waiter.key for waiter, error in settled if isinstance(error, WaitTimeoutError)} == late
            for key in late:
                del self.waiting[key]
        self._drain()

    @property
    def due(self) -> dict[int, float]:
        return {key[1]: at for key, at in self.store.timers._deadlines.items() if key[0] == "lease"}

    @rule(from_snapshot=st.booleans())
    def restart(self, from_snapshot: bool) -> None:
        """The server dies. Who waited or held a lease without a deadline is gone; the others go on."""
        records = json.loads(json.dumps(list(dump(self.store.state)))) if from_snapshot else self.journal
        fresh = MetadataStore(lambda _: next(EXTENTS))
        fresh.state.replay(records)
        fresh.state.log = []
        fresh.now = self.store.now
        self.store = fresh
        self.waiting.clear()
        fresh.adopt()
        for row in self.rows:
            for task in [task for task, lease in row["lease"].items() if lease[2] is None]:
                self._back(row, task, counted=False)
            for task, (number, _, lease_s) in list(row["lease"].items()):
                row["lease"][task] = (number, None, lease_s)
        self.journal = records
        self._drain()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def clear_rows(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(self.rows), min_size=1, unique_by=lambda row: row["number"]))
        numbers = [row["number"] for row in gone]
        self.cleared.update((task, step) for row in gone for task, (step, _) in row["acked"].items())
        self.store.clear_rows(partition="p", generation=gone[0]["generation"], rows=numbers)
        self._forget(numbers)

    @rule()
    def clear_partition(self) -> None:
        self.store.clear_partition("p")
        self.cleared.clear()
        self._forget([row["number"] for row in self.rows])

    def _forget(self, numbers: list[int]) -> None:
        self.dead += [(row["generation"], row["number"]) for row in self.rows if row["number"] in numbers]
        self.rows = [row for row in self.rows if row["number"] not in numbers]
        for task, number in list(self.acks):
            if number in numbers:
                del self.acks[task, number]
        self._drain()

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def stale_references_raise(self, data: st.DataObject) -> None:
        generation, number = data.draw(st.sampled_from(self.dead))
        with pytest.raises(StaleReferenceError):
            self.store.locate(partition="p", columns=[], generation=generation, rows=[number])

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), column=st.sampled_from("abc"))
    def locate(self, data: st.DataObject, column: str) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.rows), min_size=1, max_size=8))
        request = {
            "partition": "p",
            "columns": [column],
            "generation": chosen[0]["generation"],
            "rows": [r["number"] for r in chosen],
        }
        if any(column not in row["columns"] for row in chosen):
            with pytest.raises(MissingDataError):
                self.store.locate(**request)
            return
        located = self.store.locate(**request)
        runs = located.runs[located.columns[column][1]]
        assert [extent for extent, _, length in runs for _ in range(length)] == [r["columns"][column] for r in chosen]

    @invariant()
    def counts_agree(self) -> None:
        stats = self.store.stats()
        assert (stats["rows"], stats["extents"]) == (len(self.rows), len(self.live_extents))
        held = {lease for row in self.rows for lease in [each[0] for each in row["lease"].values()]}
        assert stats["leases"] == len(held)

    def teardown(self) -> None:
        """Exactly once: claim and ack what is left, and every row was acked by each task once, dead letters never."""
        for key in self.waiting:
            self.store.withdraw(key)  # as every host does before it says that a client left
        self.store.owner_left("A", "of a test", is_counted=False)
        self.store.owner_left("B", "of a test", is_counted=False)
        self.store.restore("p", 10**6, None)
        for task in "st":
            for row in self.rows:
                if self._free(row, task) or task in row["lease"]:
                    [column, *_] = row["columns"]
                    batch = self.store.claim(claim(next(self.keys), 1, column, task))
                    while batch is not None and batch.rows:
                        numbers = [r.number for r in batch.rows]
                        reference = {"partition": "p", "generation": batch.generation, "task": task}
                        self.store.ack(**reference, rows=numbers, leases=[batch.lease], step=9)
                        self.acks.update((task, number) for number in numbers)
                        batch = self.store.claim(claim(next(self.keys), 1, column, task, self.store.now))
            expected = {row["number"] for row in self.rows if task not in row["letters"]}
            assert {number for (each, number), times in self.acks.items() if each == task and times} == expected
        assert set(self.acks.values()) <= {0, 1}


TestStoreAgainstModel = StoreAgainstModel.TestCase
TestStoreAgainstModel.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@pytest.mark.slow
def test_ten_thousand_schedules():
    """The same, for longer."""
    many = settings(max_examples=10_000, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(StoreAgainstModel, settings=many)
