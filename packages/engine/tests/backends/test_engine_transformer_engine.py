"""Layers by Transformer Engine: steps on a GPU beside megatron-core's own, and over stand-ins of its modules on a CPU."""

from functools import partial
from importlib import import_module
from itertools import pairwise

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import EngineConfig, LoraConfig, OptimizerConfig, Precision, create_engine
from rl_engine.losses import sft_loss
from rl_engine.model.device_memory import has_float8
from rl_engine.testing import ragged_batch

stages = import_module("rl_engine.backends.megatron.model")  # which imports megatron-core without its warnings
SIZES = {
    "vocab_size": 160, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "initializer_range": 0.06,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
MODELS = {
    "dense": ("qwen3", {}),
    "window": ("mistral", {"sliding_window": 16}),
    "experts": ("qwen3_moe", {"num_experts": 8, "decoder_sparse_step": 1, "norm_topk_prob": True, **EXPERTS}),
    "sinks": ("gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16,
                          "intermediate_size": 128}),
    "latent": ("deepseek_v3", {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
                               "first_k_dense_replace": 1, "q_lora_rank": 96, "kv_lora_rank": 64, "head_dim": 32,
                               "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "num_mtp_layers": 0,
                               "num_key_value_heads": 4, **EXPERTS}),
}  # fmt: skip
FP8 = [("dense", "blockwise"), ("experts", "tensorwise"), ("experts", "blockwise"), ("latent", "blockwise")]
LENGTHS = ((9, 40), (3, 7), (30, 25), (1, 64), (12, 3))


def rows():
    draw = torch.Generator().manual_seed(5)
    parts = [[torch.randint(3, 150, (n,), generator=draw).tolist() for n in pair] for pair in LENGTHS]
    return ragged_batch([prompt for prompt, _ in parts], [completion for _, completion in parts])


def write(folder, kind):
    torch.manual_seed(3)
    name, changes = MODELS[kind]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(SIZES | changes))).save_pretrained(folder)
    return folder


def trained(folder, **changes):
    """Loss and gradient norm of three steps, the kinds of modules, and the weights before and after."""
    options = {"precision": Precision.BFLOAT16, "optimizer": OptimizerConfig(lr=1e-3)} | changes
    engine = create_engine("megatron", EngineConfig(model_path=str(folder), **options))
    engine.initialize()
    kinds = {type(module).__name__ for module in engine._scorer.model.modules()}
    weights, steps = [dict(engine.get_per_tensor_param()[0])], []
    for _ in range(3):
        engine.optimizer_zero_grad()
        loss = engine.forward_backward_batch(rows(), sft_loss).metrics["loss"]
        steps.append((loss, engine.optimizer_step()))
    weights.append(dict(engine.get_per_tensor_param()[0]))
    engine.close()
    return steps, kinds, weights


def gpu(test):
    test = pytest.mark.filterwarnings("default")(pytest.mark.gpu(test))
    has_both = torch.cuda.is_available() and stages.transformer_engine.HAVE_TE
    return pytest.mark.skipif(not has_both, reason="needs CUDA and Transformer Engine")(test)


@gpu
@pytest.mark.parametrize("kind", MODELS)
def test_steps_are_those_of_megatron_cores_own_layers(tmp_path, monkeypatch, kind):
    write(tmp_path, kind)
    steps, kinds, weights = trained(tmp_path)
    assert {"TEColumnParallelLinear", "TERowParallelLinear"} <= kinds
    assert ("TEGroupedMLP" in kinds) == (kind in ("experts", "sinks", "latent"))
    assert ("FusedRowAttention" in kinds) == (kind != "sinks")
    monkeypatch.setattr(stages, "uses_transformer_engine", lambda config: False)
    want, others, before = trained(tmp_path)
    assert not any(name.startswith("TE") for name in others)
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in want], rel=0.01)
    assert [norm for _, norm in steps] == pytest.approx([norm for _, norm in want], rel=0.05)
    for got, expected in zip(weights, before, strict=True):
        assert got.keys() == expected.keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, before[0][name])


@gpu
@pytest.mark.parametrize(("kind", "recipe"), FP8)
def test_losses_in_float8_are_near_those_in_bfloat16(tmp_path, kind, recipe):
    if not has_float8():
        pytest.skip("no GPU that has float8 products")
    write(tmp_path, kind)
    found = {fp8: [loss for loss, _ in trained(tmp_path, fp8=fp8)[0]] for fp8 in ("off", recipe)}
    assert found[recipe] == pytest.approx(found["off"], rel=0.03)
    assert found[recipe] != found["off"]


@gpu
def test_an_adapter_steps_as_on_megatron_cores_own_layers(tmp_path, monkeypatch):
    write(tmp_path, "dense")
    lora = {"lora": LoraConfig(rank=4, alpha=8.0)}
    steps, _, _ = trained(tmp_path, **lora)
    monkeypatch.setattr(stages, "uses_transformer_engine", lambda config: False)
    want, _, _ = trained(tmp_path, **lora)
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in want], rel=0.01)


