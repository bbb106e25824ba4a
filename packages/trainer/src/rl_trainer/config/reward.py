"""Keys of `reward`: where rewards come from."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - pydantic reads the annotations
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from rl_trainer.config._types import NonNegative, Positive  # noqa: TC001 - so it does these


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """One part of a completion's reward."""

    kind: Literal["rule", "loop", "function", "classifier", "judge"]
    """`rule`: one of ours; `loop`: the agent loop's own; `function`: of yours; `classifier`, `judge`: a served
    model that gives a number, or that writes one."""
    weight: float = 1.0
    """Of this part in the sum."""
    rule: str | None = None
    """exact_match, format, regex, math, gsm8k or code; None: the data source's; kind=rule."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of that rule, such as {pattern: "answer: (.*)"}."""
    path: str | None = None
    """FILE.py:FUNCTION, MODULE:FUNCTION or an entry point of rl_trainer.rewards; kind=function. Of a classifier, in the
    place of url: the folder of a reward model with one label, which the run serves, colocated as the servers are."""
    url: str | None = None
    """Of a judge the base URL, /v1 included; of a classifier the endpoint, such as http://host:8000/classify."""
    model: str | None = None
    """What the server calls the model."""
    prompt: str | None = None
    """What is asked, with {completion} and perhaps {prompt} and {ground_truth} in it. A classifier without one is given
    the conversation as messages."""
    pattern: str = r"(?i)score[^\w-]*(-?\d+(?:\.\d+)?)"
    """Regular expression whose group is the score in what a judge writes; the last place counts."""
    score_at: str = "data.0.probs.0"
    """Where a classifier's JSON answer has the score."""
    max_tokens: Positive = 512
    """That a judge may write."""
    max_attempts: Positive = 3
    """Requests for one score; a server's refusal (HTTP 4xx but 429) is final."""
    max_concurrent: Positive = 64
    """Requests at the same time, of all agent workers together."""
    requests_per_minute: NonNegative = 0
    """Of all agent workers together; 0: any number."""
    tokens_per_minute: NonNegative = 0
    """The same of tokens, as the server counts them."""
    api_key_env: str | None = None
    """Environment variable that holds the server's key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSection:
    """Where rewards come from; by default from the agent loop, or else by the rule of the row's data source."""

    path: str | None = None
    """A function of yours that gives the whole reward: FILE.py:FUNCTION, MODULE:FUNCTION or an entry point of
    rl_trainer.rewards, called with the completion's text and the row; it may be a coroutine function, and may give
    numbers by name, which are added."""
    parts: Mapping[str, RewardPart] = field(default_factory=dict)
    """Parts by name, weighted and added; instead of path."""
    num_processes: Positive = 1
    """Processes per function (or rule that parses) and agent worker."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Deadline of one call or request, seconds; a function that is stuck is killed."""
    overlong_buffer: NonNegative = 0
    """Last tokens of rollout.max_new_tokens over which a longer completion is punished, linearly, up to 1; 0: none."""
