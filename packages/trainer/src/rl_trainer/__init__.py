"""RL post-training pipelines on abstract engine, rollout, weight, agent and data interfaces."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    """Import public names when they are asked for: the command lines answer Ctrl-C with a sentence from the start."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'errors' if name.endswith('Error') else 'config'}"), name)
