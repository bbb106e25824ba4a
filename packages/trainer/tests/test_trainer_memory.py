"""The memory plan against published sizes and numbers by hand, and the recipes that say how many GPUs they take."""

import json

import pytest

from rl_trainer.config import load_config
from rl_trainer.errors import ConfigError, PlanError
from rl_trainer.planning.memory import count_parameters, memory_plan, stored_parameters
from rl_trainer.planning.simulate import forecast
from rl_trainer.planning.validate import make_plan

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
            "activations": 16_384 * 3584 * (2 * 28 + 34) / GIB,
            "reference": 4.0,
        }
    )
    cache = 2 * 2 * 28 * 4 * 128 * (512 + 1024) / 2 / GIB
    assert plan.server == pytest.approx({"weights": 4.0, "keys and values": cache})


def of_shape(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    return f"model.path={tmp_path}"


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
