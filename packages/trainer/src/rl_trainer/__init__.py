"""RL post-training pipelines on abstract engine, rollout, weight, agent and data interfaces."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_trainer.api import train
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
    from rl_trainer.plugins import reads

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
    "reads",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import public names when they are asked for: the command lines answer Ctrl-C with a sentence from the start."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {"train": "api", "reads": "plugins"}.get(name, "errors" if name.endswith("Error") else "config")
    return getattr(import_module(f"{__name__}.{home}"), name)
