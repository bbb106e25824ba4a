"""Engine backends, one per file, found by the entry points of group `rl_engine.backends`."""
