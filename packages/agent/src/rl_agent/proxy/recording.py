"""Recorded session of the proxy: a tree of exchanges that extend one another, and its trajectories."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rl_agent.errors import RowError
from rl_agent.session import add_experts, finished
from rl_agent.types import AgentLoopOutput, RoutedToken

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_rollout.types import TokenOutput

MessageKey = tuple[Any, ...]
"""Key by which two messages count as equal, however a framework spells them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Exchange: one request and its answer."""

    parent: int | None
    """Index of the exchange whose conversation this one continues."""
    prompt_token_ids: tuple[int, ...]
    """Prompt token ids."""
    sampled_spans: tuple[tuple[int, int], ...]
    """[start, end) spans of tokens that the model emitted, in the prompt and after it."""
    output: TokenOutput
    """Output of the model."""
    conversation: tuple[MessageKey, ...]
    """Messages, the answer included."""
    tools: str
    """Tools of the request and variables of its chat template, as JSON."""
    text: str
    """Text of the answer."""
    response_id: str
    """Id of the answer for the client."""
    images: tuple[str, ...] = ()
    """Data URLs of the images in the prompt."""
    policy: str = ""
    """Name of the policy that was asked, of several."""
    is_heard: bool = True
    """Whether the answer was sent; if the caller had left before, it is part of no trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """Reward of a session, or of one of its turns or trajectories; those of one name are added up."""

    value: float
    """Finite number."""
    name: str = "reward"
    """Name of the reward term."""
    turn: str | None = None
    """Id of the response that it is for."""
    trajectory: str | None = None
    """Id of the last response of the trajectory that it is for. Neither: all trajectories."""


@dataclass(slots=True, kw_only=True)
class Recording:
    """Recorded session: its exchanges, lost callers and broken special tokens."""

    exchanges: list[Exchange] = field(default_factory=list[Exchange])
    num_abandoned: int = 0
    """Number of requests whose caller left before the answer, such as a client that timed out and retried."""
    num_escaped: int = 0
    """Number of special tokens in messages of tools and users that were broken."""
    rewards: list[Reward] = field(default_factory=list[Reward])
    """Rewards so far."""

    def abandon(self, response_id: str) -> None:
        """Note that a caller left; its answer, if recorded already, belongs to no trajectory."""
        self.num_abandoned += 1
        for index, each in enumerate(self.exchanges):
            if each.response_id.partition("#")[0] == response_id:
                self.exchanges[index] = replace(each, is_heard=False)

    def reward(self, reward: Reward) -> None:
        """Add a reward.

        Raises:
            RowError: it is for a response that this session does not have.
        """
        known = {each.response_id for each in self.exchanges if each.is_heard}
        for field_name, found in (("turn", reward.turn), ("trajectory", reward.trajectory)):
            if found is not None and found not in known:
                raise RowError(f"{field_name}={found!r} is not the id of a response of this session")
        self.rewards.append(reward)


def message_key(message: Mapping[str, Any]) -> MessageKey:
    """Key of a message: role, text, calls by name and arguments, and the call that is answered."""
    calls = tuple(
        (str(call["function"]["name"]), json.dumps(parsed_arguments(call["function"].get("arguments")), sort_keys=True))
        for call in message.get("tool_calls") or ()
    )
    content = message["content"]
    if not isinstance(content, str):  # parts, whose images are long
        content = hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
    return (message["role"], content.strip(), calls, message.get("tool_call_id"))


def find_parent(
    exchanges: Sequence[Exchange],
    conversation: Sequence[MessageKey],
    tools: str,
    previous: str | None,
    policy: str = "",
) -> tuple[int | None, int]:
    """Find the exchange that a call continues; returns `(parent, num_known)`, with its number of known messages.

    It is the one named `previous`, else the newest of those of the same policy that hold most of the conversation.

    Raises:
        RowError: there is no exchange `previous`, or the call changes what came before it.
    """
    if previous is not None:
        return _named(exchanges, conversation, tools, previous, policy)
    best: int | None = None
    for index, each in enumerate(exchanges):
        length = len(each.conversation)
        is_prefix = length < len(conversation) and tuple(conversation[:length]) == each.conversation
        is_its = is_prefix and each.is_heard and (each.tools, each.policy) == (tools, policy)
        if is_its and (best is None or length >= len(exchanges[best].conversation)):
            best = index
    return best, 0 if best is None else len(exchanges[best].conversation)


