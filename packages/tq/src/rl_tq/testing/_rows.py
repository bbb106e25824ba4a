"""Conformance suite for storages: rows, their columns, clearing and claiming."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rl_tq.errors import MissingDataError, SchemaError, StaleReferenceError, WaitTimeoutError
from rl_tq.testing._served import Served, rows_of, until
from rl_tq.types import BatchMeta, PerGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_tq.base import TransferQueue
    from rl_tq.types import RowMeta


class RowsContract(Served):
    """Contract of rows: refused puts, stale references, claims and waiting."""

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
        """Ids from any client."""
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
        """A put without rows is refused for every kind of column."""
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

    def test_tags_are_values_that_a_message_can_carry(self, queue: TransferQueue) -> None:
        """A value that no message can carry is refused, even among others."""
        for wrong in ({"i": 1 << 63}, {"i": [-(1 << 63) - 1]}, {"i": object()}, {1: "i"}):
            tags: list[Any] = [{"i": 1}, wrong]
            with pytest.raises(SchemaError, match="tags must be mappings of JSON values"):
                queue.put({"a": torch.zeros(2)}, partition="p", tags=tags)
        most = {"i": (1 << 63) - 1, "j": -(1 << 63), "k": {"l": [1.5, True, None, "m"]}}
        assert queue.put({"a": torch.zeros(1)}, partition="p", tags=[most]).tags == (most,)

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
        for reference in (meta, meta.reorder([1]), meta.reorder([2, 0])):  # whatever either keeps, it has now
            assert queue.get(reference)["a"].tolist() == peer.get(reference)["a"].tolist()
        peer.clear(meta.reorder([1]))
        again = peer.put({"a": torch.tensor([9])}, partition="p", sample_ids=["y"])
        for client in (queue, peer):
            with pytest.raises(StaleReferenceError, match=r"1 of 3 rows.*'y'"):
                client.get(meta)
            with pytest.raises(StaleReferenceError):
                client.get(meta.reorder([1]))
        with pytest.raises(StaleReferenceError):
            queue.clear(meta)
        assert queue.get(meta.reorder([2, 0]))["a"].tolist() == [2, 0]
        assert queue.get(again)["a"].tolist() == [9]

    def test_a_cleared_partition_begins_anew(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Another generation and schema, nothing consumed; references to the old one never read the new."""
        meta = queue.put({"a": torch.arange(3)}, partition="p", sample_ids=["x", "y", "z"])
        queue.get_meta(partition="p", columns=["a"], batch_size=3, task="t")
        assert queue.get(meta)["a"].tolist() == peer.get(meta)["a"].tolist() == [0, 1, 2]
        peer.clear("p")
        peer.clear("p")
        for client in (queue, peer):
            with pytest.raises(StaleReferenceError, match="was not put to since"):
                client.get(meta)
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
        """The error counts the ready rows, and names the columns that the others lack."""
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
            until(lambda: queue.stats()["waiters_elsewhere"].get("p") == 2)
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
