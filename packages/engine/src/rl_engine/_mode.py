"""Training and evaluation as context managers, the same on every backend."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from torch import nn

    from rl_engine.base import Engine


@contextmanager
def mode(
    engine: Engine,
    module: nn.Module,
    home: torch.device,
    places: Mapping[str, torch.device],
    *,
    train: bool,
    grad: bool,
) -> Generator[None]:
    """Bring `engine` home on entry, and back on exit to where it was.

    Args:
        engine: To be moved.
        module: What it trains.
        home: Where it computes.
        places: Where its model, optimizer and gradients are, as `engine.to` keeps it.
        train: Whether to train.
        grad: Whether gradients come along.
    """
    before, was_training = dict(places), module.training
    engine.to(home, model=True, optimizer=train, grad=grad)
    module.train(train)
    try:
        with torch.set_grad_enabled(train):
            yield
    finally:
        module.train(was_training)
        moved = {part: device for part, device in before.items() if places[part] != device}
        for device in set(moved.values()):
            engine.to(device, **{part: moved.get(part) == device for part in before})
