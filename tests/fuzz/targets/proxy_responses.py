"""rl-agent: bodies of `/v1/responses`, as any framework may send them."""

from rl_agent import RowError
from rl_agent.proxy import responses as _responses
from rl_agent.proxy import server as _server

EXPECTED = (RowError,)


def seeds():
    yield b'{"model": "m", "input": "hi", "max_output_tokens": 5}'
    yield (
        b'{"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}, {"type": "function_call", '
        b'"call_id": "c", "name": "f", "arguments": "{}"}, {"type": "function_call_output", "call_id": "c", "output": "y"}]}'
    )
    yield b'{"input": [], "instructions": "x", "tools": [{"type": "function", "name": "f", "parameters": {}}]}'

    yield b"[" * 3000
    yield b'{"messages": ' + b"[" * 3000


def one(data):
    _server._read(_responses.read, data)
