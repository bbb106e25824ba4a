"""Layers and heads of a model: attention over packed rows, log-probs, LoRA, experts, images."""
