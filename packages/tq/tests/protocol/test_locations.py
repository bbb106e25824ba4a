"""References that say where their rows lie: read without a question, and never what was cleared."""

import pickle
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rl_tq
from rl_tq.columns.locations import Location, find_runs
from rl_tq.columns.schema import ColumnKind, ColumnSchema
from rl_tq.protocol.codec import lengthen, shorten

FLOAT = ColumnSchema(kind=ColumnKind.DENSE, dtype="float32", shape=())


class Asked:
    """Counts the questions of a client."""

    def __init__(self, client: rl_tq.TransferQueue, monkeypatch: pytest.MonkeyPatch) -> None:
        self.operations: list[str] = []
        ask = client._session.request
        monkeypatch.setattr(
            client._session, "request", lambda request, t: (self.operations.append(request["op"]), ask(request, t))[1]
        )

    def since(self) -> list[str]:
        operations, self.operations = self.operations, []
        return operations


@pytest.fixture
def queue() -> Iterator[rl_tq.TransferQueue]:
    with rl_tq.serve("shm://", timeout_s=20.0) as served:
        yield served


@pytest.fixture
def peer(queue) -> Iterator[rl_tq.TransferQueue]:
    with rl_tq.connect(queue.address, timeout_s=20.0) as client:
        yield client


@pytest.mark.parametrize("num_values", [3, 2_000_000])
def test_rows_whose_memory_is_known_are_read_without_a_question(queue, peer, monkeypatch, num_values):
    queue.put({"a": torch.arange(4.0)[:, None].expand(4, num_values), "t": ["x", "y", "z", "w"]}, partition="p")
    meta = pickle.loads(pickle.dumps(queue.get_meta(partition="p", columns=["a", "t"], batch_size=4, task="t")))
    asked = Asked(peer, monkeypatch)
    assert peer.get(meta)["a"][:, 0].tolist() == [0, 1, 2, 3]  # the segment comes with the first answer
    assert asked.since() == ["locate"]
    left, right = meta.chunk(2)
    assert peer.get(right)["a"][:, -1].tolist() == [2, 3]
    assert peer.get(meta.reorder([3, 0, 0]), ["t"])["t"].tolist() == ["w", "x", "x"]
    assert peer.get(rl_tq.BatchMeta.concat([right, left]))["a"][:, 0].tolist() == [2, 3, 0, 1]
    assert asked.since() == []


def test_one_question_publishes_and_one_claims(queue, peer, monkeypatch):
    asked = {name: Asked(client, monkeypatch) for name, client in {"queue": queue, "peer": peer}.items()}
    for _ in range(2):
        queue.put({"a": torch.ones(64, 300), "t": [torch.arange(i) for i in range(64)]}, partition="p")
        assert asked["queue"].since() == ["put"]
        meta = peer.get_meta(partition="p", columns=["a", "t"], batch_size=64, task="t")
        assert asked["peer"].since() == ["wait"]
        peer.get(meta)
        asked["peer"].since()
        peer.get(meta)
        assert asked["peer"].since() == []


def test_columns_of_several_puts_are_found_by_the_union(queue, peer, monkeypatch):
    meta = peer.put({"a": torch.arange(3)}, partition="p")
    peer.get(meta)
    asked = Asked(peer, monkeypatch)
    meta = meta.union(peer.put({"b": [torch.ones(1), torch.ones(2), torch.ones(3)]}, partition="p", sample_ids=meta))
    asked.since()
    got = peer.get(meta.reorder([2, 0]))
    assert got["a"].tolist() == [2, 0]
    assert [len(row) for row in got["b"].unbind()] == [3, 1]
    assert asked.since() == []
    with pytest.raises(rl_tq.MissingDataError, match="have no 'c' yet"):
        peer.get(meta, ["c"])


