"""The six meanings of staleness: by hand, and over random schedules."""

import random
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_trainer.config import load_config
from rl_trainer.errors import ConfigError
from rl_trainer.pipeline import staleness
from rl_trainer.pipeline.staleness import (
    POLICIES,
    Admission,
    BatchRatio,
    GroupAge,
    OldestToken,
    QueueLength,
    Schedule,
    Span,
    StalenessPolicy,
    ThresholdFraction,
    create_policy,
    create_schedule,
)
from rl_trainer.planning.plan import make_plan


def running(**released):
    return {int(group[1:]): Span(released=version) for group, version in released.items()}


def finished(released, oldest=None):
    return Span(released=released, oldest=oldest or released, newest=oldest or released)


@pytest.mark.promise("Each staleness policy keeps its bound; at 0 the losses are those of `sync`")
@given(
    name=st.sampled_from(sorted(POLICIES)), bound=st.integers(0, 3), size=st.integers(1, 4),
    fraction=st.sampled_from([0.0, 0.25, 0.5]), seed=st.integers(0, 10**6), steps=st.integers(1, 12),
)  # fmt: skip
def test_no_schedule_breaks_a_bound_or_blocks_the_trainer(name, bound, size, fraction, seed, steps):
    """Groups begin at any version after their release, and finish in any order; some never do, while others may."""
    draw = random.Random(seed)
    limit = {"threshold_fraction": fraction, "batch_ratio": bound + fraction}.get(name, bound)
    policy = POLICIES[name](max_staleness=limit, batch_size=size)
    outstanding, ready, num_released = {}, set(), 0

    def release(version):
        nonlocal num_released
        for _ in range(policy.admit(len(outstanding))):
            num_released += 1
            outstanding[num_released] = Span(released=version)

    for version in range(1, steps + 1):
        release(version)
        assert len(outstanding) >= size, "a batch can never be filled"
        while True:
            for group in policy.expire(outstanding, version):
                del outstanding[group]
                ready.discard(group)
                num_released += 1
                outstanding[num_released] = Span(released=version)
            if (chosen := policy.select(ready, outstanding, version)) is not None:
                break
            still = sorted(set(outstanding) - ready)
            assert still, "everything is finished, and still the trainer waits"
            for group in draw.sample(still, draw.randint(1, len(still))):
                begun = draw.randint(outstanding[group].released, version)
                outstanding[group] = Span(released=outstanding[group].released, oldest=begun, newest=version)
                ready.add(group)
        assert len(set(chosen)) == size
        ages = [version - outstanding[group].oldest for group in chosen]
        if name == "threshold_fraction":
            assert sum(age > 0 for age in ages) <= fraction * size
        else:
            assert max(ages) <= policy.bound
        if name not in {"oldest_token", "group_age"}:
            assert num_released == len(outstanding) + (version - 1) * size, "something was thrown away"
        for group in chosen:
            del outstanding[group]
            ready.remove(group)


def test_admission_by_hand():
    policy = Admission(max_staleness=1, batch_size=2)
    assert [policy.admit(n) for n in (0, 1, 4, 7)] == [4, 3, 0, 0]
    assert policy.select({2, 3}, running(g1=5, g2=5, g3=5, g4=5), 5) == [2, 3]
    outstanding = running(g1=5, g4=5, g5=6, g6=6)
    assert policy.select({4, 5, 6}, outstanding, 6) is None  # 1 may not be left to version 7
    assert policy.select({1, 4, 5}, outstanding, 6) == [1, 4]
    assert policy.expire(outstanding, 9) == []


def test_admission_counts_from_the_oldest_token_once_it_is_known():
    policy = Admission(max_staleness=1, batch_size=2)
    outstanding = {**running(g5=6, g6=6), 1: finished(5, oldest=6), 4: finished(5)}
    assert policy.select({1, 4, 5}, outstanding, 6) == [4, 1]  # 4 is due, 1 waited in a queue and is as young as 5


def test_oldest_token_by_hand():
    policy = OldestToken(max_staleness=1, batch_size=2)
    outstanding = {1: finished(3), 2: finished(3, oldest=4), 3: Span(released=3), 4: finished(5)}
    assert policy.expire(outstanding, 5) == [1]  # 2 began late, 3 may have
    assert policy.select({2, 4}, outstanding, 5) == [2, 4]
    assert policy.select({2}, outstanding, 5) is None


