"""Where the bookkeeping draws a line: limits of a partition, credits, leases, tags, and the pieces of a reply."""

import itertools

import pytest

from rl_tq.columns.schema import ColumnKind, ColumnSchema, Schema
from rl_tq.errors import LeaseLostError, SchemaError
from rl_tq.metadata.checks import MAX_TAG_DEPTH
from rl_tq.metadata.requests import Admission, Batch, Claim, Put
from rl_tq.metadata.rows import MAX_LOCATIONS, pieces_of
from rl_tq.metadata.store import MetadataStore
from rl_tq.policies import GroupComplete
from rl_tq.types import Credit

FLOAT = ColumnSchema(kind=ColumnKind.DENSE, dtype="float32", shape=())
NUMBERS = itertools.count(1)


@pytest.fixture
def store() -> MetadataStore:
    return MetadataStore(lambda _: next(NUMBERS))


def put(store: MetadataStore, ids: list[str] | int, nbytes: int = 100, columns: str = "a", **options) -> Batch | None:
    num_rows = ids if isinstance(ids, int) else len(ids)
    schema = Schema(dict.fromkeys(columns, FLOAT))
    names = None if isinstance(ids, int) else ids
    return store.put(
        Put(key=next(NUMBERS), partition="p", deadline=1e9, num_rows=num_rows, schema=schema, extent=next(NUMBERS),
            nbytes=nbytes, sample_ids=names, **options)
    )  # fmt: skip


def published(*given, **options) -> Batch:
    batch = put(*given, **options)
    assert batch is not None
    return batch


def admit(store: MetadataStore, num_rows: int, num_bytes: int) -> Credit:
    credit = store.admit(
        Admission(key=next(NUMBERS), partition="p", deadline=1e9, num_rows=num_rows, num_bytes=num_bytes)
    )
    assert credit is not None
    return credit


def claimed(store: MetadataStore, size: int, columns: str = "a", **options) -> Batch | None:
    claim = Claim(
        key=next(NUMBERS), partition="p", columns=tuple(columns), task="t", batch_size=size, deadline=10.0, **options
    )
    found = store.claim(claim)
    assert found is None or isinstance(found, Batch)
    return found


def of_lease(batch: Batch) -> dict:
    numbers = [row.number for row in batch.rows]
    return {"rows": numbers, "leases": [batch.lease] * len(numbers), "generation": batch.generation}


def test_bytes_fill_a_partition_to_the_last(store):
    store.configure("p", {"max_bytes": 1000})
    published(store, 1, 400)
    published(store, 1, 600)
    assert put(store, 1, 1) is None


def test_reserved_bytes_are_not_there_for_others(store):
    store.configure("p", {"max_bytes": 1000})
    credit = admit(store, 1, 600)
    assert put(store, 1, 500) is None
    assert published(store, 1, 600, credits=[credit.number])


def test_a_put_under_a_credit_needs_no_other_room(store):
    store.configure("p", {"max_bytes": 1000})
    credit = admit(store, 2, 1000)
    assert published(store, 1, 700, credits=[credit.number])
    assert published(store, 1, 300, credits=[credit.number])


def test_a_column_for_rows_of_a_full_partition_needs_no_room(store):
    store.configure("p", {"max_bytes": 100})
    published(store, ["x"], 100)
    assert published(store, ["x"], 100, columns="b")


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def test_a_tag_has_a_deepest_level(store):
    assert published(store, 1, tags=[{"x": nested(MAX_TAG_DEPTH - 1)}])
    with pytest.raises(SchemaError, match="a tag is nested more than"):
        put(store, 1, tags=[{"x": nested(MAX_TAG_DEPTH)}])


def test_lost_leases_are_named_three_at_most(store):
    published(store, list("uvwxy"))
    batch = claimed(store, 5)
    assert batch is not None
    store.ack(partition="p", task="t", step=3, sample_ids=[], **of_lease(batch))
    first = batch.rows[0].number
    with pytest.raises(LeaseLostError) as told:
        store.nack(partition="p", task="t", reason="r", sample_ids=list("uvwxy"), **of_lease(batch))
    assert ": 'u' (it was acked at step 3), 'v' (" in str(told.value)
    assert " and 2 more; nothing was done" in str(told.value)
    assert store.state.partitions["p"].tasks["t"].acked[first][0] == 3


def test_rows_may_be_acked_again_under_their_lease(store):
    published(store, 1)
    batch = claimed(store, 1)
    assert batch is not None
    for _ in range(2):
        store.ack(partition="p", task="t", step=3, **of_lease(batch))
    with pytest.raises(LeaseLostError):
        store.nack(partition="p", task="t", reason="late", **of_lease(batch))


def test_rows_cleared_at_the_restored_step_are_not_missed(store):
    for step in (2, 3):
        published(store, 1)
        batch = claimed(store, 1)
        assert batch is not None
        store.ack(partition="p", task="t", step=step, **of_lease(batch))
        store.clear_rows(partition="p", rows=[batch.rows[0].number])
    assert store.restore("p", 2, None).num_cleared == 1


def test_a_group_of_which_one_row_was_acked_is_claimed_once(store):
    policy = GroupComplete(group_size=1)
    published(store, ["x"], tags=[{"group_id": 1}])
    batch = claimed(store, 1, policy=policy)
    assert batch is not None
    store.ack(partition="p", task="t", step=1, **of_lease(batch))
    published(store, ["y"], columns="ab", tags=[{"group_id": 1}])
    assert claimed(store, 1, columns="ab", policy=policy) is None


