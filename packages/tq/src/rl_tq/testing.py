"""For tests: a queue in memory, and the suite that every storage must pass. Needs pytest.

A storage of your own passes when a subclass does::

    class TestMine(TransferQueueContract):
        address = "mine://"
"""

from __future__ import annotations

import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from rl_csrc.frames import DTYPES
from rl_tq import policies
from rl_tq._registry import connect, serve
from rl_tq.errors import (
    LeaseLostError,
    MissingDataError,
    PolicyError,
    QueueFullError,
    SchemaError,
    ServerLostError,
    StaleReferenceError,
    StaleVersionError,
    WaitTimeoutError,
)
from rl_tq.types import BatchMeta, PerGroup, Policy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rl_tq.base import TransferQueue
    from rl_tq.types import RowMeta


def fake_queue() -> TransferQueue:
    """A queue of this process alone, for the tests of whatever takes a `TransferQueue`. Close it after use."""
    return serve("inproc://")


def rows_of(value: Any) -> list[Any]:
    """A fetched column as plain lists, one item per row."""
    if isinstance(value, torch.Tensor):
        return [row.tolist() for row in value.unbind()]
    return value.tolist()


def turns_of(value: TensorDict) -> list[Any]:
    """A fetched column of turns as plain lists, one list of turns per row."""
    rows = zip(value["values"].unbind(), value["lengths"].unbind(), strict=True)
    return [[turn.tolist() for turn in values.split(lengths.tolist())] for values, lengths in rows]


