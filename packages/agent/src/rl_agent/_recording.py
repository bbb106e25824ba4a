"""What a session of the recording proxy holds: a tree of exchanges that extend one another, and its trajectories."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from rl_agent.errors import RowError
from rl_agent.types import AgentLoopOutput

if TYPE_CHECKING:
    from rl_rollout.types import TokenOutput

MessageKey = tuple[Any, ...]
"""What makes two messages the same conversation, however a framework spells them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request and its answer."""

    parent: int | None
    """Index of the exchange whose conversation this one goes on with."""
    prompt_token_ids: tuple[int, ...]
    """All ids that the server was given."""
    output: TokenOutput
    """What the model emitted."""
    conversation: tuple[MessageKey, ...]
    """The messages, the answer included."""
    tools: str
    """The request's tools, as JSON."""
    text: str
    """The answer as text."""


def message_key(message: Mapping[str, Any]) -> MessageKey:
    """See `MessageKey`: role, text, calls by name and arguments, and the call that is answered."""
    calls = tuple(
        (str(call["function"]["name"]), json.dumps(_arguments(call["function"].get("arguments")), sort_keys=True))
        for call in message.get("tool_calls") or ()
    )
    return (message["role"], str(message["content"]).strip(), calls, message.get("tool_call_id"))


def plain_message(message: Any) -> dict[str, Any]:
    """A message of the OpenAI format as chat templates take it: text for content, objects for arguments.

    Raises:
        RowError: it is no message, or holds something else than text.
    """
    if not isinstance(message, dict) or "role" not in message:
        raise RowError(f"message {message!r} has no role")
    plain = dict(cast("dict[str, Any]", message))
    content = plain.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = cast("Sequence[Any]", content)
        if not all(isinstance(part, dict) and part.get("type") in ("text", "input_text") for part in parts):
            raise RowError("a message's content holds something else than text; this endpoint takes text")
        content = "".join(part["text"] for part in parts)
    plain["content"] = content or ""
    plain["role"] = "system" if plain["role"] == "developer" else plain["role"]
    if plain.get("tool_calls"):
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"].get("arguments"))}}
            for call in plain["tool_calls"]
        ]
    return plain


def _arguments(given: Any) -> Any:
    """Arguments as an object, where their text is one."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given


def longest_match(exchanges: Sequence[Exchange], conversation: Sequence[MessageKey], tools: str) -> int | None:
    """Index of the exchange that a new conversation goes on with; the newest of those that hold most of it."""
    best: int | None = None
    for index, each in enumerate(exchanges):
        length = len(each.conversation)
        is_prefix = length < len(conversation) and tuple(conversation[:length]) == each.conversation
        if is_prefix and each.tools == tools and (best is None or length >= len(exchanges[best].conversation)):
            best = index
    return best


def trajectories(exchanges: Sequence[Exchange], reward: float | None) -> list[AgentLoopOutput]:
    """One trajectory per leaf. Where they branch, what they share is marked as the model's in the first one only."""
    parents = {each.parent for each in exchanges}
    trained: set[int] = set()
    made: list[AgentLoopOutput] = []
    for leaf in range(len(exchanges)):
        if leaf in parents:
            continue
        path: list[int] = []
        index: int | None = leaf
        while index is not None:
            path.insert(0, index)
            index = exchanges[index].parent
        made.append(_trajectory([exchanges[i] for i in path], [i not in trained for i in path], reward))
        trained.update(path)
    return made


def _trajectory(path: Sequence[Exchange], is_new: Sequence[bool], reward: float | None) -> AgentLoopOutput:
    prompt = path[0].prompt_token_ids
    ids, mask, logprobs, versions = list[int](), list[int](), list[float](), list[int]()
    for exchange, is_trained in zip(path, is_new, strict=True):
        context = exchange.prompt_token_ids[len(prompt) + len(ids) :]
        output, count = exchange.output, len(exchange.output.token_ids)
        ids += [*context, *output.token_ids]
        mask += [0] * len(context) + [int(is_trained)] * count
        logprobs += [0.0] * len(context) + (list(output.logprobs) if is_trained else [0.0] * count)
        versions += [-1] * len(context) + (list(output.weight_versions) if is_trained else [-1] * count)
    return AgentLoopOutput(
        prompt_token_ids=prompt,
        completion_token_ids=tuple(ids),
        loss_mask=tuple(mask),
        rollout_logprobs=tuple(logprobs),
        weight_versions=tuple(versions),
        finish_reason=path[-1].output.finish_reason.value,
        text=path[-1].text,
        reward=reward,
        num_turns=len(path),
    )
