"""LoRA adapters: chosen per request, mixed in one batch, equal to a merged model; and packed weights below them."""

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl_rollout import (
    GenerateRequest,
    ModelFolderError,
    RequestError,
    SamplingParams,
    ServerConfig,
    WeightUpdateError,
    create_server,
    launch_server,
)
from rl_rollout.backends.embedded.decode_engine import Engine
from rl_rollout.backends.embedded.model.linear import ActiveAdapters, LowRank, ServedLinear, can_pack
from rl_rollout.backends.embedded.model.model_runner import load_model
from rl_rollout.testing import FakeReceiver, load_weights, write_tiny_model

PROMPT = (5, 6, 7, 8, 9)


@pytest.fixture(scope="module")
def adapters(write_adapters, qwen3_folder):
    return write_adapters(qwen3_folder)


def asked(name, adapter=None, prompt=PROMPT):
    params = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params, adapter=adapter)


def alone(folder, **more):
    """What a model without adapters gives."""
    config = ServerConfig(model_path=str(folder))
    engine = Engine(load_model(config), config)
    engine.submit([(replace(asked("r"), **more), 0)])
    while engine.can_step:
        engine.step()
    return dict(engine.take_events())["r"]


def serve(folder, adapters, scenario, **more):
    async def life():
        options = {"adapters": {name: path for name, (path, _) in adapters.items()}} | more
        server = create_server("embedded", ServerConfig(model_path=str(folder), num_threads=1, options=options))
        await server.start()
        try:
            return await scenario(server)
        finally:
            await server.stop()

    return asyncio.run(life())


@pytest.mark.process
def test_adapters_mixed_in_a_batch_equal_merged_models(qwen3_folder, adapters):
    async def scenario(server):
        # Twice each, one prompt: what is known of a prefix under one adapter is not taken for another's.
        names = [None, "one", "two", "one", None, "two"]
        return await asyncio.gather(*(server.generate(asked(f"{i}", name)) for i, name in enumerate(names)))

    outputs = serve(qwen3_folder, adapters, scenario)
    want = [alone(folder) for folder in (qwen3_folder, adapters["one"][1], adapters["two"][1])]
    for output, merged in zip(outputs, [want[i] for i in (0, 1, 2, 1, 0, 2)], strict=True):
        assert output.token_ids == merged.token_ids
        assert output.logprobs == pytest.approx(merged.logprobs, abs=1e-4)
    assert len({each.token_ids for each in want}) == 3


@pytest.mark.process
def test_adapters_of_the_output_layer_equal_merged_models(write_adapters, tmp_path):
    """A pass computes the output layer for some of its tokens: the last of each prompt, or those that are scored."""
    folder = write_tiny_model(tmp_path / "untied", tie_word_embeddings=False)
    adapters = write_adapters(folder, targets=("q_proj", "lm_head"))

    async def scenario(server):
        return await asyncio.gather(
            *(server.generate(asked(f"{name}", name)) for name in (None, "one", "two")),
            *(
                server.generate(replace(asked(f"{name}-p", name), returns_prompt_logprobs=True))
                for name in ("one", "two")
            ),
        )

    outputs = serve(folder, adapters, scenario)
    want = [alone(each) for each in (folder, adapters["one"][1], adapters["two"][1])]
    for output, merged in zip(outputs, [want[i] for i in (0, 1, 2, 1, 2)], strict=True):
        assert output.token_ids == merged.token_ids
        assert output.logprobs == pytest.approx(merged.logprobs, abs=1e-4)
    scored = alone(adapters["two"][1], returns_prompt_logprobs=True)
    assert outputs[-1].prompt_logprobs == pytest.approx(scored.prompt_logprobs, abs=1e-4)


def test_an_unknown_adapter_is_a_sentence(qwen3_folder, adapters):
    async def scenario(server):
        with pytest.raises(RequestError, match=r"there is no adapter 'three'; loaded are: one, two"):
            await server.generate(asked("r", "three"))

    serve(qwen3_folder, adapters, scenario)