def test_rows_returned_too_often_are_dead_letters(store):
    store.configure("p", {"max_attempts": 2})
    published(store, ["x"])
    for _ in range(2):
        batch = claimed(store, 1)
        assert batch is not None
        store.nack(partition="p", task="t", reason="a test says so", **of_lease(batch))
    assert claimed(store, 1) is None
    _, reasons = store.dead_letters("p", "t")
    assert [*reasons.values()] == ["it came back 2 times, the last time because a test says so"]


def test_a_claim_that_waits_names_three_rows_of_those_it_lacks(store):
    published(store, ["done", "given"], columns="ab")
    for _ in range(2):
        batch = claimed(store, 1, columns="ab")
        assert batch is not None
        if batch.rows[0].sample_id == "done":
            store.ack(partition="p", task="t", step=1, **of_lease(batch))
    published(store, list("uvwxy"))
    assert claimed(store, 1, columns="ab") is None
    store.now = 10.0
    store.expire()
    [(_, error)], _ = store.drain()
    assert "0 of its 7 rows are ready, 2 were given to this task before, 5 are incomplete; 5 lack 'b' (" in str(error)
    assert "('u', 'v', 'w' and 2 more; the rest of them was put by a client)" in str(error)
    assert store.stats()["partitions"]["p"]["consumed"] == {"t": 2}


def test_a_claim_that_waits_names_three_owners_and_three_leases(store):
    for name in "uvwx":
        published(store, [name], label=f"worker {name}")
    published(store, list("123"), columns="ab")
    for reader in ("r1", "r2", "r3"):
        assert claimed(store, 1, columns="ab", label=reader)
    waits = Claim(key=1, partition="p", columns=("a", "b"), task="t", batch_size=1, deadline=10.0)
    why = store.explain(waits)
    assert "was put by worker u, worker v, worker w and 1 more)" in why
    assert why.endswith("leased and not acked: 1 to r1, 1 to r2, 1 to r3")
    published(store, ["4"], columns="ab")
    assert claimed(store, 1, columns="ab", label="r4")
    assert store.explain(waits).endswith("1 to r3 and 1 more")


def test_a_credit_given_back_lets_a_put_in(store):
    store.configure("p", {"max_rows": 1})
    credit = admit(store, 1, 0)
    assert put(store, ["x"]) is None
    store.release(credit.number)
    [(_, batch)], _ = store.drain()
    assert [row.sample_id for row in batch.rows] == ["x"]
    assert store.stats()["partitions"]["p"]["waiters"] == 0


def test_a_weight_version_may_be_set_twice_and_not_back(store):
    assert store.advance("p", 5).num_cleared == store.advance("p", 5).num_cleared == 0
    with pytest.raises(ValueError, match="is 5 and cannot become 4"):
        store.advance("p", 4)


def test_a_lease_that_expires_is_counted_once(store):
    published(store, 1)
    assert claimed(store, 1, lease_s=5.0)
    store.now = 5.0
    store.expire()
    assert store.num_expired == 1


def test_a_group_whose_acks_were_undone_is_open_again(store):
    policy = GroupComplete(group_size=2)
    groups = [{"group_id": 1}] * 2
    published(store, 2, tags=groups)
    batch = claimed(store, 2, policy=policy)
    assert batch is not None
    store.ack(partition="p", task="t", step=1, **of_lease(batch))
    store.restore("p", 0, None)
    store.clear_rows(partition="p", rows=[row.number for row in batch.rows])
    published(store, ["x", "y"], columns="ab", tags=groups)
    found = claimed(store, 2, columns="ab", policy=policy)
    assert found is not None
    assert [row.sample_id for row in found.rows] == ["x", "y"]


def pieces(store: MetadataStore, columns: str) -> list[tuple[int, int, int]] | None:
    """(first row, rows, start) of each piece of the whole partition."""
    rows = store.state.partitions["p"].rows
    found = pieces_of([*rows.values()], list(rows), frozenset(columns))
    return None if found is None else [piece[1:] for piece in found]


def test_a_piece_is_a_run_of_rows_and_of_places(store):
    published(store, list("uvwx"))
    assert pieces(store, "a") == [(1, 4, 0)]
    published(store, list("uwvx"), columns="b")
    assert pieces(store, "b") == [(1, 1, 0), (2, 1, 2), (3, 1, 1), (4, 1, 3)]


def test_a_reply_holds_so_many_pieces_and_no_more(store):
    for _ in range(MAX_LOCATIONS):
        published(store, 1)
    assert len(pieces(store, "a") or []) == MAX_LOCATIONS
    published(store, 1)
    assert pieces(store, "a") is None


@pytest.mark.parametrize("columns", ["g", "gh"])
def test_rows_share_a_column_where_their_group_has_it(store, columns):
    """Whether the shared column is alone in its extent or not."""
    published(store, ["w", "x"], columns=columns, tags=[{"group_id": 1}, {"group_id": 2}])
    published(store, ["u", "v", "y"], tags=[{"group_id": n} for n in (2, 2, 1)], shared=("g",))
    rows = store.state.partitions["p"].rows
    located = store.locate(partition="p", columns=["g"], rows=list(rows))
    places = [run[1:] for run in located.runs[located.columns["g"][1]]]
    assert places == [(0, 2), (1, 1), (1, 1), (0, 1)]
    assert sorted(pieces(store, "g") or []) == [(1, 2, 0), (3, 1, 1), (4, 1, 1), (5, 1, 0)]
