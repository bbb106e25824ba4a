"""Format of Anthropic's `/v1/messages`: https://docs.anthropic.com/en/api/messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from rl_agent.errors import RowError
from rl_agent.proxy.requests import (
    SHARED,
    WITHOUT_EFFECT,
    Call,
    ToolChoice,
    flat_structure,
    plain_content,
    read_body,
    read_choice,
    read_shared,
    read_tools,
    split_hosted,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rl_agent.proxy.requests import Answer

_KNOWN = {
    *(*SHARED, *WITHOUT_EFFECT, "messages", "system", "max_tokens", "stop_sequences"),
    *("thinking", "cache_control", "betas", "context_management", "output_config", "output_format", "inference_geo"),
}
_REFUSED: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],), "container": ()}


def read(data: bytes) -> Call:
    """Parse a request of `/v1/messages` or `/v1/messages/count_tokens`.

    Raises:
        RowError: it cannot be honoured.
    """
    body, unknown = read_body(data, known=_KNOWN, refused=_REFUSED)
    form = body.get("output_config", {}).get("format", body.get("output_format"))
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise RowError("the request needs 'messages', a list of at least one message")
    messages = [made for each in cast("list[Any]", given) for made in _messages(each)]
    if messages[-1]["role"] == "assistant":
        raise RowError("the last message is the assistant's; a turn that the client begins is not supported here")
    if system := plain_content(body.get("system")):
        messages.insert(0, {"role": "system", "content": system})
    functions, hosted = split_hosted(body.get("tools", []), lambda tool: tool.get("type", "custom") == "custom")
    tools = read_tools([_tool(each) for each in functions])
    return Call(
        messages=tuple(messages),
        tools=tools,
        **read_shared(body, "max_tokens", stop="stop_sequences", structure=flat_structure(form)),
        choice=_choice(body.get("tool_choice", {"type": "auto"}), tools),
        ignored=(*unknown, *hosted),
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Tool in the format of chat completions."""
    function = {k: tool[k] for k in ("name", "description") if k in tool}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema", {})}}


def _choice(given: Any, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    fields = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    named = {"type": "function", "name": fields.get("name")}
    known: dict[Any, Any] = {"auto": "auto", "none": "none", "any": "required", "tool": named}
    if (kind := fields.get("type")) not in known:
        raise RowError(f"tool_choice is {given!r:.80}; its type is one of auto, any, tool and none")
    return read_choice(known[kind], tools, is_parallel=not fields.get("disable_parallel_tool_use", False))


def _messages(message: Any) -> Iterator[dict[str, Any]]:
    """Messages for a chat template: results of tools become messages of their own, before what the user says."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise RowError(f"message {message!r:.80} has no role of user, assistant and system")
    fields = cast("dict[str, Any]", message)
    role, content = fields["role"], fields.get("content")
    blocks: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(content, (str, list)) or not all(isinstance(block, dict) for block in blocks):
        raise RowError(f"a message's content is {content!r:.80}; text or a list of blocks is needed")
    by_kind = {kind: [block for block in blocks if block.get("type") == kind] for kind in ("tool_result", "tool_use")}
    for block in by_kind["tool_result"]:
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": plain_content(block.get("content"))}
    thoughts = "".join(block.get("thinking", "") for block in blocks if block.get("type") == "thinking")
    others = ("tool_result", "tool_use", "thinking", "redacted_thinking")
    rest = [block for block in blocks if block.get("type") not in others]
    if role == "user" and by_kind["tool_result"] and not rest:
        return
    made: dict[str, Any] = {"role": role, "content": plain_content(rest)}
    if thoughts:
        made["reasoning_content"] = thoughts
    if by_kind["tool_use"]:
        made["tool_calls"] = [
            {"id": each["id"], "type": "function", "function": {"name": each["name"], "arguments": each["input"]}}
            for each in by_kind["tool_use"]
        ]
    yield made


class Writer:
    """Writer of messages."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.id = f"msg_{uuid4().hex}"
        self.last_line = b""
        self._open: str | None = None
        self._num_blocks = 0

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See `rl_agent.proxy.requests.Writer`."""
        (answer,) = answers
        turn = answer.turn
        blocks = [{"type": "thinking", "thinking": turn.reasoning, "signature": ""}] if turn.reasoning else []
        if turn.content or not turn.calls:
            blocks.append({"type": "text", "text": turn.content})
        blocks += [
            {"type": "tool_use", "id": call_id, "name": call.name, "input": dict(call.arguments)}
            for call, call_id in zip(turn.calls, answer.call_ids, strict=True)
        ]
        num_prompt, num_completion = answer.num_tokens
        return {**self._envelope(num_prompt, num_completion), "content": blocks, **_end(answer)}

    def start(self, num_prompt_tokens: int) -> Iterator[dict[str, Any]]:
        """See `rl_agent.proxy.requests.Writer`."""
        yield {"type": "message_start", "message": self._envelope(num_prompt_tokens, 0)}

    def delta(self, reasoning: str, content: str, index: int) -> Iterator[dict[str, Any]]:
        """See `rl_agent.proxy.requests.Writer`."""
        del index
        if reasoning:
            yield from self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._change({"type": "thinking_delta", "thinking": reasoning})
        if content:
            yield from self._begin("text", {"type": "text", "text": ""})
            yield self._change({"type": "text_delta", "text": content})

    def end(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        """See `rl_agent.proxy.requests.Writer`."""
        (answer,) = answers
        calls = zip(answer.turn.calls, answer.call_ids, strict=True)
        for number, (call, call_id) in enumerate(calls):
            yield from self._begin(call_id, {"type": "tool_use", "id": call_id, "name": call.name, "input": {}})
            yield self._change({"type": "input_json_delta", "partial_json": answer.arguments(number)})
        if not self._num_blocks:
            yield from self._begin("text", {"type": "text", "text": ""})
        yield from self._close()
        yield {"type": "message_delta", "delta": _end(answer), "usage": {"output_tokens": answer.num_tokens[1]}}
        yield {"type": "message_stop"}

    def _begin(self, name: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Open a content block, unless it is open already."""
        if self._open == name:
            return
        yield from self._close()
        self._open, self._num_blocks = name, self._num_blocks + 1
        yield {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}

    def _change(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open == "thinking":
            yield self._change({"type": "signature_delta", "signature": ""})
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._num_blocks - 1}
        self._open = None

    def _envelope(self, num_prompt: int, num_completion: int) -> dict[str, Any]:
        usage = {"input_tokens": num_prompt, "output_tokens": num_completion}
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._call.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**usage, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
        }


def _end(answer: Answer) -> dict[str, Any]:
    by_end = "stop_sequence" if answer.stop is not None else "end_turn"
    reason = "max_tokens" if answer.is_cut else "tool_use" if answer.turn.calls else by_end
    return {"stop_reason": reason, "stop_sequence": answer.stop if reason == "stop_sequence" else None}
