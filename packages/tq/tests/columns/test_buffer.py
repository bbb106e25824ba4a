"""A buffer that gets are copied into, one after the other: what of a batch is made anew, and what stays valid."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_tq
from rl_tq.columns import gather
from rl_tq.types import Buffer

NUM_ROWS = 8


@pytest.fixture(scope="module")
def queue():
    with rl_tq.serve("shm://") as served:
        yield served


@pytest.fixture(scope="module")
def meta(queue):
    """Rows of lengths 1 2 3 1 2 3 1 2; `b` and `c` are as long as `a`, and `c` came in a put of its own."""
    rows = [torch.arange(i, i + i % 3 + 1) for i in range(NUM_ROWS)]
    meta = queue.put(
        {"a": rows, "b": [row.float() for row in rows], "d": torch.arange(NUM_ROWS), "j": [*range(NUM_ROWS)]},
        partition="p",
    )
    return meta.union(queue.put({"c": [row.double() for row in rows]}, partition="p", sample_ids=meta))


@pytest.fixture
def buffer():
    return Buffer(torch.full((4096,), 0xAA, dtype=torch.uint8))


def plain(batch):
    return {
        name: [row.tolist() for row in value.unbind()] if isinstance(value, torch.Tensor) else value.tolist()
        for name, value in batch.items()
    }


GETS = st.lists(
    st.tuples(
        st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=12),
        st.lists(st.sampled_from("abcdj"), min_size=1, unique=True),
    ),
    max_size=6,
)


@pytest.mark.process
@settings(deadline=None)
@given(gets=GETS)
def test_every_get_is_what_it_is_without_a_buffer(queue, meta, gets):
    buffer = Buffer(torch.full((4096,), 0xAA, dtype=torch.uint8))
    computed = []
    for index, columns in gets:
        asked = meta.reorder(index)
        batch = queue.get(asked, columns, out=buffer)
        assert plain(batch) == plain(queue.get(asked, columns))
        for name in set(columns) & {"a", "b", "c"}:
            computed.append((batch[name] * 2, [[2 * x for x in row] for row in plain(batch)[name]]))
            assert batch[name].to_padded_tensor(0).shape == (len(index), max(i % 3 + 1 for i in index))
    for result, expected in computed:  # what was made of a batch outlives it
        assert [row.tolist() for row in result.unbind()] == expected


def test_tensors_are_used_again_where_rows_are_as_long(queue, meta, buffer):
    first = queue.get(meta, out=buffer)
    again = queue.get(meta, out=buffer)
    assert again is not first
    assert all(again[name] is first[name] for name in "abcd")
    as_long = meta.reorder([3, 4, 5, 6, 7, 2, 0, 1])
    assert all(queue.get(as_long, out=buffer)[name] is first[name] for name in "abcd")
    shorter = queue.get(meta.reorder(range(NUM_ROWS - 1)), out=buffer)
    assert all(shorter[name] is not first[name] for name in "abcd")
    assert first["a"].offsets().tolist() == [0, 1, 3, 6, 7, 9, 12, 13, 15]


def test_a_batch_that_came_to_require_a_gradient_is_left_alone(queue, meta, buffer):
    first = queue.get(meta, ["b", "d"], out=buffer)
    first["b"].requires_grad_()
    again = queue.get(meta, ["b", "d"], out=buffer)
    assert again["b"] is not first["b"]
    assert not again["b"].requires_grad


def test_inference_mode_is_not_carried_over(queue, meta, buffer):
    with torch.inference_mode():
        queue.get(meta, out=buffer)
    batch = queue.get(meta, out=buffer)
    weight = torch.ones((), requires_grad=True)
    (batch["b"] * weight).values().sum().backward()
    assert weight.grad == queue.get(meta)["b"].values().sum()


@pytest.fixture(scope="module")
def large(queue):
    """Rows of 0 to 70,000 values, some megabytes in two puts: more than one thread is to copy."""
    rows = [torch.arange(10_000 * i, 20_000 * i) for i in range(NUM_ROWS)]
    data = {
        "a": rows,
        "d": torch.rand(NUM_ROWS, 50_000),
        "j": [*range(NUM_ROWS)],
        "t": [[row, row[:7]] for row in rows],
    }
    metas = [queue.put({n: v[part] for n, v in data.items()}, partition="l") for part in (slice(3), slice(3, None))]
    return rl_tq.BatchMeta.concat(metas), data


@pytest.mark.parametrize("order", [range(NUM_ROWS), [7, 0, 3, 3, 6]], ids=["in order", "shuffled"])
def test_a_large_get_is_whole_when_it_returns(queue, large, order):
    meta, data = large
    out = torch.empty(64 << 20, dtype=torch.uint8)
    for _ in range(5):
        out.fill_(0xAA)
        batch = queue.get(meta.reorder(order), out=out)
        assert torch.equal(batch["d"], data["d"][[*order]])
        assert torch.equal(batch["a"].values(), torch.cat([data["a"][i] for i in order]))
        assert torch.equal(batch["t"]["values"].values(), torch.cat([t for i in order for t in data["t"][i]]))
        assert batch["j"].tolist() == [*order]


def test_a_get_that_fails_leaves_nobody_writing_into_the_buffer(queue, large, monkeypatch):
    monkeypatch.setattr(gather, "_jagged", lambda *_: 1 / 0)
    meta, data = large
    out = torch.full((64 << 20,), 0xAA, dtype=torch.uint8)
    with pytest.raises(ZeroDivisionError):
        queue.get(meta, ["d", "a"], out=out)
    assert torch.equal(out[: data["d"].nbytes].view(torch.float32), data["d"].reshape(-1))
    ends = -(-data["d"].nbytes // 64) * 64
    whole = torch.cat(data["a"])
    assert torch.equal(out[ends : ends + whole.nbytes].view(torch.int64), whole)


def test_a_small_get_wakes_no_thread(queue, meta, buffer, monkeypatch):
    monkeypatch.setattr("rl_csrc.rows.begin_joins", lambda _: 1 / 0)
    assert queue.get(meta, out=buffer)["d"].tolist() == [*range(NUM_ROWS)]
