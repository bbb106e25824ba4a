"""Replicas by a policy (`rollout.elastic`): what it decides, its bounds, and a plug-in of one's own."""

from dataclasses import replace

import pytest

from rl_trainer.config import load_config
from rl_trainer.errors import ConfigError, PlanError
from rl_trainer.metrics import HeldGroup, StepRecord
from rl_trainer.pipeline.elastic import Elastic, Load, WaitShare, create_policy
from rl_trainer.planning.gpus import placement_facts, resource_pools
from rl_trainer.planning.plan import make_plan

AHEAD = ["pipeline=fully_async", "rollout.elastic.max_replicas=4"]
LOAD = Load(
    step=1, num_replicas=2, wait_share=0.1, num_ready=0, num_running=4, batch_size=4, staleness_mean=0, late_groups=0
)
WAITING, LEADING = replace(LOAD, wait_share=0.5), replace(LOAD, wait_share=0.0, num_ready=4)


def record(step, wait_s, num_ready=0):
    held = tuple(HeldGroup(group_id=i, row_index=i, place=i, released=step) for i in range(num_ready))
    phases = {"wait_generate": wait_s, "update": 10.0 - wait_s, "eval": 90.0}
    return StepRecord(
        step=step, position=0, pending=(1, 2), held=held, reward=0.5, accuracy=None, num_tokens=1, num_truncated=0,
        failures={}, metrics={"staleness_mean": 1.5, "late_groups": 2.0}, phase_s=phases,
    )  # fmt: skip


class Replicas:
    """A replica set whose members come when they are told to."""

    def __init__(self, count):
        self.members, self.asked = tuple(range(count)), []

    def resize(self, count):
        self.asked.append(count)


def following(count=2, **keys):
    section = load_config("quickstart", [*AHEAD, *(f"rollout.elastic.{key}={each}" for key, each in keys.items())])
    replicas = Replicas(count)
    return Elastic(section.rollout.elastic, replicas, num_replicas=count, batch_size=4), replicas


def test_a_load_is_what_the_record_says():
    assert Load.of(record(3, 4.0, num_ready=5), num_replicas=2, batch_size=4) == Load(
        step=3, num_replicas=2, wait_share=0.4, num_ready=5, num_running=2, batch_size=4, staleness_mean=1.5,
        late_groups=2.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [
        ([WAITING, WAITING, WAITING], [2, 2, 3]),
        ([WAITING, WAITING, LOAD, WAITING, WAITING, WAITING], [2, 2, 2, 2, 2, 3]),  # a quiet step begins the count anew
        ([WAITING] * 6, [2, 2, 3, 2, 2, 3]),  # after a change it is counted anew
        ([LEADING, LEADING, LEADING], [2, 2, 1]),
        ([LEADING, LEADING, WAITING, WAITING, WAITING], [2, 2, 2, 2, 3]),
        ([replace(LEADING, num_ready=3)] * 4, [2] * 4),  # not a whole batch
        ([replace(LEADING, wait_share=0.05)] * 4, [2] * 4),
        ([LOAD] * 4, [2] * 4),
    ],
)
def test_the_policy_by_hand(loads, wanted):
    policy = WaitShare(patience=3)
    assert [policy.wanted(load) for load in loads] == wanted


@pytest.mark.promise("Replicas follow a policy within bounds, and no step waits for one that joins")
def test_replicas_follow_the_policy_in_bounds_and_await_joiners():
    elastic, replicas = following(patience=1, min_replicas=2)
    assert elastic.follow(record(1, 0.0, num_ready=4)) == [], "two are the fewest"
    (told,) = elastic.follow(record(2, 9.0))
    assert told == (
        "rollout.elastic: 2 replicas to 3 after step 2, in which learning waited for 90% and 0 finished groups were "
        "left"
    )
    assert [elastic.follow(record(step, 9.0)) for step in (3, 4)] == [[], []], "one is on its way"
    replicas.members = (0, 1, 2)
    assert len(elastic.follow(record(5, 9.0))) == 1
    replicas.members = (0, 1, 2, 3)
    assert elastic.follow(record(6, 9.0)) == [], "four are the most"
    assert len(elastic.follow(record(7, 0.0, num_ready=4))) == 1
    assert replicas.asked == [3, 4, 3]