@pytest.mark.process
def test_an_update_replaces_an_adapter_and_nothing_else(qwen3_folder, adapters):
    from safetensors.torch import load_file

    tensors = load_file(f"{adapters['one'][0]}/adapter_model.safetensors")
    fresh = {f"adapters.one.{name}": tensor * 0.5 for name, tensor in tensors.items()}

    async def scenario(server):
        await server.generate(asked("before", "one"))
        for bad, told in (
            (dict(list(fresh.items())[1:]), "1 tensors of adapter 'one' did not arrive"),
            ({name.replace(".one.", ".six."): tensor for name, tensor in fresh.items()}, "no adapter 'six'"),
            ({name: tensor[:1] for name, tensor in fresh.items()}, "the adapter holds"),
        ):
            with pytest.raises(WeightUpdateError, match=told):
                await server.update_weights(FakeReceiver(bad), 1)
        same = await server.generate(asked("same", "one"))
        await server.update_weights(FakeReceiver(fresh), 2)
        return same, await server.generate(asked("new", "one")), await server.generate(asked("base"))

    same, new, base = serve(qwen3_folder, adapters, scenario)
    assert same.token_ids == alone(adapters["one"][1]).token_ids
    assert base.token_ids == alone(qwen3_folder).token_ids
    # Halves of both factors: a quarter of the difference to the base model.
    weights, merged = load_weights(qwen3_folder), load_weights(adapters["one"][1])
    quarter = {name: weights[name] + (merged[name] - weights[name]) / 4 for name in weights}

    async def updated(server):
        await server.update_weights(FakeReceiver(quarter), 1)
        return await server.generate(asked("r"))

    want = serve(qwen3_folder, {}, updated)
    assert new.token_ids == want.token_ids
    assert new.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    assert new.weight_versions == (2,) * 16


def brought(adapters, name, served, factor=1.0):
    """An update that brings the adapter of a folder under another name."""
    from safetensors.torch import load_file

    config = json.loads(Path(adapters[name][0], "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    tensors = load_file(f"{adapters[name][0]}/adapter_model.safetensors")
    named = {f"adapters.{served}.{key}": tensor * factor for key, tensor in tensors.items()}
    return {f"adapters.{served}.scaling": torch.tensor(scaling), **named}


@pytest.mark.process
def test_a_new_adapter_arrives_by_a_transaction_of_rl_ckpt(qwen3_folder, adapters, new_trainer):
    update = {name: tensor.contiguous() for name, tensor in brought(adapters, "one", "new").items()}

    async def life():
        config = ServerConfig(model_path=str(qwen3_folder), num_threads=1, options={"max_adapters": 1})
        server, trainer = launch_server("embedded", config), new_trainer(timeout_s=60)
        await server.start()
        try:
            with pytest.raises(WeightUpdateError, match="did not arrive"):
                await trainer.update_server(server, dict(list(update.items())[:-1]), 1)
            await trainer.update_server(server, update, 2)
            return await server.generate(asked("r", "new"))
        finally:
            await trainer.close()
            await server.stop()

    output = asyncio.run(life())
    assert output.token_ids == alone(adapters["one"][1]).token_ids
    assert output.weight_versions == (2,) * 16


def removing(name):
    return {f"adapters.{name}.removed": torch.ones(1)}


@pytest.mark.process
@pytest.mark.promise("Adapters come and go by weight updates, each with its own version")
def test_adapters_come_and_go_while_the_server_runs(qwen3_folder, adapters):
    async def scenario(server):
        with pytest.raises(RequestError, match="there is no adapter 'new'; loaded are: "):
            await server.generate(asked("early", "new"))
        await server.update_weights(FakeReceiver(brought(adapters, "one", "new")), 3)
        await server.update_weights(FakeReceiver(brought(adapters, "two", "more")), 4)
        found = await asyncio.gather(*(server.generate(asked(f"{name}", name)) for name in ("new", "more", None)))
        await server.update_weights(FakeReceiver(removing("new")), 5)
        with pytest.raises(RequestError, match="there is no adapter 'new'; loaded are: more"):
            await server.generate(asked("late", "new"))
        await server.update_weights(FakeReceiver(brought(adapters, "one", "third")), 6)
        after = await asyncio.gather(*(server.generate(asked(f"{name} again", name)) for name in ("third", "more")))
        await server.update_weights(FakeReceiver(load_weights(qwen3_folder)), 7)
        last = await server.generate(asked("last", "more"))
        return *found, *after, last, server.status()["weight_version"]

    *outputs, version = serve(qwen3_folder, {}, scenario, max_adapters=2)
    one, two, base = (alone(folder) for folder in (adapters["one"][1], adapters["two"][1], qwen3_folder))
    for output, want, number in zip(outputs, (one, two, base, one, two, two), (3, 4, 0, 6, 4, 7), strict=True):
        assert output.token_ids == want.token_ids
        assert output.weight_versions == (number,) * 16
    assert version == 7


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (
            lambda update: update,
            "there is no adapter 'new', and there would be 2 with it; loaded are: one, and at most 1",
        ),
        (lambda update: update | removing("one"), "no adapters.new.scaling arrived"),
        (lambda update: removing("two"), "there is no adapter 'two' to remove; loaded are: one"),
        (
            lambda update: update | {"adapters.new.base_model.model.x.lora_A.weight": torch.ones(2, 2)},
            "belongs to no linear",
        ),
    ],
)
def test_a_change_of_adapters_that_is_refused_changes_nothing(qwen3_folder, adapters, spoil, told):
    update = brought(adapters, "two", "new")
    if "scaling" in told:
        del update["adapters.new.scaling"]

    async def scenario(server):
        before = await server.generate(asked("before", "one"))
        with pytest.raises(WeightUpdateError, match=told):
            await server.update_weights(FakeReceiver(spoil(update)), 1)
        after = await server.generate(asked("after", "one"))
        assert (after.token_ids, after.weight_versions) == (before.token_ids, before.weight_versions)

    serve(qwen3_folder, {"one": adapters["one"]}, scenario)


