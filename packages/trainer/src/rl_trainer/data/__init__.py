"""Datasets: rows of prompts with what their reward needs."""

from rl_trainer.data.datasets import Row, load_datasets
from rl_trainer.data.order import PromptOrder

__all__ = ["PromptOrder", "Row", "load_datasets"]
