"""Inference on CPUs over a paged cache of keys and values: attention, a decoder, the draw of tokens."""

from rl_csrc.inference import decoder, paged, sampling

__all__ = ["decoder", "paged", "sampling"]
