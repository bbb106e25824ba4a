import json
import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import (
    ConfigError,
    EngineConfig,
    LoraConfig,
    ModelFolderError,
    OptimizerConfig,
    Precision,
    check,
    create_engine,
)
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch, write_tiny_model

_spec = spec_from_file_location("moe_oracle", Path(__file__).parents[1] / "support" / "moe_oracle.py")
moe_oracle = module_from_spec(_spec)
_spec.loader.exec_module(moe_oracle)
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
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
def test_a_model_first_run_without_its_adapter_learns_the_same(folder):
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


@pytest.mark.process
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
        (LoraConfig(target_modules=("q_proj", "v-proj")), {}, "no layer that is trained is named v-proj"),
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


def folder_of(kind, tmp_path):
    if kind != "gpt2":
        return write_tiny_model(tmp_path / kind, tie_word_embeddings=kind == "tied")
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(tmp_path / kind)
    return tmp_path / kind


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft 0.21 reads it
@pytest.mark.parametrize("export", ["merged", "adapter"])
@pytest.mark.parametrize(
    ("kind", "targets"),
    [("untied", ("lm_head", "q_proj")), ("gpt2", ()), ("gpt2", ("c_attn",)), ("gpt2", ("c_fc", "c_proj"))],
)
def test_an_adapter_of_other_linear_layers_is_the_one_trained(tmp_path, kind, targets, export):
    """A head with a weight of its own; GPT-2's layers, whose weights are transposed."""
    folder = folder_of(kind, tmp_path)
    engine = build(folder, LoraConfig(rank=4, alpha=8.0, target_modules=targets, export=export))
    before = scores(engine)
    train(engine)
    trained = scores(engine)
    engine.save_model(tmp_path / "out")
    engine.close()
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out" if export == "merged" else folder, dtype=torch.float64
    )
    if export == "adapter":
        model = peft.PeftModel.from_pretrained(model, tmp_path / "out", autocast_adapter_dtype=False).double()
    torch.testing.assert_close(plain_scores(model), trained, rtol=1e-6, atol=1e-7)
    assert (trained - before).abs().max() > 0.01


@pytest.mark.parametrize("export", ["merged", "adapter"])
@pytest.mark.parametrize(
    ("kind", "target", "why"),
    [
        ("tied", "lm_head", r"whose weight is that of model\.embed_tokens too \(tie_word_embeddings\)"),
        ("gpt2", "lm_head", r"whose weight is that of transformer\.wte too"),
        ("tied", "embed_tokens", r"model\.embed_tokens is of type Embedding; adapters are on linear layers"),
        ("untied", "embed_tokens", "is of type Embedding"),
        ("gpt2", "wpe", "is of type Embedding"),
        ("untied", "q_norm", "is not supported"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused_by_check(tmp_path, kind, target, why, export):
    lora = LoraConfig(rank=4, target_modules=("q_proj" if kind != "gpt2" else "c_attn", target), export=export)
    with pytest.raises(ConfigError, match=why):
        check("fsdp", EngineConfig(model_path=str(folder_of(kind, tmp_path)), lora=lora))


def test_joined_experts_have_no_adapter_unless_named(tmp_path):
    found = check(
        "fsdp",
        EngineConfig(model_path=str(moe_oracle.write_model(tmp_path / "moe")), lora=LoraConfig(export="adapter")),
    )
    layers = {name.rpartition(".")[2] for name in found["adapter_layers"].split()}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.promise("An adapter on joined experts trains as peft's and is merged into them")
@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": True}])
def test_experts_are_adapted_as_peft_does(tmp_path, changes):
    """Gradients after three steps are those of peft's eager model, and so are log-probs of both exports."""
    folder = moe_oracle.write_model(tmp_path / "moe")
    rows = [(row[0], row[1]) for row in moe_oracle.draw_rows()]
    batch = ragged_batch(*map(list, zip(*rows, strict=True)))
    lora = LoraConfig(rank=2, alpha=4.0, target_modules=("q_proj", "experts"), export="adapter")
    engine = build(folder, lora, **changes)
    with engine.eval_mode(), engine.adapter_off():
        base = engine.forward_backward_batch(batch, None).columns["logprobs"].values()
    for _ in range(3):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, sft_loss)
        engine.optimizer_step()
    engine.save_model(tmp_path / "out")
    engine.optimizer_zero_grad()
    trained = engine.forward_backward_batch(batch, sft_loss).columns["logprobs"].values()
    with engine.eval_mode(), engine.adapter_off():
        torch.testing.assert_close(engine.forward_backward_batch(batch, None).columns["logprobs"].values(), base)
    gradients = {
        name.removeprefix("model."): parameter.grad
        for name, parameter in engine.parts.built.scorer.named_parameters()
        if parameter.grad is not None
    }
    engine.close()
    eager = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    eager.set_experts_implementation("eager")
    model = peft.PeftModel.from_pretrained(eager, tmp_path / "out", is_trainable=True, autocast_adapter_dtype=False)
    scored = [
        model(torch.tensor([[*p, *c]]))
        .logits[0, len(p) - 1 : -1]
        .log_softmax(-1)
        .gather(1, torch.tensor(c)[:, None])[:, 0]
        for p, c in rows
    ]
    torch.testing.assert_close(torch.cat(scored).detach(), trained, rtol=1e-6, atol=1e-8)
    (-torch.cat(scored).mean()).backward()
    wanted = {name: each.grad for name, each in model.base_model.model.named_parameters() if each.grad is not None}
    assert wanted.keys() == gradients.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-6, atol=1e-9)
    assert (trained - base).abs().max() > 0.1


@pytest.mark.process
def test_a_model_merged_with_adapted_experts_is_the_trained_one(tmp_path):
    folder = moe_oracle.write_model(tmp_path / "moe")
    engine = build(folder, LoraConfig(rank=2, alpha=4.0, target_modules=("experts",)))
    train(engine)
    trained = scores(engine)
    engine.save_model(tmp_path / "merged")
    names = [name for name, _ in engine.get_per_tensor_param()[0]]
    engine.close()
    original = load_file(folder / "model.safetensors")
    assert sorted(names) == sorted(original)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    merged.set_experts_implementation("eager")
    torch.testing.assert_close(plain_scores(merged), trained, rtol=1e-6, atol=1e-7)


def test_experts_are_no_target_where_there_are_none(folder, tmp_path):
    for lora, told in (
        (LoraConfig(target_modules=("experts",)), r"target_modules is \['experts'\]"),
        (LoraConfig(target_modules=("q_proj", "experts"), dropout=0.1), "peft has none on experts"),
    ):
        path = folder if lora.dropout == 0 else moe_oracle.write_model(tmp_path / "moe")
        with pytest.raises(ConfigError, match=told):
            check("fsdp", EngineConfig(model_path=str(path), lora=lora))


def test_megatron_has_no_adapters_on_experts(tmp_path):
    pytest.importorskip("megatron.core")
    folder = moe_oracle.write_model(tmp_path / "moe")
    with pytest.raises(
        ConfigError, match="not on its experts. Name target_modules without it, or use the fsdp backend"
    ):
        check("megatron", EngineConfig(model_path=str(folder), lora=LoraConfig(target_modules=("experts",))))


def test_a_folder_of_an_adapter_is_no_model(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with pytest.raises(ModelFolderError, match=r"adapter_config\.json makes .* the folder of an adapter"):
        check("fsdp", EngineConfig(model_path=str(tmp_path / "model")))
