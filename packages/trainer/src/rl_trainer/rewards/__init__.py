"""Rewards: rules, functions of the user's, served models, and any weighted sum of them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_trainer.rewards.answers import answer_of
    from rl_trainer.rewards.completions import Thinking
    from rl_trainer.rewards.rules import RewardFunction, check_packages, resolve_reward
    from rl_trainer.rewards.scorer import Completion, Score, Scorer

__all__ = [
    "Completion",
    "RewardFunction",
    "Score",
    "Scorer",
    "Thinking",
    "answer_of",
    "check_packages",
    "resolve_reward",
]

_HOMES = {
    "answer_of": "answers",
    "Thinking": "completions",
    "Completion": "scorer",
    "Score": "scorer",
    "Scorer": "scorer",
}
"""Names of other modules than `rules`. A reward process imports none of them: it starts in a tenth of the time."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'rules')}"), name)
