"""Commands other than `rl-train`: lists and completion, `rl-doctor`, `rl-view`."""
