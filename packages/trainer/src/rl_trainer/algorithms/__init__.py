"""What is optimised: advantage estimators and policy losses, pure functions on ragged data, registered by name."""

from rl_trainer.algorithms import group_advantages, token_advantages
from rl_trainer.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInput,
    Estimator,
    compute_advantages,
    register_advantage,
)
from rl_trainer.algorithms.policy_loss import POLICY_LOSSES, PolicyLossFunction
from rl_trainer.algorithms.value_loss import ValueLossFunction

__all__ = [
    "ADVANTAGES",
    "POLICY_LOSSES",
    "AdvantageInput",
    "Estimator",
    "PolicyLossFunction",
    "ValueLossFunction",
    "compute_advantages",
    "group_advantages",
    "register_advantage",
    "token_advantages",
]
