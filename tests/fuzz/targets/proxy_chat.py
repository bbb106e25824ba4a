"""rl-agent: bodies of `/v1/chat/completions`, as any framework may send them."""

from rl_agent import RowError
from rl_agent.proxy import chat_completions as _chat
from rl_agent.proxy import server as _server

EXPECTED = (RowError,)


def seeds():
    yield b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0.5}'
    yield b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}]}'
    yield (
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "stream": true, '
        b'"stream_options": {"include_usage": true}, "tools": [{"type": "function", "function": {"name": "f"}}]}'
    )

    yield b"[" * 3000
    yield b'{"messages": ' + b"[" * 3000


def one(data):
    _server._read(_chat.read, data)
