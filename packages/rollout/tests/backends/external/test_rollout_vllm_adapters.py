"""LoRA adapters on vLLM: mixed in one batch, on weights that are updated beneath them."""

import asyncio
import json
import shutil
import uuid
from dataclasses import replace
from unittest.mock import ANY

import pytest
import torch
from rollout_servers import alone, fake_vllm_config, real_model, real_vllm, real_vllm_config, serve
from safetensors.torch import load_file, save_file

import rl_ckpt
from rl_rollout import (
    CkptReceiver,
    ConfigError,
    ModelFolderError,
    RequestError,
    ServerParallel,
    WeightUpdateError,
    create_server,
)
from rl_rollout.testing import load_weights


def copy_of(folder, other, weights):
    """The folder of the same model with other weights."""
    shutil.copytree(folder, other)
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    return other


class WithAdapters:
    """What a server that was started with the adapters one and two must do."""

    @pytest.fixture(scope="class")
    @classmethod
    def adapters(cls, folder, write_adapters):
        return write_adapters(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, folder, adapters, new_trainer):
        folders = {name: path for name, (path, _) in adapters.items()}
        yield from serve("vllm", cls.config(folder, folders), new_trainer(60), max_model_len=256)

    def test_adapters_mixed_in_a_batch_equal_merged_models(self, served, adapters):
        names = [None, "one", "two", "one", None, "two"]
        requests = [replace(served.request(max_new_tokens=16), adapter=name) for name in names]
        folders = {None: served.model_path, **{name: merged for name, (_, merged) in adapters.items()}}
        want = {name: alone(folder, served.request(max_new_tokens=16)) for name, folder in folders.items()}
        assert len({output.token_ids for output in want.values()}) == 3
        for _ in range(2):  # the second time, their prefixes are known
            for name, output in zip(names, served.generate_all(requests), strict=True):
                assert output.token_ids == want[name].token_ids, name
                assert output.logprobs == pytest.approx(want[name].logprobs, abs=1e-4)

    def test_without_an_adapter_it_is_the_base_model_after_others_had_one(self, served, adapters):
        for name in adapters:
            served.run(served.server.generate(replace(served.request(), adapter=name)))
        output = served.generate(max_new_tokens=16)
        assert output.token_ids == alone(served.model_path, served.request(max_new_tokens=16)).token_ids

    def test_an_unknown_adapter_is_a_sentence(self, served):
        with pytest.raises(RequestError, match=r"there is no adapter 'three'; loaded are: one, two"):
            served.run(served.server.generate(replace(served.request(), adapter="three")))

    def test_an_adapter_alone_is_replaced_and_nothing_else(self, folder, adapters, new_trainer, tmp_path):
        """By halves of both factors: a quarter of the difference to the base model, in every token from then on."""
        folders = {name: path for name, (path, _) in adapters.items()}
        sent = load_file(f"{folders['one']}/adapter_model.safetensors")
        halves = {f"adapters.one.{name}": tensor * 0.5 for name, tensor in sent.items()}
        base, merged = load_weights(folder), load_weights(adapters["one"][1])
        quarter = {name: base[name] + (merged[name] - base[name]) / 4 for name in base}
        config = self.config(folder, folders)
        options = {**config.options, "default_adapter": "one"}
        served = serve("vllm", replace(config, options=options), new_trainer(60), max_model_len=256)
        for server in served:
            assert server.server.capabilities.updates_adapters
            asked = server.request(max_new_tokens=16)
            before = server.generate(max_new_tokens=16)
            assert before.token_ids == alone(adapters["one"][1], asked).token_ids, "the default adapter answers"
            for bad, told in (
                (dict(list(halves.items())[1:]), "1 tensors of adapter 'one'"),
                ({name.replace(".one.", ".six."): tensor for name, tensor in halves.items()}, "no adapter 'six'"),
            ):
                with pytest.raises(WeightUpdateError, match=told):
                    server.run(self.sent(server.server, bad, 1))
                assert server.generate(max_new_tokens=16) == replace(before, request_id=ANY)
            num_bytes = server.run(self.sent(server.server, halves, 2))
            assert num_bytes == sum(tensor.nbytes for tensor in halves.values()), "A and B, and nothing else"
            want = copy_of(folder, tmp_path / "quarter", quarter)
            for _ in range(2):
                got = server.generate(max_new_tokens=16)
                assert got.token_ids == alone(want, asked).token_ids
                assert got.logprobs == pytest.approx(alone(want, asked).logprobs, abs=1e-4)
                assert got.weight_versions == (2,) * 16
            two = server.run(server.server.generate(replace(asked, request_id="two", adapter="two")))
            assert two.token_ids == alone(adapters["two"][1], asked).token_ids, "the other one is as it was"
            assert two.weight_versions == (2,) * 16

    @staticmethod
    async def sent(server, tensors, version):
        """Bytes that one session sent; a server of several ranks takes them on each."""
        url = f"shm://adapter-{uuid.uuid4().hex}"

        def send():
            with rl_ckpt.connect(url, role="send", timeout_s=60) as sender:
                return sender.send(tensors.items(), version=version, num_peers=server.capabilities.num_receivers)

        work = asyncio.to_thread(send), server.update_weights(CkptReceiver(url), version)
        answers = await asyncio.gather(*work, return_exceptions=True)
        for answer in reversed(answers):
            if isinstance(answer, BaseException):
                raise answer
        return answers[0].num_bytes

    def test_new_weights_are_those_under_the_adapters(self, served, adapters, tmp_path):
        """The last of these tests: the adapters stay, and lie on other weights from now on."""
        old = load_weights(served.model_path)
        new = {name: weight + 0.1 * torch.sin(weight * 100) for name, weight in old.items()}
        served.install(new)
        names = [None, "one", "two"]
        requests = [replace(served.request(max_new_tokens=16), adapter=name) for name in names]
        outputs = served.generate_all(requests)
        folders = {None: served.model_path, **{name: merged for name, (_, merged) in adapters.items()}}
        for name, output in zip(names, outputs, strict=True):
            weights = {key: new[key] + weight - old[key] for key, weight in load_weights(folders[name]).items()}
            want = alone(copy_of(served.model_path, tmp_path / str(name), weights), served.request(max_new_tokens=16))
            assert output.token_ids == want.token_ids, name
            assert output.logprobs == pytest.approx(want.logprobs, abs=1e-4)
            assert output.weight_versions == (1,) * 16


