"""The vLLM backend: against a fake that speaks its protocol, and against the real server where there is one.

RL_ROLLOUT_VLLM is the folder of a virtual environment with vLLM and rl-ckpt: vLLM pins another torch than ours.
"""

import asyncio
import base64
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rl_rollout import (
    ConfigError,
    FinishReason,
    GenerateRequest,
    GenerationError,
    ModelFolderError,
    RequestError,
    SamplingParams,
    ServerConfig,
    ServerLostError,
    ServerStartError,
    TokenOutput,
    WeightUpdateError,
    create_server,
)
from rl_rollout._external import versions_of
from rl_rollout._upstream import Upstream
from rl_rollout._validation import check_length
from rl_rollout.backends.vllm import most_likely, read_experts
from rl_rollout.testing import Served, ServerConformance, load_weights, write_tiny_model

ENVIRONMENT = os.environ.get("RL_ROLLOUT_VLLM")
START_S = 600.0
FAKE = [sys.executable, str(Path(__file__).parent / "peers/fake_vllm.py")]


def config_of(folder, *args, command=FAKE, env=None, adapters=(), **fields):
    options = {"command": command, "args": list(args), "env": env or {}, "adapters": dict(adapters)}
    fields = {"num_threads": 1, "timeout_s": START_S, "dtype": "float32", "max_num_seqs": 32} | fields
    return ServerConfig(model_path=str(folder), options=options, **fields)


def real_config(folder, *args, **fields):
    return config_of(
        folder,
        "--enforce-eager",
        *args,
        command=f"{ENVIRONMENT}/bin/python -m vllm.entrypoints.openai.api_server",
        env={"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"},
        **{"kv_cache_bytes": 2**30, **fields},
    )


def real_model(folder, **overrides):
    """Heads of 32: vLLM's attention on a CPU has no smaller ones."""
    sizes = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8192}
    return write_tiny_model(folder / "model", **sizes, **overrides)


def serve(config, trainer, **fields):
    with asyncio.Runner() as runner:
        server = create_server("vllm", config)
        runner.run(server.start())
        yield Served(server=server, run=runner.run, model_path=config.model_path, update=trainer.update, **fields)
        runner.run(server.stop())
        runner.run(trainer.close())


@pytest.mark.contract
class TestProtocol(ServerConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, long_folder, new_trainer):
        yield from serve(config_of(long_folder, "--enable-sleep-mode"), new_trainer(60), max_model_len=4096)


def test_an_answer_that_only_points_to_the_log_brings_the_errors_in_it():
    class Answer:
        status = 500

        async def text(self):
            return json.dumps({"error": {"message": "See stack trace (above) for the root cause."}})

    process = SimpleNamespace(first_errors=("(Worker) RuntimeError: head_dim=56",))
    upstream = Upstream(process, name="vllm", url="http://none", connector=object, timeout_s=1.0)
    with pytest.raises(
        GenerationError, match=r"500 to /generate: See .* in its log:\n  \| \(Worker\) RuntimeError: head_dim"
    ):
        asyncio.run(upstream.check(Answer(), "/generate"))


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
        yield from serve(cls.config(folder, folders), new_trainer(60), max_model_len=256)

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
            folder = shutil.copytree(served.model_path, tmp_path / str(name))
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            want = alone(folder, served.request(max_new_tokens=16))
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
        return config_of(folder, adapters=adapters)


@pytest.mark.contract
@pytest.mark.integration
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not ENVIRONMENT, reason="RL_ROLLOUT_VLLM names no environment with vLLM and rl-ckpt")
class TestRealVllm(ServerConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, tmp_path_factory, new_trainer):
        folder = real_model(tmp_path_factory.mktemp("vllm"))
        config = real_config(folder, max_model_len=8192)
        yield from serve(config, new_trainer(60), max_model_len=8192)

    def test_logprobs_are_of_the_distribution_that_was_sampled_from(self, served):
        """Temperature, top-k and top-p, recomputed by transformers: as our own sampler defines them."""
        from transformers import AutoModelForCausalLM

        from rl_rollout.backends.embedded.sampler import truncate

        prompt = (5, 6, 7)
        output = served.generate(prompt, temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=60)
        model = AutoModelForCausalLM.from_pretrained(served.model_path).eval()
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
        rows = logits.shape[0]
        kept = truncate(logits / 0.7, torch.full((rows,), 20), torch.full((rows,), 0.9))
        want = kept.log_softmax(-1).gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.logprobs), want, atol=1e-4, rtol=0)

    test_stop_ends_it = ServerConformance.test_stop_ends_it


@pytest.mark.contract
@pytest.mark.integration
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not ENVIRONMENT, reason="RL_ROLLOUT_VLLM names no environment with vLLM and rl-ckpt")
class TestRealVllmWithAdapters(WithAdapters):
    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory):
        return real_model(tmp_path_factory.mktemp("vllm"))

    @staticmethod
    def config(folder, adapters):
        return real_config(folder, adapters=adapters)


