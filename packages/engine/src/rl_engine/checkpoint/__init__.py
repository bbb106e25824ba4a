"""Checkpoints with digests, Hugging Face model folders, shards of tensors, and run locks."""
