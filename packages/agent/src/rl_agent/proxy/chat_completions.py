"""Format of `/v1/chat/completions`: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from rl_agent.errors import RowError
from rl_agent.proxy.recording import parsed_arguments
from rl_agent.proxy.requests import (
    SHARED,
    WITHOUT_EFFECT,
    Call,
    plain_content,
    read_body,
    read_choice,
    read_count,
    read_shared,
    read_tools,
    split_hosted,
)
from rl_rollout.types import structure_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rl_agent.proxy.requests import Answer

_KNOWN = {
    *(*SHARED, *WITHOUT_EFFECT, "messages", "max_tokens", "max_completion_tokens", "stream_options", "stop", "n"),
    *("parallel_tool_calls", "logprobs", "top_logprobs", "response_format", "structured_outputs"),
}
_REFUSED: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "modalities": (["text"],),
    "functions": ([],),
    "best_of": (1,),
}


def read(data: bytes) -> Call:
    """Parse a request.

    Raises:
        RowError: it cannot be honoured.
    """
    body, unknown = read_body(data, known=_KNOWN, refused=_REFUSED)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RowError("the request needs 'messages', a list of at least one message")
    given, hosted = split_hosted(body.get("tools", []), lambda tool: tool.get("type", "function") == "function")
    tools, num_top = read_tools(given), read_count(body, "top_logprobs", 20)
    if num_top and not body.get("logprobs"):
        raise RowError("top_logprobs needs logprobs=true")
    return Call(
        messages=tuple(_plain(each) for each in cast("list[Any]", messages)),
        tools=tools,
        **read_shared(
            body,
            *("max_tokens", "max_completion_tokens"),
            stop="stop",
            structure=structure_of(body.get("response_format"), body.get("structured_outputs")),
        ),
        has_usage=bool(body.get("stream_options", {}).get("include_usage")),
        choice=read_choice(body.get("tool_choice", "auto"), tools, is_parallel=body.get("parallel_tool_calls", True)),
        num_choices=read_count(body, "n", least=1),
        has_logprobs=bool(body.get("logprobs")),
        num_top_logprobs=num_top,
        ignored=(*unknown, *hosted),
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

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See `rl_agent.proxy.requests.Writer`."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return {**self._envelope, "object": "chat.completion", "choices": choices, "usage": _usage(answers)}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        turn = answer.turn
        message: dict[str, Any] = {"role": "assistant", "content": turn.content or (None if turn.calls else "")}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = _calls(answer)
        return {
            "index": index,
            "message": message,
            "finish_reason": _reason(answer),
            "logprobs": self._logprobs(answer),
        }

    def start(self, num_prompt_tokens: int) -> Iterator[dict[str, Any]]:
        """See `rl_agent.proxy.requests.Writer`."""
        del num_prompt_tokens
        for index in range(self._call.num_choices):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, reasoning: str, content: str, index: int) -> Iterator[dict[str, Any]]:
        """See `rl_agent.proxy.requests.Writer`."""
        if reasoning:
            yield self._chunk(index, {"reasoning_content": reasoning})
        if content:
            yield self._chunk(index, {"content": content})

    def end(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        """See `rl_agent.proxy.requests.Writer`."""
        for index, answer in enumerate(answers):
            for number, call in enumerate(_calls(answer)):
                yield self._chunk(index, {"tool_calls": [{"index": number, **call}]})
            yield self._chunk(index, {}, finish_reason=_reason(answer), logprobs=self._logprobs(answer))
        if self._call.has_usage:
            yield {**self._envelope, "object": "chat.completion.chunk", "choices": [], "usage": _usage(answers)}

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        return {"content": [*answer.logprobs], "refusal": None} if self._call.has_logprobs else None

    def _chunk(self, index: int, delta: dict[str, Any], **last: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": None, **last}
        return {**self._envelope, "object": "chat.completion.chunk", "choices": [choice]}


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": answer.arguments(index)}}
        for index, (call, call_id) in enumerate(zip(answer.turn.calls, answer.call_ids, strict=True))
    ]


def _reason(answer: Answer) -> str:
    return "length" if answer.is_cut else "tool_calls" if answer.turn.calls else "stop"


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    num_prompt, num_completion = answers[0].num_tokens[0], sum(answer.num_tokens[1] for answer in answers)
    total = num_prompt + num_completion
    return {"prompt_tokens": num_prompt, "completion_tokens": num_completion, "total_tokens": total}
