"""The configuration of a training run: one tree of dataclasses, filled from a recipe file and `key=value` overrides."""

from rl_trainer.config.algorithm import AlgorithmConfig, EmaSection, StalenessSection
from rl_trainer.config.data import BatchConfig, CurriculumSection, DataConfig, MixturePart, ReplaySection
from rl_trainer.config.load import RECIPES, as_tree, load_config
from rl_trainer.config.parts import (
    AgentSection,
    CriticSection,
    EngineSection,
    LoraSection,
    ModelConfig,
    RolloutSection,
    TeacherSection,
    WarmupConfig,
)
from rl_trainer.config.reward import RewardPart, RewardSection
from rl_trainer.config.run import Config, TrackingSection

__all__ = [
    "RECIPES",
    "AgentSection",
    "AlgorithmConfig",
    "BatchConfig",
    "Config",
    "CriticSection",
    "CurriculumSection",
    "DataConfig",
    "EmaSection",
    "EngineSection",
    "LoraSection",
    "MixturePart",
    "ModelConfig",
    "ReplaySection",
    "RewardPart",
    "RewardSection",
    "RolloutSection",
    "StalenessSection",
    "TeacherSection",
    "TrackingSection",
    "WarmupConfig",
    "as_tree",
    "load_config",
]
