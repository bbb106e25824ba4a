import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_tq import BatchMeta

IDS = st.lists(st.text(max_size=4), unique=True, max_size=12)


@st.composite
def metas(draw: st.DrawFn, min_size: int = 0) -> BatchMeta:
    ids = draw(IDS.filter(lambda names: len(names) >= min_size))
    return BatchMeta(
        partition="p",
        sample_ids=tuple(ids),
        columns=tuple(draw(st.lists(st.sampled_from("abcd"), unique=True))),
        tags=tuple({"i": i} for i in range(len(ids))) if draw(st.booleans()) else (),
        rows=tuple(range(100, 100 + len(ids))) if draw(st.booleans()) else (),
        generation=7,
    )


def identities(meta: BatchMeta) -> list[tuple[object, ...]]:
    """Rows with all that belongs to them."""
    blank = [None] * len(meta)
    return list(zip(meta.sample_ids, meta.tags or blank, meta.rows or blank, strict=True))


def test_reorder_by_hand():
    meta = BatchMeta(
        partition="p", sample_ids=("x", "y", "z"), columns=("a",), tags=({"i": 0}, {"i": 1}, {"i": 2}), rows=(5, 6, 9)
    )
    assert meta.reorder([2, 0, 0]) == replace(
        meta, sample_ids=("z", "x", "x"), tags=({"i": 2}, {"i": 0}, {"i": 0}), rows=(9, 5, 5)
    )
    assert meta.reorder([-1]).sample_ids == ("z",)
    with pytest.raises(IndexError):
        meta.reorder([3])


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="2 rows has 1 tags"):
        BatchMeta(partition="p", sample_ids=("x", "y"), columns=(), tags=({},))
    with pytest.raises(ValueError, match="2 rows has 3 rows"):
        BatchMeta(partition="p", sample_ids=("x", "y"), columns=(), rows=(1, 2, 3))


@given(metas())
def test_pickling_keeps_everything(meta: BatchMeta):
    assert pickle.loads(pickle.dumps(meta)) == meta


@given(metas(), st.integers(1, 5))
def test_split_and_concat_are_inverse(meta: BatchMeta, size: int):
    parts = meta.split(size)
    assert all(len(part) == size for part in parts[:-1])
    assert [row for part in parts for row in identities(part)] == identities(meta)
    if parts:
        assert BatchMeta.concat(parts) == meta


@given(metas(min_size=1), st.integers(1, 13))
def test_chunk_divides_or_refuses(meta: BatchMeta, num_chunks: int):
    if len(meta) % num_chunks:
        with pytest.raises(ValueError, match="cannot be cut"):
            meta.chunk(num_chunks)
    else:
        parts = meta.chunk(num_chunks)
        assert [len(part) for part in parts] == [len(meta) // num_chunks] * num_chunks
        assert BatchMeta.concat(parts) == meta


def test_chunk_of_nothing():
    empty = BatchMeta(partition="p", sample_ids=(), columns=("a",))
    assert [len(part) for part in empty.chunk(3)] == [0, 0, 0]
    with pytest.raises(ValueError, match="0 equal chunks"):
        empty.chunk(0)
    with pytest.raises(ValueError, match="parts of 0"):
        empty.split(0)


@given(metas(min_size=1), st.data())
def test_reorder_composes(meta: BatchMeta, data: st.DataObject):
    positions = st.lists(st.integers(0, len(meta) - 1), min_size=1, max_size=20)
    first = data.draw(positions)
    second = data.draw(st.lists(st.integers(0, len(first) - 1)))
    assert meta.reorder(first).reorder(second) == meta.reorder([first[i] for i in second])
    assert identities(meta.reorder(first)) == [identities(meta)[i] for i in first]


@given(metas(min_size=1), st.data())
def test_union_keeps_our_order_and_joins_columns_and_tags(meta: BatchMeta, data: st.DataObject):
    order = data.draw(st.permutations(range(len(meta))))
    other = replace(
        meta.reorder(order),
        columns=("d", "e"),
        tags=tuple({"i": -1, "id": i} for i in meta.reorder(order).sample_ids),
        rows=meta.reorder(order).rows if data.draw(st.booleans()) else (),
    )
    joined = meta.union(other)
    assert joined.sample_ids == meta.sample_ids
    assert joined.rows == meta.rows
    assert set(joined.columns) == {*meta.columns, "d", "e"}
    assert len(joined.columns) == len(set(joined.columns))
    assert joined.tags == tuple({"i": -1, "id": i} for i in meta.sample_ids)
    assert replace(meta, tags=()).union(replace(meta, tags=())) == replace(meta, tags=())


def test_union_fills_in_what_a_reference_made_by_hand_lacks():
    by_hand = BatchMeta(partition="p", sample_ids=("x", "y"), columns=("a",))
    from_queue = BatchMeta(partition="p", sample_ids=("y", "x"), columns=("b",), rows=(8, 4), generation=3)
    joined = by_hand.union(from_queue)
    assert (joined.rows, joined.generation, joined.sample_ids) == ((4, 8), 3, ("x", "y"))


@pytest.mark.parametrize(
    "other",
    [
        BatchMeta(partition="q", sample_ids=("x", "y"), columns=()),
        BatchMeta(partition="p", sample_ids=("x",), columns=()),
        BatchMeta(partition="p", sample_ids=("x", "z"), columns=()),
        BatchMeta(partition="p", sample_ids=("x", "y"), columns=(), rows=(1, 3)),  # y was cleared and put again
    ],
)
def test_union_of_other_rows_is_refused(other: BatchMeta):
    meta = BatchMeta(partition="p", sample_ids=("x", "y"), columns=("a",), rows=(1, 2))
    with pytest.raises(ValueError, match="union needs"):
        meta.union(other)


def test_concat_keeps_shared_columns_and_pads_tags():
    a = BatchMeta(partition="p", sample_ids=("x",), columns=("a", "b"), tags=({"i": 1},), rows=(1,), generation=2)
    b = BatchMeta(partition="p", sample_ids=("y",), columns=("b", "c"), rows=(2,), generation=2)
    both = BatchMeta.concat([a, b])
    assert both == BatchMeta(
        partition="p", sample_ids=("x", "y"), columns=("b",), tags=({"i": 1}, {}), rows=(1, 2), generation=2
    )
    for bad, message in (
        ([], "at least one"),
        ([a, replace(b, partition="q")], "one partition"),
        ([a, replace(b, generation=3)], "generation"),
    ):
        with pytest.raises(ValueError, match=message):
            BatchMeta.concat(bad)


def test_select_columns():
    meta = BatchMeta(partition="p", sample_ids=("x",), columns=("a", "b", "c"))
    assert meta.select_columns(["c", "a"]).columns == ("c", "a")
    with pytest.raises(KeyError, match="z"):
        meta.select_columns(["a", "z"])
