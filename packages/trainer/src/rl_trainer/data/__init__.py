"""Data: rows of prompts with what their rewards need, and samplers of their order."""

from rl_trainer.data.datasets import Datasets, load_datasets
from rl_trainer.data.rows import Row, has_sounds, shows_images, shows_videos
from rl_trainer.data.sampler import Order, PromptOrder

__all__ = ["Datasets", "Order", "PromptOrder", "Row", "has_sounds", "load_datasets", "shows_images", "shows_videos"]
