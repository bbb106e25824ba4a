"""The megatron backend on one rank: its contract, what it has in common with fsdp, and what it refuses."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rl_engine import (
    CheckpointError,
    ConfigError,
    EngineConfig,
    Head,
    LoraConfig,
    LoraExport,
    ModelFolderError,
    ModelInit,
    OptimizerConfig,
    ParallelConfig,
    Precision,
    create_engine,
)
from rl_engine.losses import sft_loss
from rl_engine.testing import EngineConformance, ragged_batch, write_tiny_model

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parents[1] / "support" / "megatron_ranks.py"
_spec = spec_from_file_location("megatron_ranks", SCRIPT)
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)
value_loss = ranks.value_loss
CRITIC = {"head": Head.VALUE}
IGNORED = "ignore:The following .*_pattern keys"  # peft's, of mixtures


@pytest.mark.contract
class TestMegatronEngine(EngineConformance):
    def make_engine(self, folder, **changes):
        return create_engine("megatron", EngineConfig(model_path=str(write_tiny_model(folder)), **changes))


def build(folder, **changes):
    options = {"precision": Precision.FLOAT64, "optimizer": OptimizerConfig(lr=1e-2, eps=1e-3)}
    engine = create_engine(
        changes.pop("backend", "megatron"), EngineConfig(model_path=str(folder), **(options | changes))
    )
    engine.initialize()
    return engine


BATCH = ragged_batch([[5, 6, 7], [8], [3] * 9], [[9, 10], [11, 12, 13], [1, 2, 3, 4, 5]])


@pytest.mark.parametrize(("writer", "reader"), [("fsdp", "megatron"), ("megatron", "fsdp")])
def test_a_checkpoint_continues_on_the_other_backend(tmp_path, writer, reader):
    write_tiny_model(tmp_path / "model")
    first = build(tmp_path / "model", backend=writer)
    ranks.one_step(first, BATCH)
    first.save_checkpoint(tmp_path / "checkpoint", 4)
    straight = (*ranks.one_step(first, BATCH), ranks.ranks.weights(first))
    first.close()
    second = build(tmp_path / "model", backend=reader)
    assert second.load_checkpoint(tmp_path / "checkpoint") == 4
    loss, norm = ranks.one_step(second, BATCH)
    weights = ranks.ranks.weights(second)
    second.close()
    assert (loss, norm) == pytest.approx(straight[:2], rel=1e-6)
    torch.testing.assert_close(weights, straight[2], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("head", [Head.VALUE, Head.REWARD])
def test_a_scalar_head_is_that_of_the_fsdp_backend(tmp_path, head):
    write_tiny_model(tmp_path / "policy")
    source, seen = tmp_path / "policy", []
    for backend in ("fsdp", "megatron"):  # from a policy, whose new head is zero
        engine = build(source, backend=backend, head=head)
        engine.forward_backward_batch(BATCH, value_loss)
        engine.optimizer_step()
        engine.save_model(tmp_path / backend)
        engine.close()
        step = ranks.initial(tmp_path / backend, AutoModelForSequenceClassification)
        engine = build(tmp_path / backend, head=head)
        seen.append((step, engine.forward_backward_batch(BATCH, None).columns["values"].values()))
        engine.close()
    assert seen[0][1].abs().max() > 0.01
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": True}, {"init": ModelInit.RANDOM, "seed": 4}])
def test_it_steps_like_the_fsdp_backend(tmp_path, changes):
    write_tiny_model(tmp_path)
    seen = []
    for backend in ("fsdp", "megatron"):
        engine = build(tmp_path, backend=backend, temperature=0.7, **changes)
        seen.append((*ranks.one_step(engine, BATCH), ranks.ranks.weights(engine)))
        engine.close()
    assert seen[0][:2] == pytest.approx(seen[1][:2], rel=1e-6)
    torch.testing.assert_close(seen[0][2], seen[1][2], rtol=1e-5, atol=1e-7)


def test_bfloat16_trains_on_a_float32_copy_and_resumes_exactly(tmp_path):
    write_tiny_model(tmp_path / "model")
    options = {"precision": Precision.BFLOAT16, "optimizer": OptimizerConfig(lr=1e-4)}
    engine = build(tmp_path / "model", **options)
    wide = build(tmp_path / "model", precision=Precision.FLOAT32, optimizer=None)
    expected = wide.forward_backward_batch(BATCH, sft_loss, forward_only=True).metrics["loss"]
    wide.close()
    assert ranks.one_step(engine, BATCH)[0] == pytest.approx(expected, rel=0.02)
    engine.save_checkpoint(tmp_path / "checkpoint", 1)
    for _ in range(3):  # steps smaller than bfloat16 can hold add up in the copy
        ranks.one_step(engine, BATCH)
    straight = ranks.ranks.weights(engine)
    assert {str(tensor.dtype) for tensor in straight.values()} == {"torch.bfloat16"}
    assert engine.load_checkpoint(tmp_path / "checkpoint") == 1
    for _ in range(3):
        ranks.one_step(engine, BATCH)
    torch.testing.assert_close(ranks.ranks.weights(engine), straight, rtol=0, atol=0)
    engine.close()


ADAPTED = [((), {}), (("k_proj", "up_proj"), {}), ((), CRITIC)]


@pytest.mark.parametrize(("targets", "more"), ADAPTED)
def test_an_adapter_steps_exports_and_resumes_as_on_fsdp(tmp_path, targets, more):
    write_tiny_model(tmp_path / "model")
    lora, seen = LoraConfig(rank=3, alpha=9.0, target_modules=targets), []
    loss = value_loss if more else sft_loss
    for backend in ("fsdp", "megatron"):
        engine = build(tmp_path / "model", backend=backend, lora=lora, **more)
        if backend == "fsdp":  # whose A is drawn in another order
            engine.forward_backward_batch(BATCH, loss)
            engine.optimizer_step()
            engine.save_checkpoint(tmp_path / "checkpoint", 1)
        assert engine.load_checkpoint(tmp_path / "checkpoint") == 1
        engine.optimizer_zero_grad()
        told = [engine.forward_backward_batch(BATCH, loss).metrics["loss"], engine.optimizer_step()]
        with engine.adapter_off():
            told.append(engine.forward_backward_batch(BATCH, loss, forward_only=True).metrics["loss"])
        told.append(engine.forward_backward_batch(BATCH, loss, forward_only=True).metrics["loss"])
        with pytest.raises(ConfigError, match="merged into whole tensors only"):
            engine.get_local_shards()
        seen.append((told, ranks.ranks.weights(engine)))
        engine.close()
    assert seen[0][0] == pytest.approx(seen[1][0], rel=1e-6)
    assert seen[0][0][2] != seen[0][0][3]
    torch.testing.assert_close(seen[0][1], seen[1][1], rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # which peft asks for
@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.parametrize(("kind", "targets"), [("tied", ()), ("v3", ranks.LATENT_LAYERS)])
def test_an_adapter_of_a_folder_is_what_was_trained(tmp_path, kind, targets):
    ranks.write_model(tmp_path, kind)
    (tmp_path / kind).rename(tmp_path / "model")
    lora = LoraConfig(rank=3, target_modules=targets, export=LoraExport.ADAPTER)
    engine = build(tmp_path / "model", lora=lora)
    start = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    for _ in range(3):
        ranks.one_step(engine, BATCH)
    want = engine.forward_backward_batch(BATCH, None).columns["logprobs"].values()
    named, described = engine.get_per_tensor_param()
    found = {name: tensor.clone() for name, tensor in named}
    engine.save_model(tmp_path / "adapter")
    engine.close()
    like = build(tmp_path / "model", backend="fsdp", lora=lora)
    theirs, same = like.get_per_tensor_param()
    assert {name: part.shape for name, part in theirs} == {name: part.shape for name, part in found.items()}
    assert described == same
    like.close()
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, start[name])}
    assert changed == found.keys()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    peft.PeftModel.from_pretrained(model, tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "merged")
    whole = build(tmp_path / "merged", optimizer=None)
    torch.testing.assert_close(whole.forward_backward_batch(BATCH, None).columns["logprobs"].values(), want)
    whole.close()


def test_rope_of_llama3_is_taken_over(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
    config = AutoConfig.for_model("llama", **(ranks.SIZES | {"rope_parameters": rope}))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    seen = []
    for backend in ("fsdp", "megatron"):
        engine = build(tmp_path, backend=backend, optimizer=None)
        seen.append(engine.forward_backward_batch(BATCH, None).columns["logprobs"].values())
        engine.close()
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-5, atol=1e-6)


def test_windowed_and_full_layers_see_the_same_on_fsdp(tmp_path):
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True}
    write_tiny_model(tmp_path, **kinds)
    seen = []
    for backend in ("fsdp", "megatron"):
        engine = build(tmp_path, backend=backend)
        seen.append((*ranks.one_step(engine, BATCH), ranks.ranks.weights(engine)))
        engine.close()
    assert seen[0][:2] == pytest.approx(seen[1][:2], rel=1e-6)
    torch.testing.assert_close(seen[0][2], seen[1][2], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": ParallelConfig(tp=2)}, r"parallel\.tp \* pp \* cp = 2 \* 1 \* 1 = 2 does not divide 1 ranks"),
        ({"parallel": ParallelConfig(tp=3)}, r"parallel\.tp = 3 does not divide the model's 4 query heads"),
        ({"parallel": ParallelConfig(pp=3)}, r"parallel\.pp is 3 and the model has 2 layers, too few"),
        ({"parallel": ParallelConfig(ep=2)}, "has no experts"),
        ({"parallel": ParallelConfig(cp=2)}, r"parallel\.tp \* pp \* cp = 1 \* 1 \* 2 = 2 does not divide 1 ranks"),
        ({"parallel": ParallelConfig(tp=2, cp=4)}, r"parallel\.tp \* cp = 8 does not divide the model's 4 query heads"),
        ({"parallel": ParallelConfig(pp=2, vpp=2)}, r"parallel\.pp \* vpp = 4 does not divide the model's 2 layers"),
        ({"parallel": ParallelConfig(vpp=2)}, r"parallel\.vpp is 2 and parallel\.pp is 1; pieces need a pipeline"),
        ({"parallel": ParallelConfig(sequence_parallel=True)}, "it would do nothing"),
        ({"head": Head.VALUE, "entropy": True}, "entropy is True; it needs head=lm"),
        ({"num_candidates": 79}, "num_candidates is 79; the model's vocabulary has 78 entries"),
        ({"lora": LoraConfig(), "optimizer": None}, "A frozen engine's adapter would stay as it was made"),
        ({"lora": LoraConfig(target_modules=("w9",))}, r"target_modules is \['w9'\]"),
        (
            {"lora": LoraConfig(dropout=0.1), "parallel": ParallelConfig(tp=2)},
            r"lora\.dropout is 0\.1 and parallel\.tp is 2, whose ranks would drop",
        ),
    ],
)
def test_what_it_cannot_honour_is_refused(tmp_path, changes, message):
    write_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, **changes)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("is_away", [False, True])
def test_gradients_arrive_after_parameters_were_elsewhere(tmp_path, is_away):
    """torch drops a parameter's accumulator, on which megatron-core listens, where its device changes, as an offload
    does on a GPU, or its number format, as here."""
    norms = []
    for is_moved in (False, True):
        engine = build(write_tiny_model(tmp_path))
        engine.forward_backward_batch(BATCH, ranks.sft_loss)
        if is_moved:
            for parameter in engine.parts.built.scorer.model.parameters() if is_away else ():
                parameter.data = parameter.data.float()
            engine.parts.built.optimizer.to(torch.device("cpu"), model=True, optimizer=False, grad=False)
        engine.forward_backward_batch(BATCH, ranks.sft_loss)
        norms.append(engine.optimizer_step())
        engine.close()
    assert norms[1] == norms[0] > 0


@pytest.mark.filterwarnings(IGNORED)
def test_an_adapter_on_experts_is_refused(tmp_path):
    ranks.write_model(tmp_path, "v3")
    targets = ("q_a_proj", "gate_proj", "up_proj", "down_proj")  # of dense layers too
    with pytest.raises(
        ConfigError,
        match=r"target_modules takes model.layers.1.mlp.experts; the megatron backend has adapters on linear",
    ):
        build(tmp_path / "v3", lora=LoraConfig(target_modules=targets))


def test_an_adapter_on_the_head_is_refused(tmp_path):
    write_tiny_model(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ConfigError, match="target_modules takes lm_head; the megatron backend has adapters on"):
        build(tmp_path, lora=LoraConfig(target_modules=("lm_head",)))


@pytest.mark.parametrize("layout", [{"sp": 2}, {"dp_replicate": 2}])
def test_layouts_of_fsdp_are_refused(tmp_path, layout):
    write_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match=f"parallel.{next(iter(layout))} is 2; it belongs to the fsdp backend"):
        build(tmp_path, parallel=ParallelConfig(**layout))


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(**{axis: 2}) for axis in ("tp", "pp", "vpp", "cp")],
)
def test_fsdp_refuses_layouts_that_it_has_not(tmp_path, parallel):
    write_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match="the fsdp backend takes sp, dp_replicate and ep only"):
        build(tmp_path, backend="fsdp", parallel=parallel)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gpt2", None, "Model type 'gpt2' has no mapping to the megatron backend; mapped are llama, mistral"),
        ("llama", {"attention_bias": True}, "attention_bias=true"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act=gelu"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "dense layers among expert layers"),
    ],
)
def test_models_without_a_mapping_are_refused(tmp_path, kind, changes, message):
    AutoConfig.for_model(kind, **({} if changes is None else ranks.SIZES | changes)).save_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match=message):
        build(tmp_path)


def test_a_folder_that_does_not_fit_is_refused(tmp_path):
    write_tiny_model(tmp_path, tie_word_embeddings=False)
    config = AutoConfig.from_pretrained(tmp_path)
    config.num_hidden_layers, config.layer_types = 3, ["full_attention"] * 3
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match=r"lacks 11 tensor\(s\): model\.layers\.2"):
        build(tmp_path)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match=r"has, beyond what the architecture takes, 11 tensor"):
        build(tmp_path)
    config.num_hidden_layers, config.layer_types, config.intermediate_size = 2, ["full_attention"] * 2, 60
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match=r"has with another shape 6 tensor"):
        build(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    write_tiny_model(tmp_path / "one")
    write_tiny_model(tmp_path / "other", hidden_size=16)
    engine = build(tmp_path / "one")
    engine.save_checkpoint(tmp_path / "checkpoint", 1)
    engine.close()
    other = build(tmp_path / "other")
    with pytest.raises(CheckpointError, match="belongs to another model"):
        other.load_checkpoint(tmp_path / "checkpoint")
    other.close()
