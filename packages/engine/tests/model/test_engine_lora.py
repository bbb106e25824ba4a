import json

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl_engine import ConfigError, EngineConfig, LoraConfig, OptimizerConfig, Precision, create_engine
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch, write_tiny_model

PROMPTS, COMPLETIONS = [[5, 6, 7], [8], [9, 9]], [[9, 10], [11, 12, 13], [4]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("lora") / "model")


def build(folder, lora=None, **changes):
    lora = LoraConfig(rank=4, alpha=8.0) if lora is None else lora
    options = {"precision": Precision.FLOAT64, "optimizer": OptimizerConfig(lr=1e-2)}
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder), lora=lora, **(options | changes)))
    engine.initialize()
    return engine


def train(engine, steps=5):
    losses = []
    for _ in range(steps):
        engine.optimizer_zero_grad()
        losses.append(engine.forward_backward_batch(ragged_batch(PROMPTS, COMPLETIONS), sft_loss).metrics["loss"])
        engine.optimizer_step()
    return losses


def scores(engine):
    return engine.forward_backward_batch(ragged_batch(PROMPTS, COMPLETIONS), None).columns["logprobs"].values()


def plain_scores(model):
    found = []
    with torch.no_grad():
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            found.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.process
def test_the_adapter_learns_and_the_model_under_it_does_not_move(folder):
    engine = build(folder)
    before = scores(engine)
    losses = train(engine, steps=20)
    with engine.eval_mode(), engine.adapter_off():
        torch.testing.assert_close(scores(engine), before, rtol=0, atol=0)
    assert (scores(engine) - before).abs().max() > 0.05
    assert losses[-1] < losses[0] - 0.2
    engine.close()


@pytest.mark.process
def test_a_model_that_is_first_asked_without_its_adapter_learns_as_any_other(folder):
    """In bfloat16, where the parameters and what is computed with them are of two formats."""
    losses = []
    for is_asked in (False, True):
        engine = build(folder, precision=Precision.BFLOAT16)
        if is_asked:
            with engine.eval_mode(), engine.adapter_off():
                scores(engine)
        losses.append(train(engine, steps=3))
        engine.close()
    assert losses[0] == losses[1]


@pytest.mark.process
def test_the_merged_model_is_the_one_that_was_trained(folder, tmp_path):
    engine = build(folder)
    train(engine)
    trained = scores(engine)
    names = [name for name, _ in engine.get_per_tensor_param()[0]]
    engine.save_model(tmp_path / "merged")
    engine.close()
    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert sorted(names) == sorted(name for name, _ in original.named_parameters())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    torch.testing.assert_close(plain_scores(merged), trained, rtol=1e-6, atol=1e-7)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft 0.21 reads it
def test_the_adapter_alone_is_a_folder_that_peft_loads(folder, tmp_path):
    engine = build(folder, LoraConfig(rank=4, alpha=8.0, export="adapter"))
    train(engine)
    trained = scores(engine)
    weights, config = engine.get_per_tensor_param()
    exported = {name: tensor.clone() for name, tensor in weights}
    engine.save_model(tmp_path / "adapter")
    engine.close()
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert written.keys() == exported.keys()
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False)
    torch.testing.assert_close(plain_scores(loaded.double()), trained, rtol=1e-6, atol=1e-7)


@pytest.mark.process
def test_a_checkpoint_continues_where_it_was_written(folder, tmp_path):
    engine = build(folder)
    train(engine, steps=3)
    engine.save_checkpoint(tmp_path / "checkpoint", 3)
    straight = train(engine, steps=2)
    engine.close()
    resumed = build(folder, seed=9)
    assert resumed.load_checkpoint(tmp_path / "checkpoint") == 3
    assert train(resumed, steps=2) == straight
    resumed.close()


def test_only_the_named_layers_are_adapted(folder):
    engine = build(folder, LoraConfig(rank=2, target_modules=("q_proj",), export="adapter"))
    names = [name for name, _ in engine.get_per_tensor_param()[0]]
    engine.close()
    assert names == [
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight"
        for layer in range(2)
        for part in "AB"
    ]


@pytest.mark.parametrize(
    ("lora", "changes", "message"),
    [
        (LoraConfig(target_modules=("nothing",)), {}, r"target_modules is \['nothing'\]"),
        (LoraConfig(), {"optimizer": None}, "A frozen engine's adapter would stay as it was made"),
    ],
)
def test_what_cannot_be_adapted_is_refused(folder, lora, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(folder, lora, **changes)


def test_an_engine_without_adapter_has_none_to_turn_off(folder):
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder)))
    engine.initialize()
    with pytest.raises(ConfigError, match="no adapter to turn off"):
        engine.adapter_off()
    engine.close()
