"""Five parts of an RL system by strangers, which import `base`, `types`, `errors` and `registry` of the rl packages."""
