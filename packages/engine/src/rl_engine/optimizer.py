"""AdamW and Muon, their schedule, and clipping that refuses a bad norm before anything changes."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl_engine.errors import NonFiniteError
from rl_engine.types import AdamParams, OptimizerConfig, OptimizerKind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping


class StepOptimizer(Protocol):
    """An optimizer as engines use it."""

    max_norm: float
    """Global gradient norm is clipped to this."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups, as torch's; the rate is `lr` of each."""
        ...

    @property
    def state(self) -> Mapping[Any, dict[str, Tensor]]:
        """State by parameter, as torch's."""
        ...

    def zero_grad(self) -> None:
        """Drop accumulated gradients."""
        ...

    def clip_and_step(self) -> float:
        """Clip, step, and return the global gradient norm before clipping. Collective.

        Raises:
            NonFiniteError: the norm is NaN or infinite; parameters and state are as before.
        """
        ...


class ClippedAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter, 1711.05101) with its state allocated; one-dimensional parameters do not decay."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], config: OptimizerConfig, uncounted: Iterable[Tensor] = ()
    ) -> None:
        """Allocate the state of `parameters`; gradients of those in `uncounted` are not in the norm."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        groups = [
            {
                "params": [parameter for parameter in alike if (parameter.ndim > 1) == decays],
                "weight_decay": config.weight_decay * decays,
                "wd_mult": float(decays),
            }
            for alike in by_mesh(trained)
            for decays in (True, False)
        ]
        super().__init__(
            [group for group in groups if group["params"]],
            lr=learning_rate(config, 0),
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self._trained, self.max_norm = trained, config.max_grad_norm
        self._uncounted = {id(parameter) for parameter in uncounted}
        for parameter in trained:
            self.state[parameter] = adamw_state(parameter)

    def clip_and_step(self) -> float:
        """See `StepOptimizer`."""
        norm = clip_grad_norm(self._trained, self.max_norm, self._uncounted)
        self.step()
        return norm


class ClippedMuon:
    """Muon (2502.16982) for matrices inside the layers, AdamW for everything else; one norm is clipped.

    Both are torch's. Matrices may be sharded: torch gathers what the products of the orthogonalisation need.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        matrices: Iterable[nn.Parameter],
        config: OptimizerConfig,
        uncounted: Iterable[Tensor] = (),
    ) -> None:
        """Allocate the state of `parameters`; those of them that are `matrices` (two-dimensional) are Muon's.

        Gradients of those in `uncounted` are not in the norm.
        """
        self._uncounted = {id(parameter) for parameter in uncounted}
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        inner = {id(parameter) for parameter in matrices}
        mine = [parameter for parameter in self._trained if id(parameter) in inner]
        self.max_norm = config.max_grad_norm
        self._adamw = ClippedAdamW((parameter for parameter in self._trained if id(parameter) not in inner), config)
        self._muon = torch.optim.Muon(
            mine,
            lr=learning_rate(config, 0),
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        for parameter in mine:
            self._muon.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """See `StepOptimizer`."""
        return [*self._muon.param_groups, *self._adamw.param_groups]

    @property
    def state(self) -> Mapping[Any, dict[str, Tensor]]:
        """See `StepOptimizer`."""
        return dict(chain(self._muon.state.items(), self._adamw.state.items()))

    def zero_grad(self) -> None:
        """See `StepOptimizer`."""
        self._muon.zero_grad()
        self._adamw.zero_grad()

    def clip_and_step(self) -> float:
        """See `StepOptimizer`."""
        norm = clip_grad_norm(self._trained, self.max_norm, self._uncounted)
        self._muon.step()
        self._adamw.step()
        return norm


def module_optimizer(
    parameters: Iterable[nn.Parameter],
    matrices: Iterable[nn.Parameter],
    config: OptimizerConfig,
    uncounted: Iterable[Tensor] = (),
) -> ClippedAdamW | ClippedMuon:
    """The optimizer that the settings ask for; `matrices` are what Muon takes of `parameters`."""
    if config.kind == OptimizerKind.MUON:
        return ClippedMuon(parameters, matrices, config, uncounted)
    return ClippedAdamW(parameters, config, uncounted)


def apply_adam(optimizer: StepOptimizer, adam: AdamParams) -> None:
    """Set the numbers of the next step; Muon's matrices take rate and decay alone."""
    optimizer.max_norm = adam.grad_clip_norm or math.inf
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = adam.lr, adam.weight_decay * group.get("wd_mult", 1.0)
        if "betas" in group:
            group["betas"], group["eps"] = (adam.beta1, adam.beta2), adam.eps


def adamw_state(parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a parameter before its first step."""
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


def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, uncounted: Collection[int] = frozenset()
) -> float:
    """Scale gradients so that their global norm is at most `max_norm`; return the norm before.

    Parameters whose `id` is in `uncounted` are scaled as the others are, and are not in the norm.

    Raises:
        NonFiniteError: the norm is NaN or infinite; gradients are as they were.
    """
    trained = by_mesh(parameters)
    norms: list[Tensor] = []
    for alike in trained:
        norm = torch.nn.utils.get_total_norm([
            parameter.grad for parameter in alike if parameter.grad is not None and id(parameter) not in uncounted
        ])  # fmt: skip
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    norm = norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)
    value = float(norm)
    refuse_non_finite(value)
    if value > max_norm:
        for alike in trained:
            torch.nn.utils.clip_grads_with_norm_(alike, max_norm, norm)
    return value


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that are sharded over the same ranks; torch computes with no others together."""
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        found.setdefault(mesh, []).append(parameter)
    return list(found.values())


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
