"""RL post-training of language models: one training loop over the interfaces of engine, rollout, agent and queue."""

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
    """Import a public name when it is first used, so that a command answers Ctrl-C while torch and Ray still import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {"train": "api", "reads": "plugins"}.get(name, "errors" if name.endswith("Error") else "config")
    return getattr(import_module(f"{__name__}.{home}"), name)