@pytest.mark.contract
class TestProtocolWithAdapters(WithAdapters):
    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, qwen3_folder):
        return qwen3_folder

    @staticmethod
    def config(folder, adapters):
        return fake_vllm_config(folder, adapters=adapters)


@pytest.mark.contract
@real_vllm
class TestRealVllmWithAdapters(WithAdapters):
    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory):
        return real_model(tmp_path_factory.mktemp("vllm"))

    @staticmethod
    def config(folder, adapters):
        return real_vllm_config(folder, adapters=adapters)


@pytest.mark.contract
@real_vllm
class TestRealVllmOfTwoRanksWithAdapters(TestRealVllmWithAdapters):
    """Each rank is sent all of an adapter, and holds its part of some tensors."""

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory):
        return real_model(tmp_path_factory.mktemp("vllm"), num_key_value_heads=2)

    @staticmethod
    def config(folder, adapters):
        return real_vllm_config(folder, adapters=adapters, parallel=ServerParallel(tp=2))


def test_an_adapter_that_cannot_be_served_is_told_before_anything_starts(qwen3_folder, tmp_path):
    def start(**settings):
        if settings:
            (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        create_server("vllm", fake_vllm_config(qwen3_folder, adapters={"mine": str(tmp_path)}))

    with pytest.raises(ModelFolderError, match=r"adapter 'mine': folder .* has no adapter_config.json"):
        start()
    with pytest.raises(ModelFolderError, match="adapter 'mine' is of type 'IA3'; LORA is served"):
        start(peft_type="IA3")
    with pytest.raises(ConfigError, match="default_adapter='yours' is none of the adapters: none"):
        create_server("vllm", replace(fake_vllm_config(qwen3_folder), options={"default_adapter": "yours"}))
    with pytest.raises(ConfigError, match="adapter 'mine' has rank 513; vLLM takes at most 512"):
        start(peft_type="LORA", r=513)
