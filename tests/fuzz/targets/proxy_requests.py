"""rl-agent: requests to a recording proxy that runs, through its socket and its handlers."""

import logging

from _listeners import Served

from rl_agent.proxy import RecordingProxy
from rl_agent.testing import FakeGenerator, FakeTokenizer

EXPECTED = ()
PATHS = ("/v1/chat/completions", "/sessions/a/v1/responses", "/sessions/a/v1/chat/completions")
_served = None


def seeds():
    yield b'0{"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}'
    yield b'1{"model": "m", "input": "hi", "max_output_tokens": 5, "stream": true}'
    yield b'2{"messages": [{"role": "user", "content": "hi"}], "stream": true, "stream_options": {"include_usage": true}}'
    yield b'0{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 0}'
    yield b"2" + b"[" * 3000


async def _start():
    proxy = RecordingProxy(FakeGenerator(), FakeTokenizer())
    await proxy.start()
    return proxy.url


def one(data):
    global _served
    if not data:
        return
    if _served is None:
        logging.disable(logging.CRITICAL)
        _served = Served(_start)
    status, said = _served.post(PATHS[data[0] % len(PATHS)], data[1:])
    assert status < 500, (status, said[:500])
