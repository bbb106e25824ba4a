"""Algorithms: advantage estimators and policy losses, pure functions on ragged data, registered by name."""

from rl_trainer.algorithms.advantages import ADVANTAGES, AdvantageInput, Estimator, compute_advantages, estimator_named
from rl_trainer.algorithms.aggregation import Aggregation
from rl_trainer.algorithms.critic_losses import ValueLossFunction
from rl_trainer.algorithms.losses import POLICY_LOSSES, PolicyLoss, PolicyLossInput, loss_named
from rl_trainer.algorithms.policy_loss import PolicyLossFunction

__all__ = [
    "ADVANTAGES",
    "POLICY_LOSSES",
    "AdvantageInput",
    "Aggregation",
    "Estimator",
    "PolicyLoss",
    "PolicyLossFunction",
    "PolicyLossInput",
    "ValueLossFunction",
    "compute_advantages",
    "estimator_named",
    "loss_named",
]
