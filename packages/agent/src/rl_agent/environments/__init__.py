"""Environments by name, file or hub: one adapter per file, each an entry point of the group `rl_agent.hubs`."""
