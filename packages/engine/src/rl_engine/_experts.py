"""The routers of a Hugging Face model, made to replay, count and report what they choose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_engine._routing import Experts, Routing
from rl_engine.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Routers:
    """Every layer's router of one model: a module that gives logits, weights and indices of the experts it chose.

    That is what transformers' `...TopKRouter` modules give. While `routing` is set, their choices are replaced and
    observed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.routing: Routing | None = None
        self._is_normalised: dict[int, bool] = {}
        found = [module for module in model.modules() if _is_router(module)]
        self.experts: Experts | None = None
        if found:
            first: Any = found[0]
            self.experts = Experts(num_layers=len(found), num_experts=first.num_experts, top_k=first.top_k)
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
        """Of other experts than the router's own, by the rule that its own obey."""
        logits, weights, chosen = output
        if layer not in self._is_normalised:
            with torch.no_grad():  # a recomputed layer does not come here
                rules = [_rule(logits, chosen, way) for way in (True, False)]
            fits = [torch.allclose(rule, weights.to(rule.dtype), rtol=1e-2, atol=1e-3) for rule in rules]
            if not any(fits):
                raise ConfigError(
                    f"{type(module).__name__} weighs its experts by another rule than softmax, before or after the "
                    "choice; routed_experts cannot be replayed on it. Drop the column."
                )
            self._is_normalised[layer] = fits[0]
        return _rule(logits, wanted, self._is_normalised[layer]).to(weights.dtype)


def _rule(logits: Tensor, chosen: Tensor, is_normalised: bool) -> Tensor:
    """Softmax over the chosen experts, or over all of them."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    if is_normalised:
        return logits.gather(1, chosen).softmax(-1, dtype=wide)
    return logits.softmax(-1, dtype=wide).gather(1, chosen)


def _is_router(module: nn.Module) -> bool:
    return type(module).__name__.endswith("TopKRouter") and hasattr(module, "top_k") and hasattr(module, "num_experts")
