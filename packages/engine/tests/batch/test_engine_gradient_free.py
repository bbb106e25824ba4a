"""Rows without a gradient are scored and not differentiated: loss, metrics, columns and gradient are the batch's."""

import pytest
import torch

from rl_engine import EngineConfig, OptimizerConfig, create_engine
from rl_engine.losses import token_mean, token_values
from rl_engine.testing import ragged_batch, write_tiny_model

PROMPTS = [[5, 6, 7], [5, 6, 7], [8], [8], [3] * 9]
COMPLETIONS = [[9, 10], [11, 12, 13], [4], [1, 2, 3, 4, 5], [7, 7]]


class Weighed:
    """Likelihood weighed by the column `weight`, and a metric of every token."""

    def has_gradient(self, rows):
        return rows["weight"] != 0

    def __call__(self, output, rows):
        mask = token_values(rows, "loss_mask", output.logprobs)
        weight = rows["weight"].repeat_interleave(output.cu_seqlens.diff())
        passes.append(torch.is_grad_enabled() and output.logprobs.requires_grad)
        shares = {"mean": token_mean(output.logprobs.detach(), mask, output)}
        return -token_mean(weight * output.logprobs, mask, output), shares


class OnAllRows(Weighed):
    has_gradient = None

    def __getattribute__(self, name):
        if name == "has_gradient":
            raise AttributeError(name)
        return super().__getattribute__(name)


passes = []


def step(backend, folder, loss, weights):
    """A step's metrics, columns and gradients, and the weights after it."""
    passes.clear()
    config = EngineConfig(model_path=str(folder), optimizer=OptimizerConfig(lr=0.1, weight_decay=0.1))
    engine = create_engine(backend, config)
    engine.initialize()
    batch = ragged_batch(PROMPTS, COMPLETIONS)
    batch["weight"] = torch.tensor(weights)
    engine.optimizer_zero_grad()
    output = engine.forward_backward_batch(batch, loss)
    norm = engine.optimizer_step()
    after = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    engine.close()
    return output, norm, after, list(passes)


@pytest.mark.process
@pytest.mark.parametrize("backend", ["fsdp", "megatron", "torchtitan"])
def test_rows_without_gradient_change_nothing(tmp_path, backend):
    write_tiny_model(tmp_path)
    weights = [0.0, 1.0, 0.0, -0.5, 0.0]
    output, norm, after, passed = step(backend, tmp_path, Weighed(), weights)
    expected, expected_norm, expected_after, _ = step(backend, tmp_path, OnAllRows(), weights)
    assert passed == [True, False]
    assert output.metrics == pytest.approx(expected.metrics, rel=1e-5)
    assert norm == pytest.approx(expected_norm, rel=1e-5)
    torch.testing.assert_close(output.columns["logprobs"].values(), expected.columns["logprobs"].values())
    torch.testing.assert_close(after, expected_after, rtol=1e-4, atol=1e-5)


@pytest.mark.process
@pytest.mark.parametrize("backend", ["fsdp", "megatron", "torchtitan"])
def test_a_step_without_any_gradient_is_the_step_it_was(tmp_path, backend):
    """The weights decay and the moments fade, bit for bit."""
    write_tiny_model(tmp_path)
    output, norm, after, passed = step(backend, tmp_path, Weighed(), [0.0] * 5)
    expected, expected_norm, expected_after, _ = step(backend, tmp_path, OnAllRows(), [0.0] * 5)
    assert passed == [True]
    assert (norm, output.metrics) == (expected_norm, expected.metrics)
    assert norm == 0
    assert all(torch.equal(tensor, expected_after[name]) for name, tensor in after.items())


def test_rows_that_are_wrong_are_reported_as_before(tmp_path):
    write_tiny_model(tmp_path)
    engine = create_engine("fsdp", EngineConfig(model_path=str(tmp_path), optimizer=OptimizerConfig()))
    engine.initialize()
    batch = ragged_batch(PROMPTS, COMPLETIONS)
    del batch["loss_mask"]
    batch["weight"] = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
    with pytest.raises(ValueError, match="The batch lacks loss_mask"):
        engine.forward_backward_batch(batch, Weighed())
    engine.close()