class Grouped(torch.nn.Module):
    """Stands for Transformer Engine's `GroupedLinear` as megatron-core wraps it."""

    def __init__(self, num_gemms, input_size, output_size, *, config, bias, skip_bias_add, **_):
        super().__init__()
        self._count, self._is_apart = num_gemms, skip_bias_add
        empty = partial(torch.empty, dtype=config.params_dtype)
        for index in range(num_gemms):
            self.register_parameter(f"weight{index}", torch.nn.Parameter(empty(output_size, input_size)))
            self.register_parameter(f"bias{index}", torch.nn.Parameter(empty(output_size)) if bias else None)

    def forward(self, x, m_splits):
        biases = [getattr(self, f"bias{index}") for index in range(self._count)]
        parts = [
            torch.nn.functional.linear(part, getattr(self, f"weight{index}"), None if self._is_apart else biases[index])
            for index, part in enumerate(x.split(m_splits))
        ]
        return torch.cat(parts), biases if self._is_apart and biases[0] is not None else None


class Attention(torch.nn.Module):
    """Stands for `TEDotProductAttention`: packed rows (`thd`), by what it is documented to be told."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, *, softmax_scale=None, **_):
        super().__init__()
        self.window_size, self._scale, self._heads = None, softmax_scale, config.num_attention_heads

    def forward(self, q, k, v, mask, attn_mask_type, *, packed_seq_params):
        told, repeats = packed_seq_params, q.shape[1] // k.shape[1]
        assert (told.qkv_format, attn_mask_type.name, mask) == ("thd", "causal", None)
        assert (q.shape[1], told.max_seqlen_q) == (self._heads, int(told.cu_seqlens_q.diff().max()))
        scale = q.shape[-1] ** -0.5 if self._scale is None else self._scale
        outs = []
        for start, stop in pairwise(told.cu_seqlens_q.tolist()):
            scores = torch.einsum("qhd,khd->hqk", q[start:stop], k[start:stop].repeat_interleave(repeats, 1)) * scale
            far = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
            unseen = (far < 0) | (far > (len(far) if self.window_size is None else self.window_size[0]))
            weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v[start:stop].repeat_interleave(repeats, 1)))
        return torch.cat(outs).flatten(1)


@pytest.fixture
def stand_ins(monkeypatch):
    """Where neither CUDA nor Transformer Engine is; fused permutations are left to megatron-core's own."""
    layers = import_module("megatron.core.tensor_parallel")
    rope, experts = (
        import_module(f"megatron.core.{name}")
        for name in ("models.common.embeddings.rope_utils", "transformer.moe.moe_utils")
    )
    for name, part in {
        "TEColumnParallelLinear": layers.ColumnParallelLinear, "TERowParallelLinear": layers.RowParallelLinear,
        "TEColumnParallelGroupedLinear": Grouped, "TERowParallelGroupedLinear": Grouped,
        "TEDotProductAttention": Attention,
    }.items():  # fmt: skip
        monkeypatch.setattr(stages.transformer_engine, name, part)
    plain = partial(rope._apply_rotary_pos_emb_bshd, rotary_interleaved=False)
    monkeypatch.setattr(rope, "fused_apply_rotary_pos_emb", lambda t, freqs, interleaved: plain(t, freqs))
    for name in (
        "permute",
        "permute_with_probs",
        "sort_chunks_by_index",
        "sort_chunks_by_index_with_probs",
        "unpermute",
    ):
        monkeypatch.setattr(experts, f"fused_{name}", object(), raising=False)
    config_of = stages.transformer_config

    def unfused(*given, **named):
        config = config_of(*given, **named)
        assert config.moe_permute_fusion == (bool(config.num_moe_experts) and named["is_fused"])
        config.moe_permute_fusion = False
        return config

    monkeypatch.setattr(stages, "transformer_config", unfused)


@pytest.mark.usefixtures("cuda_stand_in", "stand_ins")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile, in megatron-core's activation of GPT-OSS
@pytest.mark.parametrize("kind", MODELS)
def test_what_its_modules_are_told_is_the_model(tmp_path, monkeypatch, kind):
    """Steps over stand-ins that compute what the library documents are those of megatron-core's own layers."""
    write(tmp_path, kind)
    found = []
    for is_fused in (True, False):
        monkeypatch.setattr(stages, "uses_transformer_engine", lambda config, is_fused=is_fused: is_fused)
        found.append(trained(tmp_path, precision=Precision.FLOAT64))
    assert ("Grouped" in found[0][1]) == (kind in ("experts", "sinks", "latent"))
    assert ("FusedRowAttention" in found[0][1]) == (kind != "sinks")
    assert not {"Grouped", "FusedRowAttention"} & found[1][1]
    torch.testing.assert_close(*(one[0] for one in found), rtol=1e-9, atol=0)
    torch.testing.assert_close(*(one[2] for one in found), rtol=1e-7, atol=1e-9)


def test_it_is_taken_on_a_gpu_in_bfloat16(monkeypatch):
    monkeypatch.setattr(stages, "has_gpu", lambda: True)
    monkeypatch.setattr(stages.transformer_engine, "HAVE_TE", True)
    taken = {one: stages.uses_transformer_engine(EngineConfig(model_path="m", precision=one)) for one in Precision}
    assert [one for one, is_taken in taken.items() if is_taken] == [Precision.BFLOAT16]
    monkeypatch.setattr(stages.transformer_engine, "HAVE_TE", False)
    assert not stages.uses_transformer_engine(EngineConfig(model_path="m", precision="bfloat16"))
