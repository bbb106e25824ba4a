"""Requests of the proxy and their answers, common to the three endpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast
from uuid import uuid4

from rl_agent.errors import RowError
from rl_rollout.types import FinishReason, structure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from rl_agent.proxy.recording import Exchange
    from rl_agent.types import ParsedTurn

SAMPLING = {
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"), (int, float)),
    "seed": (int,),
}
"""Fields of `SamplingParams` that requests may set, with their types."""
SHARED = (*SAMPLING, "model", "stream", "tools", "tool_choice", "chat_template_kwargs")
"""Fields that all endpoints read."""
WITHOUT_EFFECT = (
    *("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    "service_tier",
)
"""Fields that say nothing about the answer."""
DEFAULT_MODEL = "policy"
"""Name of the model in requests that name none."""
_MOST_CHOICES = 128
_MOST_STOPS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Tool choice: whether the answer may hold calls, and which."""

    mode: str = "auto"
    """`auto`, `none` or `required`."""
    name: str | None = None
    """Tool that has to be called, with `required`; None: any."""
    is_parallel: bool = True
    """Whether one turn may hold several calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Validated request."""

    messages: tuple[dict[str, Any], ...]
    """Messages for a chat template, without those of the earlier response that the request names; a content part
    `{"type": "image", "image": DATA_URL}` has its image."""
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
    choice: ToolChoice = field(default_factory=ToolChoice)
    """Tool choice."""
    stops: tuple[str, ...] = ()
    """Stop strings: the answer ends before the first of them."""
    num_choices: int = 1
    """Number of answers."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further variables of the chat template."""
    has_logprobs: bool = False
    """Whether the answer has the log-prob of every token."""
    num_top_logprobs: int = 0
    """Number of most likely tokens at every position."""
    ignored: tuple[str, ...] = ()
    """What the request holds and the answer does not depend on: unknown fields, tools that the vendor's servers run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer of the model to a call: one of its choices."""

    exchange: Exchange
    """Recorded exchange."""
    turn: ParsedTurn
    """Parsed turn; malformed calls are text."""
    call_ids: tuple[str, ...]
    """Ids of the turn's calls."""
    stop: str | None = None
    """Stop string that ended it."""
    logprobs: tuple[dict[str, Any], ...] = ()
    """Log-probs in OpenAI's format, if the call asks for them."""

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

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Response body of a whole answer: all choices of the call."""
        ...

    def start(self, num_prompt_tokens: int) -> Iterator[dict[str, Any]]:
        """Events before the first token."""
        ...

    def delta(self, reasoning: str, content: str, index: int) -> Iterator[dict[str, Any]]:
        """Events of new text of one choice."""
        ...

    def end(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        """Events after the last token, whose text was sent."""
        ...


def new_call_id() -> str:
    """Random call id of nine letters and digits, the only form that some chat templates accept."""
    return uuid4().hex[:9]


def read_body(
    data: bytes, *, known: Collection[str], refused: Mapping[str, tuple[Any, ...]]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields of a request that are not null, and the names of those that are not known.

    Args:
        data: The request.
        known: Fields that are honoured, or say nothing about the answer.
        refused: Fields that would change the answer and are not supported, with the values that change nothing.

    Raises:
        RowError: it is no JSON object, or asks for something that is not supported.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RowError(f"the request is not JSON, or nested too deeply: {error}") from error
    if not isinstance(found, dict):
        raise RowError(f"the request is a {type(found).__name__}; a JSON object is needed")
    body = {name: value for name, value in cast("dict[str, Any]", found).items() if value is not None}
    for name, value in body.items():
        if value not in refused.get(name, (value,)):
            raise RowError(f"{name}={value!r:.200} is not supported here; leave it out")
    if not isinstance(body.get("stream", False), bool):
        raise RowError(f"stream is {body['stream']!r}; true or false is needed")
    return body, tuple(name for name in body if name not in {*known, *refused})


def read_shared(body: Mapping[str, Any], *limits: str, stop: str, structure: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Call` that all endpoints have; `limits` are names of `max_new_tokens`, `stop` that of stop strings.

    Args:
        body: The request.
        limits: Names of its limit of tokens.
        stop: Name of its stop strings.
        structure: Fields of `SamplingParams` for the structure that it asks for, by `structure_of`.

    Raises:
        RowError: one is not what it has to be.
    """
    if structure and body.get("tools") and body.get("tool_choice") != "none":
        raise RowError("a structured output cannot call tools; leave tools out, or set tool_choice to none")
    kwargs = body.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise RowError(f"chat_template_kwargs is {kwargs!r:.80}; an object is needed")
    given = body.get(stop, ())
    stops: Any = [given] if isinstance(given, str) else given
    if not isinstance(stops, (list, tuple)) or not all(isinstance(each, str) for each in cast("list[Any]", stops)):
        raise RowError(f"{stop} is {given!r:.80}; text or a list of texts is needed")
    found = tuple(dict.fromkeys(each for each in cast("list[str]", stops) if each))
    if len(found) > _MOST_STOPS:
        raise RowError(f"{stop} holds {len(found)} texts; at most {_MOST_STOPS} are allowed")
    return {
        "sampling": read_sampling(body, *limits) | dict(structure),
        "model": str(body.get("model", DEFAULT_MODEL)),
        "is_streaming": bool(body.get("stream")),
        "stops": found,
        "template_kwargs": cast("dict[str, Any]", kwargs),
    }


