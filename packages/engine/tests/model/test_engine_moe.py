"""Mixtures of experts: the auxiliary loss of the whole batch, and the experts that a server chose."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from rl_engine import BatchError, ConfigError, EngineConfig, OptimizerConfig, Precision, create_engine
from rl_engine.losses import sft_loss
from rl_engine.testing import write_tiny_model

_spec = spec_from_file_location("moe_oracle", Path(__file__).parents[1] / "support" / "moe_oracle.py")
oracle = module_from_spec(_spec)
_spec.loader.exec_module(oracle)
STEP = OptimizerConfig(lr=1.0, eps=1.0, weight_decay=0.0, max_grad_norm=1e9)  # nearly proportional to the gradient


def built(backend, folder, **changes):
    options = {"precision": Precision.FLOAT64, "optimizer": STEP}
    engine = create_engine(backend, EngineConfig(model_path=str(folder), **(options | changes)))
    engine.initialize()
    return engine


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}


@pytest.mark.process
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize("is_routed", [True, False])
def test_losses_and_step_are_those_of_the_whole_batch(tmp_path, backend, is_normalised, is_routed):
    folder, rows = oracle.write_model(tmp_path, is_normalised=is_normalised), oracle.draw_rows()
    want = oracle.reference(folder, rows, is_routed=is_routed, coef=oracle.COEF)
    for changes in ({}, {"max_tokens_per_gpu": 20}, {"max_tokens_per_gpu": 30, "activation_checkpointing": True}):
        engine = built(backend, folder, router_aux_loss_coef=oracle.COEF, **changes)
        before = weights(engine)
        output = engine.forward_backward_batch(oracle.batch_of(rows, is_routed=is_routed), sft_loss)
        assert output.metrics["loss"] == pytest.approx(want["loss"], rel=1e-6)
        assert output.metrics["router_aux_loss"] == pytest.approx(want["aux"], rel=1e-6)
        for got, expected in zip(output.columns["logprobs"].unbind(), want["logprobs"], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        assert engine.optimizer_step() == pytest.approx(want["norm"], rel=1e-5)
        for name, tensor in weights(engine).items():
            grad = want["gradients"][name]
            torch.testing.assert_close(before[name] - tensor, grad / (grad.abs() + 1), rtol=1e-4, atol=1e-7)
        engine.close()


def test_other_experts_change_scores_and_the_same_do_not(tmp_path):
    folder, rows = oracle.write_model(tmp_path), oracle.draw_rows()
    engine = built("fsdp", folder, optimizer=None)
    seen = []
    for is_routed in (False, True):
        data = oracle.batch_of(rows, is_routed=is_routed)
        seen.append(engine.forward_backward_batch(data, None).columns["logprobs"].values())
    assert (seen[0] - seen[1]).abs().max() > 0.01
    chosen = [[] for _ in range(oracle.LAYERS)]
    for layer, module in enumerate(engine.parts.built.scorer.model.model.layers):
        module.mlp.gate.register_forward_hook(lambda *call, layer=layer: chosen[layer].append(call[2][2]))
    own = []
    for row in rows:
        engine.forward_backward_batch(oracle.batch_of([row], is_routed=False), None)
        own.append((*row[:2], torch.stack([found.pop() for found in chosen], 1).tolist()))
    again = engine.forward_backward_batch(oracle.batch_of(own, is_routed=True), None).columns["logprobs"].values()
    torch.testing.assert_close(again, seen[0], rtol=1e-6, atol=1e-6)


@pytest.mark.process
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_what_cannot_be_replayed_is_refused(tmp_path, backend):
    engine = built(backend, oracle.write_model(tmp_path / "moe"), optimizer=None)
    prompt, completion, routed = oracle.draw_rows(count=1)[0]
    for bad, reason in (
        ([entry[:1] for entry in routed], "for each token 2 layers with 2 experts"),
        ([[[0, 9]] * 2 for _ in routed], "outside 0 to 3"),
        (routed[1:], f"Row 0 has {len(routed)} tokens that the model is fed and {len(routed) - 1} entries"),
    ):
        with pytest.raises(BatchError, match=reason):
            engine.forward_backward_batch(oracle.batch_of([(prompt, completion, bad)], is_routed=True), None)
    engine.close()
    dense = built(backend, write_tiny_model(tmp_path / "dense"), optimizer=None)
    with pytest.raises(BatchError, match="no router to replay"):
        dense.forward_backward_batch(oracle.batch_of([(prompt, completion, routed)], is_routed=True), None)
    dense.close()
    for coef, reason in ((0.1, "has no router"), (-1.0, "must be 0")):
        with pytest.raises(ConfigError, match=reason):
            built(backend, tmp_path / "dense", router_aux_loss_coef=coef)
