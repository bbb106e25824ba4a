"""Backends, one per module: found by entry points, imported when asked for."""
