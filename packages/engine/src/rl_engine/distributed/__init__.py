"""Ranks: the process group, what they tell each other, and sequence parallelism."""
