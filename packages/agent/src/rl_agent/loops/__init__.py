"""The agent loops that ship with rl-agent, one per file, found by entry point."""
