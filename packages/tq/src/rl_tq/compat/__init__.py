"""Other systems' interfaces over rl-tq."""
