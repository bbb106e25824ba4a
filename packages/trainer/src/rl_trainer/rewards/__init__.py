"""Rewards: rules, functions of the user's, served models, and any weighted sum of them."""

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
