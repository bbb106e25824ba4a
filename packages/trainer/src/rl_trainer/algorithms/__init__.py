"""What is optimised: advantage estimators and policy losses, pure functions on ragged data, registered by name."""

from rl_trainer.algorithms.advantages import ADVANTAGES, AdvantageInput, compute_advantages, register_advantage
from rl_trainer.algorithms.policy_loss import POLICY_LOSSES, PolicyLossFunction

__all__ = [
    "ADVANTAGES",
    "POLICY_LOSSES",
    "AdvantageInput",
    "PolicyLossFunction",
    "compute_advantages",
    "register_advantage",
]