CACHE_TOKENS = 512
CACHE_BYTES = (CACHE_TOKENS + 128) * 2 * 2 * 32 * 4
"""Of `real_model`: keys and values, layers, numbers of one head, float32; and a page that vLLM keeps to itself."""


async def fill_the_cache(config):
    """Requests that fit into the cache one at a time, all at once; and each of them alone."""
    prompts = [tuple(range(3, 40 + i)) for i in range(6)]
    requests = [replace(request(str(i), max_new_tokens=400), prompt_token_ids=p) for i, p in enumerate(prompts)]
    server = create_server("vllm", config)
    await server.start()
    try:
        outputs = await asyncio.gather(*map(server.generate, requests))
        return outputs, [await server.generate(each) for each in requests]
    finally:
        await server.stop()


@pytest.mark.integration
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not ENVIRONMENT, reason="RL_ROLLOUT_VLLM names no environment with vLLM and rl-ckpt")
def test_a_full_cache_of_the_real_one(tmp_path):
    """Sequences that outgrow it are put off and lose nothing; one that could never fit is told at the start."""
    config = real_config(real_model(tmp_path), max_model_len=CACHE_TOKENS, kv_cache_bytes=CACHE_BYTES)
    outputs, alone = asyncio.run(fill_the_cache(config))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
    assert all(len(output.token_ids) == 400 for output in outputs)
    with pytest.raises(ServerStartError, match="one request with the model's max seq len"):
        asyncio.run(create_server("vllm", replace(config, max_model_len=2 * CACHE_TOKENS)).start())


@pytest.mark.integration
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not ENVIRONMENT, reason="RL_ROLLOUT_VLLM names no environment with vLLM and rl-ckpt")
def test_the_real_one_on_a_cpu_cannot_sleep(qwen3_folder):
    """Its own words, if it is a build for CPUs: the fake is all that sleep has been run against."""
    server = create_server("vllm", real_config(qwen3_folder, "--enable-sleep-mode"))
    with pytest.raises(ServerStartError, match="Sleep mode is not supported on current platform"):
        asyncio.run(server.start())


@pytest.mark.integration
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not ENVIRONMENT, reason="RL_ROLLOUT_VLLM names no environment with vLLM and rl-ckpt")
def test_the_real_one_on_a_cpu_tells_no_routed_experts(tmp_path):
    """Its own words, where Triton has no backend for CPUs: the runner that tells them is asked for, and needs it."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder = real_model(tmp_path, family="qwen3_moe", **experts)
    server = create_server("vllm", real_config(folder, "--enable-return-routed-experts"))
    with pytest.raises(ServerStartError, match="Model Runner V2 requires Triton"):
        asyncio.run(server.start())


def alone(folder, request):
    """What a model without adapters gives."""

    async def life():
        server = create_server("embedded", ServerConfig(model_path=str(folder), num_threads=1))
        await server.start()
        try:
            return await server.generate(request)
        finally:
            await server.stop()

    return asyncio.run(life())


def request(request_id="r", **params):
    params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
    return GenerateRequest(request_id=request_id, prompt_token_ids=(5, 6), sampling_params=SamplingParams(**params))


def test_a_server_that_dies_at_start_shows_its_last_lines(qwen3_folder):
    server = create_server("vllm", config_of(qwen3_folder, "--no-such-argument"))
    with pytest.raises(ServerStartError, match=r"(?s)vllm .* ended with code 2; .*--no-such-argument"):
        asyncio.run(server.start())


def test_a_port_in_use_is_told_before_anything_starts(qwen3_folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = create_server("vllm", config_of(qwen3_folder, port=port))
        with pytest.raises(ServerStartError, match=f"port {port} of 127.0.0.1 cannot be bound"):
            asyncio.run(server.start())
    assert not server.process.was_started


def test_an_output_that_was_cut_is_no_output():
    output = TokenOutput(
        request_id="r",
        token_ids=(1, 2),
        logprobs=(-1.0, -1.0),
        weight_versions=(0, 0),
        finish_reason=FinishReason.LENGTH,
    )
    check_length(output, 2)
    with pytest.raises(GenerationError, match="ended it for its length after 2 of 3 tokens"):
        check_length(output, 3)


def test_a_command_that_is_none(qwen3_folder):
    server = create_server("vllm", config_of(qwen3_folder, command=["/no/such/python"]))
    with pytest.raises(ServerStartError, match="/no/such/python"):
        asyncio.run(server.start())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"options": {"comand": "python"}}, "did you mean 'command'"),
        ({"options": {"command": 3}}, "list of words"),
        ({"options": {"env": "A=1"}}, "object of names and values"),
        ({"options": {"adapters": ["one"]}}, "object of names and folders"),
        ({"options": {"adapters": {"tiny-qwen3": "here"}}}, "is the name of the model"),
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        (
            {"options": {"args": "--enable-return-routed-experts", "env": {"VLLM_USE_V2_MODEL_RUNNER": 0}}},
            "VLLM_USE_V2_MODEL_RUNNER='0' and args have --enable-return-routed-experts, .* leave one of them out",
        ),
        (
            {"kv_cache_bytes": 2**20, "options": {"env": {"VLLM_CPU_KVCACHE_SPACE": 1}}},
            "kv_cache_bytes=1048576 and VLLM_CPU_KVCACHE_SPACE='1' .* leave one of them out",
        ),
    ],
)
def test_bad_settings_are_told_before_anything_starts(qwen3_folder, fields, told):
    with pytest.raises(ConfigError, match=told):
        create_server("vllm", ServerConfig(model_path=str(qwen3_folder), **fields))


def test_an_adapter_that_cannot_be_served_is_told_before_anything_starts(qwen3_folder, tmp_path):
    def start(**settings):
        if settings:
            (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        create_server("vllm", config_of(qwen3_folder, adapters={"mine": str(tmp_path)}))

    with pytest.raises(ModelFolderError, match=r"adapter 'mine': folder .* has no adapter_config.json"):
        start()
    with pytest.raises(ModelFolderError, match="adapter 'mine' is of type 'IA3'; LORA is served"):
        start(peft_type="IA3")
    with pytest.raises(ConfigError, match="adapter 'mine' has rank 513; vLLM takes at most 512"):
        start(peft_type="LORA", r=513)


def test_a_folder_that_is_none_is_told_before_anything_starts(tmp_path):
    with pytest.raises(ModelFolderError, match="config.json"):
        create_server("vllm", config_of(tmp_path / "missing"))


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_server_that_is_killed_is_told_and_leaves_nothing_behind(qwen3_folder):
    async def scenario():
        server = create_server("vllm", config_of(qwen3_folder))
        await server.start()
        (child,) = children(server.process.pid)
        await server.pause("keep")
        await server.resume()
        task = asyncio.create_task(server.generate(request(max_new_tokens=200)))
        await asyncio.sleep(0.05)
        os.kill(int(child), signal.SIGKILL)
        with pytest.raises(ServerLostError, match="ended with code 137"):
            await task
        with pytest.raises(ServerLostError):
            await server.generate(request())
        await server.stop()
        return child, Path(server._folder)

    child, folder = asyncio.run(scenario())
    assert not Path(f"/proc/{child}").exists()
    assert not folder.exists()


def test_it_ends_with_the_process_that_started_it(qwen3_folder):
    code = f"""
