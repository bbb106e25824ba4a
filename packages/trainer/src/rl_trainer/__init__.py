"""RL post-training pipelines on abstract engine, rollout, weight, agent and data interfaces."""

from rl_trainer.config import Config, load_config
from rl_trainer.errors import (
    ConfigError,
    DataError,
    InputError,
    PlacementError,
    PlanError,
    RolloutFailedError,
    StaleWeightsError,
    TrainerError,
    WorkerDiedError,
    WorkerTimeoutError,
)

__all__ = [
    "Config",
    "ConfigError",
    "DataError",
    "InputError",
    "PlacementError",
    "PlanError",
    "RolloutFailedError",
    "StaleWeightsError",
    "TrainerError",
    "WorkerDiedError",
    "WorkerTimeoutError",
    "load_config",
]
