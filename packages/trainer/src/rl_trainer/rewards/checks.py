"""What the keys of `reward` need beside them, checked before anything starts."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from rl_trainer.config import RewardPart, RewardSection
from rl_trainer.errors import PlanError
from rl_trainer.rewards.code import CodeTests
from rl_trainer.rewards.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_KEYS_OF_KINDS = {
    "rule": ("rule",),
    "options": ("rule",),
    "path": ("function", "classifier"),
    "url": ("classifier", "judge"),
    "model": ("classifier", "judge"),
    "prompt": ("classifier", "judge"),
    "max_attempts": ("classifier", "judge"),
    "max_concurrent": ("classifier", "judge"),
    "requests_per_minute": ("classifier", "judge"),
    "tokens_per_minute": ("classifier", "judge"),
    "api_key_env": ("classifier", "judge"),
    "pattern": ("judge",),
    "max_tokens": ("judge",),
    "score_at": ("classifier",),
}
_NEEDED_KEYS = {"function": ("path",), "judge": ("url", "model", "prompt")}


def check_reward(reward: RewardSection) -> None:
    """Check that every key of the section does something.

    Raises:
        PlanError: one does nothing, or one is missing.
    """
    default = RewardSection()
    if reward.path is not None and reward.parts:
        raise PlanError(
            "reward.path gives the whole reward, and reward.parts its parts; set one of them (a part of kind=function "
            "has a path of its own)"
        )
    if reward.overlong_buffer and "overlong" in reward.parts:
        raise PlanError(
            "reward.parts.overlong has the name of what reward.overlong_buffer takes off, and one would hide the "
            "other; give it another"
        )
    kinds = {part.kind for part in reward.parts.values()}
    if kinds and not kinds & {"function", "rule"} and reward.num_processes != default.num_processes:
        raise PlanError("reward.num_processes does nothing without a part of kind=function or rule; leave it out")
    for name, part in reward.parts.items():
        _check_part(f"reward.parts.{name}", part)


def _check_part(key: str, part: RewardPart) -> None:
    default = RewardPart(kind=part.kind)
    for name in _NEEDED_KEYS.get(part.kind, ()):
        if getattr(part, name) is None:
            raise PlanError(f"{key} is of kind={part.kind}, which needs {key}.{name}")
    for name, kinds in _KEYS_OF_KINDS.items():
        if part.kind not in kinds and getattr(part, name) != getattr(default, name):
            raise PlanError(
                f"{key}.{name} does nothing with kind={part.kind}, only with {' or '.join(kinds)}; leave it out"
            )
    if part.kind == "classifier":
        _check_classifier(key, part)
    _check_rule(key, part)
    if part.prompt is not None and "{completion}" not in part.prompt:
        raise PlanError(
            f"{key}.prompt has no {{completion}} in it, so that every completion would be asked about alike"
        )
    try:
        num_groups = re.compile(part.pattern).groups
    except re.error as error:
        raise PlanError(f"{key}.pattern={part.pattern!r} is no regular expression: {error}") from error
    if num_groups != 1:
        raise PlanError(f"{key}.pattern={part.pattern!r} has {num_groups} groups; one is needed, around the score")
    if part.url is not None and not part.url.startswith(("http://", "https://")):
        raise PlanError(f"{key}.url={part.url!r} is no URL; it starts with http:// or https://")


def _check_classifier(key: str, part: RewardPart) -> None:
    if (part.url is None) == (part.path is None):
        raise PlanError(
            f"{key} is of kind=classifier, which needs one of {key}.url (of a server that is there) and {key}.path "
            "(of a model that the run serves)"
        )
    default = RewardPart(kind=part.kind)
    for name in ("model", "score_at", "api_key_env"):
        if part.path is not None and getattr(part, name) != getattr(default, name):
            raise PlanError(f"{key}.{name} is of a server at {key}.url, and the run serves {key}.path; leave it out")


def _check_rule(key: str, part: RewardPart) -> None:
    names = sorted([*RULES, "code"])
    if part.rule is None:
        if part.options:
            raise PlanError(
                f"{key}.options are those of a rule, and {key}.rule names none: the data source's has no options. Name "
                f"one of {', '.join(names)}, or leave them out"
            )
        return
    if part.rule not in names:
        raise PlanError(f"{key}.rule={part.rule!r} is no rule; there are {', '.join(names)}")
    _check_options(f"{key}.options", part.options, part.rule, CodeTests if part.rule == "code" else RULES[part.rule])


def _check_options(key: str, options: Mapping[str, Any], rule: str, function: Callable[..., Any]) -> None:
    """Check options against a function's keyword-only parameters."""
    known = {p.name: p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    there = ", ".join(known)
    for name in options:
        if name not in known:
            raise PlanError(f"{key}.{name} does nothing with rule={rule}, whose options are {there}; leave it out")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options:
            raise PlanError(f"{key} lacks {name}, without which there is no rule={rule}")
    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    for name, value in options.items():
        try:
            TypeAdapter(hints[name]).validate_python(value, strict=isinstance(value, (bool, str)))
        except ValidationError as error:
            said = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise PlanError(f"{key}.{name}={value!r} cannot be used: {said}") from error
