"""Tools that are shipped, found by the entry points `rl_agent.tools`."""
