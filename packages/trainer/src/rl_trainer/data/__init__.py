"""Data: rows of prompts with what their rewards need, and samplers of their order."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rl_trainer.data.rows import Row, has_sounds, shows_images, shows_videos

if TYPE_CHECKING:
    from rl_trainer.data.datasets import Datasets, load_datasets
    from rl_trainer.data.sampler import Order, PromptOrder

__all__ = ["Datasets", "Order", "PromptOrder", "Row", "has_sounds", "load_datasets", "shows_images", "shows_videos"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: a reward process reads rows, and needs no samplers and no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'sampler' if name.endswith('Order') else 'datasets'}"), name)
