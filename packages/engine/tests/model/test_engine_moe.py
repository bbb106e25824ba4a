"""Mixtures of experts: the auxiliary loss of the whole batch, and the experts that a server chose."""

import gc
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import BatchError, ConfigError, EngineConfig, OptimizerConfig, Precision, create_engine
from rl_engine.losses import sft_loss
from rl_engine.testing import write_tiny_model

pytestmark = pytest.mark.process

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


@pytest.mark.process
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_closed_engine_is_freed(tmp_path, backend):
    """Its process groups, of which each has a socket, are counted: they go with the last layer that names one."""
    folder, rows = oracle.write_model(tmp_path), oracle.draw_rows()

    def descriptors():
        engine = built(backend, folder, router_aux_loss_coef=oracle.COEF)
        engine.forward_backward_batch(oracle.batch_of(rows, is_routed=False), sft_loss)
        engine.close()
        del engine
        gc.collect()
        return len([*Path("/proc/self/fd").iterdir()])

    assert descriptors() == descriptors()


SIGMOIDS = {
    "glm4_moe": {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.5},
    "deepseek_v3": {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "head_dim": 4,
                    "q_lora_rank": 24, "num_mtp_layers": 0, "routed_scaling_factor": 2.5},
}  # fmt: skip


def write_sigmoids(folder, kind):
    """One dense layer before those of the oracle's rows; a bias that changes the choice."""
    torch.manual_seed(3)
    sizes = oracle.SIZES | {"num_hidden_layers": 1 + oracle.LAYERS, "n_routed_experts": oracle.EXPERTS} | SIGMOIDS[kind]
    sizes |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    config = AutoConfig.for_model(kind, **{key: value for key, value in sizes.items() if key != "num_experts"})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.weight.data.normal_(std=0.2)
        layer.mlp.gate.e_score_correction_bias.normal_()
    model.save_pretrained(folder)
    return folder


def replayed(folder, rows):
    """Loss, gradient norm and log-probs of a plain model that takes the rows' experts (2412.19437, section 2.1.2)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    model.set_experts_implementation("eager")
    for index, layer in enumerate(model.model.layers[1:]):

        def replace(gate, _, output, index=index):
            chosen = wanted[-1][:, index]
            weights = output[0].sigmoid().gather(1, chosen)
            return output[0], weights / weights.sum(-1, keepdim=True) * gate.routed_scaling_factor, chosen

        layer.mlp.gate.register_forward_hook(replace)
    total, tokens, logprobs, wanted = 0.0, 0, [], []
    for prompt, completion, routed in rows:
        wanted.append(torch.tensor(routed))
        logits = model(torch.tensor([prompt + completion[:-1]])).logits[0, len(prompt) - 1 :]
        logprobs.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
        total, tokens = total - logprobs[-1].sum(), tokens + len(completion)
    (total / tokens).backward()
    norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
    return float(total.detach() / tokens), float(norm), [each.detach() for each in logprobs]


@pytest.mark.process
@pytest.mark.promise("router replay with routers by sigmoids")
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("kind", SIGMOIDS)
def test_experts_of_routers_by_sigmoids_are_replayed(tmp_path, backend, kind):
    folder, rows = write_sigmoids(tmp_path, kind), oracle.draw_rows()
    loss, norm, logprobs = replayed(folder, rows)
    for changes in ({}, {"max_tokens_per_gpu": 30, "activation_checkpointing": True}):
        engine = built(backend, folder, **changes)
        output = engine.forward_backward_batch(oracle.batch_of(rows, is_routed=True), sft_loss)
        for got, expected in zip(output.columns["logprobs"].unbind(), logprobs, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        assert output.metrics["loss"] == pytest.approx(loss, rel=1e-5)
        assert engine.optimizer_step() == pytest.approx(norm, rel=1e-4)
        engine.close()
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef is 0.1 .* by sigmoids, whose bias evens out the load"):
        create_engine(backend, EngineConfig(model_path=str(folder), router_aux_loss_coef=0.1)).check(1)


@pytest.mark.process
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
