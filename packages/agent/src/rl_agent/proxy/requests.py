"""Requests of the proxy and their answers, common to both endpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast
from uuid import uuid4

from rl_agent.errors import RowError
from rl_rollout.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from rl_agent.proxy.recording import Exchange
    from rl_agent.types import ParsedTurn

SAMPLING = {"temperature": (int, float), "top_p": (int, float), "seed": (int,)}
"""Fields of `SamplingParams` that requests may set, with their types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Validated request."""

    messages: tuple[dict[str, Any], ...]
    """Messages for a chat template, without those of the earlier response that the request names."""
    tools: tuple[dict[str, Any], ...]
    """Tools in the format of chat completions."""
    sampling: Mapping[str, Any]
    """Sampling parameters that the request sets, by field of `SamplingParams`."""
    model: str
    """Model name in the request."""
    is_streaming: bool
    """Whether the answer is streamed."""
    has_usage: bool = True
    """Whether the stream ends with token counts."""
    previous: str | None = None
    """Id of the response that the request continues, if it names one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer of the model to a call."""

    exchange: Exchange
    """Recorded exchange."""
    turn: ParsedTurn
    """Parsed turn; malformed calls are text."""
    call_ids: tuple[str, ...]
    """Ids of the turn's calls."""

    @property
    def is_cut(self) -> bool:
        """Whether the turn was cut off."""
        return self.exchange.output.finish_reason is not FinishReason.STOP

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Number of tokens of the prompt and of the answer."""
        return len(self.exchange.prompt_token_ids), len(self.exchange.output.token_ids)

    def arguments(self, index: int) -> str:
        """JSON text of a call's arguments."""
        return json.dumps(dict(self.turn.calls[index].arguments), ensure_ascii=False)


class Writer(Protocol):
    """Writer of the answer to one call, in the format of its endpoint."""

    id: str
    """Id of the answer."""
    last_line: bytes
    """Last bytes of a stream of events."""

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Response body of a whole answer."""
        ...

    def start(self) -> Iterator[dict[str, Any]]:
        """Events before the first token."""
        ...

    def delta(self, reasoning: str, content: str) -> Iterator[dict[str, Any]]:
        """Events of new text."""
        ...

    def end(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """Events after the last token, whose text was sent."""
        ...


def new_call_id() -> str:
    """Random call id of nine letters and digits, the only form that some chat templates accept."""
    return uuid4().hex[:9]


def read_body(data: bytes, *, known: Container[str], neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Fields of a request that are not null.

    Args:
        data: The request.
        known: Fields that are honoured, or have no effect here.
        neutral: Fields that are accepted at the values that change nothing.

    Raises:
        RowError: it is no JSON object, or holds something that is not honoured.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RowError(f"the request is not JSON, or nested too deeply: {error}") from error
    if not isinstance(found, dict):
        raise RowError(f"the request is a {type(found).__name__}; a JSON object is needed")
    body = {name: value for name, value in cast("dict[str, Any]", found).items() if value is not None}
    for name, value in body.items():
        if name not in known and value not in neutral.get(name, ()):
            raise RowError(f"{name}={value!r} is not supported here; leave it out")
    if not isinstance(body.get("stream", False), bool):
        raise RowError(f"stream is {body['stream']!r}; true or false is needed")
    return body


def read_sampling(body: Mapping[str, Any], *limits: str) -> dict[str, Any]:
    """Sampling parameters of a request; `limits` are the names that it may give `max_new_tokens`.

    Raises:
        RowError: one is not a number, or a limit below 1.
    """
    for name, types in (*SAMPLING.items(), *((limit, (int,)) for limit in limits)):
        if name in body and (not isinstance(body[name], types) or isinstance(body[name], bool)):
            raise RowError(f"{name} is {body[name]!r}; a number is needed")
    if sum(limit in body for limit in limits) > 1:
        raise RowError(f"{' and '.join(limits)} are one setting; leave one of them out")
    given = {name: body[name] for name in SAMPLING if name in body}
    for limit in limits:
        if limit in body:
            if body[limit] < 1:
                raise RowError(f"{limit} is {body[limit]}; at least 1 is needed")
            given["max_new_tokens"] = body[limit]
    return given


def read_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Tools in the format of chat completions.

    Raises:
        RowError: they are no list of functions with names.
    """
    if not isinstance(tools, list):
        raise RowError(f"tools is {tools!r:.80}; a list is needed")
    for tool in cast("list[Any]", tools):
        match tool:
            case {"type": "function", "function": {"name": str(name)}} if name:
                pass
            case _:
                raise RowError(f'a tool is {tool!r:.80}; {{"type": "function", "function": {{"name": ...}}}} is needed')
    return tuple(cast("list[dict[str, Any]]", tools))


def plain_content(content: Any) -> str:
    """Text of a message's content, which is a string or a list of parts.

    Raises:
        RowError: it holds something else than text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RowError(f"a message's content is {content!r:.80}; text or a list of parts is needed")
    parts = cast("list[Any]", content)
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text")
        if not (is_text and isinstance(part.get("text"), str)):
            raise RowError(f"a message's content holds {part!r:.80}; this endpoint takes text")
    return "".join(part["text"] for part in parts)
