"""LoRA adapters on vLLM: mixed in one batch, on weights that are updated beneath them."""

import json
from dataclasses import replace

import pytest
import torch
from adapters_alone import (
    check_adapter_alone,
    check_adapters_come_and_go,
    check_slices_under_an_adapter,
    copy_of,
)
from rollout_servers import alone, fake_vllm_config, real_model, real_vllm, real_vllm_config, serve

from rl_rollout import (
    ConfigError,
    ModelFolderError,
    RequestError,
    ServerParallel,
    create_server,
)
from rl_rollout.testing import load_weights


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

    def test_without_an_adapter_it_is_the_base_model_after_others(self, served, adapters):
        for name in adapters:
            served.run(served.server.generate(replace(served.request(), adapter=name)))
        output = served.generate(max_new_tokens=16)
        assert output.token_ids == alone(served.model_path, served.request(max_new_tokens=16)).token_ids

    def test_an_unknown_adapter_is_a_sentence(self, served):
        with pytest.raises(RequestError, match=r"there is no adapter 'three'; loaded are: one, two"):
            served.run(served.server.generate(replace(served.request(), adapter="three")))

    @pytest.mark.promise("An adapter alone replaces the one that a vLLM serves, attested, in every token from then on")
    def test_an_adapter_alone_is_replaced_and_nothing_else(self, folder, adapters, tmp_path):
        folders = {name: path for name, (path, _) in adapters.items()}
        check_adapter_alone("vllm", self.config(folder, folders), adapters, tmp_path)

    def test_adapters_come_and_go_by_updates(self, folder, adapters):
        """Two at once, of ranks that they bring; a third in the place of one that is removed in the same update."""
        config = self.config(folder, {})
        config = replace(config, options={**config.options, "adapters": {}, "max_adapters": 2, "max_rank": 8})
        check_adapters_come_and_go("vllm", config, adapters)

    @pytest.mark.slow
    def test_slices_go_under_an_adapter_that_was_sent_alone(self, folder, adapters, tmp_path):
        folders = {name: path for name, (path, _) in adapters.items()}
        check_slices_under_an_adapter("vllm", self.config(folder, folders), adapters, tmp_path)

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


@pytest.mark.process
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


def test_an_unservable_adapter_is_reported_before_the_start(qwen3_folder, tmp_path):
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
    for options, told in (
        ({"max_adapters": 1.5}, "max_adapters=1.5, max_rank=64 must be positive numbers"),
        ({"max_adapters": 1, "max_rank": 0}, "max_rank=0 must be positive"),
        ({"max_adapters": 1, "adapters": {"mine": str(tmp_path)}}, "adapters and max_adapters exclude each other"),
    ):
        with pytest.raises(ConfigError, match=told):
            create_server("vllm", replace(fake_vllm_config(qwen3_folder), options=options))
