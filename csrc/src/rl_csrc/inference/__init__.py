"""Inference over a paged cache of keys and values: attention, a CPU decoder, a layer's small steps, draws of tokens."""

from rl_csrc.inference import decoder, layers, paged, sampling

__all__ = ["decoder", "layers", "paged", "sampling"]
