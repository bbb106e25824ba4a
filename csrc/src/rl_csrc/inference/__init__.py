"""Inference over a paged KV cache: attention, a CPU decoder, norm, rotary embedding and gating, token sampling."""

from rl_csrc.inference import decoder, layers, paged, sampling

__all__ = ["decoder", "layers", "paged", "sampling"]
