"""`rl-serve` in front of every backend, and the `openai` backend in front of vLLM's own server."""

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from rl_rollout import GenerateRequest, SamplingParams, ServerConfig, create_server, launch_server
from rl_rollout.testing import write_tiny_model

pytestmark = pytest.mark.process

ENVIRONMENT = os.environ.get("RL_ROLLOUT_VLLM")
START_S = 600.0


def request(request_id="r", prompt=(5, 6, 7), **fields):
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=params, **fields)


async def answer_of(server, asked):
    await server.start()
    try:
        return await server.generate(asked)
    finally:
        await server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["vllm", "sglang", "tensorrt_llm"])
def test_the_command_line_serves_the_engines_of_others(backend, qwen3_folder):
    fake = Path(__file__).parents[2] / f"peers/fake_{backend.replace('tensorrt_llm', 'trtllm')}.py"
    options = {"command": [sys.executable, str(fake)]}
    config = ServerConfig(model_path=str(qwen3_folder), num_threads=1, timeout_s=START_S, options=options)
    got = asyncio.run(answer_of(launch_server(backend, config), request()))
    own = ServerConfig(model_path=str(qwen3_folder), num_threads=1)
    assert got.token_ids == asyncio.run(answer_of(create_server("embedded", own), request())).token_ids


@pytest.mark.slow
def test_the_command_line_serves_a_url(qwen3_folder):
    async def scenario():
        served = create_server("embedded", ServerConfig(model_path=str(qwen3_folder), num_threads=1))
        url = (await served.start()).url
        try:
            options = {"url": f"{url}/v1"}
            config = ServerConfig(model_path=qwen3_folder.name, timeout_s=START_S, options=options)
            return await served.generate(request()), await answer_of(launch_server("openai", config), request())
        finally:
            await served.stop()

    want, got = asyncio.run(scenario())
    assert got.token_ids == want.token_ids


@pytest.fixture
def vllm_url(tmp_path):
    """A model folder, and where vLLM itself serves it."""
    sizes = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = write_tiny_model(tmp_path / "model", **sizes)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [f"{ENVIRONMENT}/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += ["--model", str(folder), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", str(2**28)]
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=os.environ | variables, stdout=log, stderr=log, start_new_session=True)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not is_healthy(url):
            assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield folder, f"{url}/v1"
    finally:
        process.terminate()
        process.wait(60)


def is_healthy(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return answer.status == 200
    except urllib.error.URLError:
        return False


@pytest.mark.integration
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not ENVIRONMENT, reason="RL_ROLLOUT_VLLM names no environment with vLLM and rl-ckpt")
def test_vllm_itself_at_a_url(vllm_url):
    """Token ids, log-probs, a prompt's log-probs and text, by OpenAI's API alone."""
    folder, url = vllm_url
    scored = request("scored", prompt=(5, 9, 13, 6), returns_prompt_logprobs=True)

    async def scenario():
        config = ServerConfig(model_path="tiny", timeout_s=START_S, options={"url": url, "api_key_variable": "HOME"})
        theirs = create_server("openai", config)
        ours = create_server("embedded", ServerConfig(model_path=str(folder), num_threads=1, max_model_len=256))
        await theirs.start()
        await ours.start()
        try:
            pairs = [(await ours.generate(each), await theirs.generate(each)) for each in (request(), scored)]
            said = await theirs.complete("1+2=", SamplingParams(max_new_tokens=12, temperature=0.0))
            return theirs.capabilities, pairs, said
        finally:
            await theirs.stop()
            await ours.stop()

    can, pairs, said = asyncio.run(scenario())
    assert can.takes_token_ids
    assert not can.updates_weights
    for want, got in pairs:
        assert got.token_ids == want.token_ids
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
        assert got.prompt_logprobs == pytest.approx(want.prompt_logprobs, abs=1e-4)
    assert said.text
