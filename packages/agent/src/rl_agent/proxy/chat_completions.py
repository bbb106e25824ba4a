"""Format of `/v1/chat/completions`: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from rl_agent.errors import RowError
from rl_agent.proxy.recording import parsed_arguments
from rl_agent.proxy.requests import SAMPLING, Call, plain_content, read_body, read_sampling, read_tools

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_agent.proxy.requests import Answer

_KNOWN = {
    *SAMPLING,
    *("messages", "model", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options"),
    *("user", "metadata", "safety_identifier", "prompt_cache_key"),  # without effect
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([], ""),
    "store": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
}


def read(data: bytes) -> Call:
    """Parse a request.

    Raises:
        RowError: it cannot be honoured.
    """
    body = read_body(data, known=_KNOWN, neutral=_NEUTRAL)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RowError("the request needs 'messages', a list of at least one message")
    return Call(
        messages=tuple(_plain(each) for each in cast("list[Any]", messages)),
        tools=read_tools(body.get("tools", [])),
        sampling=read_sampling(body, "max_tokens", "max_completion_tokens"),
        model=body.get("model", "policy"),
        is_streaming=bool(body.get("stream")),
        has_usage=bool(body.get("stream_options", {}).get("include_usage")),
    )


def _plain(message: Any) -> dict[str, Any]:
    """Message for a chat template: text as content, objects as arguments."""
    if not isinstance(message, dict) or "role" not in message:
        raise RowError(f"message {message!r} has no role")
    plain = dict(cast("dict[str, Any]", message))
    plain["content"] = plain_content(plain.get("content"))
    plain["role"] = "system" if plain["role"] == "developer" else plain["role"]
    if plain.get("tool_calls"):
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": parsed_arguments(call["function"].get("arguments"))}}
            for call in plain["tool_calls"]
        ]
    return plain


class Writer:
    """Writer of chat completions."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.id = f"chatcmpl-{uuid4().hex}"
        self.last_line = b"data: [DONE]\n\n"
        self._envelope = {"id": self.id, "created": int(time.time()), "model": call.model}

    def whole(self, answer: Answer) -> dict[str, Any]:
        """See `rl_agent.proxy.requests.Writer`."""
        turn = answer.turn
        message: dict[str, Any] = {"role": "assistant", "content": turn.content or (None if turn.calls else "")}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = _calls(answer)
        choice = {"index": 0, "message": message, "finish_reason": _reason(answer), "logprobs": None}
        return {**self._envelope, "object": "chat.completion", "choices": [choice], "usage": _usage(answer)}

    def start(self) -> Iterator[dict[str, Any]]:
        """See `rl_agent.proxy.requests.Writer`."""
        yield self._chunk({"role": "assistant", "content": ""})

    def delta(self, reasoning: str, content: str) -> Iterator[dict[str, Any]]:
        """See `rl_agent.proxy.requests.Writer`."""
        if reasoning:
            yield self._chunk({"reasoning_content": reasoning})
        if content:
            yield self._chunk({"content": content})

    def end(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """See `rl_agent.proxy.requests.Writer`."""
        for index, call in enumerate(_calls(answer)):
            yield self._chunk({"tool_calls": [{"index": index, **call}]})
        yield self._chunk({}, _reason(answer))
        if self._call.has_usage:
            yield {**self._envelope, "object": "chat.completion.chunk", "choices": [], "usage": _usage(answer)}

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return {**self._envelope, "object": "chat.completion.chunk", "choices": [choice]}


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": answer.arguments(index)}}
        for index, (call, call_id) in enumerate(zip(answer.turn.calls, answer.call_ids, strict=True))
    ]


def _reason(answer: Answer) -> str:
    return "length" if answer.is_cut else "tool_calls" if answer.turn.calls else "stop"


def _usage(answer: Answer) -> dict[str, int]:
    num_prompt, num_completion = answer.num_tokens
    total = num_prompt + num_completion
    return {"prompt_tokens": num_prompt, "completion_tokens": num_completion, "total_tokens": total}
