"""`rl-agent proxy`: a server and a proxy as processes, and a session over HTTP from its creation to its export."""

import asyncio
import json
import os
import signal
import sys
import urllib.request

import pytest

from rl_agent import validate_output
from rl_agent.types import AgentLoopOutput
from rl_rollout import ServerConfig, create_server
from rl_rollout.testing import write_tiny_model

pytestmark = pytest.mark.process

pytest.importorskip("transformers", reason="needs the extra rl-agent[hf]")


def ask(url, key, body=None):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"}, method="POST")
    request.data, request.headers["Content-type"] = json.dumps(body or {}).encode(), "application/json"
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


@pytest.mark.process
def test_the_command_records_what_its_server_emits(tmp_path):
    folder = str(write_tiny_model(tmp_path / "model"))

    async def main():
        server = create_server("embedded", ServerConfig(model_path=folder, num_threads=1))
        address = await server.start()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rl_agent.cli", "proxy", "--server", address.url, "--model", folder),
            *("--sampling", '{"max_new_tokens": 8, "seed": 1}'),
            env={**os.environ, "RL_AGENT_API_TOKEN": "secret"},
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(120):
                url = (await process.stdout.readline()).decode().split()[-1]
                root = url.removesuffix("/v1")
                session = await asyncio.to_thread(ask, root + "/sessions", "secret")
                body = {"messages": [{"role": "user", "content": "1 + 2"}], "logprobs": True}
                answer = await asyncio.to_thread(ask, url + "/chat/completions", session["api_key"], body)
                path = f"{root}/sessions/{session['session']}/finish"
                found = await asyncio.to_thread(ask, path, "secret", {"reward": 0.5})
                process.send_signal(signal.SIGTERM)
                status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
            await server.stop()
        return status, answer, found["trajectories"]

    status, answer, (trajectory,) = asyncio.run(main())
    output = AgentLoopOutput(**trajectory)
    validate_output(output)
    logprobs = [each["logprob"] for each in answer["choices"][0]["logprobs"]["content"]]
    assert (status, output.reward, output.rollout_logprobs) == (0, 0.5, logprobs)
