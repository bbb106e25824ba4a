"""The configuration of a training run: one tree of dataclasses, filled from a recipe file and `key=value` overrides."""

from rl_trainer.config.load import RECIPES, as_tree, load_config
from rl_trainer.config.schema import Config

__all__ = ["RECIPES", "Config", "as_tree", "load_config"]
