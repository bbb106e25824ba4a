"""Parts of the loop: rollout source, staleness and schedules, replay, replica sets, weight sync, EMA reference."""