def test_one_that_found_no_room_is_asked_for_again_after_a_while():
    elastic, replicas = following(patience=1)
    for step in range(1, 13):
        elastic.follow(record(step, 9.0))
    assert replicas.asked == [3, 3]


class Weights:
    """What lends the engine's GPUs from the next sync on."""

    lends = False


def test_engine_gpus_are_lent_only_while_learning_waits():
    section = load_config("quickstart", [*AHEAD, "rollout.elastic.lend=true", "rollout.elastic.patience=99"])
    weights, replicas = Weights(), Replicas(1)
    elastic = Elastic(section.rollout.elastic, replicas, num_replicas=1, batch_size=4, weights=weights)
    told = [elastic.follow(record(step, wait_s)) for step, wait_s in enumerate((1.0, 3.0, 1.0, 0.4, 1.0), start=1)]
    assert [len(lines) for lines in told] == [0, 1, 0, 1, 0]
    assert told[1] == ["rollout.elastic: the engine's GPUs are lent while learning waits; it waited for 30% of step 2"]
    assert told[3] == ["rollout.elastic: the engine's GPUs are lent no more; it waited for 4% of step 4"]
    assert not weights.lends
    apart = Elastic(
        replace(section.rollout.elastic, lend=False), replicas, num_replicas=1, batch_size=4, weights=weights
    )
    assert apart.follow(record(1, 9.0)) == []
    assert not weights.lends


def test_a_policy_of_one_s_own_is_a_plug_in(tmp_path):
    (tmp_path / "own.py").write_text(
        "from rl_trainer.pipeline.elastic import ElasticPolicy\n"
        "class Steps(ElasticPolicy):\n    def wanted(self, load):\n        return load.step + self.patience\n"
        "class Other:\n    pass\n"
    )
    elastic, replicas = following(policy=f"{tmp_path / 'own.py'}:Steps", patience=1)
    elastic.follow(record(2, 0.0))
    assert replicas.asked == [3]
    section = load_config("quickstart", [*AHEAD, f"rollout.elastic.policy={tmp_path / 'own.py'}:Other"])
    with pytest.raises(ConfigError, match="leads to Other, which is not a subclass of ElasticPolicy"):
        create_policy(section.rollout.elastic)


TIS = ["algorithm.correction=tis", "algorithm.old_logprobs=recompute"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.elastic.min_replicas=5"], "min_replicas=5 is more than max_replicas=4"),
        (["rollout.num_replicas=5"], "rollout.num_replicas=5, with which .* 1 to 4; change one of them"),
        (["rollout.elastic.min_replicas=2"], "rollout.num_replicas=1, with which .* 2 to 4; change one of them"),
        (["rollout.elastic.policy=none"], "rollout.elastic.policy='none' is not known.*; there are wait_share"),
        (["pipeline=sync"], "does not go with pipeline=sync, in which generation and learning take turns"),
        (["pipeline=sync", "rollout.colocated=true"], "does not go with rollout.colocated=true"),
        (["runtime=inline"], "does not go with runtime=inline, which has one process"),
        (["rollout.elastic.lend=true", "pipeline=one_step_off"], "lend does not go with pipeline=one_step_off, which"),
        (["rollout.elastic.lend=true", "weights.delta=true"], "lend does not go with weights.delta=true: a lent"),
        (
            ["rollout.elastic.lend=true", "rollout.parallel.tp=2", "rollout.backend=vllm"],
            "lend does not go with replicas of 2 GPUs, which do not divide engine.world_size=1",
        ),
    ],
)
def test_what_cannot_be_elastic_is_refused_in_one_sentence(overrides, words):
    with pytest.raises((ConfigError, PlanError), match=words):
        make_plan(load_config("quickstart", [*AHEAD, *TIS, *overrides]))


def test_the_plan_reports_bounds_and_each_replica_s_reservation():
    config = load_config("quickstart", [*AHEAD, *TIS, "rollout.num_replicas=2"])
    make_plan(config)
    assert [pool.name for pool in resource_pools(config) if pool.is_elastic] == ["rollout"]
    told = dict(placement_facts(config, {}, gpus=8))
    assert told["pool rollout"] == "2 processes of 1 GPU, 1 to 4 by rollout.elastic (wait_share): rollout"
