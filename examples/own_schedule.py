"""A schedule of one's own: `rl-train quickstart pipeline=examples/own_schedule.py:half_a_batch_ahead`."""

from rl_trainer.pipeline.staleness import BatchRatio, Schedule


def half_a_batch_ahead(config):
    """Half a batch is generated ahead; weights change under running generations."""
    policy = BatchRatio(max_staleness=0.5, batch_size=config.batch.batch_size)
    return Schedule(policy=policy, releases_after_sync=True, settles_before_sync=False)
