from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from rl_engine import BatchError
from rl_engine.batch import row_batch
from rl_engine.batch.row_batch import RowBatch
from rl_engine.checkpoint import hf_folder
from rl_engine.layers.multimodal import MultimodalInputs
from rl_engine.losses import last_token, pair_mean, pairs_of, process_reward_loss, row_sum, sft_loss, token_values
from rl_engine.testing import ragged, ragged_batch
from rl_engine.types import BatchCounts, ModelOutput

_spec = spec_from_file_location(
    "test_engine_multimodal", Path(__file__).parents[1] / "model" / "test_engine_multimodal.py"
)
images = module_from_spec(_spec)
_spec.loader.exec_module(images)
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


def last_reward(output, rows):
    """What the losses of reward models look at."""
    mask = token_values(rows, "loss_mask", output.values)
    return row_sum(output.values * last_token(mask, output), output).sum(), {}


def pairs(output, rows):
    """What the losses of pairs do."""
    chosen, rejected = pairs_of(row_sum(output.logprobs, output), rows)
    return pair_mean(chosen - rejected, output), {}


class OnDevice(torch.Tensor):
    """A tensor of the CPU that stands for one of a GPU: what makes the CPU wait for that is written down."""

    waits: ClassVar[list[str]] = []
    WAITING = ("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "cpu", "equal", "nonzero", "unique")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        is_sized = name == "repeat_interleave" and len(args) > 1 and kwargs.get("output_size") is None
        masks = [part for part in args[1:2] if isinstance(part, torch.Tensor) and part.dtype == torch.bool]
        if name in cls.WAITING or is_sized or (name in ("__getitem__", "__setitem__") and masks):
            cls.waits.append(name)
        return super().__torch_function__(func, types, args, kwargs)


def test_a_micro_batch_is_cut_without_waiting_for_the_device(monkeypatch):
    data = ragged_batch([[1, 2, 3], [4], [5, 6]], [[7], [8, 9, 10], [11, 12]])
    data["weight"] = torch.tensor([0.5, 1.0, 2.0])
    want = RowBatch(data, needs_mask=True, device=CPU)
    batch = RowBatch(data, needs_mask=True, device=CPU)
    for column in ("prompt_token_ids", "completion_token_ids"):
        ragged_column = batch._columns[column]
        object.__setattr__(ragged_column, "values", ragged_column.values.as_subclass(OnDevice))
    monkeypatch.setattr(row_batch, "to_device", lambda tensor, device: tensor.as_subclass(OnDevice))
    OnDevice.waits.clear()
    packed, plain = batch.pack([2, 0]), want.pack([2, 0])
    selected = batch.select([2, 0])
    assert OnDevice.waits == []
    for name in ("token_ids", "position_ids", "score_index", "labels", "cu_seqlens"):
        assert isinstance(getattr(packed, name), OnDevice)
        assert getattr(packed, name).tolist() == getattr(plain, name).tolist()
    assert selected["weight"].tolist() == [2.0, 0.5]
    assert OnDevice.waits  # what was just asked


def test_images_are_placed_without_waiting_for_the_device(monkeypatch, tmp_path):
    model = hf_folder.empty_model(images.write_model(tmp_path, "qwen3_vl"))
    batch, multimodal = (
        RowBatch(images.batch_of(images.rows_of(96)), needs_mask=True, device=CPU),
        MultimodalInputs(model),
    )
    multimodal.place(batch)
    monkeypatch.setattr(row_batch, "to_device", lambda tensor, device: tensor.as_subclass(OnDevice))
    packed = batch.pack([2, 1])
    OnDevice.waits.clear()
    positions = multimodal.arguments(packed)["position_ids"]
    assert OnDevice.waits == []
    assert positions.shape == (3, 1, sum(packed.lengths))
    first = positions[:, 0, : packed.lengths[0]]  # text, an image of one token, text, and one of two by two
    assert not torch.equal(first[1], first[2])


@pytest.mark.parametrize("loss", [sft_loss, process_reward_loss, last_reward, pairs])
def test_a_loss_is_computed_without_waiting_for_the_device(loss):
    scores = torch.tensor([-1.0, -0.2, -3.0]).as_subclass(OnDevice).requires_grad_()
    output = ModelOutput(
        token_logprobs=scores,
        token_values=scores,
        entropy=None,
        cu_seqlens=torch.tensor([0, 1, 3]).as_subclass(OnDevice),
        counts=BatchCounts(tokens=4.0, sequences=3.0),
    )
    columns = {"loss_mask": torch.tensor([1, 0, 1]), "step_labels": torch.tensor([0.0, 1.0, 1.0])}
    rows = {
        name: SimpleNamespace(values=lambda found=found: found.as_subclass(OnDevice)) for name, found in columns.items()
    }
    rows |= {"pair_id": torch.tensor([4, 4]).as_subclass(OnDevice), "is_chosen": torch.tensor([False, True])}
    rows["is_chosen"] = rows["is_chosen"].as_subclass(OnDevice)
    OnDevice.waits.clear()
    loss(output, rows)[0].backward()
    assert OnDevice.waits == []