def flat_structure(form: Any) -> dict[str, Any]:
    """Fields of `SamplingParams` for a format whose schema is next to its type.

    Raises:
        RequestError: it asks for no structure that is known.
    """
    if isinstance(form, dict) and "schema" in form:
        fields = cast("dict[str, Any]", form)
        form = {**fields, "json_schema": {"schema": fields["schema"]}}
    return structure_of(form)


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
    if given.get("top_k") == -1:  # how vLLM and others spell that all tokens are kept
        given["top_k"] = 0
    for limit in limits:
        if limit in body:
            if body[limit] < 1:
                raise RowError(f"{limit} is {body[limit]}; at least 1 is needed")
            given["max_new_tokens"] = body[limit]
    return given


def read_count(body: Mapping[str, Any], name: str, most: int = _MOST_CHOICES, least: int = 0) -> int:
    """Integer field of a request; `least` where it is missing.

    Raises:
        RowError: it is no integer of that range.
    """
    value = body.get(name, least)
    if type(value) is not int or not least <= value <= most:
        raise RowError(f"{name} is {value!r}; an integer from {least} to {most} is needed")
    return value


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


def read_choice(given: Any, tools: Sequence[Mapping[str, Any]], *, is_parallel: Any) -> ToolChoice:
    """Tool choice in OpenAI's formats: a word, or an object that names a function.

    Raises:
        RowError: it is no tool choice, or asks for a call of a tool that the request does not have.
    """
    match given:
        case "auto" | "none" | "required":
            mode, name = str(given), None
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            mode = "required"
        case _:
            raise RowError(f"tool_choice is {given!r:.80}; auto, none, required or a function by name is needed")
    if not isinstance(is_parallel, bool):
        raise RowError(f"parallel_tool_calls is {is_parallel!r}; true or false is needed")
    names = [tool["function"]["name"] for tool in tools]
    if mode == "required" and (not names or (name is not None and name not in names)):
        raise RowError(f"tool_choice is {given!r:.80}, and the request has the tools: {', '.join(names) or 'none'}")
    return ToolChoice(mode=mode, name=name, is_parallel=is_parallel)


def split_hosted(
    tools: Any, is_function: Callable[[Mapping[str, Any]], bool]
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Split tools into those that the client runs, and the names of those that the vendor's servers would run.

    Raises:
        RowError: they are no list of objects.
    """
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in cast("list[Any]", tools)):
        raise RowError(f"tools is {tools!r:.80}; a list of objects is needed")
    given = cast("list[dict[str, Any]]", tools)
    ours = [tool for tool in given if is_function(tool)]
    return ours, tuple(f"the hosted tool {tool.get('type')!r}" for tool in given if not is_function(tool))


def plain_content(content: Any) -> str | list[dict[str, Any]]:
    """Content of a message for a chat template: text, or parts where it has images.

    Raises:
        RowError: it holds something else than text and images, or an image that would have to be downloaded.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RowError(f"a message's content is {content!r:.80}; text or a list of parts is needed")
    parts = [_plain_part(part) for part in cast("list[Any]", content)]
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _plain_part(part: Any) -> dict[str, Any]:
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "input_image", "image_url": str(url)}:
            pass
        case {"type": "image", "source": {"type": "base64", "media_type": str(kind), "data": str(data)}}:
            url = f"data:{kind};base64,{data}"
        case _:
            raise RowError(f"a message's content holds {part!r:.80}; text and images are supported")
    if not url.startswith("data:image/"):
        raise RowError(f"image {url!r:.80} is not a data URL (data:image/png;base64,...); nothing is downloaded")
    return {"type": "image", "image": url}