def _named(
    exchanges: Sequence[Exchange], conversation: Sequence[MessageKey], tools: str, previous: str, policy: str
) -> tuple[int, int]:
    found = next((i for i, each in enumerate(exchanges) if each.is_heard and each.response_id == previous), None)
    if found is None:
        raise RowError(f"previous_response_id={previous!r} is not a response of this session")
    if exchanges[found].policy != policy:
        raise RowError(f"previous_response_id={previous!r} is a response of model {exchanges[found].policy!r}")
    if exchanges[found].tools != tools:
        raise RowError(f"the tools differ from those of previous_response_id={previous!r}; a prompt cannot be changed")
    has_system = conversation[0][0] == "system"
    if has_system and conversation[0] != exchanges[found].conversation[0]:
        raise RowError(
            f"the instructions differ from those of previous_response_id={previous!r}; a prompt cannot be changed"
        )
    return found, int(has_system)


def trajectories(recording: Recording, reward: float | None) -> list[AgentLoopOutput]:
    """Trajectories of a session, one per leaf. Shared tokens have loss mask 1 in the first of them only.

    The reward of each is the sum of what was given to the session, to it, and to the turns that it trains; None if
    nothing was. The metrics `reward/NAME` are the sums by name, if any was given by name.
    """
    exchanges = recording.exchanges
    given = [*recording.rewards, *(() if reward is None else (Reward(value=reward),))]
    parents = {each.parent for each in exchanges if each.is_heard}
    metrics = {"num_abandoned": float(recording.num_abandoned), "num_escaped": float(recording.num_escaped)}
    trained: set[int] = set()
    made: list[AgentLoopOutput] = []
    for leaf in range(len(exchanges)):
        if leaf in parents or not exchanges[leaf].is_heard:
            continue
        path: list[int] = []
        index: int | None = leaf
        while index is not None:
            path.insert(0, index)
            index = exchanges[index].parent
        is_new = [i not in trained for i in path]
        output = _trajectory([exchanges[i] for i in path], is_new, metrics)
        made.append(_rewarded(output, [exchanges[i].response_id for i in path], is_new, given))
        trained.update(path)
    return made


def _rewarded(
    output: AgentLoopOutput, responses: Sequence[str], is_new: Sequence[bool], given: Sequence[Reward]
) -> AgentLoopOutput:
    turns = dict.fromkeys((name for name, is_own in zip(responses, is_new, strict=True) if is_own), 0.0)
    by_name: dict[str, float] = {}
    for each in given:
        if each.trajectory not in (None, responses[-1]) or (each.turn is not None and each.turn not in turns):
            continue
        by_name[each.name] = by_name.get(each.name, 0.0) + each.value
        if each.turn is not None:
            turns[each.turn] += each.value
    is_named = bool(by_name.keys() - {"reward"})
    terms = {f"reward/{name}": value for name, value in by_name.items()} if is_named else {}
    has_turns = all(is_new) and any(each.turn in turns for each in given)
    return replace(
        output,
        reward=sum(by_name.values()) if by_name else None,
        turn_rewards=tuple(turns.values()) if has_turns else (),
        metrics={**output.metrics, **terms},
    )


def _trajectory(path: Sequence[Exchange], is_new: Sequence[bool], metrics: Mapping[str, float]) -> AgentLoopOutput:
    prompt = path[0].prompt_token_ids
    ids, mask, logprobs, versions = list[int](), list[int](), list[float](), list[int]()
    experts = list[RoutedToken]()
    for exchange, is_trained in zip(path, is_new, strict=True):
        context = exchange.prompt_token_ids[len(prompt) + len(ids) :]
        output, count = exchange.output, len(exchange.output.token_ids)
        add_experts(experts, len(exchange.prompt_token_ids), output)
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
        num_turns=len(path),
        metrics=dict(metrics),
        images=path[-1].images,
        routed_experts=finished(experts, len(prompt) + len(ids)),
        policy=path[-1].policy,
    )


def parsed_arguments(given: Any) -> Any:
    """Arguments as an object, if their text is JSON of one."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given
