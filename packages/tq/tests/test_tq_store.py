"""The bookkeeping without any host: hand-made sequences, then random ones against a model too simple to be wrong."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rl_tq import MissingDataError, SchemaError, StaleReferenceError, WaitTimeoutError
from rl_tq._ready import ReadyRows
from rl_tq._schema import ColumnKind, ColumnSchema
from rl_tq._store import Batch, MetadataStore, Waiter

FLOAT = ColumnSchema(kind=ColumnKind.DENSE, dtype="float32", shape=())
EXTENTS = itertools.count(1)


def publish(store: MetadataStore, columns: str, ids: list[str] | int, partition: str = "p") -> Batch:
    num_rows = ids if isinstance(ids, int) else len(ids)
    return store.publish(
        partition=partition,
        num_rows=num_rows,
        schema=dict.fromkeys(columns, FLOAT),
        extent=next(EXTENTS),
        nbytes=100,
        sample_ids=None if isinstance(ids, int) else ids,
    )


def claim(key: object, size: int, columns: str = "a", task: str = "t", deadline: float = 10.0) -> Waiter:
    return Waiter(
        key=key, partition="p", columns=tuple(columns), task=task, batch_size=size, deadline=deadline, is_claim=True
    )


def ids(batch: object) -> list[str]:
    assert isinstance(batch, Batch)
    return [row.sample_id for row in batch.rows]


def test_runs_follow_the_batch():
    store = MetadataStore()
    first = publish(store, "a", ["x", "y", "z"])
    second = publish(store, "a", ["u", "v"])
    numbers = [row.number for row in (*first.rows, *second.rows)]
    extent_1, extent_2 = first.rows[0].places["a"][0], second.rows[0].places["a"][0]
    located = store.locate(partition="p", columns=["a"], rows=[numbers[i] for i in (1, 2, 3, 4, 0, 0)])
    assert located.columns["a"][1] == [(extent_1, 1, 2), (extent_2, 0, 2), (extent_1, 0, 1), (extent_1, 0, 1)]
    assert located.extents == {extent_1, extent_2}


def test_waiters_are_answered_in_order_and_small_ones_are_not_held_up():
    store = MetadataStore()
    assert store.wait(claim("big", 3)) is None
    assert store.wait(claim("small", 1)) is None
    assert store.wait(claim("late", 1)) is None
    publish(store, "a", ["x"])
    settled, _ = store.drain()
    assert [(w.key, ids(answer)) for w, answer in settled] == [("small", ["x"])]
    publish(store, "a", ["y", "z", "u", "v"])
    settled, _ = store.drain()
    assert [(w.key, ids(answer)) for w, answer in settled] == [("big", ["y", "z", "u"]), ("late", ["v"])]
    assert store.drain() == ([], [])


def test_deadlines():
    store = MetadataStore()
    assert store.next_deadline() is None
    store.wait(claim("one", 1, deadline=5.0))
    store.wait(claim("two", 1, deadline=3.0))
    store.wait(claim("gone", 1, deadline=1.0))
    store.withdraw("gone")
    assert store.next_deadline() == 3.0
    store.expire(2.9)
    assert store.drain() == ([], [])
    store.expire(3.0)
    [(waiter, error)], _ = store.drain()
    assert waiter.key == "two"
    assert isinstance(error, WaitTimeoutError)
    publish(store, "a", 1)
    [(waiter, _)], _ = store.drain()
    assert waiter.key == "one"


def test_a_waiter_outlives_a_clear():
    store = MetadataStore()
    publish(store, "a", ["x"])
    store.wait(claim("w", 2))
    store.clear_partition("p")
    publish(store, "a", ["y"])
    assert store.drain()[0] == []
    publish(store, "a", ["z"])
    [(_, answer)], _ = store.drain()
    assert ids(answer) == ["y", "z"]


def test_a_choice_is_claimed_whole_or_not_at_all():
    store = MetadataStore()
    rows = [row.number for row in publish(store, "a", 3).rows]
    store.wait(claim("w", 1))
    choose = {"partition": "p", "columns": ["a"], "task": "t"}
    assert store.claim_rows(rows=rows, **choose) is None
    assert store.claim_rows(rows=[], **choose) is None
    assert store.claim_rows(rows=[rows[1]] * 2, **choose) is None
    chosen = store.claim_rows(rows=[rows[2], rows[1]], **choose)
    assert chosen is not None
    assert [row.number for row in chosen.rows] == [rows[2], rows[1]]
    assert store.claim_rows(rows=[rows[1]], **choose) is None
    assert store.stats()["partitions"]["p"]["consumed"] == {"t": 3}


def test_a_listing_waits_for_news():
    store = MetadataStore()
    version = publish(store, "a", 2).version
    listing = {"partition": "p", "columns": ("a",), "task": "t", "batch_size": 2, "deadline": 9.0, "is_claim": False}
    assert isinstance(store.wait(Waiter(key=1, **listing)), Batch)
    assert store.wait(Waiter(key=2, after=version, **listing)) is None
    publish(store, "b", ["other"])
    [(waiter, answer)], _ = store.drain()
    assert waiter.key == 2
    assert len(ids(answer)) == 2


def test_extents_are_freed_with_their_last_row():
    store = MetadataStore()
    both = publish(store, "a", ["x", "y"])
    extent = both.rows[0].places["a"][0]
    added = publish(store, "b", ["x"]).rows[0].places["b"][0]
    store.clear_rows(partition="p", sample_ids=["x"])
    assert store.drain()[1] == [added]
    store.clear_partition("p")
    assert store.drain()[1] == [extent]
    assert store.stats()["bytes"] == 0


def test_cleared_rows_count_as_given_to_nobody():
    store = MetadataStore()
    publish(store, "a", ["x", "y"])
    store.wait(claim("w", 2))
    store.clear_rows(partition="p", sample_ids=["y"])
    assert store.stats()["partitions"]["p"]["consumed"] == {"t": 1}


def test_a_refused_publish_changes_nothing():
    store = MetadataStore()
    publish(store, "a", ["x"])
    before = store.stats()
    with pytest.raises(SchemaError):
        publish(store, "ba", ["y", "x"])
    assert store.stats() == before
    with pytest.raises(SchemaError):
        publish(store, "a", [], partition="new")
    assert store.stats() == before


def test_a_fresh_id_is_not_one_that_somebody_chose():
    store = MetadataStore()
    publish(store, "a", ["row2"])
    assert ids(publish(store, "a", 1)) == ["row2+"]


def test_ready_rows_forget_what_left():
    ready = ReadyRows([5, 3])
    for row in range(10, 1000):
        ready.add(row)
    ready.add(3)
    ready.discard(range(4, 990))
    assert list(ready) == [3, *range(990, 1000)]
    assert (3 in ready, 5 in ready, len(ready)) == (True, False, 11)
    assert ready.take(2) == [3, 990]
    assert len(ready._heap) < 100


class StoreAgainstModel(RuleBasedStateMachine):
    """The model: a list of rows in order of age, each a dict. Every answer is found by looking through all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MetadataStore()
        self.rows: list[dict] = []
        self.dead: list[tuple[int, int]] = []
        self.waiting: dict[int, Waiter] = {}
        self.keys = itertools.count()
        self.live_extents: set[int] = set()

    def _ready(self, waiter: Waiter) -> list[dict]:
        return [r for r in self.rows if waiter.task not in r["given"] and set(waiter.columns) <= r["columns"].keys()]

    def _answered(self, waiter: Waiter, answer: object) -> None:
        expected = self._ready(waiter)[: waiter.batch_size]
        assert [row["id"] for row in expected] == ids(answer)
        for row in expected:
            row["given"].add(waiter.task)

    def _drain(self) -> None:
        settled, freed = self.store.drain()
        for waiter, answer in settled:
            del self.waiting[waiter.key]
            self._answered(waiter, answer)
        in_use = {extent for row in self.rows for extent in row["columns"].values()}
        assert set(freed) == self.live_extents - in_use
        self.live_extents = in_use
        assert all(len(self._ready(waiter)) < waiter.batch_size for waiter in self.waiting.values())

    @rule(
        names=st.lists(st.sampled_from("uvwxyz"), unique=True, max_size=4),
        columns=st.sets(st.sampled_from("abc"), min_size=1),
    )
    def publish(self, names: list[str], columns: set[str]) -> None:
        by_id = {row["id"]: row for row in self.rows}
        filled = any(columns & by_id[name]["columns"].keys() for name in names if name in by_id)
        extent = next(EXTENTS)
        arguments = {"partition": "p", "num_rows": len(names), "schema": dict.fromkeys(columns, FLOAT), "nbytes": 10}
        if filled or not names:
            with pytest.raises(SchemaError):
                self.store.publish(extent=extent, sample_ids=names, **arguments)
        else:
            batch = self.store.publish(extent=extent, sample_ids=names, **arguments)
            self.live_extents.add(extent)
            for name, row in zip(names, batch.rows, strict=True):
                if name not in by_id:
                    by_id[name] = {
                        "id": name,
                        "number": row.number,
                        "generation": batch.generation,
                        "columns": {},
                        "given": set(),
                    }
                    self.rows.append(by_id[name])
                assert by_id[name]["number"] == row.number
                by_id[name]["columns"].update(dict.fromkeys(columns, extent))
            for waiter in list(self.waiting.values()):
                assert waiter.partition == "p"
        self._drain()

    @rule(
        columns=st.sets(st.sampled_from("abc"), min_size=1),
        task=st.sampled_from(["s", "t"]),
        size=st.integers(1, 4),
        deadline=st.integers(0, 5),
    )
    def wait(self, columns: set[str], task: str, size: int, deadline: int) -> None:
        waiter = claim(next(self.keys), size, "".join(sorted(columns)), task, float(deadline))
        answer = self.store.wait(waiter)
        if answer is None:
            self.waiting[waiter.key] = waiter
            assert len(self._ready(waiter)) < size
        else:
            self._answered(waiter, answer)

    @rule(now=st.integers(0, 5))
    def expire(self, now: int) -> None:
        self.store.expire(now)
        late = {key for key, waiter in self.waiting.items() if waiter.deadline <= now}
        settled, _ = self.store.drain()
        assert {waiter.key for waiter, error in settled if isinstance(error, WaitTimeoutError)} == late
        for key in late:
            del self.waiting[key]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def clear_rows(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(self.rows), min_size=1, unique_by=lambda row: row["number"]))
        numbers = [row["number"] for row in gone]
        self.store.clear_rows(partition="p", generation=gone[0]["generation"], rows=numbers)
        self.dead += [(row["generation"], row["number"]) for row in gone]
        self.rows = [row for row in self.rows if row["number"] not in numbers]
        self._drain()

    @rule()
    def clear_partition(self) -> None:
        self.store.clear_partition("p")
        self.dead += [(row["generation"], row["number"]) for row in self.rows]
        self.rows = []
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
        runs = self.store.locate(**request).columns[column][1]
        assert [extent for extent, _, length in runs for _ in range(length)] == [r["columns"][column] for r in chosen]

    @invariant()
    def counts_agree(self) -> None:
        stats = self.store.stats()
        assert (stats["rows"], stats["extents"]) == (len(self.rows), len(self.live_extents))


TestStoreAgainstModel = StoreAgainstModel.TestCase
TestStoreAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
