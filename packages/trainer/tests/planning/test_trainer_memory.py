"""The memory plan against published sizes and numbers by hand, and the recipes that say how many GPUs they take."""

import json

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_engine import create_engine
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch
from rl_rollout.backends.embedded.kv_cache import KVCache
from rl_rollout.backends.embedded.model.model_runner import load_model
from rl_rollout.testing import write_tiny_model
from rl_trainer.commands.simulate import forecast
from rl_trainer.config import load_config
from rl_trainer.errors import ConfigError, PlanError
from rl_trainer.pipeline.roles import actor_config, model_facts, server_config
from rl_trainer.planning.memory import (
    adapter_parameters,
    block_activations,
    count_parameters,
    memory_facts,
    memory_plan,
    stored_parameters,
)
from rl_trainer.planning.plan import make_plan

GIB = 2**30
QWEN2 = {"model_type": "qwen2", "vocab_size": 152_064}
MIXTURE = {"model_type": "qwen3_moe", "vocab_size": 151_936, "head_dim": 128, "num_experts": 128}


def shape(width, layers, heads, key_heads, feed_forward, **more):
    key = "moe_intermediate_size" if "num_experts" in more else "intermediate_size"
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "num_key_value_heads": key_heads, key: feed_forward, "tie_word_embeddings": False, **more}


MODELS = {
    "qwen2.5-7b": shape(3584, 28, 28, 4, 18944, **QWEN2),
    "qwen2.5-32b": shape(5120, 64, 40, 8, 27648, **QWEN2),
    "llama3.1-70b": shape(8192, 80, 64, 8, 28672, model_type="llama", vocab_size=128_256),
    "qwen3-30b-a3b": shape(2048, 48, 32, 4, 768, **MIXTURE),
    "qwen3-235b-a22b": shape(4096, 94, 64, 4, 1536, **MIXTURE),
}
RATES = {"replica_tokens_per_s": "4000", "sequence_tokens_per_s": "60", "update_tokens_per_s": "20000"}
RATES |= {"mean_tokens": "400", "sync_s": "5"}


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-32b", 32_763_876_352),
        ("llama3.1-70b", 70_553_706_496),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
    ],
)
def test_a_model_has_as_many_parameters_as_its_authors_say(name, published):
    assert count_parameters(MODELS[name]) == published


@pytest.mark.process
def test_the_count_is_that_of_a_model_that_is_stored(model):
    assert count_parameters(json.loads((model / "config.json").read_text())) == stored_parameters(model)


def test_a_plan_by_hand():
    config = load_config("qwen2.5-7b", ["engine.world_size=4", "rollout.parallel.tp=2", "rollout.num_replicas=2"])
    plan = memory_plan(config, MODELS["qwen2.5-7b"], num_parameters=4 * GIB)
    assert plan.engine == pytest.approx(
        {
            "weights": 4.0,
            "gradients": 4.0,
            "optimizer": 8.0,
            "gathered blocks": 2 * 2 * (4 * GIB - 2 * 152_064 * 3584) / 28 / GIB,
            # Inputs of 28 blocks, and of one: norms 16 bytes a unit of width, heads 14, four widths of the MLP.
            "activations": 16_384 * (2 * 28 * 3584 + 16 * 3584 + 14 * 32 * 128 + 8 * 18944) / GIB,
            "reference": 2.0,  # frozen: in the number format of its passes
        }
    )
    cache = 2 * 2 * 28 * 4 * 128 * (512 + 1024) / 2 / GIB
    assert plan.server == pytest.approx({"weights": 4.0, "keys and values": cache})


LEARNED = {"weights": 4.0, "gradients": 4.0, "optimizer": 8.0}
EXPERTS = 48 * 128 * 3 * 2048 * 768
DENSE = 4 * GIB - EXPERTS - 2 * 151_936 * 2048


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["engine.parallel.dp_replicate=2"], {"weights": 8.0, "gradients": 8.0, "optimizer": 16.0}),
        # A rank gathers the experts that it has, of two blocks at a time.
        (["engine.parallel.ep=4"], LEARNED | {"gathered blocks": 2 * 2 * (DENSE + EXPERTS / 4) / 48 / GIB}),
        ([], LEARNED | {"gathered blocks": 2 * 2 * (DENSE + EXPERTS) / 48 / GIB}),
        (["engine.optimizer_offload=true", "engine.max_tokens_per_gpu=1"], LEARNED),
        (
            # Its part of the model whole, in bfloat16; float32 moments and copy of the weights are cut over all ranks.
            ["engine.backend=megatron", "engine.parallel={tp: 2, ep: 4}"],
            {
                "weights": 2 * (DENSE / 2 + 2 * 151_936 * 2048 / 2 + EXPERTS / 4) / GIB,
                "gradients": 4 * (DENSE / 2 + 2 * 151_936 * 2048 / 2 + EXPERTS / 4) / GIB,
                "optimizer": 12 * (DENSE + 2 * 151_936 * 2048 + EXPERTS) / 4 / GIB,
                "gathered blocks": 0.0,
            },
        ),
    ],
)
def test_layouts_by_hand(overrides, wanted):
    config = load_config("qwen3-30b-a3b", ["engine.world_size=4", *overrides])
    plan = memory_plan(config, MODELS["qwen3-30b-a3b"], num_parameters=4 * GIB)
    found = {name: plan.engine[name] for name in wanted}
    if config.engine.optimizer_offload:
        beside = plan.engine["activations"] + plan.engine["gathered blocks"]
        assert plan.host == {"optimizer": 8.0}
        found["optimizer"] += beside  # a step has it on the GPU, once these are gone
    assert found == pytest.approx(wanted)


