"""Data types: messages, tool calls, failures, trajectories and results of rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

Message = Mapping[str, Any]
"""A chat message: `role` and `content`."""
RoutedToken = tuple[tuple[int, ...], ...]
"""[MoE layers][experts per token] ids of the experts that one token was routed to; empty where no server told."""


class Tokenizer(Protocol):
    """What a loop needs of a tokenizer; any Hugging Face tokenizer is one."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Token ids of `text`."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Text of `token_ids`."""
        ...

    def apply_chat_template(self, conversation: Sequence[Message], **kwargs: Any) -> Any:
        """Render a conversation."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that the model wrote."""

    name: str
    """The tool; empty where the call names none."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """By parameter name."""
    error: str = ""
    """Why the call cannot be made, in a sentence for the model; empty where it is well formed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """What a turn of the model says, taken apart."""

    content: str
    """Text outside of the calls and of the reasoning."""
    calls: tuple[ToolCall, ...] = ()
    """In the order written, malformed ones included."""
    reasoning: str = ""
    """What the model thought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a tool may answer instead of text alone."""

    text: str = ""
    """For the model."""
    images: tuple[str | bytes, ...] = ()
    """Encoded images, shown before the text: data URLs, or bytes of PNG, JPEG, GIF or WebP files."""


class FailureKind(StrEnum):
    """What a failed rollout failed on."""

    GENERATION = "generation"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    GRADER = "grader"
    TRANSPORT = "transport"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A rollout that did not end well. A value, not an exception, and never a reward of zero."""

    kind: FailureKind
    """What it failed on."""
    stage: str
    """Where in the loop."""
    message: str
    """The error's sentence."""
    is_retryable: bool
    """Whether another attempt could succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoopOutput:
    """One trajectory: a prompt of P tokens and a completion of C tokens, some written by tools or an environment."""

    prompt_token_ids: tuple[int, ...]
    """P ids."""
    completion_token_ids: tuple[int, ...]
    """C ids, everything after the prompt."""
    loss_mask: tuple[int, ...]
    """C flags: 1 = the model wrote it."""
    rollout_logprobs: tuple[float, ...]
    """C log-probs of the sampler; 0 where loss_mask is 0."""
    weight_versions: tuple[int, ...]
    """C weight versions; -1 where loss_mask is 0."""
    finish_reason: str
    """Why the last generation ended: stop, length, abort or timeout."""
    text: str = ""
    """What the model wrote, in its last turn where there are several; for rewards and logs, never re-tokenised."""
    reward: float | None = None
    """Reward of the whole trajectory, where the loop or its environment gives one."""
    turn_rewards: tuple[float, ...] = ()
    """One per model turn, where there are such."""
    num_turns: int = 1
    """Generations by the model."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Durations (`_s`) and counts."""
    routed_experts: tuple[RoutedToken, ...] = ()
    """P + C - 1 entries, of every token but the last; each as the first generation that was fed it told. Empty unless
    the requests asked (`GenerateRequest.returns_routed_experts`)."""
    images: tuple[str, ...] = ()
    """Data URLs of the images in prompt and context, as they were given, in the order of their places in the ids."""
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    """Whatever the loop wants to travel with the sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """How one rollout ended: with trajectories, or with a failure. There is no third way."""

    row_index: int
    """Position of the row among the rows that were given; the rollouts of one row form its group."""
    rollout_index: int
    """Which of the row's rollouts, 0 to group_size - 1."""
    outputs: tuple[AgentLoopOutput, ...] | Failure
    """One valid trajectory or more, or why there is none."""
    num_attempts: int
    """Times the loop was started."""
    wall_s: float
    """Seconds from the first start to the end, retries included."""
