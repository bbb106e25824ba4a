"""RL for models that generate no tokens: picture models and action policies as engines and rollout servers."""

from rl_omni.base import Condition, FlowModel
from rl_omni.errors import OmniError, PipelineError
from rl_omni.rewards import colour_reward, colourfulness
from rl_omni.sampler import SdeKind, logprobs_of, mean_of, noise_schedule

__all__ = [
    "Condition",
    "FlowModel",
    "OmniError",
    "PipelineError",
    "SdeKind",
    "colour_reward",
    "colourfulness",
    "logprobs_of",
    "mean_of",
    "noise_schedule",
]
