"""Ranks: the process group, their exchange of values, and sequence parallelism."""
