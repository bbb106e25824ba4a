"""Commands beside `rl-train`: lists and completion, `rl-doctor`, `rl-view`."""
