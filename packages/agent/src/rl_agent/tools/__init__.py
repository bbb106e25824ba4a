"""Tools of rl-agent, found by the entry points `rl_agent.tools`."""
