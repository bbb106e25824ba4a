"""Worker classes that `setup.place` puts into processes: engine, rollout server, agent loops, sample queue."""
