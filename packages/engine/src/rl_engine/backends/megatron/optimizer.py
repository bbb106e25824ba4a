"""AdamW whose state, and the float32 copy of narrow parameters, is sharded over data-parallel ranks.

Stage 1 of ZeRO (Rajbhandari et al., 1910.02054), as Megatron's distributed optimizer. Parameters lie end to end in a
few flat buffers; gradients are reduce-scattered, each rank steps its part, and the parameters are gathered again.
megatron-core's own `DistributedOptimizer` takes CUDA tensors of 32 and 16 bits only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_engine.backends.megatron.weights import Cut
from rl_engine.optimizer import adamw_state, learning_rate, refuse_non_finite

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rl_engine.backends.megatron.layout import Axis, Layout
    from rl_engine.backends.megatron.weights import Entry
    from rl_engine.types import OptimizerConfig

STATES = ("exp_avg", "exp_avg_sq")
MASTER = "master"
STEP = "step"


@dataclass(frozen=True, slots=True)
class _Kind:
    """Parameters of one kind share a buffer."""

    is_expert: bool
    """Expert parameters: data parallel over the experts' own ranks."""
    has_decay: bool
    """Weight decay applies."""
    is_counted: bool
    """Whether this rank's copy counts in the gradient norm."""


class ShardedAdamW:
    """AdamW (Loshchilov and Hutter, 1711.05101) over the parameters of one rank. A step uses the gradients up."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        entries: Mapping[str, Entry],
        layout: Layout,
        config: OptimizerConfig,
        *,
        sequence_parallel: bool,
    ) -> None:
        """Move the parameters into flat buffers and allocate state.

        Args:
            named: This rank's parameters.
            entries: What each of them is.
            layout: Where this rank stands.
            config: AdamW's numbers.
            sequence_parallel: Norms see this rank's tokens only.
        """
        self._layout, self._config = layout, config
        kinds: dict[_Kind, dict[str, nn.Parameter]] = {}
        for name, parameter in named.items():
            kinds.setdefault(_kind(parameter, entries[name], layout), {})[name] = parameter
        self._buffers = [
            _Buffer(group, kind, layout.expert_dp if kind.is_expert else layout.dp) for kind, group in kinds.items()
        ]
        self._summed_over_tp = [
            name for name, parameter in named.items() if _is_partial(name, parameter, sequence_parallel)
        ]
        self._tied = [name for name, entry in entries.items() if entry.is_tied]
        groups = [
            {"params": [buffer.master], "weight_decay": config.weight_decay if buffer.kind.has_decay else 0.0}
            for buffer in self._buffers
        ]
        self._adamw = torch.optim.AdamW(
            groups, lr=learning_rate(config, 0), betas=config.betas, eps=config.eps, fused=True
        )
        for buffer in self._buffers:
            self._adamw.state[buffer.master] = adamw_state(buffer.master)

    def zero_grad(self) -> None:
        """Drop what has accumulated."""
        for buffer in self._buffers:
            buffer.grad.zero_()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """See `StepOptimizer`."""
        return self._adamw.param_groups

    @property
    def state(self) -> Mapping[Any, dict[str, Tensor]]:
        """See `StepOptimizer`; of the flat buffers."""
        return self._adamw.state

    def clip_and_step(self) -> float:
        """See `StepOptimizer`: reduce, clip, step, gather. The gradients are gone, also after an error."""
        self._reduce_over_model()
        shards = [buffer.reduce() for buffer in self._buffers]
        norm = self._norm(shards)
        self.zero_grad()
        refuse_non_finite(norm)
        scale = min(1.0, self._config.max_grad_norm / (norm + 1e-6))
        for buffer, shard in zip(self._buffers, shards, strict=True):
            buffer.master.grad = shard.mul_(scale) if scale < 1 else shard
        self._adamw.step()
        for buffer in self._buffers:
            buffer.master.grad = None
            buffer.publish()
        return norm

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer state by kind of state and parameter name, each in its parameter's shape. Collective."""
        found: dict[str, dict[str, Tensor]] = {}
        for kind in self._kinds:
            found[kind] = {}
            for buffer in self._buffers:
                found[kind] |= buffer.whole(self._shard(buffer, kind))
        return found

    def load_tensors(self, tensors: Mapping[str, Mapping[str, Tensor]], num_steps: float) -> None:
        """Take what `tensors` gave; parameters that are not narrow are their own master copy."""
        for kind in self._kinds:
            for buffer in self._buffers:
                self._shard(buffer, kind).copy_(buffer.cut(tensors[kind]))
        for state in self._adamw.state.values():
            state[STEP].fill_(num_steps)
        for buffer in self._buffers:
            if buffer.is_narrow:
                buffer.publish()

    @property
    def num_steps(self) -> float:
        """Steps taken so far, by AdamW's count."""
        return float(self._adamw.state[self._buffers[0].master][STEP])

    def to(self, device: torch.device, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move the flat buffers; parameters follow as views."""
        for buffer in self._buffers:
            state = self._adamw.state.pop(buffer.master)
            before = buffer.master
            buffer.to(device, model=model, optimizer=optimizer, grad=grad)
            self._adamw.state[buffer.master] = {
                key: value.to(device) if optimizer else value for key, value in state.items()
            }
            for group in self._adamw.param_groups:
                group["params"] = [buffer.master if item is before else item for item in group["params"]]

    def _shard(self, buffer: _Buffer, state: str) -> Tensor:
        """Shard of this rank of one kind of state."""
        return buffer.master.detach() if state == MASTER else self._adamw.state[buffer.master][state]

    @property
    def _kinds(self) -> tuple[str, ...]:
        """Kinds of state; the master copy is one where it is not the parameters themselves."""
        return (*STATES, MASTER) if any(buffer.is_narrow for buffer in self._buffers) else STATES

    def _reduce_over_model(self) -> None:
        """Sum gradients of parameters that ranks of one model replica share (replicated over tp, or tied)."""
        if self._layout.tp.size > 1 and self._summed_over_tp:
            grads = [self._grad_of(name) for name in self._summed_over_tp]
            flat = self._layout.tp.all_reduce(torch.cat([grad.flatten() for grad in grads]))
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        for name in self._tied:
            self._layout.embedding.all_reduce(self._grad_of(name))

    def _grad_of(self, name: str) -> Tensor:
        return next(buffer.grads[name] for buffer in self._buffers if name in buffer.grads)

    def _norm(self, shards: Iterable[Tensor]) -> float:
        """Every element of the model counts once: on one data-parallel rank and, where replicated, one tp rank."""
        squares = [
            shard.double().pow(2).sum()
            for buffer, shard in zip(self._buffers, shards, strict=True)
            if buffer.kind.is_counted
        ]
        device = self._buffers[0].grad.device
        total = torch.stack([*squares, torch.zeros((), dtype=torch.float64, device=device)]).sum()
        dist.all_reduce(total)
        return math.sqrt(value) if (value := float(total)) >= 0 else value


class _Buffer:
    """Parameters of one kind, end to end, padded to a multiple of the data-parallel ranks."""

    def __init__(self, named: dict[str, nn.Parameter], kind: _Kind, ranks: Axis) -> None:
        self.kind, self._named, self._ranks = kind, named, ranks
        first = next(iter(named.values()))
        size = sum(parameter.numel() for parameter in named.values())
        padded = -(-size // ranks.size) * ranks.size
        self._params = torch.zeros(padded, dtype=first.dtype, device=first.device)
        wide = torch.promote_types(first.dtype, torch.float32)
        self.is_narrow = wide != first.dtype
        self.grad = torch.zeros(padded, dtype=wide, device=first.device)
        with torch.no_grad():
            for parameter, part in zip(named.values(), self._parts(self._params), strict=True):
                part.copy_(parameter)
        self._attach()
        self.master = nn.Parameter(self._mine(self._params).to(wide))  # a view, unless parameters are narrow
        for name, parameter in named.items():
            parameter.register_post_accumulate_grad_hook(partial(self._accumulate, name))

    def reduce(self) -> Tensor:
        """Gradient shard of this rank, summed over data-parallel ranks."""
        if self._ranks.size == 1:
            return self.grad.clone()
        shard = self.grad.new_empty(self.grad.numel() // self._ranks.size)
        # torch 2.13 renames it; this is the name that 2.11 has too
        dist.reduce_scatter_tensor(shard, self.grad, group=self._ranks.group)  # pyright: ignore[reportDeprecated]
        return shard

    def publish(self) -> None:
        """All-gather the stepped shards into the parameters."""
        shard = self.master.detach().to(self._params.dtype)
        self._params.copy_(self._ranks.all_gather(shard).flatten())

    def whole(self, shard: Tensor) -> dict[str, Tensor]:
        """A sharded state as tensors in the shapes of the parameters. Collective."""
        full = self._ranks.all_gather(shard).flatten()
        return dict(zip(self._named, self._parts(full), strict=True))

    def cut(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Shard of this rank of a state given in the shapes of the parameters."""
        full = torch.cat([tensors[name].flatten() for name in self._named])
        return self._mine(nn.functional.pad(full, (0, self.grad.numel() - full.numel())))

    def to(self, device: torch.device, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move the buffers; parameters and master copy become views of them again."""
        if model:
            self._params = self._params.to(device)
        if grad:
            self.grad = self.grad.to(device)
        self._attach()
        if self.is_narrow:
            if optimizer:
                self.master = nn.Parameter(self.master.detach().to(device))
        else:
            self.master = nn.Parameter(self._mine(self._params))

    def _attach(self) -> None:
        for parameter, part in zip(self._named.values(), self._parts(self._params), strict=True):
            parameter.data = part
        self.grads = dict(zip(self._named, self._parts(self.grad), strict=True))

    def _accumulate(self, name: str, parameter: Tensor) -> None:
        """Add a parameter's gradient to the flat buffer, in its wider format."""
        assert parameter.grad is not None
        self.grads[name].add_(parameter.grad)
        parameter.grad = None

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """Views in the shapes of the parameters."""
        parts: list[Tensor] = []
        start = 0
        for parameter in self._named.values():
            parts.append(flat[start : start + parameter.numel()].view(parameter.shape))
            start += parameter.numel()
        return parts

    def _mine(self, flat: Tensor) -> Tensor:
        size = flat.numel() // self._ranks.size
        return flat[self._ranks.rank * size : (self._ranks.rank + 1) * size]


def _kind(parameter: nn.Parameter, entry: Entry, layout: Layout) -> _Kind:
    is_expert = entry.expert_rank is not None
    is_replicated = not is_expert and entry.cut == Cut.WHOLE
    return _Kind(
        is_expert=is_expert,
        has_decay=parameter.ndim > 1,
        is_counted=not entry.is_copy and (not is_replicated or layout.tp.rank == 0),
    )


def _is_partial(name: str, parameter: nn.Parameter, sequence_parallel: bool) -> bool:
    """Whether a parameter is replicated over tp and its gradient is of this rank's tokens or heads only."""
    is_head_norm = ".q_layernorm." in name or ".k_layernorm." in name
    return is_head_norm or (sequence_parallel and getattr(parameter, "sequence_parallel", False))
