"""Rewards by rule: a completion's text against the row's ground truth."""

from rl_trainer.rewards.rules import RewardFunction, answer_of, resolve_reward
from rl_trainer.rewards.scorer import Scorer

__all__ = ["RewardFunction", "Scorer", "answer_of", "resolve_reward"]
