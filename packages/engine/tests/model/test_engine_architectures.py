"""Any causal LM: log-probs and gradients equal to those of the bare model, row by row."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from rl_engine import ConfigError, EngineConfig, MatmulPrecision, ModelFolderError, Precision, check, create_engine
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch

pytestmark = pytest.mark.process  # seconds of computation

SMALL = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
ROWS = (
    [[3, 4, 5, 6], [7], [8, 9, 10, 11, 12, 13], [3, 4, 5, 6], [7], [3, 4, 5, 6]],
    [[14, 15], [16, 17, 18, 19, 20, 21, 22], [23], [24, 25, 26, 27, 28, 29], [30, 31], [32]],
)
PACKED = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    "mistral": {"sliding_window": 3},
    "phi3": {},
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 4},
    "cohere": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "gpt2": GPT2,
    "afmoe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8, "num_key_value_heads": 2},
}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
          "shared_expert_intermediate_size": 16}  # fmt: skip
STATEFUL = {"qwen3_next": DELTA | SPARSE, "qwen3_5_text": DELTA, "qwen3_5_moe_text": DELTA | SPARSE}
PACKED |= STATEFUL
PARTED = ("qwen3_moe", "gpt_oss", *STATEFUL)  # prompts fed with every row: routers, and layers with state
PADDED = {
    "mamba": {"state_size": 4},
    # sparse attention: a query sees the three tokens that its indexer likes best, without gradient of the choice
    "deepseek_v32": {
        "index_n_heads": 2, "index_head_dim": 8, "index_topk": 3, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "num_key_value_heads": 4, "head_dim": 4,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip


def folder_of(tmp_path, kind, changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(changes if "n_embd" in changes else SMALL | changes))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


def oracle(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")
    rows, squares = [], []
    for prompt, completion in zip(*ROWS, strict=True):
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.7
        rows.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
        squares.append(logits.detach().softmax(-1).square().sum(-1))
    (-torch.cat(rows).mean()).backward()
    return rows, squares, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.promise("Any causal LM: fourteen architectures give the scores of the bare model")
@pytest.mark.parametrize("kind", [*PACKED, *PADDED])
def test_scores_and_gradients_are_those_of_the_bare_model(tmp_path, kind):
    folder = folder_of(tmp_path, kind, (PACKED | PADDED)[kind])
    rows, squares, gradients = oracle(folder)
    config = EngineConfig(model_path=str(folder), precision=Precision.FLOAT64, temperature=0.7, sum_pi_squared=True)
    engine = create_engine("fsdp", config)
    engine.initialize()
    assert engine.parts.built.scorer.is_packed == (kind in PACKED)
    assert engine.parts.built.scorer.shares_prefixes == (kind in PACKED and kind not in PARTED)
    assert engine.parts.built.scorer.head is not None
    with engine.eval_mode():
        columns = engine.forward_backward_batch(ragged_batch(*ROWS), None).columns
    for got, want in zip(columns["logprobs"].unbind(), rows, strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(
        columns["sum_pi_squared"].values(), torch.cat(squares), rtol=1e-5, atol=1e-6, check_dtype=False
    )
    engine.parts.built.scorer.eval()
    engine.forward_backward_batch(ragged_batch(*ROWS), sft_loss)
    for name, parameter in engine.parts.built.scorer.model.named_parameters():
        assert (parameter.grad is None) == (gradients[name] is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("doge", "DogeAttention adds a position bias or mask, so its rows cannot be packed"),
        ("nemotron", "NemotronAttention does not hand keyword arguments on, so its rows cannot be packed"),
    ],
)
def test_attention_that_cannot_be_packed_is_refused_by_check(tmp_path, kind, why):
    with pytest.raises(ConfigError, match=why):
        check("fsdp", EngineConfig(model_path=str(folder_of(tmp_path, kind, {}))))


def test_attention_that_fails_on_packed_rows_is_refused_by_check(tmp_path, monkeypatch):
    """Whatever a new family does with the result."""

    def view(self, hidden_states, **kwargs):
        return hidden_states.transpose(1, 2).view(-1), None

    monkeypatch.setattr(Qwen3Attention, "forward", view)
    with pytest.raises(ModelFolderError, match="Qwen3Attention cannot attend within packed rows: view size is not"):
        check("fsdp", EngineConfig(model_path=str(folder_of(tmp_path, "qwen3", {}))))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_exported_names_and_values_are_those_of_the_folder(tmp_path, kind):
    from safetensors.torch import load_file

    folder = folder_of(tmp_path / "in", kind, PACKED[kind])
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder), optimizer=None))
    engine.initialize()
    exported = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    engine.save_model(tmp_path / "out")
    torch.testing.assert_close(exported, load_file(folder / "model.safetensors"), rtol=0, atol=0)
    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors"), exported, rtol=0, atol=0)


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.BFLOAT16])
def test_exported_weights_after_a_forward_pass_are_the_trained(tmp_path, precision):
    folder = folder_of(tmp_path / "in", "qwen3", PACKED["qwen3"])
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder), precision=precision))
    engine.initialize()
    before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    engine.forward_backward_batch(ragged_batch(*ROWS), None, forward_only=True)
    after = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    engine.forward_backward_batch(ragged_batch(*ROWS), None, forward_only=True)
    engine.save_checkpoint(tmp_path / "checkpoint", 1)
    fresh = create_engine("fsdp", EngineConfig(model_path=str(folder), precision=precision, init="random", seed=3))
    fresh.initialize()
    fresh.load_checkpoint(tmp_path / "checkpoint")
    torch.testing.assert_close(dict(fresh.get_per_tensor_param()[0]), before, rtol=0, atol=0)


@pytest.mark.process
def test_other_number_formats_agree_with_float32(tmp_path):
    folder = folder_of(tmp_path, "qwen3", {"hidden_size": 64})
    scores = []
    for changes in ({}, {"matmul_precision": MatmulPrecision.MEDIUM}, {"precision": Precision.BFLOAT16}):
        engine = create_engine("fsdp", EngineConfig(model_path=str(folder), **changes))
        engine.initialize()
        output = engine.forward_backward_batch(ragged_batch(*ROWS), sft_loss)
        scores.append((output.columns["logprobs"].values(), engine.optimizer_step()))
        engine.close()
    assert torch.get_float32_matmul_precision() == "highest"
    for logprobs, norm in scores[1:]:
        assert logprobs.dtype == torch.float32
        torch.testing.assert_close(logprobs, scores[0][0], atol=0.05, rtol=0.02)
        assert norm == pytest.approx(scores[0][1], rel=0.05)


def test_activation_checkpointing_changes_nothing(tmp_path):
    folder = folder_of(tmp_path, "qwen3", {})
    norms = []
    for is_on in (False, True):
        engine = create_engine("fsdp", EngineConfig(model_path=str(folder), activation_checkpointing=is_on))
        engine.initialize()
        engine.forward_backward_batch(ragged_batch(*ROWS), sft_loss)
        norms.append(engine.optimizer_step())
        engine.close()
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_a_random_model_is_seeded(tmp_path):
    folder = folder_of(tmp_path, "qwen3", {})
    (folder / "model.safetensors").unlink()
    weights = []
    for seed in (1, 1, 2):
        engine = create_engine("fsdp", EngineConfig(model_path=str(folder), init="random", seed=seed))
        engine.initialize()
        weights.append(next(engine.get_per_tensor_param()[0])[1].clone())
        engine.close()
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
