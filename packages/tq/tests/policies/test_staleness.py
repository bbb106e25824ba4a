"""The six meanings of staleness: by hand, and over random schedules."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_tq.policies import POLICIES, policy_from_json
from rl_tq.policies.staleness import Admission, BatchRatio, GroupAge, OldestToken, QueueLength, ThresholdFraction
from rl_tq.types import StalenessPolicy
from rl_tq.types.staleness import Span

NAMES = sorted(name for name, policy in POLICIES.items() if issubclass(policy, StalenessPolicy))


def running(**released):
    return {int(group[1:]): Span(admitted=version) for group, version in released.items()}


def finished(released, oldest=None):
    return Span(admitted=released, oldest=oldest or released)


@pytest.mark.promise("Each staleness policy keeps its bound; at 0 the losses are those of `sync`")
@given(
    name=st.sampled_from(NAMES), bound=st.integers(0, 3), size=st.integers(1, 4),
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
            outstanding[num_released] = Span(admitted=version)

    for version in range(1, steps + 1):
        release(version)
        assert len(outstanding) >= size, "a batch can never be filled"
        while True:
            for group in policy.expire(outstanding, version):
                del outstanding[group]
                ready.discard(group)
                num_released += 1
                outstanding[num_released] = Span(admitted=version)
            if (chosen := policy.select(ready, outstanding, version)) is not None:
                break
            still = sorted(set(outstanding) - ready)
            assert still, "everything is finished, and still the trainer waits"
            for group in draw.sample(still, draw.randint(1, len(still))):
                begun = draw.randint(outstanding[group].admitted, version)
                outstanding[group] = Span(admitted=outstanding[group].admitted, oldest=begun)
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
    outstanding = {1: finished(3), 2: finished(3, oldest=4), 3: Span(admitted=3), 4: finished(5)}
    assert policy.expire(outstanding, 5) == [1]  # 2 began late, 3 may have
    assert policy.select({2, 4}, outstanding, 5) == [2, 4]
    assert policy.select({2}, outstanding, 5) is None


def test_group_age_by_hand():
    policy = GroupAge(max_staleness=1, batch_size=2)
    outstanding = {1: finished(3), 2: finished(3, oldest=4), 3: Span(admitted=3), 4: finished(5)}
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
    assert ThresholdFraction(max_staleness=0, batch_size=4).bound == 0
    assert policy.select({7, 8, 9, 10}, running(g1=1, g6=1, g7=2, g8=2, g9=2, g10=2), 2) == [7, 8, 9, 10]


@pytest.mark.parametrize("name", NAMES)
def test_without_staleness_one_batch_is_released_in_order(name):
    policy = POLICIES[name](max_staleness=0, batch_size=3)
    assert policy.admit(0) == 3
    assert policy.select({9, 7, 8}, running(g7=4, g8=4, g9=4), 4) == [7, 8, 9]


@pytest.mark.parametrize("name", NAMES)
def test_extra_groups_are_admitted_and_policies_travel(name):
    policy = POLICIES[name](max_staleness=0, batch_size=3, num_extra=2)
    assert policy.admit(0) == 5
    assert policy_from_json(policy.to_json()) == policy


@pytest.mark.parametrize(
    ("policy", "given", "words"),
    [
        (Admission, {"max_staleness": 0.5}, "max_staleness=0.5 counts whole versions with the policy admission"),
        (ThresholdFraction, {"max_staleness": 2}, "max_staleness=2 is a share of the batch .* give 0 to 1"),
        (GroupAge, {"max_staleness": -1}, "at least 0"),
        (GroupAge, {"max_staleness": 1, "batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_parameters_without_a_meaning_are_refused(policy, given, words):
    with pytest.raises(ValueError, match=words):
        policy(**{"batch_size": 4, **given})