@pytest.mark.promise("The memory plan tells what offloads keep on the host")
def test_what_is_kept_on_the_host_takes_no_gpu():
    sizes, own = MODELS["qwen2.5-7b"], ["engine.world_size=4", "engine.activation_checkpointing=true"]
    plain, activations, everything = (
        memory_plan(load_config("qwen2.5-7b", [*own, *more]), sizes, num_parameters=4 * GIB)
        for more in ([], ["engine.activation_offload=true"], ["engine.cpu_offload=true"])
    )
    inputs = 16_384 * 2 * 28 * 3584 / GIB
    assert plain.host == {}
    assert activations.host == pytest.approx({"activations": inputs})
    assert plain.engine["activations"] - activations.engine["activations"] == pytest.approx(inputs)
    assert everything.host == LEARNED
    assert {*everything.engine} == {"gathered blocks", "activations", "reference"}
    assert dict(everything.lines())["memory, host of an engine rank"].startswith("16.0 GiB: weights 4.0, gradients 4.0")


@pytest.mark.core
def test_parts_that_are_recomputed_or_offloaded_are_counted_once():
    """28 layers, 16,384 tokens in bfloat16: two norms of 3584, heads of 28 and 4 times 128, an MLP of 18,944."""
    sizes, tokens = MODELS["qwen2.5-7b"], 16_384 / GIB
    norm, attention, mlp = 2 * 8 * 3584, 14 * (3584 + 512), 8 * 18_944
    wanted = {
        "engine.recompute=[mlp]": (28 * (norm + attention) + mlp, 0),
        "engine.recompute=[norm]": (28 * (8 * 3584 + attention + mlp) + norm, 0),
        "engine.activation_offload=[attention]": (28 * (norm + mlp) + attention, 28 * attention),
    }
    for override, (there, away) in wanted.items():
        own = ["engine.world_size=4", "engine.activation_checkpointing=false", override]
        plan = memory_plan(load_config("qwen2.5-7b", own), sizes, num_parameters=4 * GIB)
        assert plan.engine["activations"] == pytest.approx(tokens * there)
        assert plan.host.get("activations", 0) == pytest.approx(tokens * away)


@pytest.mark.core
def test_an_adapter_on_experts_is_counted_by_hand():
    """One layer of width 8: rank 2 of four experts, 8 into 2 x 6 and 6 into 8, and of a query projection, 8 into 8."""
    model = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 99}
    model |= {"num_experts": 4, "moe_intermediate_size": 6}
    assert adapter_parameters(model, 2, ["experts", "q_proj"]) == 2 * (4 * ((8 + 12) + (6 + 8)) + 16)
    assert adapter_parameters(model, 2, []) == 2 * 4 * 16


def test_experts_of_a_server_are_spread_over_its_ranks():
    own = ["rollout.parallel={tp: 2, dp: 2, ep: 4}", "rollout.num_replicas=4"]
    plan = memory_plan(load_config("qwen3-30b-a3b", own), MODELS["qwen3-30b-a3b"], num_parameters=4 * GIB)
    assert plan.server["weights"] == pytest.approx(2 * ((4 * GIB - EXPERTS) / 2 + EXPERTS / 4) / GIB)


