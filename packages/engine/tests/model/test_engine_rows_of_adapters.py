"""Rows of several adapters in one worker: what is refused before a pass, what is the base model's, and files."""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl_engine import AdamParams, BatchError, CheckpointError, ConfigError, LoraConfig, TrainingRow
from rl_engine.losses import sft_loss
from rl_engine.testing import write_tiny_model

_spec = spec_from_file_location("adapter_ranks", Path(__file__).parents[1] / "support" / "adapter_ranks.py")
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)
NAMES = tuple(ranks.LORAS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("adapters") / "model").parent


@pytest.fixture(scope="module")
def worker(folder):
    with ranks.build(folder) as built:
        ranks.steps(
            built, list, seeds=[1]
        )  # B is 0 no more: A has a gradient too, and rows differ from the base model's
        yield built


def test_servers_names_and_peft_files_hold_the_same_tensors(worker, tmp_path):
    found, described = worker.export_adapter("cy")
    worker.save_state(tmp_path / "cy", "cy", optimizer=False)
    written = load_file(tmp_path / "cy" / "adapter_model.safetensors")
    assert {"adapters.cy.scaling", *(f"adapters.cy.{name}" for name in written)} == set(dict(found))
    assert described["r"] == json.loads((tmp_path / "cy" / "adapter_config.json").read_text())["r"] == 8
    assert all(name.startswith("base_model.model.model.layers.") for name in written)


def test_rows_without_an_adapter_are_the_base_models(folder, worker):
    rows = [TrainingRow(adapter=adapter, token_ids=[1, 2], target_token_ids=[2, 3]) for adapter in (None, "ann")]
    found = worker.forward_rows(rows).logprobs
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    with torch.no_grad():
        plain = model(torch.tensor([[1, 2]])).logits[0].log_softmax(-1).gather(1, torch.tensor([[2], [3]]))[:, 0]
    torch.testing.assert_close(found[0].double(), plain, rtol=1e-5, atol=1e-6)
    assert (found[1] - found[0]).abs().max() > 1e-3
    with pytest.raises(BatchError, match="A row has no adapter, and the base model is frozen"):
        worker.forward_backward_rows(rows[:1], {None: sft_loss})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"adapter": "dan"}, "Row 1 is for adapter 'dan'; there are: ann, bob, cy"),
        ({"token_ids": [1, 999]}, "prompt_token_ids|completion_token_ids holds token id 999"),
        ({"target_token_ids": [1]}, "Row 1 has 2 tokens and 1 entries of target_token_ids"),
        ({"target_token_ids": [1, -2]}, "target_token_ids holds token id -2"),
        ({"inputs": {"weights": [1.0]}}, "Row 1 has 2 tokens and 1 entries of weights"),
        ({"inputs": {}}, "Rows of adapter 'ann' have the columns weights, and others of it"),
        ({"token_ids": [], "target_token_ids": []}, "Row 1 has no token"),
        ({"token_ids": [1] * 65, "target_token_ids": [1] * 65, "inputs": {"weights": [1.0] * 65}}, "66"),
        ({"inputs": {"loss_mask": [1.0, 1.0]}}, "loss_mask"),
    ],
)  # fmt: skip
def test_bad_rows_are_refused_before_anything_runs(worker, change, told):
    worker.forward_backward_rows(ranks.mixed_rows(1, counts=(1, 1, 1)), ranks.LOSSES)
    before = {name: ranks.gradient(worker, name) for name in NAMES}
    good = {"adapter": "ann", "token_ids": [1, 2], "target_token_ids": [2, 3], "inputs": {"weights": [1.0, 1.0]}}
    rows = [TrainingRow(**good), TrainingRow(**(good | change))]
    for refuse in (worker.check_rows, worker.forward_backward_rows):
        with pytest.raises(BatchError, match=told):
            refuse(rows, ranks.LOSSES)
    with pytest.raises(BatchError, match="has no loss in this pass"):
        worker.forward_backward_rows(rows[:1], {"bob": ranks.LOSSES["bob"]})
    torch.testing.assert_close({name: ranks.gradient(worker, name) for name in NAMES}, before, rtol=0, atol=0)


def test_folders_that_an_adapter_cannot_take_change_nothing(worker, tmp_path):
    worker.save_state(tmp_path / "full", "bob")
    worker.save_state(tmp_path / "bare", "bob", optimizer=False)
    before = {name: ranks.state(worker, name) for name in NAMES}
    with pytest.raises(CheckpointError, match="without the optimizer's state"):
        worker.load_state(tmp_path / "bare", "bob")
    with pytest.raises(CheckpointError, match="with r 2, and this one's is 4"):
        worker.load_state(tmp_path / "full", "ann")
    with pytest.raises(CheckpointError, match="cannot be read"):
        worker.load_state(tmp_path / "none", "bob")
    file = tmp_path / "full" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="is damaged"):
        worker.load_state(tmp_path / "full", "bob")
    torch.testing.assert_close({name: ranks.state(worker, name) for name in NAMES}, before, rtol=0, atol=0)


def test_adapters_that_cannot_be_added_and_unknown_ones(worker):
    for name, lora, told in (
        ("ann", LoraConfig(), "There is an adapter 'ann' already"),
        ("a.b", LoraConfig(), "An adapter cannot be named 'a.b'"),
        ("dan", LoraConfig(dropout=0.1), "adapters that share a batch have none"),
        ("dan", LoraConfig(target_modules=("nothing",)), "lora.target_modules"),
        ("dan", LoraConfig(target_modules=("lm_head",)), "lm_head"),
    ):
        with pytest.raises(ConfigError, match=told):
            worker.add_adapter(name, lora)
    for call in (worker.remove_adapter, worker.export_adapter, lambda name: worker.optim_step(AdamParams(), name)):
        with pytest.raises(ConfigError, match="There is no adapter 'dan'; there are: ann, bob, cy"):
            call("dan")
