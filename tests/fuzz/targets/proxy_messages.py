"""rl-agent: bodies of `/v1/messages`, as any client may send them."""

from rl_agent import RowError
from rl_agent.proxy import messages as _messages
from rl_agent.proxy import server as _server

EXPECTED = (RowError,)


def seeds():
    yield b'{"model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "messages": [{"role": "user", "content": "hi"}]}'
    yield (
        b'{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}, '
        b'{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]}], '
        b'"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "f"}, "thinking": {}}'
    )
    yield b"[" * 3000


def one(data):
    _server._read(_messages.read, data)
