"""Expert parallelism for Hugging Face mixtures of experts: each rank holds some experts, tokens travel to them.

A layer's tokens go to the ranks of their experts by an all-to-all, are computed there by transformers' grouped products
(`torch.nn.functional.grouped_mm`; one expert after the other in float64, which it does not take) and come back by
another (GShard, Lepikhin et al., 2006.16668). No token is dropped.

Legend: `T` tokens of a rank, `E` experts, `K` experts of a token, `H` hidden, `R` token-expert pairs that a rank gets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from rl_engine.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

EXPERTS_NAME = "rl_engine_expert_parallel"
_GROUP = "rl_engine_expert_group"


def expert_modules(model: nn.Module) -> list[Any]:
    """The modules that hold all experts of one layer, each of their parameters one tensor with `E` as first axis."""
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def check_experts(model: PreTrainedModel, ep: int, shards: int) -> None:
    """Refuse a model whose experts cannot be divided among ranks.

    Args:
        model: May be empty.
        ep: Ranks that share the experts.
        shards: Ranks that share each expert's parameters.

    Raises:
        ConfigError: says what does not divide, or that there are no experts.
    """
    modules = expert_modules(model)
    if not modules:
        raise ConfigError(
            f"parallel.ep is {ep} and {type(model).__name__} has no experts that transformers joins in one tensor a "
            "layer. Set it to 1."
        )
    for module in modules:
        if module.num_experts % ep:
            raise ConfigError(f"parallel.ep = {ep} does not divide the model's {module.num_experts} experts.")
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.shape[1] % shards:
                raise ConfigError(
                    f"parallel.ep = {ep} leaves {shards} ranks to share each expert, and {shards} does not divide the "
                    f"{parameter.shape[1]} rows of its {name}. Use another parallel.ep."
                )


def divide_experts(model: PreTrainedModel, mesh: DeviceMesh) -> list[Any]:
    """Leave this rank its share of every layer's experts, in place, values undefined; the modules that hold them.

    Args:
        model: Its experts are dispatched by `dispatch_experts` from now on.
        mesh: One axis, the ranks that share the experts.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, dispatch_experts)
    model.set_experts_implementation(EXPERTS_NAME)
    modules = expert_modules(model)
    for module in modules:
        setattr(module, _GROUP, mesh.get_group())
        for name, whole in list(module.named_parameters(recurse=False)):
            own = torch.empty((whole.shape[0] // mesh.size(), *whole.shape[1:]), dtype=whole.dtype, device=whole.device)
            cut = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(cut, requires_grad=whole.requires_grad))
    return modules


def dispatch_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Forward pass of one layer's experts, in the place of transformers' own. Collective.

    Args:
        module: From `expert_modules`.
        hidden: (T, H).
        chosen: (T, K) int64, the experts of each token.
        weights: (T, K), their weights.

    Returns:
        (T, H), in the number format of `hidden`.
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    group = getattr(module, _GROUP)
    size = dist.get_world_size(group)
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=module.num_experts)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    theirs = theirs.view(size, -1)
    sends, receives = torch.stack([counts.view(size, -1).sum(1), theirs.sum(1)]).tolist()
    received = _Exchange.apply(hidden[order // chosen.shape[1]], receives, sends, group)
    own = torch.arange(theirs.shape[1], device=hidden.device).repeat(size).repeat_interleave(theirs.flatten())
    num_received = len(own)
    if not num_received:  # a token of zeros, so that this rank takes part in every collective of the backward pass
        received, own = nn.functional.pad(received, (0, 0, 0, 1)), own.new_zeros(1)
    one_by_one: Any = type(module).forward.__wrapped__
    compute: Any = one_by_one if hidden.dtype == torch.float64 else grouped_mm_experts_forward
    done = compute(_OwnExperts(module), received, own[:, None], torch.ones_like(received[:, :1]))
    back: Any = _Exchange.apply(done[:num_received], sends, receives, group)
    weighted = back * weights.flatten()[order][:, None]
    slot = torch.empty_like(order)
    slot[order] = torch.arange(len(order), device=order.device)
    return weighted[slot].view(*chosen.shape, -1).sum(1).to(hidden.dtype)


class _OwnExperts:
    """A module of experts as one that has this rank's alone."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.num_experts = 0
        for name, parameter in module.named_parameters(recurse=False):
            own = parameter.to_local()
            setattr(self, name, own)
            self.num_experts = len(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Exchange(torch.autograd.Function):
    """`[sum(sends), H]` rows, in the order of the ranks that they go to, for `[sum(receives), H]` of theirs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, receives: list[int], sends: list[int], group: Any) -> Tensor:
        ctx.receives, ctx.sends, ctx.group = receives, sends, group
        return _exchange(rows, receives, sends, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grads[0], ctx.sends, ctx.receives, ctx.group), None, None, None


def _exchange(rows: Tensor, receives: list[int], sends: list[int], group: Any) -> Tensor:
    found = rows.new_empty(sum(receives), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), receives, sends, group=group)
    return found
