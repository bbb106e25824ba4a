import pytest
import torch

from rl_engine import BatchError
from rl_engine._rows import RowBatch
from rl_engine.testing import ragged, ragged_batch

CPU = torch.device("cpu")


def make(*, extra=None, needs_mask=True):
    data = ragged_batch([[1, 2, 3], [4], [5, 6]], [[7], [8, 9, 10], [11, 12]], [[1], [0, 0, 0], [1, 0]])
    for name, column in (extra or {}).items():
        data[name] = column
    return RowBatch(data, needs_mask=needs_mask, device=CPU)


def test_rows_are_packed_without_their_last_token():
    packed = make().pack([1, 0, 2])
    assert packed.token_ids.tolist() == [4, 8, 9, 1, 2, 3, 5, 6, 11]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert packed.lengths == (3, 3, 3)
    assert packed.score_index.tolist() == [0, 1, 2, 5, 7, 8]
    assert packed.labels.tolist() == [8, 9, 10, 7, 11, 12]
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 6]


def test_counts_are_masked_tokens_and_rows_that_have_one():
    assert make().counts() == (2.0, 2.0)


def test_select_takes_every_column_in_the_given_order():
    extra = {"advantages": ragged([[0.5], [1, 2, 3], [4, 5]], torch.float32), "group": torch.tensor([7, 8, 9])}
    rows = make(extra=extra).select([2, 0])
    assert rows["advantages"].values().tolist() == [4, 5, 0.5]
    assert rows["group"].tolist() == [9, 7]
    assert rows["prompt_token_ids"].values().tolist() == [5, 6, 1, 2, 3]
    assert (rows["advantages"] * rows["loss_mask"]).values().tolist() == [4, 0, 0.5]


def test_one_value_per_row_of_any_kind_rides_along():
    data = ragged_batch([[1], [2]], [[3], [4]])
    data["data_source"] = ["a", "b"]
    assert RowBatch(data, needs_mask=True, device=CPU).select([1, 0])["data_source"] == ["b", "a"]


def test_restore_undoes_the_order_of_the_micro_batches():
    column = make().restore([1, 2, 0], [torch.tensor([1.0, 2, 3]), torch.tensor([4.0, 5, 6])])
    assert [row.tolist() for row in column.unbind()] == [[6], [1, 2, 3], [4, 5]]


def test_a_missing_column_is_named_with_those_that_are_there():
    data = ragged_batch([[1]], [[2]])
    del data["loss_mask"]
    with pytest.raises(BatchError, match="lacks loss_mask; it has completion_token_ids, prompt_token_ids"):
        RowBatch(data, needs_mask=True, device=CPU)
    assert RowBatch(data, needs_mask=False, device=CPU).counts() == (1.0, 1.0)


def test_a_padded_column_is_refused():
    data = ragged_batch([[1]], [[2]])
    data["prompt_token_ids"] = torch.tensor([[1, 0]])
    with pytest.raises(BatchError, match="prompt_token_ids is not ragged"):
        RowBatch(data, needs_mask=True, device=CPU)
