"""Agent loops of rl-agent, one per file, found by entry point."""
