"""rl-rollout: requests to the endpoint of a server that runs, through its socket and its handlers."""

import logging

from _listeners import Served

from rl_rollout import ServerConfig
from rl_rollout.http.endpoint import Endpoint
from rl_rollout.testing import FakeServer

EXPECTED = ()
PATHS = ("/generate", "/generate_batch", "/generate_stream", "/abort", "/v1/completions", "/v1/chat/completions")
_served = None


def seeds():
    yield b'0{"request_id": "a", "prompt_token_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}}'
    yield b'1{"requests": [{"request_id": "a", "prompt_token_ids": [1]}, {"request_id": "a"}], "progress": true}'
    yield b'2{"request_id": "b", "prompt_token_ids": [1], "sampling_params": {"n": 1, "stop_token_ids": [1]}}'
    yield b'3{"request_ids": ["a"]}'
    yield b'4{"model": "m", "prompt": [1, 2], "max_tokens": 2, "stream": true}'
    yield b'5{"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 2}'
    yield b"0" + b"[" * 3000


async def _start():
    server = FakeServer()
    await server.start()
    return await Endpoint(server, ServerConfig(model_path="/nonexistent"), model_name="m").start()


def one(data):
    global _served
    if not data:
        return
    if _served is None:
        logging.disable(logging.CRITICAL)
        _served = Served(_start)
    status, said = _served.post(PATHS[data[0] % len(PATHS)], data[1:])
    assert status < 500 or b"ModelFolderError" in said, (status, said[:500])
