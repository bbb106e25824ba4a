"""Kinds of sandboxes, one per file, found by the entry points `rl_agent.sandboxes`."""