def test_what_was_cleared_is_noticed_and_what_was_not_is_read(queue, peer, monkeypatch):
    meta = queue.put({"a": torch.arange(4)}, partition="p")
    other = queue.put({"a": torch.arange(4, 6)}, partition="p")
    peer.get(rl_tq.BatchMeta.concat([meta, other]))
    asked = Asked(peer, monkeypatch)
    queue.clear(meta.reorder([1]))
    with pytest.raises(rl_tq.StaleReferenceError, match=r"1 of 4 rows.*'row2'"):
        peer.get(meta)
    assert peer.get(meta.reorder([0, 2, 3]))["a"].tolist() == [0, 2, 3]
    assert set(asked.since()) == {"locate"}
    assert peer.get(other)["a"].tolist() == [4, 5]
    assert asked.since() == []
    queue.clear("p")
    queue.put({"a": torch.arange(100, 106)}, partition="p")
    for reference in (meta, other):
        with pytest.raises(rl_tq.StaleReferenceError):
            peer.get(reference)


def test_a_place_of_another_server_is_not_believed(tmp_path):
    address = f"file://{tmp_path}/q"
    with rl_tq.serve(address) as queue:
        meta = queue.put({"a": torch.arange(3)}, partition="p")
        assert queue.get(meta)["a"].tolist() == [0, 1, 2]
    with rl_tq.serve(address) as queue:
        again = queue.put({"a": torch.arange(7, 9)}, partition="p")
        assert queue.get(again)["a"].tolist() == [7, 8]
        assert queue.get(meta)["a"].tolist() == [0, 1, 2]
        queue.clear(meta)
        with pytest.raises(rl_tq.StaleReferenceError):
            queue.get(meta)


def test_rows_in_many_pieces_are_asked_for(queue, peer):
    metas = [queue.put({"a": torch.tensor([i])}, partition="p") for i in range(100)]
    meta = peer.get_meta(partition="p", columns=["a"], batch_size=100, task="t")
    assert not meta.places
    assert peer.get(meta)["a"].tolist() == list(range(100))
    assert peer.get(rl_tq.BatchMeta.concat(metas[::-1]))["a"].tolist() == list(range(99, -1, -1))


@st.composite
def pieces(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(first row, rows, start), not overlapping, in any order."""
    found, row = [], 0
    for _ in range(draw(st.integers(1, 4))):
        row += draw(st.integers(0, 2))
        count = draw(st.integers(1, 4))
        found.append((row, count, draw(st.integers(0, 3))))
        row += count
    return draw(st.permutations(found))


@pytest.mark.process
@given(pieces(), st.data())
def test_runs_are_those_of_the_rows_one_by_one(found, data):
    places = [
        Location({"a": FLOAT}, first, count, start, extent, 1, 0, 64, 0, 0)
        for extent, (first, count, start) in enumerate(found)
    ]
    where = {first + i: (extent, start + i) for extent, (first, count, start) in enumerate(found) for i in range(count)}
    rows = data.draw(st.lists(st.sampled_from(sorted(where)), min_size=1, max_size=12))
    columns, used = find_runs(rows, ["a"], places)
    runs = columns["a"][1]
    assert [(extent, start + i) for extent, start, count in runs for i in range(count)] == [where[row] for row in rows]
    assert {place.extent for place in used} == {where[row][0] for row in rows}
    assert find_runs([*rows, max(where) + 1], ["a"], places) is None
    assert find_runs(rows, ["b"], places) is None


@given(
    st.one_of(
        st.lists(st.integers(0, 5), max_size=8),
        st.builds(lambda a, n: list(range(a, a + n)), st.integers(0, 9), st.integers(0, 9)),
        st.builds(lambda a, n: [a] * n, st.integers(0, 9), st.integers(0, 9)),
    )
)
def test_numbers_are_the_same_after_the_wire(numbers):
    assert list(lengthen(shorten(numbers))) == numbers


def test_numbers_that_are_none_are_refused():
    with pytest.raises(ValueError, match="not a list of numbers"):
        lengthen({"of": [0, 1, 1 << 60]})
