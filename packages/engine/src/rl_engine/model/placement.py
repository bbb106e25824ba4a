"""Placement of an engine's model, optimizer and gradients: moves between the compute device and elsewhere."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_engine.errors import ConfigError
from rl_engine.model.device_memory import DeviceMemory
from rl_engine.model.scorer import reshard
from rl_engine.model.settings import compute_device

if TYPE_CHECKING:
    from collections.abc import Generator

    from rl_engine.model.scorer import BuiltModel


class Placement:
    """Devices of the model, the optimizer's state and the gradients, and moves between them.

    Args:
        built: The engine's model; everything is on its compute device.
        grads_follow: Whether gradients are on the device of their parameters; False: in a buffer of their own.
    """

    def __init__(self, built: BuiltModel, *, grads_follow: bool = True) -> None:
        self._built, self._grads_follow = built, grads_follow
        self.memory = DeviceMemory()
        """Page-locked copies, and what goes back to the driver."""
        self.compute_device = compute_device(built.config, built.world)
        """Device of the parameters between uses."""
        self.devices: dict[str, torch.device] = dict.fromkeys(("model", "optimizer", "grad"), self.compute_device)
        """Device of each."""

    @contextmanager
    def mode(self, *, train: bool) -> Generator[None]:
        """Move what training or evaluation needs to the compute device; on exit back to where it was."""
        scorer = self._built.scorer
        before, was_training = dict(self.devices), scorer.training
        self.to(self.compute_device, model=True, optimizer=train, grad=train or self._grads_follow)
        scorer.train(train)
        try:
            with torch.set_grad_enabled(train):
                yield
        finally:
            scorer.train(was_training)
            moved = {part: device for part, device in before.items() if self.devices[part] != device}
            for device in set(moved.values()):
                self.to(device, **{part: moved.get(part) == device for part in before})

    def to(self, device: torch.device | str, *, model: bool, optimizer: bool, grad: bool) -> None:
        """See `Engine.to`."""
        target = self._resolve(device)
        if target == self.compute_device and self._built.config.optimizer_offload:
            optimizer = False  # a step alone brings it there
        self.move(target, model=model, optimizer=optimizer, grad=grad)

    def move(self, target: torch.device, *, model: bool = False, optimizer: bool = False, grad: bool = False) -> None:
        """Move the requested state that is elsewhere.

        Raises:
            ConfigError: gradients would be left behind, or moved alone.
        """
        scorer, trained = self._built.scorer, self._built.optimizer
        is_elsewhere = self.devices["model"] != target
        if is_elsewhere and model != grad and any(parameter.grad is not None for parameter in scorer.parameters()):
            raise ConfigError("Gradients are on the device of their parameters; move both, or zero them first.")

        def moved(tensor: Tensor) -> Tensor:
            return self.memory.move(tensor, target)

        is_moved = False
        if is_elsewhere and model:
            reshard(scorer)
            with torch.no_grad():
                scorer._apply(moved)  # pyright: ignore[reportPrivateUsage] - `.to()` would not use page-locked memory
            self.devices["model"] = self.devices["grad"] = target
            is_moved = True
        if optimizer and trained is not None and self.devices["optimizer"] != target:
            for state in trained.state.values():
                for key in [*state]:
                    state[key] = moved(state[key])
            self.devices["optimizer"] = target
            is_moved = True
        if is_moved:
            self.memory.finish()

    def close(self) -> None:
        """Free page-locked memory."""
        self.memory.close()

    def _resolve(self, device: torch.device | str) -> torch.device:
        wanted, here = torch.device(device), self._built.world.device
        is_own = wanted in (here, torch.device(here.type))  # no index: this rank's own
        return self.compute_device if is_own else wanted