import asyncio, os
from pathlib import Path
from rl_rollout import ServerConfig, create_server
async def main():
    config = ServerConfig(model_path={str(qwen3_folder)!r}, dtype="float32", options={{"command": {FAKE!r}}})
    server = create_server("vllm", config)
    await server.start()
    guard = server.process.pid
    print(guard, *Path(f"/proc/{{guard}}/task/{{guard}}/children").read_text().split(), flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=START_S).stdout
    pids = told.split()
    assert len(pids) == 2
    deadline = time.monotonic() + START_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_update_that_was_installed_by_half_makes_the_server_refuse(qwen3_folder, new_trainer):
    """vLLM has the new weights and does not say so: no token may come of them until an update succeeds."""

    async def scenario():
        server, trainer = create_server("vllm", config_of(qwen3_folder, "--fail-finish", "1")), new_trainer(60)
        weights = load_weights(qwen3_folder)
        await server.start()
        try:
            with pytest.raises(WeightUpdateError, match="installed by half.*finish was told to fail.*refuses"):
                await trainer.update_server(server, weights, 1)
            with pytest.raises(WeightUpdateError, match="must succeed first"):
                await server.generate(request())
            await trainer.update_server(server, weights, 2)
            return await server.generate(request())
        finally:
            await server.stop()
            await trainer.close()

    assert asyncio.run(scenario()).weight_versions == (2,) * 8


def test_what_has_no_logprob_is_not_among_the_most_likely():
    found = [{"token_id": i, "logprob": x} for i, x in ((7, -2.0), (3, -0.5), (9, -9999.0))]
    assert most_likely(found, 3) == ((3, -0.5), (7, -2.0))


def test_routed_experts_are_read_from_npy():
    file = io.BytesIO()
    np.save(file, np.arange(12, dtype=np.uint8).reshape(3, 2, 2))
    experts = read_experts(base64.b64encode(file.getvalue()).decode())
    assert experts == (((0, 1), (2, 3)), ((4, 5), (6, 7)), ((8, 9), (10, 11)))


def test_routed_experts_are_asked_of_the_runner_that_tells_them(qwen3_folder):
    plain = create_server("vllm", config_of(qwen3_folder))
    telling = create_server("vllm", config_of(qwen3_folder, "--enable-return-routed-experts"))
    assert [server.capabilities.gives_routed_experts for server in (plain, telling)] == [False, True]
    assert [server.process.environment.get("VLLM_USE_V2_MODEL_RUNNER") for server in (plain, telling)] == [None, "1"]


def test_versions_are_never_guessed():
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]
    assert versions_of(spans, 5, "vllm") == [3, 3, 4, 4, 4]
    with pytest.raises(WeightUpdateError, match="of 5 tokens, and there are 6"):
        versions_of(spans, 6, "vllm")
