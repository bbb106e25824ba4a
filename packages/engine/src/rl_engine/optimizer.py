"""AdamW, its schedule, and clipping that refuses a bad norm before anything changes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl_engine.errors import NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rl_engine.types import OptimizerConfig


class StepOptimizer(Protocol):
    """An optimizer as engines use it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As torch's; the rate is `lr` of each."""
        ...

    @property
    def state(self) -> Mapping[Any, dict[str, Tensor]]:
        """As torch's."""
        ...

    def zero_grad(self) -> None:
        """Drop what has accumulated."""
        ...

    def clip_and_step(self) -> float:
        """Clip, step, and return the global gradient norm before clipping. Collective.

        Raises:
            NonFiniteError: the norm is NaN or infinite; parameters and state are as before.
        """
        ...


class ClippedAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter, 1711.05101) with its state allocated; one-dimensional parameters do not decay."""

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        groups = [
            {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
        ]
        super().__init__(
            [group for group in groups if group["params"]],
            lr=learning_rate(config, 0),
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self._trained, self._max_norm = trained, config.max_grad_norm
        for parameter in trained:
            self.state[parameter] = adamw_state(parameter)

    def clip_and_step(self) -> float:
        """See `StepOptimizer`."""
        norm = clip_grad_norm(self._trained, self._max_norm)
        self.step()
        return norm


def adamw_state(parameter: Tensor) -> dict[str, Tensor]:
    """What AdamW keeps of a parameter, before its first step."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
    }


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Rate of optimizer step `step` (from 0): linear up over `warmup_steps`, then cosine down to `min_lr_ratio`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.total_steps is None:
        return config.lr
    span = max(1, config.total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale gradients so that their global norm is at most `max_norm`; return the norm before.

    Raises:
        NonFiniteError: the norm is NaN or infinite; gradients are as they were.
    """
    trained = list(parameters)
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in trained if parameter.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    value = float(norm)
    refuse_non_finite(value)
    if value > max_norm:
        torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
    return value


def refuse_non_finite(norm: float) -> None:
    """Raise where a gradient norm is NaN or infinite.

    Raises:
        NonFiniteError: it is.
    """
    if not math.isfinite(norm):
        raise NonFiniteError(
            f"The gradient norm is {norm}; the step was not taken. Look at the batch's loss, lower the learning rate, "
            "or zero the gradients and go on with the next batch."
        )


def optimizer_tensors(optimizer: StepOptimizer, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """Every state tensor under `name.key`."""
    return {
        f"{name}.{key}": value for name, parameter in named for key, value in optimizer.state.get(parameter, {}).items()
    }
