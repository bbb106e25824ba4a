"""A custom schedule: `rl-train quickstart pipeline=examples/own_schedule.py:half_a_batch_ahead`."""

from rl_trainer.pipeline.staleness import Schedule, create_policy


def half_a_batch_ahead(config):
    """Half a batch is generated ahead; weights change under running generations."""
    policy = create_policy("batch_ratio", max_staleness=0.5, batch_size=config.batch.batch_size)
    return Schedule(policy=policy, releases_after_sync=True, settles_before_sync=False)
