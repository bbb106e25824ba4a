"""Format of `/v1/responses`: https://platform.openai.com/docs/api-reference/responses."""

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
    flat_structure,
    plain_content,
    read_body,
    read_choice,
    read_count,
    read_shared,
    read_tools,
    split_hosted,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rl_agent.proxy.requests import Answer

_KNOWN = {
    *(*SHARED, *WITHOUT_EFFECT, "input", "instructions", "max_output_tokens", "previous_response_id", "top_logprobs"),
    *("parallel_tool_calls", "include", "reasoning", "text", "truncation", "stream_options", "stop", "client_metadata"),
}
_REFUSED: dict[str, tuple[Any, ...]] = {"background": (False,), "conversation": (), "prompt": ()}
_LOGPROBS = "message.output_text.logprobs"


def read(data: bytes) -> Call:
    """Parse a request.

    Raises:
        RowError: it cannot be honoured.
    """
    body, unknown = read_body(data, known=_KNOWN, refused=_REFUSED)
    form = body.get("text", {}).get("format", {"type": "text"})
    given = body.get("input")
    items: Any = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise RowError("the request needs 'input', a text or a list of at least one item")
    messages = _messages(cast("list[Any]", items))
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": str(body["instructions"])})
    functions, hosted = split_hosted(body.get("tools", []), lambda tool: tool.get("type") == "function")
    tools, num_top = read_tools([_tool(each) for each in functions]), read_count(body, "top_logprobs", 20)
    return Call(
        messages=tuple(messages),
        tools=tools,
        **read_shared(body, "max_output_tokens", stop="stop", structure=flat_structure(form)),
        previous=body.get("previous_response_id"),
        choice=read_choice(body.get("tool_choice", "auto"), tools, is_parallel=body.get("parallel_tool_calls", True)),
        has_logprobs=bool(num_top) or _LOGPROBS in body.get("include", ()),
        num_top_logprobs=num_top,
        ignored=(*unknown, *hosted, *(f"reasoning.{name}" for name in body.get("reasoning", {}) if name == "effort")),
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Function tool in the format of chat completions."""
    return {"type": "function", "function": {k: tool[k] for k in ("name", "description", "parameters") if k in tool}}


def _messages(items: list[Any]) -> list[dict[str, Any]]:
    """Convert items to messages; text and calls of one turn become one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if not isinstance(item, dict):
            raise RowError(f"input item {item!r:.80} is not an object")
        fields = cast("dict[str, Any]", item)
        match fields.get("type", "message"):
            case "message" if "role" in fields:
                role = "system" if fields["role"] == "developer" else fields["role"]
                message = {"role": role, "content": plain_content(fields.get("content"))}
                _assistant(messages).update(message) if role == "assistant" else messages.append(message)
            case "reasoning":
                parts = cast("list[dict[str, Any]]", fields.get("content") or fields.get("summary") or [])
                _assistant(messages)["reasoning_content"] = "".join(str(part.get("text", "")) for part in parts)
            case "function_call":
                call = {"name": fields.get("name"), "arguments": parsed_arguments(fields.get("arguments"))}
                made = {"id": fields.get("call_id"), "type": "function", "function": call}
                _assistant(messages).setdefault("tool_calls", []).append(made)
            case "function_call_output":
                content = plain_content(fields.get("output"))
                messages.append({"role": "tool", "tool_call_id": fields.get("call_id"), "content": content})
            case other:
                raise RowError(
                    f"input item of type {other!r} is not supported here; there are message, reasoning, function_call "
                    "and function_call_output"
                )
    return messages


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Assistant message at the end of the list, appended if there is none that may be extended."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


class Writer:
    """Writer of responses."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.id = f"resp_{uuid4().hex}"
        self.last_line = b""
        self._created = time.time()
        self._message_id, self._reasoning_id = f"msg_{uuid4().hex}", f"rs_{uuid4().hex}"
        self._text, self._thought = "", ""
        self._logprobs: list[dict[str, Any]] = []
        self._num_events = 0
        self._items: list[dict[str, Any]] = []

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See `rl_agent.proxy.requests.Writer`."""
        (answer,) = answers
        turn, self._logprobs = answer.turn, [*answer.logprobs]
        items = [self._reasoning(turn.reasoning)] if turn.reasoning else []
        if turn.content or not turn.calls:
            items.append(self._message(turn.content))
        return self._response([*items, *_calls(answer)], answer)

    def start(self, num_prompt_tokens: int) -> Iterator[dict[str, Any]]:
        """See `rl_agent.proxy.requests.Writer`."""
        del num_prompt_tokens
        yield self._event("response.created", response=self._response([]))
        yield self._event("response.in_progress", response=self._response([]))

    def delta(self, reasoning: str, content: str, index: int) -> Iterator[dict[str, Any]]:
        """See `rl_agent.proxy.requests.Writer`."""
        del index
        if reasoning:
            if not self._thought:
                item = {**self._reasoning(""), "status": "in_progress"}
                yield self._event("response.output_item.added", item=item, output_index=0)
            self._thought += reasoning
            yield self._event("response.reasoning_text.delta", **self._place(self._reasoning_id), delta=reasoning)
        if content:
            if not self._text:
                yield from self._open_message()
            self._text += content
            place = self._place(self._message_id)
            yield self._event("response.output_text.delta", **place, delta=content, logprobs=[])

    def end(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        """See `rl_agent.proxy.requests.Writer`."""
        (answer,) = answers
        self._logprobs = [*answer.logprobs]
        yield from self._close_reasoning()
        calls = _calls(answer)
        if self._text or not calls:
            if not self._text:
                yield from self._open_message()
            place, message = self._place(self._message_id), self._message(self._text)
            yield self._event("response.output_text.done", **place, text=self._text, logprobs=self._logprobs)
            yield self._event("response.content_part.done", **place, part=message["content"][0])
            yield self._done(message)
        for call in calls:
            place = {"item_id": call["id"], "output_index": len(self._items)}
            opened = {**call, "arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", item=opened, output_index=len(self._items))
            yield self._event("response.function_call_arguments.delta", **place, delta=call["arguments"])
            done = {"name": call["name"], "arguments": call["arguments"]}
            yield self._event("response.function_call_arguments.done", **place, **done)
            yield self._done(call)
        kind = "response.incomplete" if answer.is_cut else "response.completed"
        yield self._event(kind, response=self._response(self._items, answer))

    def _open_message(self) -> Iterator[dict[str, Any]]:
        yield from self._close_reasoning()
        message = {**self._message(""), "content": [], "status": "in_progress"}
        yield self._event("response.output_item.added", item=message, output_index=len(self._items))
        part = self._message("")["content"][0]
        yield self._event("response.content_part.added", **self._place(self._message_id), part=part)

    def _close_reasoning(self) -> Iterator[dict[str, Any]]:
        if self._thought and not self._items:
            yield self._event("response.reasoning_text.done", **self._place(self._reasoning_id), text=self._thought)
            yield self._done(self._reasoning(self._thought))

    def _done(self, item: dict[str, Any]) -> dict[str, Any]:
        self._items.append(item)
        return self._event("response.output_item.done", item=item, output_index=len(self._items) - 1)

    def _place(self, item_id: str) -> dict[str, Any]:
        return {"item_id": item_id, "output_index": len(self._items), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _message(self, text: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }

    def _reasoning(self, text: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}]
        return {"id": self._reasoning_id, "type": "reasoning", "summary": [], "content": content}

    def _response(self, items: list[dict[str, Any]], answer: Answer | None = None) -> dict[str, Any]:
        status = "in_progress" if answer is None else "incomplete" if answer.is_cut else "completed"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "metadata": {},
            "model": self._call.model,
            "output": items,
            "parallel_tool_calls": self._call.choice.is_parallel,
            "previous_response_id": self._call.previous,
            "tool_choice": self._call.choice.mode,
            "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in self._call.tools],
            "usage": None if answer is None else _usage(answer),
        }


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {
            "id": f"fc_{call_id}",
            "type": "function_call",
            "call_id": call_id,
            "name": call.name,
            "arguments": answer.arguments(index),
            "status": "completed",
        }
        for index, (call, call_id) in enumerate(zip(answer.turn.calls, answer.call_ids, strict=True))
    ]


def _usage(answer: Answer) -> dict[str, Any]:
    num_prompt, num_completion = answer.num_tokens
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_completion,
    }
