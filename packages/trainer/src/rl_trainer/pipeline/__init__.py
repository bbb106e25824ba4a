"""What the loop drives: rollouts, their staleness and replay, the agent workers, weights and the reference."""
