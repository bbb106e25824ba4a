import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_tq import BatchMeta
from rl_tq.types import batch_meta

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


def test_ids_that_are_numbers_are_made_of_the_rows_that_are_left():
    meta = batch_meta("p", None, ("a",), ({"g": 0}, {"g": 1}, {"g": 0}), (5, 6, 9), 1, "", (), (), {})
    assert meta.reorder([2, 0]).sample_ids == ("row9", "row5")
    assert [part.sample_ids for part in meta.split(2)] == [("row5", "row6"), ("row9",)]
    assert {group: part.sample_ids for group, part in meta.groupby("g").items()} == {0: ("row5", "row9"), 1: ("row6",)}
    assert meta.sample_ids == ("row5", "row6", "row9")
    assert meta.reorder([1]).sample_ids == ("row6",)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="2 rows has 1 tags"):
        BatchMeta(partition="p", sample_ids=("x", "y"), columns=(), tags=({},))
    with pytest.raises(ValueError, match="2 rows has 3 rows"):
        BatchMeta(partition="p", sample_ids=("x", "y"), columns=(), rows=(1, 2, 3))


@pytest.mark.process
@given(metas())
def test_pickling_keeps_everything(meta: BatchMeta):
    assert pickle.loads(pickle.dumps(meta)) == meta


@pytest.mark.process
@given(metas(), st.integers(1, 5))
def test_split_and_concat_are_inverse(meta: BatchMeta, size: int):
    parts = meta.split(size)
    assert all(len(part) == size for part in parts[:-1])
    assert [row for part in parts for row in identities(part)] == identities(meta)
    if parts:
        assert BatchMeta.concat(parts) == meta


@pytest.mark.process
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


@pytest.mark.process
@given(metas(min_size=1), st.data())
def test_reorder_composes(meta: BatchMeta, data: st.DataObject):
    positions = st.lists(st.integers(0, len(meta) - 1), min_size=1, max_size=20)
    first = data.draw(positions)
    second = data.draw(st.lists(st.integers(0, len(first) - 1)))
    assert meta.reorder(first).reorder(second) == meta.reorder([first[i] for i in second])
    assert identities(meta.reorder(first)) == [identities(meta)[i] for i in first]


@pytest.mark.process
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
    from_queue = BatchMeta(
        partition="p", sample_ids=("y", "x"), columns=("b",), rows=(8, 4), generation=3, task="t", leases=(6, 5)
    )
    joined = by_hand.union(from_queue)
    assert (joined.rows, joined.generation, joined.sample_ids) == ((4, 8), 3, ("x", "y"))
    assert (joined.task, joined.leases) == ("t", (5, 6))


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


def numbered(tokens: list[int], **more: object) -> BatchMeta:
    """Rows with tags `num_tokens` and `i`, leased."""
    size = len(tokens)
    return BatchMeta(
        partition="p",
        sample_ids=tuple(f"s{i}" for i in range(size)),
        columns=("a",),
        tags=tuple({"num_tokens": n, "i": i, **more} for i, n in enumerate(tokens)),
        rows=tuple(range(size)),
        generation=7,
        task="t",
        leases=(5,) * size,
    )


def in_order(meta: BatchMeta) -> BatchMeta:
    """Its rows in the order in which `numbered` made them."""
    return meta.reorder(sorted(range(len(meta)), key=lambda row: meta.rows[row]))


TOKENS = st.lists(st.integers(0, 9), max_size=24)


@given(TOKENS)
def test_filter_keeps_what_is_accepted_in_order(tokens: list[int]):
    meta = numbered(tokens)
    kept = meta.filter(lambda tags: tags["num_tokens"] > 4)
    assert kept == meta.reorder([i for i, n in enumerate(tokens) if n > 4])
    assert kept.filter(lambda tags: tags["num_tokens"] > 4) == kept
    rest = meta.filter(lambda tags: tags["num_tokens"] <= 4)
    assert sorted(kept.rows + rest.rows) == list(meta.rows)


def test_filter_shows_rows_without_tags_an_empty_mapping():
    meta = BatchMeta(partition="p", sample_ids=("x", "y"), columns=())
    assert meta.filter(lambda tags: "reward" in tags).sample_ids == ()
    assert meta.filter(lambda tags: not tags) == meta


@given(TOKENS)
def test_groupby_parts_the_rows(tokens: list[int]):
    meta = numbered(tokens)
    groups = meta.groupby("num_tokens")
    assert list(groups) == list(dict.fromkeys(tokens))
    for value, group in groups.items():
        assert group == meta.filter(lambda tags, value=value: tags["num_tokens"] == value)
    if groups:
        assert in_order(BatchMeta.concat(list(groups.values()))) == meta


@given(st.integers(1, 6), st.data())
def test_balanced_gives_equal_counts_and_close_sums(num_parts: int, data: st.DataObject):
    count = num_parts * data.draw(st.integers(0, 5))
    tokens = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    meta = numbered(tokens)
    parts = meta.balanced(num_parts).chunk(num_parts)
    assert in_order(BatchMeta.concat(parts)) == meta
    assert all(part == in_order(part) for part in parts)
    sums = [sum(tags["num_tokens"] for tags in part.tags) for part in parts]
    # A part is passed over only while it is the fuller one or full, so no two differ by more than a longest row each.
    assert max(sums) - min(sums) <= max(tokens, default=0) * max(1, count // num_parts)


def test_balanced_by_hand():
    assert numbered([7, 1, 5, 3]).balanced(2).rows == (0, 1, 2, 3)  # 7 + 1 and 5 + 3
    assert numbered([1, 2, 3, 4, 5, 60]).balanced(3).rows == (0, 5, 1, 4, 2, 3)
    with pytest.raises(ValueError, match="5 rows cannot be balanced over 2"):
        numbered([1] * 5).balanced(2)


def test_positions_are_ranges_where_rows_of_a_value_are_together():
    meta = BatchMeta(partition="p", sample_ids=("a", "b", "c"), columns=(), tags=({"g": 1}, {"g": 1}, {"g": 0}))
    assert meta.positions("g") == {1: range(2), 0: range(2, 3)}
    assert meta.reorder([0, 2, 1]).positions("g") == {1: [0, 2], 0: [1]}
    assert meta.reorder(()).positions("g") == {}


def test_reorder_by_a_range_is_reorder_by_its_positions():
    meta = BatchMeta(partition="p", sample_ids=("a", "b", "c"), columns=(), rows=(4, 5, 6))
    for index in (range(3), range(1, 3), range(2, 2), range(2, -1, -1), range(-2, 0), range(0, 3, 2)):
        assert meta.reorder(index) == meta.reorder(list(index))
    with pytest.raises(IndexError):
        meta.reorder(range(4))


@pytest.mark.parametrize("call", [lambda m: m.groupby("x"), lambda m: m.balanced(1, tag="x")])
def test_a_missing_tag_is_named_with_a_row(call):
    meta = BatchMeta(partition="p", sample_ids=("x", "y"), columns=(), tags=({"x": 1}, {}))
    with pytest.raises(KeyError, match="1 of 2 rows have no tag 'x', 'y' among them"):
        call(meta)


@given(TOKENS.filter(bool), st.data())
def test_a_permutation_is_undone_by_its_inverse(tokens: list[int], data: st.DataObject):
    meta = numbered(tokens)
    order = data.draw(st.permutations(range(len(meta))))
    inverse = [order.index(i) for i in range(len(meta))]
    assert meta.reorder(order).reorder(inverse) == meta
    assert meta.union(meta.reorder(order)) == meta
