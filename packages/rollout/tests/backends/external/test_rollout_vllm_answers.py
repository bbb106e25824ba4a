"""What vLLM is asked, and how its answers are read."""

import asyncio
import base64
import io

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rollout_servers import fake_vllm_config

from rl_rollout import (
    FinishReason,
    GenerateRequest,
    GenerationError,
    SamplingParams,
    ServerConfig,
    ServerLostError,
    TokenOutput,
    UnsupportedError,
    WeightUpdateError,
    create_server,
)
from rl_rollout.backends.external.upstream import Upstream
from rl_rollout.backends.vllm import expert_layers, most_likely, read_experts
from rl_rollout.validation import check_length, versions_of


class LogOf:
    """A process that runs, and has written an error."""

    pid = 7
    first_errors = ("(Worker) RuntimeError: head_dim=56",)

    @staticmethod
    async def has_ended(timeout_s):
        return False


@pytest.mark.parametrize(
    ("health", "error", "told"),
    [
        (200, GenerationError, r"500 to /generate: See .* in its log:\n  \| \(Worker\) RuntimeError: head_dim"),
        (503, ServerLostError, r"vllm \(pid 7\) is lost: vllm answered 500 to /generate: See stack trace"),
    ],
)
def test_an_answer_naming_the_log_brings_its_errors_or_the_loss(health, error, told):
    """A reply that refers to the log is raised with the errors found there, or as a lost server."""

    async def failed(request):
        message = {"error": {"message": "See stack trace (above) for the root cause."}}
        return web.json_response(message, status=500)

    async def well(request):
        return web.Response(status=health)

    async def scenario():
        app = web.Application()
        app.add_routes([web.post("/generate", failed), web.get("/health", well)])
        async with TestServer(app) as server:
            url = str(server.make_url("/")).rstrip("/")
            upstream = Upstream(LogOf(), name="vllm", url=url, connector=aiohttp.TCPConnector, timeout_s=60.0)
            try:
                await upstream.call("POST", "/generate", {})
            finally:
                await upstream.close()

    with pytest.raises(error, match=told):
        asyncio.run(scenario())


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


def test_what_has_no_logprob_is_not_among_the_most_likely():
    found = [{"token_id": i, "logprob": x} for i, x in ((7, -2.0), (3, -0.5), (9, -9999.0))]
    assert most_likely(found, 3) == ((3, -0.5), (7, -2.0))


def test_routed_experts_are_read_from_npy():
    file = io.BytesIO()
    np.save(file, np.arange(12, dtype=np.uint8).reshape(3, 2, 2))
    encoded = base64.b64encode(file.getvalue()).decode()
    assert read_experts(encoded, [0, 1]) == (((0, 1), (2, 3)), ((4, 5), (6, 7)), ((8, 9), (10, 11)))
    assert read_experts(encoded, [1]) == (((2, 3),), ((6, 7),), ((10, 11),))  # layer 0 is dense


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, [0, 1, 2, 3]),
        ({"first_k_dense_replace": 1}, [1, 2, 3]),
        ({"mlp_only_layers": [2], "decoder_sparse_step": 1}, [0, 1, 3]),
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, [1, 2, 3]),
        ({"text_config": {"num_hidden_layers": 2, "first_k_dense_replace": 1}}, [1]),
    ],
)
def test_layers_with_experts_are_those_of_the_config(config, layers):
    assert expert_layers({"num_hidden_layers": 4} | config) == layers


def test_routed_experts_are_asked_of_the_runner_that_tells_them(qwen3_folder):
    plain = create_server("vllm", fake_vllm_config(qwen3_folder))
    telling = create_server("vllm", fake_vllm_config(qwen3_folder, "--enable-return-routed-experts"))
    assert [server.capabilities.gives_routed_experts for server in (plain, telling)] == [False, True]
    assert [server.process.environment.get("VLLM_USE_V2_MODEL_RUNNER") for server in (plain, telling)] == [None, "1"]


def test_threads_are_those_that_were_asked_for(qwen3_folder, monkeypatch):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    names = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")
    servers = [create_server("vllm", ServerConfig(model_path=str(qwen3_folder), num_threads=n)) for n in (0, 3)]
    told = [[server.process.environment.get(name) for name in names] for server in servers]
    assert told == [[None, None], ["3", "nobind"]]  # without nobind, vLLM takes a thread for each core


@pytest.mark.parametrize("params", [{"temperature": 0.009}, {"seed": -1}])
def test_what_vllm_would_take_for_something_else_is_refused(qwen3_folder, params):
    server = create_server("vllm", fake_vllm_config(qwen3_folder))
    request = GenerateRequest(request_id="r", prompt_token_ids=(5,), sampling_params=SamplingParams(**params))
    with pytest.raises(UnsupportedError, match=f"{next(iter(params))}={next(iter(params.values()))}"):
        asyncio.run(server.post_generate(request, None, "r"))


def test_versions_are_never_guessed():
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]
    assert versions_of(spans, 5, "vllm") == [3, 3, 4, 4, 4]
    with pytest.raises(WeightUpdateError, match="of 5 tokens, and there are 6"):
        versions_of(spans, 6, "vllm")
