"""Conformance suite for storages: the values that get returns, and their memory."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from rl_csrc.buffers.frames import DTYPES
from rl_tq.errors import MissingDataError, SchemaError
from rl_tq.testing._served import Served, rows_of, turns_of
from rl_tq.types import BatchMeta, Buffer, PerGroup

if TYPE_CHECKING:
    from rl_tq.base import TransferQueue


class ValuesContract(Served):
    """Columns of every kind, in any order, in new memory or in a buffer."""

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
        # Padded to the longest row, and not to the length of all rows together.
        assert batch["listed"].to_padded_tensor(-1).tolist() == [[1, 2], [-1, -1], [3, -1]]
        assert batch["images"].to_padded_tensor(0.0).shape == (3, 3, 2, 2)
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
        """Values of every kind come back row by row, and their column may be put row by row as well."""
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
        """The result of a get can be put again."""
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
        """Transposed, sliced, nested with holes, requiring grad, and negated or conjugated when read."""
        base = torch.arange(6.0).view(2, 3)
        nested = torch.nested.nested_tensor_from_jagged(torch.arange(6), torch.tensor([0, 3, 6]), torch.tensor([2, 1]))
        meta = queue.put({"t": base.t().requires_grad_(), "s": base.flatten()[::2]}, partition="p")
        holes = queue.put({"n": nested}, partition="p", sample_ids=meta.sample_ids[:2])
        assert peer.get(meta)["t"].tolist() == base.t().tolist()
        assert peer.get(meta)["s"].tolist() == [0.0, 2.0, 4.0]
        assert rows_of(peer.get(holes)["n"]) == [[0, 1], [3]]
        sparse = torch.nested.nested_tensor_from_jagged(torch.arange(6), torch.tensor([0, 9, 2, 9, 6])[::2])
        assert rows_of(peer.get(queue.put({"o": sparse}, partition="q"))["o"]) == [[0, 1], [2, 3, 4, 5]]
        conjugated = [torch.tensor(row).conj() for row in ([1 + 2j], [3 + 4j, 5 + 6j])]
        lazy = queue.put({"c": conjugated, "i": [row.imag[:1] for row in conjugated]}, partition="p")
        assert rows_of(peer.get(lazy)["c"]) == [[1 - 2j], [3 - 4j, 5 - 6j]]
        assert rows_of(peer.get(lazy)["i"]) == [[-2.0], [-4.0]]

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

    # Where values land

    def test_a_buffer_is_used_again(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Views of it come back, aligned; it must be large enough, and says how large."""
        data = {
            "r": [torch.arange(3), torch.arange(2)], "d": torch.tensor([[1.5], [2.5]]), "j": ["x", "y"],
            "b": torch.tensor([True, False]),
        }  # fmt: skip
        metas = [queue.put(data, partition="p"), queue.put({**data, "d": torch.zeros(2, 1)}, partition="p")]
        out = torch.full((1024,), 0xAA, dtype=torch.uint8)
        buffer = Buffer(out)
        shuffled = BatchMeta.concat(metas).reorder([3, 0])
        for meta, place in product((*metas, shuffled, metas[0]), (out, buffer)):
            plain, landed = peer.get(meta), peer.get(meta, out=place)
            assert rows_of(plain["r"]) == rows_of(landed["r"])
            assert plain["d"].tolist() == landed["d"].tolist()
            assert plain["b"].tolist() == landed["b"].tolist()
            assert plain["j"].tolist() == landed["j"].tolist()
            inside = range(out.data_ptr(), out.data_ptr() + len(out))
            assert all(each.data_ptr() in inside for each in (landed["r"].values(), landed["d"], landed["b"]))
        assert peer.get(metas[0], ["d"], device="cpu")["d"].tolist() == [[1.5], [2.5]]
        with pytest.raises(ValueError, match=r"out has 100 bytes.* take 192"):
            peer.get(metas[0], out=Buffer(out[:100]))
        with pytest.raises(ValueError, match="must be uint8"):
            peer.get(metas[0], out=torch.zeros(1000))
