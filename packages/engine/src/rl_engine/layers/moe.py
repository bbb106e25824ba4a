"""Routing of mixtures of experts: replay of given choices, counts of tokens, and the load-balancing loss.

Legend: `T` tokens fed, `L` layers with experts, `E` experts, `K` experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_engine.errors import BatchError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_engine.batch.packed import PackedRows
    from rl_engine.batch.row_batch import RowBatch


_BIAS = "e_score_correction_bias"
"""Of a router that chooses by sigmoids."""
_TINY = 1e-20  # as transformers adds to the sum of weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Sizes of a mixture: expert layers, experts, experts of a token."""

    num_layers: int
    """L."""
    num_experts: int
    """E."""
    top_k: int
    """K."""
    is_sigmoid: bool = False
    """Chosen by sigmoids and a bias per expert, which evens out the load itself (DeepSeek-V3, 2412.19437)."""

    def check(self, routed: Tensor) -> None:
        """Refuse a `routed_experts` column that is not one of this model.

        Raises:
            BatchError: says what does not fit.
        """
        wanted = (self.num_layers, self.top_k)
        if routed.ndim != 3 or tuple(routed.shape[1:]) != wanted or routed.is_floating_point():
            raise BatchError(
                f"routed_experts has shape {list(routed.shape)} and type {routed.dtype}; wanted whole numbers, for "
                f"each token {wanted[0]} layers with {wanted[1]} experts."
            )
        if routed.numel() and not 0 <= int(routed.min()) <= int(routed.max()) < self.num_experts:
            raise BatchError(f"routed_experts names an expert outside 0 to {self.num_experts - 1}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """Expert load of one logical batch, for the load-balancing loss."""

    counts: Tensor
    """(L, E) float64, tokens of all ranks and micro-batches that went to each expert."""
    coef: float
    """Weight of the auxiliary loss."""


@dataclass(slots=True, kw_only=True)
class Routing:
    """Routing state of one micro-batch on this rank. A layer that is called again overwrites its record."""

    num_valid: int
    """Tokens here that are not padding; they come first."""
    replayed: Tensor | None = None
    """(T, L, K) int64, the experts to take; None: those that the router likes best."""
    is_counting: bool = False
    """Whether to keep `counts`."""
    load: ExpertLoad | None = None
    """Given, each layer's share of the auxiliary loss is computed."""
    counts: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Tokens that went to each expert, `[E]`, by layer."""
    shares: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Shares of the auxiliary loss of this micro-batch, by layer."""

    def choice(self, layer: int) -> Tensor | None:
        """`[T, K]` experts to take in a layer."""
        return None if self.replayed is None else self.replayed[:, layer]

    def observe(self, layer: int, logits: Tensor, chosen: Tensor) -> None:
        """Record the routing of one layer: `[T, E]` logits and `[T, K]` experts taken.

        The auxiliary loss is E * sum over experts of (share of the batch's choices) * (mean router probability), 1
        where both are even (Fedus et al., 2101.03961, generalised to K choices). The first factor is of the whole batch
        and carries no gradient; the second is linear in the tokens, so that shares of any cut add up to the same.
        """
        if self.is_counting:
            chosen = chosen[: self.num_valid].flatten()
            ones = torch.ones_like(chosen, dtype=torch.float64)  # bincount would wait for the device
            self.counts[layer] = ones.new_zeros(logits.shape[-1]).index_add_(0, chosen, ones)
        if self.load is None:
            return
        counts = self.load.counts[layer].to(logits.device)
        wide = torch.promote_types(logits.dtype, torch.float32)
        probabilities = logits[: self.num_valid].softmax(-1, dtype=wide).sum(0)
        weights = counts / counts.sum() * (logits.shape[-1] * chosen.shape[-1] / counts.sum())
        self.shares[layer] = (weights.to(wide) * probabilities).sum()

    def add_counts(self, counts: Tensor) -> None:
        """Add what was counted of this rank's layers to (L, E) float64 `counts`."""
        for layer, own in self.counts.items():
            counts[layer] += own

    def aux_share(self) -> Tensor | None:
        """This rank's share of the auxiliary loss, summed over its layers; None without one."""
        return torch.stack(list(self.shares.values())).sum() if self.shares else None


def routing_of(
    rows: PackedRows,
    load: ExpertLoad | None = None,
    *,
    is_counting: bool = False,
    start: int = 0,
    stop: int | None = None,
) -> Routing:
    """The `Routing` of a micro-batch's tokens `start` to `stop`; padding may follow them."""
    total = sum(rows.lengths)
    stop = total if stop is None else stop
    replayed = None if rows.routed_experts is None else rows.routed_experts[start:stop]
    num_valid = max(0, min(rows.num_valid, stop) - start)
    return Routing(num_valid=num_valid, replayed=replayed, load=load, is_counting=is_counting)


def counts_of_column(batch: RowBatch, experts: Experts) -> Tensor:
    """Expert counts (L, E), float64, of the column `routed_experts`."""
    routed = batch.routed_experts()
    assert routed is not None
    counts = torch.zeros(experts.num_layers, experts.num_experts, dtype=torch.float64, device=routed.device)
    for layer in range(experts.num_layers):
        counts[layer] = torch.bincount(routed[:, layer].flatten(), minlength=experts.num_experts)
    return counts


def check_aux(coef: float, experts: Experts | None) -> None:
    """Refuse an auxiliary loss without experts.

    Raises:
        ConfigError: there are none.
    """
    if coef and experts is None:
        raise ConfigError(
            f"router_aux_loss_coef is {coef} and the model has no router that it could even out. Set it to 0."
        )
    if coef and experts is not None and experts.is_sigmoid:
        raise ConfigError(
            f"router_aux_loss_coef is {coef} and the model's routers choose by sigmoids, whose bias evens out the "
            "load. Set it to 0."
        )


def check_replay(batch: RowBatch, experts: Experts | None) -> None:
    """Refuse a `routed_experts` column that the model cannot replay.

    Raises:
        BatchError: says why.
    """
    if (routed := batch.routed_experts()) is None:
        return
    if experts is None:
        raise BatchError("The batch has routed_experts and the model has no router to replay them. Drop the column.")
    experts.check(routed)


class Routers:
    """Every layer's router of one model: a module that gives logits, weights and indices of the experts it chose.

    That is what transformers' `...TopKRouter` modules give. While `routing` is set, their choices are replaced and
    observed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.routing: Routing | None = None
        self._rules: dict[int, _Rule] = {}
        found = [module for module in model.modules() if _is_router(module)]
        self.experts: Experts | None = None
        if found:
            first: Any = found[0]
            self.experts = Experts(
                num_layers=len(found),
                num_experts=first.num_experts,
                top_k=first.top_k,
                is_sigmoid=hasattr(first, _BIAS),
            )
        for layer, module in enumerate(found):
            module.register_forward_hook(self._hook(layer))

    def _hook(self, layer: int) -> Any:
        def replace(module: nn.Module, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            if self.routing is None:
                return output
            logits, weights, chosen = output
            wanted = self.routing.choice(layer)
            if wanted is not None:
                weights, chosen = self._weights(layer, module, output, wanted), wanted
            self.routing.observe(layer, logits, chosen)
            return logits, weights, chosen

        return replace

    def _weights(self, layer: int, module: nn.Module, output: tuple[Tensor, Tensor, Tensor], wanted: Tensor) -> Tensor:
        """Weights of the replayed experts, by the router's own rule."""
        logits, weights, chosen = output
        scale = getattr(module, "routed_scaling_factor", 1.0)
        if layer not in self._rules:
            with torch.no_grad():  # a recomputed layer does not come here
                made = [(_weighed(logits, chosen, rule) * scale, rule) for rule in _Rule]
            fits = [rule for each, rule in made if torch.allclose(each, weights.to(each.dtype), rtol=1e-2, atol=1e-3)]
            if not fits:
                raise ConfigError(
                    f"{type(module).__name__} weighs its experts by another rule than softmax or sigmoids, of all or "
                    "of the chosen; routed_experts cannot be replayed on it. Drop the column."
                )
            self._rules[layer] = fits[0]
        return (_weighed(logits, wanted, self._rules[layer]) * scale).to(weights.dtype)


class _Rule(Enum):
    """Weights of the chosen experts: by softmax or sigmoids of the logits, and whether they sum to 1."""

    SOFTMAX_OF_CHOSEN = "softmax", True
    SOFTMAX = "softmax", False
    SIGMOID_OF_CHOSEN = "sigmoid", True
    SIGMOID = "sigmoid", False


def _weighed(logits: Tensor, chosen: Tensor, rule: _Rule) -> Tensor:
    """(T, K) weights of the chosen experts, float32 or wider."""
    score, is_normalised = rule.value
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    found = (wide.sigmoid() if score == "sigmoid" else wide.softmax(-1)).gather(1, chosen)
    return found / (found.sum(-1, keepdim=True) + _TINY) if is_normalised else found


def _is_router(module: nn.Module) -> bool:
    name = type(module).__name__
    is_one = name.endswith("TopKRouter") or (name.endswith("TopkRouter") and hasattr(module, _BIAS))
    return is_one and hasattr(module, "top_k") and hasattr(module, "num_experts")
