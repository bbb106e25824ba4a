"""The storages that come with rl-tq. Reach them through `rl_tq.serve` and `rl_tq.connect`."""