def test_group_age_by_hand():
    policy = GroupAge(max_staleness=1, batch_size=2)
    outstanding = {1: finished(3), 2: finished(3, oldest=4), 3: Span(released=3), 4: finished(5)}
    assert policy.expire(outstanding, 5) == [1, 2, 3]
    assert policy.expire(outstanding, 4) == []


def test_batch_ratio_by_hand():
    policy = BatchRatio(max_staleness=0.5, batch_size=4)
    assert [policy.admit(n) for n in (0, 4, 6)] == [6, 2, 0]
    assert policy.bound == 1
    outstanding = running(g1=1, g6=1, g7=2, g8=2, g9=2, g10=2)
    assert policy.select({6, 7, 8, 9}, outstanding, 2) is None  # 1 is due
    assert policy.select({1, 7, 8, 9}, outstanding, 2) is None  # and 6 too
    assert policy.select({1, 6, 7, 8}, outstanding, 2) == [1, 6, 7, 8]


def test_queue_length_by_hand():
    policy = QueueLength(max_staleness=2, batch_size=2)
    assert policy.admit(0) == 6
    outstanding = running(g1=1, g2=1, g3=1, g4=1)
    assert policy.select({2, 3, 4}, outstanding, 1) is None  # the first batch is 1 and 2
    assert policy.select({1, 2, 3}, outstanding, 1) == [1, 2]


def test_threshold_fraction_by_hand():
    policy = ThresholdFraction(max_staleness=0.5, batch_size=4)
    assert policy.admit(0) == 6
    assert policy.admit(2) == 4  # the two that are left are the stale ones of the next version
    assert policy.bound is None
    assert policy.select({7, 8, 9, 10}, running(g1=1, g6=1, g7=2, g8=2, g9=2, g10=2), 2) == [7, 8, 9, 10]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_without_staleness_one_batch_is_released_in_order(name):
    policy = POLICIES[name](max_staleness=0, batch_size=3)
    assert policy.admit(0) == 3
    assert policy.select({9, 7, 8}, running(g7=4, g8=4, g9=4), 4) == [7, 8, 9]


def config(*overrides):
    return load_config("quickstart", ["pipeline=fully_async", "batch.batch_size=8", *overrides])


def test_the_configuration_chooses():
    policy = create_policy(config("staleness.policy=batch_ratio", "staleness.max_staleness=1.5"))
    assert policy == BatchRatio(max_staleness=1.5, batch_size=8)
    assert create_policy(config()) == Admission(max_staleness=1, batch_size=8)


class Hoarder(StalenessPolicy):
    """Somebody else's."""


@pytest.mark.promise("and staleness policies")
def test_a_policy_from_outside_is_found_by_its_entry_point(monkeypatch):
    point = EntryPoint(name="hoarder", value=f"{__name__}:Hoarder", group=staleness.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: Hoarder)
    monkeypatch.setattr("rl_trainer.plugins.entry_points", lambda group: EntryPoints([point]))
    make_plan(config("staleness.policy=hoarder", "batch.mini_batch_size=8"))
    assert isinstance(create_policy(config("staleness.policy=hoarder", "staleness.max_staleness=3")), Hoarder)


@pytest.mark.promise("So are schedules")
def test_a_schedule_from_outside_is_found_by_its_entry_point(monkeypatch):
    def patient(config):
        return Schedule(policy=Hoarder(max_staleness=0, batch_size=config.batch.batch_size), lag=2)

    point = EntryPoint(name="patient", value=f"{__name__}:patient", group=staleness.SCHEDULE_GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: patient)
    monkeypatch.setattr("rl_trainer.plugins.entry_points", lambda group: EntryPoints([point]))
    schedule = create_schedule(config("pipeline=patient"))
    assert (schedule.lag, schedule.policy.batch_size, type(schedule.policy)) == (2, 8, Hoarder)
    with pytest.raises(ConfigError, match=r"pipeline='hasty' is not known; .*sync.*patient"):
        create_schedule(config("pipeline=hasty"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["staleness.policy=hope"], "'hope' is not known; there are admission, batch_ratio, group_age"),
        (["staleness.max_staleness=0.5"], "max_staleness=0.5 counts whole versions"),
        (["staleness.policy=threshold_fraction", "staleness.max_staleness=2"], "give 0 to 1"),
    ],
)
def test_unsupported_policy_settings_are_refused_before_start(overrides, words):
    with pytest.raises(ConfigError, match=words):
        make_plan(config("batch.mini_batch_size=8", *overrides))
