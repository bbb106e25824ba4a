"""Transports, one per file, found by the entry points `rl_ckpt.backends`."""