class TransferQueueContract:
    """What `TransferQueue` promises. Each test gets a queue that is served here, and a second client of it."""

    address: ClassVar[str]
    """What to serve; its name empty, so that each test has a queue of its own."""

    @pytest.fixture
    def queue(self) -> Iterator[TransferQueue]:
        """The client that serves."""
        with serve(self.address, timeout_s=20.0) as served:
            yield served

    @pytest.fixture
    def peer(self, queue: TransferQueue) -> Iterator[TransferQueue]:
        """Another client of the same queue."""
        with connect(queue.address, timeout_s=20.0) as client:
            yield client

    # Values

    def test_every_kind_of_column_comes_back_as_it_was_put(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Dense, ragged from a list, ragged from a nested tensor, ragged rows of two dimensions, and JSON."""
        meta = queue.put(
            {
                "dense": torch.arange(6, dtype=torch.int32).view(3, 2),
                "scalar": torch.tensor([0.5, -1.0, 2.0]),
                "listed": [torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([3])],
                "nested": torch.nested.nested_tensor_from_jagged(torch.arange(4.0), torch.tensor([0, 1, 1, 4])),
                "images": [torch.ones(1, 2, 2), torch.zeros(3, 2, 2), torch.full((2, 2, 2), 7.0)],
                "info": [{"answer": "72", "ids": [1, 2]}, "ä\n", None],
            },
            partition="train",
        )
        batch = peer.get(meta)
        assert batch.batch_size == (3,)
        assert batch["dense"].dtype == torch.int32
        assert batch["dense"].tolist() == [[0, 1], [2, 3], [4, 5]]
        assert batch["scalar"].tolist() == [0.5, -1.0, 2.0]
        assert batch["listed"].layout is torch.jagged
        assert rows_of(batch["listed"]) == [[1, 2], [], [3]]
        assert rows_of(batch["nested"]) == [[0.0], [], [1.0, 2.0, 3.0]]
        assert [tuple(image.shape) for image in batch["images"].unbind()] == [(1, 2, 2), (3, 2, 2), (2, 2, 2)]
        assert batch["images"].unbind()[2].unique().tolist() == [7.0]
        assert batch["info"].tolist() == [{"answer": "72", "ids": [1, 2]}, "ä\n", None]

    def test_rows_come_back_in_whatever_order_they_are_asked_for(
        self, queue: TransferQueue, peer: TransferQueue
    ) -> None:
        """Shuffled and repeated, small rows and large ones, of one put and of two."""
        data: dict[str, Any] = {
            "bf16": torch.arange(40, dtype=torch.bfloat16),
            "flag": torch.arange(40) % 3 == 0,
            "wide": torch.arange(120, dtype=torch.int16).view(40, 3),
            "none": torch.zeros(40, 0),
            "large": torch.arange(40.0)[:, None].expand(40, 2000),
            "ragged": [torch.arange(n) for n in range(40)],
        }
        meta = queue.put(data, partition="p")
        both = BatchMeta.concat([meta, queue.put(data, partition="p")])
        order = [*range(39, -1, -1), *range(0, 40, 2), 5, 5, 5]
        shuffled = [(7 * i) % 40 for i in order]
        for rows, of in (
            (meta.reorder(shuffled), shuffled),
            (both.reorder([i + 40 for i in shuffled] + [0]), shuffled),
        ):
            for out in (None, torch.zeros(1 << 20, dtype=torch.uint8)):
                batch = peer.get(rows, out=out)
                expected = [*of, 0][: len(rows)]
                for name in ("bf16", "flag", "wide", "none", "large"):
                    assert torch.equal(batch[name], data[name][expected])
                assert rows_of(batch["ragged"]) == [list(range(n)) for n in expected]

    def test_turns_and_bytes_come_back_as_they_were_put(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """A list of turns per row, of none, of empty ones, and of two dimensions; packed again as it came."""
        turns = [[torch.tensor([1, 2]), torch.tensor([3])], [], [torch.tensor([], dtype=torch.int64), torch.arange(4)]]
        images = [[torch.full((n, 2), float(n)) for n in row] for row in ((1, 2), (3,), ())]
        data = {"turns": turns, "images": images, "raw": [b"\xff\x00", b"", b"JSON"], "x": torch.arange(3)}
        meta = queue.put(data, partition="p")
        batch = peer.get(meta)
        assert turns_of(batch["turns"]) == [[[1, 2], [3]], [], [[], [0, 1, 2, 3]]]
        assert turns_of(batch["images"])[0] == [[[1.0, 1.0]], [[2.0, 2.0], [2.0, 2.0]]]
        assert batch["turns", "values"].layout is torch.jagged
        assert batch["raw"].tolist() == [b"\xff\x00", b"", b"JSON"]
        again = queue.put(batch.select("turns", "images"), partition="p")
        mixed = BatchMeta.concat([again.reorder([2]), meta.select_columns(["turns", "images"]).reorder([0, 0])])
        assert turns_of(peer.get(mixed)["turns"]) == [[[], [0, 1, 2, 3]], [[1, 2], [3]], [[1, 2], [3]]]
        landed = peer.get(meta, out=torch.zeros(2048, dtype=torch.uint8))
        assert turns_of(landed["turns"]) == turns_of(batch["turns"])
        assert landed["raw"].tolist() == batch["raw"].tolist()

    def test_values_of_a_group_are_stored_once(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """They come back row by row, whatever their kind, and their column may be put row by row as well."""
        groups = ["b", "b", "a", "b", "a"]
        tags = [{"group_id": group} for group in groups]
        image = torch.rand(2, 100_000)
        shared: dict[str, Any] = {
            "image": PerGroup(image),
            "prompt": PerGroup([torch.tensor([1]), torch.tensor([2, 3])]),
            "turns": PerGroup([[torch.tensor([4]), torch.tensor([5])], []]),
            "info": PerGroup([{"of": "b"}, {"of": "a"}]),
            "raw": PerGroup([b"b", b"aa"]),
        }
        meta = queue.put({**shared, "x": torch.arange(5)}, partition="p", tags=tags)
        assert queue.stats()["bytes"] < 1.5 * image.nbytes
        alone = queue.put({"image": image[:1], "prompt": [torch.tensor([9])]}, partition="p")
        batch = peer.get(meta.reorder([4, 0, 1, 2]))
        assert torch.equal(batch["image"], image[[1, 0, 0, 1]])
        assert rows_of(batch["prompt"]) == [[2, 3], [1], [1], [2, 3]]
        assert turns_of(batch["turns"]) == [[], [[4], [5]], [[4], [5]], []]
        assert batch["info"].tolist() == [{"of": group} for group in "abba"]
        assert batch["raw"].tolist() == [b"aa", b"b", b"b", b"aa"]
        assert batch["x"].tolist() == [4, 0, 1, 2]
        both = BatchMeta.concat([alone, meta.reorder([2])])
        assert rows_of(peer.get(both, ["prompt"])["prompt"]) == [[9], [2, 3]]
        assert torch.equal(peer.get(both, ["image"], out=torch.zeros(900_000, dtype=torch.uint8))["image"], image)
        added = peer.put({"late": PerGroup(torch.tensor([0.5, 1.5]))}, partition="p", sample_ids=meta)
        assert queue.get(added)["late"].tolist() == [0.5, 0.5, 1.5, 0.5, 1.5]

    def test_rows_that_come_later_share_what_their_group_has(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Put by others, alone or several at a time; it outlives the rows that brought it."""
        image = torch.rand(2, 100_000)
        data = {"image": PerGroup(image), "prompt": PerGroup([b"x", b"yy"]), "x": torch.arange(2)}
        first = queue.put(data, partition="p", tags=[{"group_id": 1}, {"group_id": 2}])
        held = queue.stats()["bytes"]
        mine: dict[str, Any] = {"image": PerGroup(), "prompt": PerGroup()}
        later = [
            peer.put({**mine, "x": torch.tensor([5, 6])}, partition="p", tags=[{"group_id": 2}, {"group_id": 1}]),
            queue.put({**mine, "x": torch.tensor([7])}, partition="p", tags=[{"group_id": 2}]),
        ]
        assert later[0].columns == ("x", "image", "prompt")
        empty = peer.put({"x": torch.tensor([8])}, partition="p", tags=[{"group_id": 1}])
        later.append(peer.put({"prompt": PerGroup(), "y": ["late"]}, partition="p", sample_ids=empty))
        assert queue.stats()["bytes"] - held < 10_000
        claim: dict[str, Any] = {"partition": "p", "columns": ["image", "x"], "task": "t"}
        meta = peer.get_meta(**claim, batch_size=5)
        assert meta.rows == (*first.rows, *later[0].rows, *later[1].rows)
        for client in (queue, peer):
            batch = client.get(meta.reorder([4, 0, 3, 2, 1]))
            assert torch.equal(batch["image"], image[[1, 0, 0, 1, 1]])
            assert batch["x"].tolist() == [7, 0, 6, 5, 1]
            assert client.get(later[0], ["prompt"])["prompt"].tolist() == [b"yy", b"x"]
            assert client.get(later[2])["prompt"].tolist() == [b"x"]
        queue.clear(first)
        last = queue.put({**mine, "x": torch.tensor([9])}, partition="p", tags=[{"group_id": 1}])
        for reference, wanted in ((later[0], [1, 0]), (last, [0])):
            assert torch.equal(peer.get(reference, ["image"])["image"], image[wanted])
        with pytest.raises(MissingDataError, match=r"no row of 1 groups of partition 'p' has 'image' \(3\)"):
            queue.put({**mine, "x": torch.tensor([7])}, partition="p", tags=[{"group_id": 3}])
        for given, tags, message in (
            ({**mine, "x": torch.tensor([7])}, None, "no tag 'group_id'"),
            (mine, [{"group_id": 1}], "at least one of their own"),
        ):
            with pytest.raises(SchemaError, match=message):
                queue.put(given, partition="p", tags=tags)
        with pytest.raises(SchemaError, match="filled already"):
            queue.put({"image": PerGroup(), "z": [1]}, partition="p", sample_ids=last)
        queue.clear("p")
        assert queue.stats()["extents"] == 0

    def test_a_tensordict_round_trips(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """What a get returned can be put again."""
        data = TensorDict({"x": torch.arange(2), "text": NonTensorStack("a", "b")}, batch_size=[2])
        data["ragged"] = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
        again = peer.get(peer.put(queue.get(queue.put(data, partition="a")), partition="b"))
        assert again["x"].tolist() == [0, 1]
        assert again["text"].tolist() == ["a", "b"]
        assert rows_of(again["ragged"]) == [[0, 1], [0, 1, 2]]

    def test_every_dtype_keeps_its_bits(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Rows of random bits, gathered from two puts."""
        for dtype in DTYPES:
            if dtype is torch.complex32:
                continue  # torch itself warns that it hardly supports it
            bits = torch.randint(0, 2 if dtype is torch.bool else 256, (3, 64), dtype=torch.uint8)
            name = str(dtype)
            metas = [queue.put({name: part.view(dtype)}, partition="bits") for part in bits.split([1, 2])]
            fetched = peer.get(BatchMeta.concat(metas))[name]
            assert fetched.dtype == dtype
            assert torch.equal(fetched.view(torch.uint8), bits), dtype

    def test_strided_and_sliced_tensors_are_put_by_value(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Transposed, sliced, nested with holes, and requiring grad."""
        base = torch.arange(6.0).view(2, 3)
        nested = torch.nested.nested_tensor_from_jagged(torch.arange(6), torch.tensor([0, 3, 6]), torch.tensor([2, 1]))
        meta = queue.put({"t": base.t().requires_grad_(), "s": base.flatten()[::2]}, partition="p")
        holes = queue.put({"n": nested}, partition="p", sample_ids=meta.sample_ids[:2])
        assert peer.get(meta)["t"].tolist() == base.t().tolist()
        assert peer.get(meta)["s"].tolist() == [0.0, 2.0, 4.0]
        assert rows_of(peer.get(holes)["n"]) == [[0, 1], [3]]

    def test_rows_come_in_the_order_of_the_reference(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Shuffled, repeated, and from many puts at once."""
        parts = [
            queue.put({"x": torch.tensor([10 * i, 10 * i + 1]), "r": [torch.full((i,), i)] * 2}, partition="p")
            for i in range(4)
        ]
        meta = BatchMeta.concat(parts).reorder([7, 0, 1, 4, 4, 5, 2])
        batch = peer.get(meta)
        assert batch["x"].tolist() == [31, 0, 1, 20, 20, 21, 10]
        assert rows_of(batch["r"]) == [[3, 3, 3], [], [], [2, 2], [2, 2], [2, 2], [1]]

    def test_only_the_columns_asked_for_are_fetched(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """A get names columns; ragged ones of equal lengths can be combined by torch."""
        rows = [torch.arange(n) for n in (2, 3)]
        meta = queue.put({"a": rows, "b": rows, "c": torch.zeros(2)}, partition="p")
        batch = peer.get(meta, ["b", "a"])
        assert sorted(batch.keys()) == ["a", "b"]
        assert rows_of(batch["a"] + batch["b"]) == [[0, 2], [0, 2, 4]]

    def test_what_was_put_and_what_was_got_are_copies(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Writing to either changes nothing in the queue; small and large extents, which are stored differently."""
        for num_columns in (4, 3_000_000):
            source = torch.zeros(2, num_columns, dtype=torch.int32)
            tags = [{"n": 1}, {"n": 2}]
            meta = queue.put({"x": source}, partition="p", tags=tags)
            source += 5
            tags[0]["n"] = 9
            first = peer.get(meta)
            first["x"] += 7
            assert queue.get(meta)["x"].unique().tolist() == [0]
            assert peer.get(meta)["x"].unique().tolist() == [0]
            assert meta.tags == ({"n": 1}, {"n": 2})
            queue.clear("p")
            assert first["x"].unique().tolist() == [7]

    # Rows and columns

    def test_columns_are_added_to_rows_and_united(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """A put returns its own columns only, so that `batch.union(put(...))` is the whole."""
        batch = queue.put(
            {"a": torch.arange(3)}, partition="p", sample_ids=["x", "y", "z"], tags=[{"i": i} for i in range(3)]
        )
        added = peer.put({"b": torch.tensor([2, 0])}, partition="p", sample_ids=["z", "x"], tags=[{"k": 1}, {"k": 2}])
        assert added.columns == ("b",)
        assert added.sample_ids == ("z", "x")
        assert added.tags == ({"i": 2, "k": 1}, {"i": 0, "k": 2})
        united = batch.reorder([0, 2]).union(pickle.loads(pickle.dumps(added)))
        assert united.columns == ("a", "b")
        assert queue.get(united)["b"].tolist() == [0, 2]
        assert queue.get(united)["a"].tolist() == [0, 2]

    def test_fresh_rows_have_fresh_ids(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """From any client."""
        metas = [client.put({"a": torch.zeros(5)}, partition="p") for client in (queue, peer, queue)]
        assert len({sample_id for meta in metas for sample_id in meta.sample_ids}) == 15

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ({"a": torch.zeros(2, dtype=torch.int64)}, "dense float32.*dense int64"),
            ({"a": torch.zeros(2, 1)}, r"dense float32 \[\].*dense float32 \[1\]"),
            ({"a": [torch.zeros(1), torch.zeros(2)]}, "dense.*ragged"),
            ({"a": ["x", "y"]}, "dense.*json"),
            ({"b": torch.zeros(2), "c": torch.zeros(3)}, "row counts differ"),
            ({"b": [torch.zeros(1), "x"]}, "mixes tensors"),
            ({"b": [torch.zeros(1), torch.zeros(1, dtype=torch.int64)]}, "several dtypes"),
            ({"b": [torch.zeros(1, 2), torch.zeros(1, 3)]}, "in their first only"),
            ({"b": [torch.tensor(1.0), torch.tensor(2.0)]}, "at least one dimension"),
            ({"b": torch.tensor(1.0)}, "of shape"),
            ({"b": [{1: "x"}, {}]}, "keys must be strings"),
            ({"b": [object(), 1]}, "cannot be kept as JSON"),
            ({"b": 3}, "builtins.int"),
            ({}, "one or more columns"),
            ({"b": torch.zeros(2).to_sparse()}, "strided"),
            ({"a": [b"x", b"y"]}, "dense.*bytes"),
            ({"a": [[torch.zeros(1)], []]}, r"dense.*turns float32 \[\*, \*\]"),
            ({"b": [[torch.zeros(1)], torch.zeros(1)]}, "mixes lists of tensors"),
            ({"b": [[torch.zeros(1)], [torch.zeros(1, 1)]]}, "in their first only"),
            ({"b": [b"x", "y"]}, "mixes bytes"),
            ({"b": PerGroup(torch.zeros(1))}, "no tag 'group_id'"),
            ({"b\0": torch.zeros(2)}, "without NUL"),
            ({"b": {"values": torch.zeros(2, 1), "lengths": torch.ones(2, 1)}}, "jagged values"),
        ],
    )
    def test_what_does_not_fit_is_refused_whole(self, queue: TransferQueue, data: Any, message: str) -> None:
        """A refused put leaves nothing behind."""
        queue.put({"a": torch.zeros(2)}, partition="p", sample_ids=["x", "y"])
        before = queue.stats()["partitions"]
        with pytest.raises(SchemaError, match=message):
            queue.put({"z": torch.zeros(2), **data} if data else data, partition="p", sample_ids=["v", "w"])
        assert queue.stats()["partitions"] == before

    def test_a_put_has_rows(self, queue: TransferQueue) -> None:
        """None of any kind of column is nothing to put."""
        nested = torch.nested.nested_tensor_from_jagged(torch.zeros(0), torch.tensor([0]))
        for value in (torch.zeros(0, 3), [], nested):
            with pytest.raises(SchemaError, match="no rows"):
                queue.put({"a": value}, partition="p")

    def test_a_value_is_written_once(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Filling a column again is refused, even in one row of many."""
        queue.put({"a": torch.zeros(2)}, partition="p", sample_ids=["x", "y"])
        with pytest.raises(SchemaError, match="filled already in 1 rows"):
            peer.put({"a": torch.zeros(2), "b": torch.zeros(2)}, partition="p", sample_ids=["y", "z"])
        with pytest.raises(SchemaError, match="more than once"):
            peer.put({"b": torch.zeros(2)}, partition="p", sample_ids=["z", "z"])
        with pytest.raises(SchemaError, match="3 sample_ids were given for 2 rows"):
            peer.put({"b": torch.zeros(2)}, partition="p", sample_ids=["u", "v", "w"])
        with pytest.raises(SchemaError, match="1 tags were given for 2 rows"):
            peer.put({"b": torch.zeros(2)}, partition="p", tags=[{}])
        assert peer.stats()["partitions"]["p"]["rows"] == 2

    def test_missing_columns_and_rows_are_named(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """A get is never shorter than what was asked for."""
        meta = queue.put({"a": torch.zeros(2)}, partition="p", sample_ids=["x", "y"])
        queue.put({"b": torch.zeros(1)}, partition="p", sample_ids=["x"])
        with pytest.raises(MissingDataError, match=r"1 of 2 rows have no 'b' yet.*'y'"):
            peer.get(meta, ["a", "b"])
        with pytest.raises(MissingDataError, match="1 of 2 rows of partition 'p' are not there: 'q'"):
            peer.get(BatchMeta(partition="p", sample_ids=("x", "q"), columns=("a",)))
        with pytest.raises(MissingDataError, match="no partition 'nowhere'"):
            peer.get(BatchMeta(partition="nowhere", sample_ids=("x",), columns=("a",)))
        with pytest.raises(MissingDataError, match="nothing to fetch"):
            peer.get(meta.reorder([]))

    # Clearing

    def test_cleared_rows_are_stale_and_others_are_not(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Even when a row is put again under the same id."""
        meta = queue.put({"a": torch.arange(3)}, partition="p", sample_ids=["x", "y", "z"])
        peer.clear(meta.reorder([1]))
        again = peer.put({"a": torch.tensor([9])}, partition="p", sample_ids=["y"])
        with pytest.raises(StaleReferenceError, match=r"1 of 3 rows.*'y'"):
            queue.get(meta)
        with pytest.raises(StaleReferenceError):
            queue.clear(meta)
        assert queue.get(meta.reorder([2, 0]))["a"].tolist() == [2, 0]
        assert queue.get(again)["a"].tolist() == [9]

    def test_a_cleared_partition_begins_anew(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """With another generation and schema, and nothing consumed; references to the old one never read the new."""
        meta = queue.put({"a": torch.arange(3)}, partition="p", sample_ids=["x", "y", "z"])
        queue.get_meta(partition="p", columns=["a"], batch_size=3, task="t")
        peer.clear("p")
        peer.clear("p")
        with pytest.raises(StaleReferenceError, match="was not put to since"):
            queue.get(meta)
        again = queue.put({"a": [torch.zeros(2), torch.zeros(1)]}, partition="p", sample_ids=["x", "y"])
        assert again.generation > meta.generation
        with pytest.raises(StaleReferenceError, match=f"its generation {meta.generation}"):
            peer.get(meta)
        assert peer.get_meta(partition="p", columns=["a"], batch_size=2, task="t").sample_ids == ("x", "y")

    def test_clearing_frees(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """An extent goes with its last row."""
        meta = queue.put({"a": torch.zeros(4, 100)}, partition="p")
        peer.put({"b": torch.zeros(2, 2_000_000)}, partition="p", sample_ids=meta.sample_ids[:2])
        peer.get(meta)
        queue.clear(meta.reorder([0, 1, 2]))
        assert queue.stats()["extents"] == 1
        assert 1_600 <= queue.stats()["bytes"] < 4_000
        queue.clear(meta.reorder([3]))
        stats = queue.stats()
        assert (stats["extents"], stats["bytes"], stats["rows"]) == (0, 0, 0)

    # Claiming

    def test_each_task_gets_each_row_once(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Oldest first; tasks do not see one another; rows are ready when all their columns are there."""
        meta = queue.put({"a": torch.arange(4)}, partition="p", tags=[{"i": i} for i in range(4)])
        queue.put({"b": torch.zeros(3)}, partition="p", sample_ids=[meta.sample_ids[i] for i in (3, 0, 2)])
        claim: dict[str, Any] = {"partition": "p", "columns": ["a", "b"], "batch_size": 2}
        first = peer.get_meta(task="train", **claim)
        assert first.sample_ids == (meta.sample_ids[0], meta.sample_ids[2])
        assert first.columns == ("a", "b")
        assert first.tags == ({"i": 0}, {"i": 2})
        assert queue.get(first)["a"].tolist() == [0, 2]
        assert queue.get_meta(task="log", **claim).sample_ids == first.sample_ids
        rest = queue.get_meta(task="train", partition="p", columns=["a", "b"], batch_size=1)
        assert rest.sample_ids == (meta.sample_ids[3],)
        # The same task with other columns: what it was given stays given.
        assert queue.get_meta(partition="p", columns=["a"], batch_size=1, task="train").sample_ids == (
            meta.sample_ids[1],
        )

    def test_waiting_too_long_says_what_is_missing(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """How many rows are ready, and which columns the others lack."""
        with pytest.raises(WaitTimeoutError, match="nothing was put there"):
            peer.get_meta(partition="p", columns=["a"], batch_size=1, task="t", timeout_s=0)
        meta = queue.put({"a": torch.arange(5)}, partition="p")
        queue.put({"b": torch.zeros(2)}, partition="p", sample_ids=meta.sample_ids[:2])
        peer.get_meta(partition="p", columns=["a", "b"], batch_size=1, task="t")
        with pytest.raises(WaitTimeoutError) as caught:
            peer.get_meta(partition="p", columns=["a", "b", "c"], batch_size=4, task="t", timeout_s=0.05)
        message = str(caught.value)
        assert "0 of its 5 rows are ready, 1 were given to this task before, 4 are incomplete" in message
        assert "3 lack 'b'" in message
        assert "4 lack 'c'" in message
        with pytest.raises(ValueError, match="batch_size is 0"):
            peer.get_meta(partition="p", columns=["a"], batch_size=0, task="t")

    def test_a_waiter_wakes_and_holds_up_nobody(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Calls through the same client go on while one of its threads waits."""
        with ThreadPoolExecutor(2) as pool:
            claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "batch_size": 2}
            waiting = [pool.submit(peer.get_meta, task=task, **claim) for task in ("s", "t")]
            _until(lambda: queue.stats()["waiters_elsewhere"].get("p") == 2)
            one = peer.put({"a": torch.zeros(1)}, partition="p")
            assert peer.get(one)["a"].tolist() == [0.0]
            assert queue.stats()["partitions"]["p"]["waiters"] == 2
            two = peer.put({"a": torch.ones(1)}, partition="p")
            for answer in waiting:
                assert answer.result(10).sample_ids == one.sample_ids + two.sample_ids
        assert queue.stats()["partitions"]["p"]["waiters"] == 0

    def test_a_sampler_chooses_and_may_wait(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Groups of two, of which the one that is complete first is claimed, whole."""

        def complete_group(rows: Sequence[RowMeta], batch_size: int) -> Sequence[int] | None:
            for group in dict.fromkeys(row.tags["group"] for row in rows):
                positions = [i for i, row in enumerate(rows) if row.tags["group"] == group]
                if len(positions) == batch_size:
                    return positions
            return None

        def put(group: str, value: int) -> None:
            queue.put({"a": torch.tensor([value])}, partition="p", tags=[{"group": group}])

        claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "batch_size": 2, "task": "t"}
        with ThreadPoolExecutor(1) as pool:
            put("x", 1)
            put("y", 2)
            waiting = pool.submit(peer.get_meta, **claim, sampler=complete_group)
            put("z", 3)
            put("y", 4)
            assert peer.get(waiting.result(10))["a"].tolist() == [2, 4]
        with pytest.raises(WaitTimeoutError, match="the sampler did not choose"):
            peer.get_meta(**claim, sampler=complete_group, timeout_s=0.05)

        def too_few(rows: Sequence[RowMeta], batch_size: int) -> Sequence[int]:
            return range(batch_size - 1)

        with pytest.raises(ValueError, match="the sampler chose"):
            peer.get_meta(**claim, sampler=too_few)

    def test_threads_and_clients_share_rows_exactly(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Four threads put, four claim through two clients: each row arrives once, with its own values."""
        num_puts, rows_per_put = 20, 4

        def produce(worker: int) -> None:
            client = (queue, peer)[worker % 2]
            for step in range(num_puts):
                values = torch.arange(rows_per_put) + 1000 * worker + rows_per_put * step
                client.put({"x": values, "r": [values[: i + 1] for i in range(rows_per_put)]}, partition="p")

        def consume(worker: int) -> list[int]:
            client = (queue, peer)[worker % 2]
            taken: list[int] = []
            for _ in range(num_puts // 2):
                meta = client.get_meta(partition="p", columns=["x", "r"], batch_size=2 * rows_per_put, task="t")
                batch = client.get(meta)
                assert [row[-1] for row in rows_of(batch["r"])] == batch["x"].tolist()
                taken += batch["x"].tolist()
                client.clear(meta)
            return taken

        with ThreadPoolExecutor(8) as pool:
            consumers = [pool.submit(consume, worker) for worker in range(4)]
            for done in [pool.submit(produce, worker) for worker in range(4)]:
                done.result(60)
            taken = sorted(value for consumer in consumers for value in consumer.result(60))
        assert taken == [1000 * worker + i for worker in range(4) for i in range(num_puts * rows_per_put)]
        assert queue.stats()["extents"] == 0

    # Leases

    def test_a_claim_is_consumed_by_an_ack_and_comes_back_by_a_nack(
        self, queue: TransferQueue, peer: TransferQueue
    ) -> None:
        """Parts of a claim may be settled apart, by any client; acking twice is nothing; the rest waits for its own."""
        queue.put({"a": torch.arange(4)}, partition="p")
        claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "task": "t"}
        first = peer.get_meta(**claim, batch_size=4)
        assert first.task == "t"
        assert len(set(first.leases)) == 1
        left, right = pickle.loads(pickle.dumps(first)).chunk(2)
        queue.ack(left, step=3)
        peer.ack(left, step=4)
        queue.nack(right, reason="of a test")
        assert peer.get(queue.get_meta(**claim, batch_size=2))["a"].tolist() == [2, 3]
        with pytest.raises(LeaseLostError, match=r"2 of 2 rows.*leased to"):
            peer.ack(right)
        with pytest.raises(LeaseLostError, match=r"3 of 3 rows.*acked at step 3"):
            peer.nack(BatchMeta.concat([left, right]).reorder([0, 2, 3]))
        counts = queue.stats()["partitions"]["p"]["tasks"]["t"]
        assert (counts["acked"], counts["leased"], counts["dead"]) == (2, 2, 0)
        with pytest.raises(ValueError, match="has no leases"):
            queue.ack(queue.put({"a": torch.zeros(1, dtype=torch.int64)}, partition="p"))

    def test_a_lease_expires_for_a_waiter(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Whoever waits gets the rows; whoever let the time pass is fenced off, and so is what he writes."""
        queue.put({"a": torch.arange(2)}, partition="p")
        claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "task": "t", "batch_size": 2}
        zombie = peer.get_meta(**claim, lease_s=0.2)
        again = queue.get_meta(**claim, lease_s=600.0, timeout_s=20.0)
        assert again.rows == zombie.rows
        assert again.leases != zombie.leases
        for call in (
            lambda: peer.ack(zombie),
            lambda: peer.extend(zombie, 5.0),
            lambda: peer.put({"b": torch.zeros(2)}, partition="p", sample_ids=zombie),
        ):
            with pytest.raises(LeaseLostError, match="leased to"):
                call()
        peer.put({"b": torch.ones(2)}, partition="p", sample_ids=again)
        queue.extend(again, 600.0)
        queue.ack(again)
        assert queue.stats()["leases_expired"] == 1

    def test_a_client_that_leaves_gives_its_claims_back(self, queue: TransferQueue) -> None:
        """Rows are not lost because somebody fetched them; a good-bye costs no attempt."""
        queue.put({"a": torch.arange(3)}, partition="p")
        claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "task": "t", "batch_size": 3}
        with connect(queue.address, timeout_s=20.0) as client:
            claimed = client.get_meta(**claim)
            client.get(claimed)
            client.ack(claimed.reorder([1]))
        again = queue.get_meta(partition="p", columns=["a"], task="t", batch_size=2, timeout_s=20.0)
        assert queue.get(again)["a"].tolist() == [0, 2]
        assert queue.stats()["partitions"]["p"]["tasks"]["t"]["returns"] == 0

    def test_what_comes_back_too_often_is_a_dead_letter(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """It keeps its values and says why; the others go on."""
        queue.configure("p", max_attempts=2)
        queue.put({"a": torch.arange(2)}, partition="p", tags=[{"i": 0}, {"i": 1}])
        claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "task": "t"}
        peer.nack(peer.get_meta(**claim, batch_size=2))
        poison, fine = peer.get_meta(**claim, batch_size=2).chunk(2)
        peer.nack(poison, reason="the reward model failed")
        peer.ack(fine)
        dead = queue.dead_letters("p", "t")
        assert queue.get(dead)["a"].tolist() == [0]
        assert "2 times" in dead.tags[0]["dead_letter"]
        assert "the reward model failed" in dead.tags[0]["dead_letter"]
        with pytest.raises(WaitTimeoutError, match="1 are dead letters"):
            peer.get_meta(**claim, batch_size=1, timeout_s=0.0)
        assert len(queue.dead_letters("nowhere", "t")) == 0

    def test_restore_returns_what_was_acked_since(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """In order, with what was under way; the trainer of before is fenced off; what was cleared is counted."""
        queue.put({"a": torch.arange(6)}, partition="p")
        claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "task": "t"}
        metas = [peer.get_meta(**claim, batch_size=1) for _ in range(5)]
        for step, meta in enumerate(metas[:4]):
            peer.ack(meta, step=step)
        queue.clear(metas[3])
        report = queue.restore("p", 1)
        assert (report.num_returned, report.num_cleared, report.num_revoked) == (1, 1, 1)
        with pytest.raises(LeaseLostError):
            peer.ack(metas[4])
        assert queue.get(queue.get_meta(**claim, batch_size=3))["a"].tolist() == [2, 4, 5]

    # Limits

    def test_a_full_partition_blocks_until_there_is_room(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """In order; new columns never wait; the error says who holds the room."""
        queue.configure("p", max_rows=3)
        full = queue.put({"a": torch.zeros(3)}, partition="p")
        queue.get_meta(partition="p", columns=["a"], batch_size=1, task="t")
        with pytest.raises(WaitTimeoutError, match=r"holds 3 of 3 rows \(1 leased\)"):
            peer.put({"a": torch.zeros(1)}, partition="p", timeout_s=0.05)
        with pytest.raises(QueueFullError, match="can never enter"):
            peer.put({"a": torch.zeros(4)}, partition="p")
        with ThreadPoolExecutor(2) as pool:
            two = pool.submit(peer.put, {"a": torch.ones(2)}, partition="p")
            _until(lambda: queue.stats()["partitions"]["p"]["waiters"] == 1)
            one = pool.submit(queue.put, {"a": torch.ones(1)}, partition="p")
            _until(lambda: queue.stats()["partitions"]["p"]["waiters"] == 2)
            queue.put({"b": torch.zeros(3)}, partition="p", sample_ids=full)
            queue.clear(full.reorder([0]))
            assert queue.stats()["partitions"]["p"]["waiters"] == 2  # one row has room, and may not overtake
            queue.clear(full.reorder([1, 2]))
            assert len(two.result(20)) == 2
            assert len(one.result(20)) == 1
        assert queue.get(two.result())["a"].tolist() == [1.0, 1.0]

    def test_room_is_promised_before_rows_are_made(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """A credit is good for its rows, is nobody else's, and goes back with its client."""
        queue.configure("p", max_lag=1, rows_per_version=2)
        with connect(queue.address, timeout_s=20.0) as client:
            credit = client.admit(partition="p", num_rows=3)
            with pytest.raises(WaitTimeoutError, match="promised 3 rows, 0 bytes to"):
                peer.admit(partition="p", num_rows=2, timeout_s=0.05)
            with pytest.raises(WaitTimeoutError):
                peer.put({"a": torch.zeros(2)}, partition="p", timeout_s=0.05)
            client.put({"a": torch.zeros(2)}, partition="p", credit=credit)
            assert queue.stats()["partitions"]["p"]["promised_rows"] == 1
        other = peer.admit(partition="p", num_rows=2)
        peer.release(other)
        peer.release(other)
        with pytest.raises(QueueFullError, match="used up or was released"):
            peer.put({"a": torch.zeros(1)}, partition="p", credit=other)
        with pytest.raises(ValueError, match="no options"):
            queue.configure("p", max_row=3)
        with pytest.raises(ValueError, match="choose one of"):
            queue.configure("p", on_full="drop")

    def test_full_partitions_raise_or_drop_and_count(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Whole groups, never what is leased."""
        queue.configure("p", max_rows=4, on_full="raise")
        tags = [{"group_id": g, "weight_version_min": v} for g, v in ((0, 7), (0, 9), (1, 8), (1, 8))]
        first = queue.put({"a": torch.arange(4)}, partition="p", tags=tags)
        with pytest.raises(QueueFullError, match="4 of 4 rows"):
            peer.put({"a": torch.tensor([4])}, partition="p")
        queue.configure("p", max_rows=4, on_full="drop_stalest")
        peer.put({"a": torch.tensor([4, 5])}, partition="p", tags=[{"group_id": 2, "weight_version_min": 9}] * 2)
        with pytest.raises(StaleReferenceError):
            queue.get(first.reorder([1]))
        queue.configure("p", max_rows=4, on_full="drop_oldest")
        held = peer.get_meta(partition="p", columns=["a"], batch_size=1, task="t")
        peer.put({"a": torch.tensor([6])}, partition="p")
        assert peer.get(held)["a"].tolist() == [2]
        assert queue.stats()["partitions"]["p"]["dropped"] == {"drop_stalest": 2, "drop_oldest": 2}
        with pytest.raises(QueueFullError, match="is not enough"):
            peer.put({"a": torch.tensor([7, 8, 9])}, partition="p")

    def test_stale_rows_go_and_are_refused(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """At every new version, with their group; versions only grow."""
        queue.configure("p", max_lag=1)
        versions = [(0, 1), (0, 3), (1, 3), (None, None)]
        tags = [{} if v is None else {"group_id": g, "weight_version_min": v} for g, v in versions]
        queue.put({"a": torch.arange(4)}, partition="p", tags=tags)
        assert peer.advance("p", 2) == 0
        assert peer.advance("p", 3) == 2
        left = queue.get_meta(partition="p", columns=["a"], batch_size=2, task="t")
        assert queue.get(left)["a"].tolist() == [2, 3]
        with pytest.raises(StaleVersionError, match="at weight version 3 and takes rows at most 1 behind"):
            peer.put({"a": torch.zeros(1, dtype=torch.int64)}, partition="p", tags=[{"weight_version_min": 1}])
        with pytest.raises(ValueError, match="cannot become 2"):
            peer.advance("p", 2)
        assert queue.stats()["partitions"]["p"]["dropped"] == {"stale": 2}

    def test_rows_go_when_all_tasks_are_done_with_them(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """A step later, as `keep_steps` says; a task that was not declared is refused."""
        queue.configure("p", tasks=["s", "t"], keep_steps=1)
        meta = queue.put({"a": torch.arange(2)}, partition="p")
        with pytest.raises(PolicyError, match=r"\['s', 't'\], and 'typo' is none"):
            peer.get_meta(partition="p", columns=["a"], batch_size=1, task="typo")
        for task in ("s", "t"):
            for step in (1, 2):
                claimed = peer.get_meta(partition="p", columns=["a"], batch_size=1, task=task)
                peer.ack(claimed, step=step)
        assert queue.stats()["rows"] == 1
        with pytest.raises(StaleReferenceError):
            queue.get(meta)
        assert queue.get(meta.reorder([1]))["a"].tolist() == [1]

    # Policies

    def test_policies(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Which rows come, in which order; each on rows of its own."""

        def given(batch_size: int, policy: Policy, tags: list[dict[str, Any]]) -> list[int]:
            partition = f"p{next(numbers)}"
            queue.put({"a": torch.arange(len(tags))}, partition=partition, tags=tags)
            meta = peer.get_meta(
                partition=partition, columns=["a"], batch_size=batch_size, task="t", sampler=policy, timeout_s=0.0
            )
            return peer.get(meta)["a"].tolist()

        numbers = iter(range(100))
        versions: list[dict[str, Any]] = [{"weight_version_min": v} for v in (3, 1, 2, 1)]
        assert given(4, policies.OldestVersion(), [*versions, {}]) == [1, 3, 2, 0]
        assert given(3, policies.Priority(), [{"priority": p} for p in (1, 2.5, -1)] + [{}]) == [1, 0, 3]
        groups = [{"group_id": g} for g in (0, 1, 2, 1, 0, 2)]
        assert given(4, policies.GroupComplete(group_size=2), groups) == [1, 3, 0, 4]
        assert given(2, policies.FirstK(k=2), [{"group_id": g} for g in (0, 1, 1, 1, 0)]) == [1, 2]
        tokens: list[dict[str, Any]] = [{"num_tokens": n} for n in (5, 3, 4, 1)]
        assert given(4, policies.TokenBudget(max_tokens=8), tokens) == [0, 1]
        assert given(2, policies.TokenBudget(max_tokens=100), tokens) == [0, 1]
        assert given(4, policies.LengthBalanced(num_parts=2), tokens) == [0, 3, 1, 2]
        with pytest.raises(WaitTimeoutError, match="together they have 13 of 14 tokens"):
            given(5, policies.TokenBudget(max_tokens=14), tokens)
        with pytest.raises(PolicyError, match="num_tokens=5, and a claim takes 4"):
            given(1, policies.TokenBudget(max_tokens=4), tokens)
        with pytest.raises(PolicyError, match="no number as tag 'num_tokens'"):
            given(2, policies.LengthBalanced(num_parts=2), [{}, {}])
        with pytest.raises(ValueError, match="groups have 4 rows"):
            given(6, policies.GroupComplete(group_size=4), groups)

    def test_a_predicate_on_tags_and_what_it_rejects(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Rows without the tag wait for it; rejected groups leave, and a producer that waits for room gets theirs."""
        queue.configure("p", max_rows=4)
        good = policies.Where(
            tag="spread", op=">", value=0.0, is_clearing=True, then=policies.GroupComplete(group_size=2)
        )
        claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "batch_size": 2, "task": "t", "sampler": good}
        tags = [{"group_id": g} for g in (0, 0, 1, 1)]
        meta = queue.put({"a": torch.arange(4)}, partition="p", tags=tags)
        with pytest.raises(WaitTimeoutError, match="4 have no tag 'spread' that can be compared yet"):
            peer.get_meta(**claim, timeout_s=0.0)
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(peer.get_meta, **claim)
            refill = pool.submit(peer.admit, partition="p", num_rows=2)
            _until(lambda: queue.stats()["partitions"]["p"]["waiters"] == 2)
            queue.put({"b": torch.zeros(2)}, partition="p", sample_ids=meta.reorder([0, 1]), tags=[{"spread": 0.0}] * 2)
            credit = refill.result(20)
            again = [{"group_id": 2, "spread": 0.5}] * 2
            peer.put({"a": torch.tensor([4, 5])}, partition="p", credit=credit, tags=again)
            assert queue.get(waiting.result(20))["a"].tolist() == [4, 5]
        assert queue.stats()["partitions"]["p"]["dropped"] == {"rejected": 2}
        with pytest.raises(StaleReferenceError):
            queue.get(meta)
        kept: dict[str, Any] = {"partition": "q", "columns": ["a"], "batch_size": 1, "task": "t"}
        queue.put({"a": torch.arange(3)}, partition="q", tags=[{"kind": kind} for kind in ("x", "y", "z")])
        few = policies.Where(tag="kind", op="in", value=["y", "z"], then=policies.Fifo())
        taken = [queue.get(queue.get_meta(**kept, sampler=few))["a"].tolist() for _ in range(2)]
        assert taken == [[1], [2]]
        with pytest.raises(WaitTimeoutError, match=r"1 have one that is not in \('y', 'z'\)"):
            queue.get_meta(**kept, sampler=few, timeout_s=0.0)
        with pytest.raises(PolicyError, match="'x', which cannot be compared by '>' with 3"):
            queue.get_meta(**kept, sampler=policies.Where(tag="kind", op=">", value=3))
        assert queue.stats()["partitions"]["q"]["rows"] == 3

    def test_ranks_of_one_replica_get_the_same_rows(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Each batch once per rank, data-parallel ranks different ones; what went back is given anew."""
        queue.put({"a": torch.arange(8)}, partition="p", tags=[{"num_tokens": n} for n in range(8)])

        def ask(client: TransferQueue, dp_rank: int, batch_index: int, **options: Any) -> BatchMeta:
            policy = policies.RankAware(dp_rank=dp_rank, batch_index=batch_index, num_replicas=2, **options)
            return client.get_meta(
                partition="p", columns=["a"], batch_size=2, task="t", sampler=policy, timeout_s=0.0
            )  # fmt: skip

        first, other, second = ask(queue, 0, 0), ask(queue, 1, 0), ask(peer, 0, 0)
        assert (first.rows, first.leases) == (second.rows, second.leases)
        assert not set(first.rows) & set(other.rows)
        queue.ack(first)
        peer.ack(second)
        queue.nack(other)
        anew = ask(peer, 1, 0)
        assert (anew.rows, anew.leases != other.leases) == (other.rows, True)
        assert ask(queue, 1, 0) == anew
        balanced = ask(queue, 0, 1, then=policies.LengthBalanced(num_parts=2))
        queue.ack(balanced)
        queue.clear(balanced)
        late = ask(peer, 0, 1, then=policies.LengthBalanced(num_parts=2))
        assert late.rows == balanced.rows
        with pytest.raises(StaleReferenceError):
            peer.get(late)
        assert ask(queue, 0, 2).rows != balanced.rows
        with pytest.raises(ValueError, match="outermost"):
            policies.Where(tag="x", op="==", value=1, then=policies.RankAware(dp_rank=0, batch_index=0, num_replicas=1))

    def test_a_late_sample_never_mixes_groups(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """A group waits for its last sample while others pass; rows of a group that was given come whole or not."""
        claim: dict[str, Any] = {
            "partition": "p", "columns": ["a"], "task": "t", "batch_size": 2,
            "sampler": policies.GroupComplete(group_size=2),
        }  # fmt: skip

        def put(group: str, value: int) -> None:
            queue.put({"a": torch.tensor([value])}, partition="p", tags=[{"group_id": group}])

        for group, value in (("x", 0), ("y", 1), ("z", 2), ("y", 3)):
            put(group, value)
        first = peer.get_meta(**claim)
        assert queue.get(first)["a"].tolist() == [1, 3]
        with pytest.raises(WaitTimeoutError, match="group 'x' has 1 of 2"):
            peer.get_meta(**claim, timeout_s=0.0)
        put("z", 4)
        put("x", 5)
        assert queue.get(peer.get_meta(**claim))["a"].tolist() == [2, 4]
        peer.nack(first)  # comes back whole, before or after the other
        assert queue.get(peer.get_meta(**claim))["a"].tolist() == [0, 5]
        again = peer.get_meta(**claim)
        assert queue.get(again)["a"].tolist() == [1, 3]
        peer.ack(again.reorder([0]))
        peer.nack(again.reorder([1]), reason="of a test")
        assert "others of its group 'y' were acked" in peer.dead_letters("p", "t").tags[0]["dead_letter"]

    def test_explain(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """What is missing, who put the rest, and who has the others."""
        meta = peer.put({"a": torch.zeros(3)}, partition="p", sample_ids=["x", "y", "z"])
        peer.get_meta(partition="p", columns=["a"], batch_size=1, task="t")
        queue.put({"b": torch.zeros(1)}, partition="p", sample_ids=meta.sample_ids[1:2])
        text = queue.explain(partition="p", columns=["a", "b"], batch_size=2, task="t")
        assert "1 of its 3 rows are ready, 1 were given to this task before, 1 are incomplete" in text
        assert "1 lack 'b' ('z'; the rest of them was put by " in text
        assert "leased and not acked: 1 to " in text

    # Where values land

    def test_a_buffer_is_used_again(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Views of it come back, aligned; it must be large enough, and says how large."""
        data = {
            "r": [torch.arange(3), torch.arange(2)], "d": torch.tensor([[1.5], [2.5]]), "j": ["x", "y"],
            "b": torch.tensor([True, False]),
        }  # fmt: skip
        metas = [queue.put(data, partition="p"), queue.put({**data, "d": torch.zeros(2, 1)}, partition="p")]
        out = torch.full((1024,), 0xAA, dtype=torch.uint8)
        for meta in (*metas, BatchMeta.concat(metas).reorder([3, 0])):
            plain, landed = peer.get(meta), peer.get(meta, out=out)
            assert rows_of(plain["r"]) == rows_of(landed["r"])
            assert plain["d"].tolist() == landed["d"].tolist()
            assert plain["b"].tolist() == landed["b"].tolist()
            assert plain["j"].tolist() == landed["j"].tolist()
            inside = range(out.data_ptr(), out.data_ptr() + len(out))
            assert all(each.data_ptr() in inside for each in (landed["r"].values(), landed["d"], landed["b"]))
        assert peer.get(metas[0], ["d"], device="cpu")["d"].tolist() == [[1.5], [2.5]]
        with pytest.raises(ValueError, match=r"out has 100 bytes.* take 192"):
            peer.get(metas[0], out=out[:100])
        with pytest.raises(ValueError, match="must be uint8"):
            peer.get(metas[0], out=torch.zeros(1000))

    # The end

    def test_closing_ends_the_queue_for_everybody_at_once(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Waiters are told, and so is who calls later; closing again is nothing."""
        meta = peer.put({"a": torch.zeros(1)}, partition="p")
        failures: list[BaseException] = []

        def wait() -> None:
            try:
                peer.get_meta(partition="p", columns=["b"], batch_size=1, task="t", timeout_s=600)
            except ServerLostError as error:
                failures.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        _until(lambda: queue.stats()["partitions"]["p"]["waiters"] == 1)
        queue.close()
        waiter.join(10)
        assert len(failures) == 1
        assert queue.address in str(failures[0])
        for call in (lambda: peer.get(meta), peer.stats, queue.stats, lambda: connect(queue.address)):
            with pytest.raises(ServerLostError):
                call()
        queue.close()
        peer.close()
        peer.close()

    def test_a_client_that_leaves_claims_nothing_more(self, queue: TransferQueue) -> None:
        """Its waiters end at once, and what they waited for goes to others."""
        claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "batch_size": 1, "task": "t"}
        with ThreadPoolExecutor(1) as pool, connect(queue.address) as client:
            waiting = pool.submit(client.get_meta, **claim, timeout_s=600)
            _until(lambda: queue.stats()["waiters_elsewhere"].get("p") == 1)
            client.close()
            with pytest.raises(ServerLostError, match=r"client.* was closed"):
                waiting.result(10)
        _until(lambda: "p" not in queue.stats()["waiters_elsewhere"])
        meta = queue.put({"a": torch.zeros(1)}, partition="p")
        assert queue.get_meta(**claim).rows == meta.rows

    def test_a_client_that_leaves_takes_nothing_along(self, queue: TransferQueue) -> None:
        """What it put stays, small or large."""
        with connect(queue.address) as client:
            metas = [client.put({"a": torch.ones(2, n)}, partition=str(n)) for n in (3, 2_000_000)]
        for meta in metas:
            assert queue.get(meta)["a"].unique().tolist() == [1.0]
        with pytest.raises(ServerLostError, match=r"client.* was closed"):
            client.get(metas[0])


def _until(is_true: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain"
        time.sleep(0.005)
