"""Architectures: the numbers of a model that its Megatron parameters and their Hugging Face names follow from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from rl_engine.model.moe import Experts


class Registry(Protocol):
    """What is asked of its `MegatronMappingRegistry`."""

    def megatron_to_hf_lookup(self, megatron_param_name: str) -> Any:
        """The mapping of a parameter, with `hf_param` (a name, or several by their role), or None."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer with grouped-query attention, gated SiLU MLPs (or experts), RMSNorm and rotary."""

    model_type: str
    """As in config.json."""
    num_layers: int
    """Decoder layers."""
    hidden_size: int
    """H."""
    num_heads: int
    """Query heads."""
    num_groups: int
    """Key and value heads."""
    head_dim: int
    """Of a head."""
    ffn_size: int
    """Inner size of a dense MLP."""
    vocab_size: int
    """V."""
    pad_id: int | None
    """The token whose embedding is not trained, as in transformers; it still is as a row of a tied head."""
    context: int
    """Longest row."""
    norm_eps: float
    """Of RMSNorm."""
    is_tied: bool
    """The language-model head is the embedding."""
    has_scalar_head: bool
    """The head gives one number, as a sequence classifier with one label."""
    has_qkv_bias: bool
    """Query, key and value projections have a bias."""
    has_qk_norm: bool
    """RMSNorm of each query and key head."""
    num_experts: int
    """0: dense."""
    top_k: int
    """Experts per token."""
    expert_size: int
    """Inner size of an expert."""
    norm_top_k: bool
    """The chosen experts' probabilities are scaled to sum to 1."""
    registry: Registry | None = None
    """Megatron-Bridge's names of the tensors; None: the built-in ones."""

    @property
    def experts(self) -> Experts | None:
        """What its routers choose among; None for a dense model."""
        if not self.num_experts:
            return None
        return Experts(num_layers=self.num_layers, num_experts=self.num_experts, top_k=self.top_k)
