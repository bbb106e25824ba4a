"""A process ends as its program says while an engine computes in it: no abort, no signal, no hang."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

CODE = """
import asyncio, sys, threading
from rl_rollout import GenerateRequest, SamplingParams, ServerConfig, create_server

async def main():
    server = create_server("embedded", ServerConfig(model_path=sys.argv[1], num_threads=1))
    await server.start()
    params = SamplingParams(max_new_tokens=4000, ignore_eos=True)
    for i in range(64):
        request = GenerateRequest(request_id=str(i), prompt_token_ids=(5, 6), sampling_params=params)
        asyncio.ensure_future(server.generate(request))
    while not server.status()["num_running"]:
        await asyncio.sleep(0.01)
    if sys.argv[2] == "in the loop":
        raise RuntimeError("of the user")
    return server

server = asyncio.run(main())
if sys.argv[2] == "after the loop":
    raise RuntimeError("of the user")
sys.exit(3)
"""


@pytest.mark.timeout(900)  # a process that imports torch, on a machine that may be busy
@pytest.mark.parametrize(
    ("where", "code"),
    [
        ("in the loop", 1),
        pytest.param("after the loop", 1, marks=pytest.mark.slow),
        pytest.param("exit", 3, marks=pytest.mark.slow),
    ],
)
def test_a_program_failing_in_generation_ends_with_its_own_error(long_folder, where, code):
    command = [sys.executable, "-c", CODE, str(long_folder), where]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == code, ended.stderr
    assert ("RuntimeError: of the user" in ended.stderr) == (code == 1)
    for word in ("terminate", "Abort", "Fatal", "never retrieved", "Event loop is closed"):
        assert word not in ended.stderr