def of_shape(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    return f"model.path={tmp_path}"


@pytest.mark.process
@pytest.mark.parametrize(
    ("recipe", "cluster"),
    [
        ("qwen2.5-7b", "1x8x80"),
        ("qwen2.5-32b", "2x8x80"),
        ("llama3.1-70b", "8x8x80"),
        ("qwen3-30b-a3b", "2x8x80"),
        ("qwen3-235b-a22b", "16x8x80"),
    ],
)
def test_a_recipe_fits_the_gpus_that_it_names_and_says_how(recipe, cluster, tmp_path):
    config = load_config(recipe, [of_shape(recipe, tmp_path)])
    make_plan(config)
    told = dict(forecast(config, RATES | {"cluster": cluster}))
    assert "in turn; 0 idle" in told["GPUs"]
    learned = 16 * count_parameters(MODELS[recipe]) / config.engine.world_size / GIB
    assert learned < float(told["memory, engine rank"].split()[0]) < 80
    assert float(told["memory, server GPU"].split()[0]) < 64
    assert "s (" in told["simulated step"]


@pytest.mark.promise(
    "The plan says what every role takes of a GPU, and what does not fit is refused with what to change"
)
@pytest.mark.parametrize(
    ("recipe", "cluster", "overrides", "words"),
    [
        ("llama3.1-70b", "2x8x80", ["engine.world_size=16", "rollout.num_replicas=2"],
         r"an engine rank takes \d+.\d GiB of a GPU that has 80 .*; raise engine.world_size=16, or lower"),
        ("llama3.1-70b", "8x8x80", ["rollout.parallel.tp=1", "rollout.num_replicas=64"],
         r"a server's GPU takes 131.\d GiB of a GPU that has 80 .*; raise rollout.parallel.tp=1"),
        ("qwen2.5-7b", "1x4x80", [], "cluster=1x4x80 has 4 GPUs, and the run asks for 8"),
        ("llama3.1-70b", "16x4x80", [], "takes 8 GPUs of one node, and a node of .* has 4"),
        ("qwen2.5-7b", "1x8x", [], "cluster=1x8x is not of the form"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_to_change(recipe, cluster, overrides, words, tmp_path):
    config = load_config(recipe, [of_shape(recipe, tmp_path), *overrides])
    with pytest.raises((ConfigError, PlanError), match=words):
        forecast(config, RATES | {"cluster": cluster})


LORA = ["engine.lora={rank: 4}"]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
}


@pytest.mark.process
@pytest.mark.parametrize("overrides", [[], LORA, ["engine.lora={rank: 3, target_modules: [q_proj, down_proj]}"]])
def test_weights_gradients_and_moments_are_those_of_an_engine(tmp_path, overrides):
    folder = write_tiny_model(tmp_path / "model", tie_word_embeddings=False, **SIZES)
    config = load_config("gsm8k", [f"model.path={folder}", "data.path=there", "engine.precision=float32", *overrides])
    engine = create_engine("fsdp", actor_config(config, folder))
    engine.initialize()
    engine.forward_backward_batch(ragged_batch([[5, 6, 7]], [[9, 10]]), sft_loss)
    weights = [*engine.parts.built.scorer.model.parameters()]
    held = {
        "weights": sum(w.nbytes for w in weights if not (overrides and w.requires_grad)),
        "gradients": sum(w.grad.nbytes for w in weights if w.grad is not None),
    }
    if overrides:
        held["adapter"] = sum(w.nbytes for w in weights if w.requires_grad)
    engine.optimizer_step()
    moments = [value for state in engine.parts.built.optimizer.state.values() for value in state.values()]
    held["optimizer"] = sum(value.nbytes for value in moments if value.ndim)
    engine.close()
    plan = memory_plan(config, model_facts(folder).config, num_parameters=stored_parameters(folder))
    assert {name: round(plan.engine[name] * GIB) for name in held} == held
    assert ("adapter" in plan.engine) == bool(overrides)


def saved_bytes(num_layers, dtype, num_tokens):
    """What the backward pass of a model keeps of its forward pass, its own weights excepted."""
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, num_hidden_layers=num_layers, **SIZES)).to(dtype)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(torch.zeros(1, num_tokens, dtype=torch.int64)).last_hidden_state.sum()
        return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_those_that_a_block_keeps(dtype):
    measured = (saved_bytes(5, dtype, 100) - saved_bytes(1, dtype, 100)) / 4 / 100
    assert measured <= sum(block_activations(SIZES, dtype.itemsize).values()) <= 1.2 * measured


def test_a_server_s_parts_are_those_of_its_model_and_cache(tmp_path):
    folder = write_tiny_model(tmp_path / "model", max_position_embeddings=4096, **SIZES)
    config = load_config("gsm8k", [f"model.path={folder}", "data.path=there", "engine.precision=float32"])
    model = load_model(server_config(config, folder))
    cache = KVCache(model.layer_shapes, block_size=16, dtype=model.dtype, device=model.device)
    plan = memory_plan(config, model_facts(folder).config, num_parameters=stored_parameters(folder))
    assert round(plan.server["weights"] * GIB) == sum(p.nbytes for p in model.module.parameters())
    assert round(plan.server["keys and values"] * GIB) == cache.bytes_per_block * (512 + 1024) // 16


def test_8b_with_lora_fits_one_gpu_and_without_it_does_not(tmp_path):
    sizes = shape(4096, 36, 32, 8, 12288, model_type="qwen3", vocab_size=151_936, head_dim=128)
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    overrides = ["data.path=there", f"model.path={tmp_path}", "rollout.colocated=true"]
    overrides += ["engine.precision=bfloat16", "engine.activation_checkpointing=true"]  # as on a GPU
    lora = load_config("lora", overrides)
    for gib, verdict in ((139.8, "of 139.8: it fits"), (79.6, "of 79.6: it fits"), (40, "of 40.0: too much")):
        assert verdict in dict(memory_facts(lora, there=gib))["a GPU at its fullest"]
    phase, most = memory_plan(lora, sizes).fullest()
    assert phase == "weight sync"  # the engine's float32 weights beside the server's
    assert 45 < most < 49
    whole = dict(memory_facts(load_config("gsm8k", overrides), there=139.8))["a GPU at its fullest"]
    assert "(training) of 139.8: too much" in whole
