"""What a model has random in training mode is off: log-probs of a forward pass are those of the trained one."""

import json
import math

import pytest
import torch

from rl_engine import ConfigError, EngineConfig, LoraConfig, OptimizerConfig, check, create_engine
from rl_engine.finetune.distill import DistillConfig
from rl_engine.finetune.preferences import DpoConfig
from rl_engine.finetune.preferences import train as train_dpo
from rl_engine.finetune.sft import SftConfig
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch, write_tiny_model

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
KINDS = {
    "llama": {**SMALL, "attention_dropout": 0.1},
    "gpt2": GPT2,  # 0.1 three times by default
    "opt": {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.1, "layerdrop": 0.5},
    "mixtral": {**SMALL, "num_local_experts": 4, "num_key_value_heads": 2, "router_jitter_noise": 0.5},
    "phimoe": {**SMALL, "num_local_experts": 4, "num_key_value_heads": 2, "input_jitter_noise": 0.5},
}
ROWS = ragged_batch([[5, 6, 7], [8, 2]], [[9, 10, 11, 12], [11, 12, 13]])


def folder_of(path, kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **KINDS[kind]), dtype=torch.float32)
    model.save_pretrained(path)
    return path


def two_passes(config):
    """Log-probs of one batch without and with a backward pass."""
    engine = create_engine("fsdp", config)
    engine.initialize()
    with engine.eval_mode():
        scored = engine.forward_backward_batch(ROWS, None, forward_only=True).columns["logprobs"].values().clone()
    with engine.train_mode():
        trained = engine.forward_backward_batch(ROWS, sft_loss).columns["logprobs"].values().clone()
    engine.close()
    return scored, trained


@pytest.mark.process
@pytest.mark.promise("Nothing random enters a ratio")
@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_pass_is_the_scored_one(tmp_path, kind):
    scored, trained = two_passes(EngineConfig(model_path=str(folder_of(tmp_path, kind)), optimizer=OptimizerConfig()))
    torch.testing.assert_close(trained, scored, rtol=1e-5, atol=1e-6)


@pytest.mark.process
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_dropout_of_the_model_is_asked_for(tmp_path, kind):
    config = EngineConfig(model_path=str(folder_of(tmp_path, kind)), dropout=True)
    scored, trained = two_passes(config)
    assert not torch.allclose(trained, scored, rtol=1e-4, atol=1e-4)
    assert "dropout" not in check("fsdp", config)


@pytest.mark.process
@pytest.mark.parametrize("backend", ["fsdp", "megatron", "torchtitan"])
def test_what_is_off_is_said(tmp_path, backend):
    folder = write_tiny_model(tmp_path / "model", attention_dropout=0.25)
    assert check(backend, EngineConfig(model_path=str(folder)))["dropout"] == "off: attention_dropout=0.25"
    if backend != "fsdp":
        with pytest.raises(ConfigError, match=f"dropout is true and the {backend} backend has none"):
            check(backend, EngineConfig(model_path=str(folder), dropout=True))


def test_rates_of_a_saved_folder_are_the_sources(tmp_path):
    folder = write_tiny_model(tmp_path / "model", attention_dropout=0.25)
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder)))
    engine.initialize()
    engine.save_model(tmp_path / "out")
    engine.close()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["attention_dropout"] == 0.25


def config_of(kind, tmp_path, **changes):
    folder = write_tiny_model(tmp_path / "model", attention_dropout=0.3)
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "no"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"model_path": str(folder), "data_path": str(tmp_path / "rows.jsonl"), "output_dir": str(tmp_path / "out")}
    return kind(**keys, batch_size=8, **changes)


@pytest.mark.process
@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
@pytest.mark.parametrize("rank", [0, 4], ids=["whole", "adapter"])
def test_preferences_start_where_policy_and_reference_agree(tmp_path, loss, rank):
    adapter = {"lora_rank": rank, "lora_dropout": 0.5} if rank else {}
    config = config_of(DpoConfig, tmp_path, steps=1, loss=loss, **adapter)
    lines = []
    first = train_dpo(config, lines.append).metrics["loss"]
    assert first == pytest.approx(math.log(2) if loss == "sigmoid" else 0.5, abs=1e-6)
    assert f"dropout is off: attention_dropout=0.3{', lora.dropout=0.5' if rank else ''}" in lines


def test_fine_tuning_has_dropout_where_a_key_asks_for_it(tmp_path):
    config = config_of(SftConfig, tmp_path, dropout=True, lora_rank=2, lora_dropout=0.5)
    assert (config.engine.dropout, config.engine.lora) == (True, LoraConfig(rank=2, dropout=0.5))
    (tmp_path / "student").mkdir()
    student = config_of(DistillConfig, tmp_path / "student", teacher_path="t", lora_rank=2, lora_dropout=0.5)
    assert (student.engine.dropout, student.engine.lora) == (False, LoraConfig(rank=2))
