"""What a refusal advises, applied to what it refuses, is accepted."""

from dataclasses import replace

import pytest

from rl_rollout.errors import ConfigError, RequestError
from rl_rollout.http.text import check_calls
from rl_rollout.registry import create_server
from rl_rollout.testing import write_tiny_model
from rl_rollout.types import GenerateRequest, SamplingParams, ServerConfig, ServerParallel
from rl_rollout.validation import check_request

PLACES = {"options": {}}
ADVICE = [
    ("embedded", {"host": "0.0.0.0"}, r"set api_token, or use 127.0.0.1", [{"api_token": "x"}, {"host": "127.0.0.1"}]),
    ("embedded", {"device": "mps"}, r"use auto, cpu", [{"device": "auto"}, {"device": "cpu"}]),
    ("embedded", {"options": {"default_adapter": "a"}}, r"none of the adapters", [PLACES]),
    ("vllm", {"device": "cpu"}, r"leave it at auto, and choose among GPUs with the option env", [
        {"device": "auto", "options": {"env": {"CUDA_VISIBLE_DEVICES": "0"}}}
    ]),
    ("vllm", {"options": {"args": "--tensor-parallel-size 2"}}, r"leave it out, and set parallel tp", [
        {"options": {}, "parallel": ServerParallel(tp=2)}
    ]),
    ("vllm", {"parallel": ServerParallel(tp=4, ep=2)}, r"make it 4, or 1", [
        {"parallel": ServerParallel(tp=4, ep=4)}, {"parallel": ServerParallel(tp=4, ep=1)}
    ]),
    ("sglang", {"kv_cache_bytes": 1 << 30}, r"leave it at 0, and use the option args='--max-total-tokens N'", [
        {"kv_cache_bytes": 0, "options": {"args": "--max-total-tokens 4096"}}
    ]),
    ("sglang", {"parallel": ServerParallel(tp=2, ep=2)}, r"leave ep at 1, or take the backend vllm", [
        {"parallel": ServerParallel(tp=2)}
    ]),
    ("tensorrt_llm", {"kv_cache_bytes": 1 << 30}, r"leave it at 0, and name the file in the option args", [
        {"kv_cache_bytes": 0, "options": {"args": "--extra_llm_api_options f.yaml"}}
    ]),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("advice") / "model"))


@pytest.mark.parametrize(("backend", "fields", "words", "changes"), ADVICE, ids=lambda value: str(value)[:40])
def test_advice_on_a_server_is_accepted(model, backend, fields, words, changes):
    config = ServerConfig(model_path=model, **fields)
    with pytest.raises(ConfigError, match=words):
        create_server(backend, config)
    for change in changes:
        create_server(backend, replace(config, **change))


REQUESTS = [
    ({"prompt_token_ids": ()}, r"give at least one token id", {"prompt_token_ids": (1,)}),
    ({"prompt_token_ids": (1,) * 9}, r"shorten the prompt", {"prompt_token_ids": (1,) * 4}),
    ({"timeout_s": 0.0}, r"must be above 0", {"timeout_s": 1.0}),
    (
        {"sampling_params": SamplingParams(top_p=2.0)},
        r"top_p=2.0 must be",
        {"sampling_params": SamplingParams(top_p=1.0)},
    ),
]


@pytest.mark.parametrize(("fields", "words", "change"), REQUESTS, ids=lambda value: str(value)[:40])
def test_advice_on_a_request_is_accepted(fields, words, change):
    request = GenerateRequest(**{"request_id": "r", "prompt_token_ids": (1,), **fields})
    with pytest.raises(RequestError, match=words):
        check_request(request, vocab_size=8, max_model_len=8)
    check_request(replace(request, **change), vocab_size=8, max_model_len=8)


def test_advice_on_tool_calls_is_accepted():
    with pytest.raises(RequestError, match="each needs a function with name and arguments"):
        check_calls({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]})
    assert check_calls({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]})
