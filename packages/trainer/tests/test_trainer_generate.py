"""How a batch is filled when rollouts fail or groups have no signal."""

import pytest

from rl_tq.types import BatchMeta
from rl_trainer.config import load_config
from rl_trainer.data import PromptOrder
from rl_trainer.errors import RolloutFailedError
from rl_trainer.rollout_source import RolloutManager
from rl_trainer.workers.agent import GenerateReport

ROWS = [{"rewards": (1.0, 1.0)}, {"rewards": (0.0, 1.0)}, {"rewards": (0.0, 0.0)}, {"rewards": None}]


class Agents:
    """Gives each row's completions the rewards that the row says; None is a group with a failed rollout."""

    def generate(self, jobs, sampling, partition, group_size):
        good = [job for job in jobs if job.row["rewards"] is not None]
        tags = [{"group_id": job.group_id, "reward": r, "attempt": 0} for job in good for r in job.row["rewards"]]
        ids = tuple(f"{t['group_id']}-{i}" for i, t in enumerate(tags))
        batch = BatchMeta(partition=partition, sample_ids=ids, columns=("rewards",), tags=tuple(tags)) if tags else None
        failures = {"timeout": len(jobs) - len(good)} if len(good) < len(jobs) else {}
        groups = tuple(job.group_id for job in good)
        return [GenerateReport(batch=batch, complete_groups=groups, failures=failures, last_failure="too slow")]


def manager(rows, *overrides):
    sizes = ["batch.batch_size=4", "batch.mini_batch_size=4", "batch.group_size=2"]
    config = load_config("quickstart", [*sizes, *overrides])
    return RolloutManager(Agents(), rows, PromptOrder(num_rows=len(rows), seed=0, position=0), config)


def test_groups_without_signal_are_replaced_and_still_count_in_the_reward():
    made = manager(ROWS[:3], "batch.dynamic_sampling=true", "batch.max_refills=20").generate_sequences("train", 1)
    assert len(made.batch) == 8
    rewards = {}
    for tags in made.batch.tags:
        rewards.setdefault(tags["group_id"], []).append(tags["reward"])
    assert list(rewards.values()) == [[0.0, 1.0]] * 4
    assert made.position == 4 + made.dropped_groups
    assert 6 <= made.dropped_groups <= 8  # one row of three has signal, and each comes once per round
    assert 0.3 < made.reward < 0.7


def test_without_dynamic_sampling_every_group_stays():
    made = manager(ROWS[:3]).generate_sequences("train", 1)
    assert (len(made.batch), made.dropped_groups, made.position) == (8, 0, 4)


def test_failed_groups_are_counted_and_replaced():
    made = manager([ROWS[1], ROWS[3]], "batch.max_refills=20").generate_sequences("train", 1)
    assert len(made.batch) == 8
    assert made.failures == {"timeout": made.position - 4}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            ROWS[2:3],
            r"4 of 4 groups are missing .*max_refills=2: failed rollouts \{\}, .* all their rewards are equal 12",
        ),
        (ROWS[3:4], r"failed rollouts \{'timeout': 12\}, .*; the last failure: too slow"),
    ],
)
def test_a_batch_that_cannot_be_filled_says_why(rows, words):
    with pytest.raises(RolloutFailedError, match=words):
        manager(rows, "batch.dynamic_sampling=true").generate_sequences("train", 1)
