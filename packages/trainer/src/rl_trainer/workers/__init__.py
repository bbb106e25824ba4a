"""The worker classes that the pipelines place: engine, rollout server, agent loops, sample queue."""