@pytest.mark.process
def test_requests_of_a_removed_adapter_end_and_others_go_on(qwen3_folder, adapters):
    """By the engine itself, step by step: two rows are under way, one is changed, and a third is in its cache."""
    folders = {name: path for name, (path, _) in adapters.items()}
    config = ServerConfig(model_path=str(qwen3_folder), options={"adapters": folders})
    engine = Engine(load_model(config), config)
    engine.submit([(asked(name, adapter), 0) for name, adapter in (("a", "one"), ("b", "two"), ("c", None))])
    for _ in range(4):
        engine.step()
    num_computed = engine.scheduler.num_prompt_tokens
    for name, tensor in removing("one").items():
        engine.model.adapters.stage(name, tensor)
    engine.set_adapters(1, engine.model.adapters.swap(1, has_base=False))
    engine.submit([(asked("d", "one"), 0)])
    while engine.can_step:
        engine.step()
    ended = dict(engine.take_events())
    for name in "ad":
        with pytest.raises(RequestError, match=f"request '{name}': adapter 'one' was removed; loaded are: two"):
            raise ended[name]
    assert ended["b"].token_ids == alone(adapters["two"][1]).token_ids
    assert ended["c"].token_ids == alone(qwen3_folder).token_ids
    assert engine.scheduler.num_prompt_tokens == num_computed  # nobody else is computed again


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda config: {**config, "use_dora": True}, "use_dora=True; False is served"),
        (lambda config: {**config, "bias": "all"}, "bias='all'; 'none' is served"),
        (lambda config: {**config, "alora_invocation_tokens": [9, 10]}, r"alora_invocation_tokens=\[9, 10\]; None is"),
        (lambda config: {**config, "init_lora_weights": "pissa"}, "'pissa', which changed the base model"),
        (lambda config: {**config, "peft_type": "IA3"}, "of type 'IA3'; LORA is served"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused(tmp_path, qwen3_folder, adapters, spoil, told):
    config = json.loads(Path(adapters["one"][0], "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(spoil(config)))
    with pytest.raises(ModelFolderError, match=told):
        serve(qwen3_folder, {"bad": (str(tmp_path), None)}, None)


def test_an_adapter_of_another_model_is_refused(tmp_path, adapters):
    folder = write_tiny_model(tmp_path / "wide", hidden_size=64)
    with pytest.raises(ModelFolderError, match=r"adapter 'one': .* the layer's width is"):
        serve(folder, {"one": adapters["one"]}, None)


@pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.float32), reason="torch was built without oneDNN on this machine"
)
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_packed_layer_gives_the_products_of_its_weight(bias):
    layer = torch.nn.Linear(128, 256, bias=bias)
    active = ActiveAdapters()
    served = ServedLinear(layer, active, is_packed=True)
    assert served._packed is not None
    x = torch.randn(1, 20, 128)
    torch.testing.assert_close(served(x), layer(x))
    torch.testing.assert_close(served(x[:, :1]), layer(x[:, :1]))
    layer.weight.data = torch.randn(256, 128)
    served.repack()
    torch.testing.assert_close(served(x), layer(x), atol=1e-4, rtol=1e-5)
    low = LowRank(a=torch.randn(2, 128), b=torch.randn(256, 2), scaling=0.5)
    served.adapters["one"] = low
    active.tokens = {"one": torch.tensor([1, 4])}
    want = layer(x)
    want[0, [1, 4]] += 0.5 * x[0, [1, 4]] @ low.a.T @ low.b.T
    torch.testing.assert_close(served(x), want, atol=1e-3, rtol=1e-4)


def test_requests_for_adapters_are_refused_where_none_is_loaded(qwen3_folder):
    from rl_rollout import UnsupportedError

    async def scenario(server):
        with pytest.raises(UnsupportedError, match="adapter"):
            await server.generate(replace(asked("r"), adapter="one"))

    serve(qwen3_folder, {}, scenario)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_folder_that_peft_has_written(tmp_path, qwen3_folder):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(qwen3_folder), config)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(tmp_path / "adapter")
    shutil.copytree(qwen3_folder, tmp_path / "merged")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")

    async def scenario(server):
        return await server.generate(asked("r", "one"))

    output = serve(qwen3_folder, {"one": (str(tmp_path / "adapter"), None)}, scenario)
    assert output.token_ids == alone(tmp_path / "merged").token_ids
    assert output.token_ids != alone(qwen3_folder).token_ids
