from dataclasses import asdict

import pytest

from rl_bench import Role, Row, Run, missing
from rl_bench.run import half_width_95, speed_ratio


def row_of(run: Run, system: str) -> Row:
    return next(row for row in run.rows() if row.system == system)


def recorded(unit: str, ours: float, peers: list[float], limit: float, goal: str | None = None) -> Run:
    run = Run()
    run.record("m", "ours", [ours], unit=unit, goal=goal)
    for i, peer in enumerate(peers):
        run.record("m", f"peer{i}", [peer], unit=unit, role=Role.PEER)
    run.record("m", "limit", [limit], unit=unit, role=Role.LIMIT)
    return run


def test_systems_take_turns_and_the_warm_up_round_is_not_counted():
    calls: list[str] = []
    run = Run(repetitions=3)
    run.compare("m", {"a": lambda: calls.append("a")}, peers={"b": lambda: calls.append("b")}, inner=2)
    assert "".join(calls) == "aabb" * 4
    assert [row_of(run, name).n for name in "ab"] == [3, 3]


def test_slow_peers_may_take_fewer_turns():
    calls: list[str] = []
    run = Run(repetitions=3)
    run.compare("m", {"a": lambda: calls.append("a")}, peers={"b": lambda: calls.append("b")}, peer_repetitions=1)
    assert "".join(calls) == "ababaa"
    assert [row_of(run, name).n for name in "ab"] == [3, 1]


def test_collect_alternates_and_returns_results_after_warm_up():
    calls = iter(range(100))
    assert Run(repetitions=2).collect({"a": lambda: next(calls), "b": lambda: next(calls)}) == {
        "a": [2, 4],
        "b": [3, 5],
    }


def test_before_is_untimed_per_sample_and_sync_runs_after_it():
    calls: list[str] = []
    run = Run(repetitions=1)
    run.compare("m", {"a": lambda: calls.append("a")}, before=lambda: calls.append("<"), sync=lambda: calls.append(">"))
    assert "".join(calls) == "<a><a>"


def test_median_min_and_max_are_those_of_the_samples():
    run = Run()
    run.record("m", "ours", [5.0, 1.0, 2.0], unit="ms")
    row = row_of(run, "ours")
    assert (row.median, row.min, row.max, row.n) == (2.0, 1.0, 5.0, 3)


@pytest.mark.parametrize(
    ("unit", "ours", "peers", "limit", "to_limit", "to_peer"),
    [
        ("ms", 2.0, [8.0, 4.0], 1.0, 0.5, 2.0),  # durations: the best peer is the shortest
        ("GB/s", 2.0, [0.5, 1.0], 4.0, 0.5, 2.0),  # rates: the best peer is the largest
    ],
)
def test_ratios_are_of_speed_whatever_the_unit(unit, ours, peers, limit, to_limit, to_peer):
    row = row_of(recorded(unit, ours, peers, limit), "ours")
    assert (row.ratio_to_limit, row.ratio_to_best_peer) == (to_limit, to_peer)


def test_a_peer_has_a_ratio_to_the_limit_and_none_to_the_peers():
    row = row_of(recorded("ms", 2.0, [4.0], 1.0), "peer0")
    assert (row.ratio_to_limit, row.ratio_to_best_peer) == (0.25, None)


def test_only_rows_of_the_same_metric_are_compared():
    run = recorded("ms", 2.0, [4.0], 1.0)
    run.record("other", "alone", [3.0], unit="ms")
    row = row_of(run, "alone")
    assert (row.ratio_to_limit, row.ratio_to_best_peer) == (None, None)


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        ("<= 2 ms", True),
        ("<= 1.9 ms", False),
        (">= 3 ms", False),
        (">= 0.5 of limit", True),
        (">= 0.51 of limit", False),
        (">= 2 of best peer", True),
        (">= 2.1 of best peer", False),
        (None, None),
    ],
)
def test_a_goal_is_judged_on_the_median_or_on_a_ratio(goal, met):
    assert row_of(recorded("ms", 2.0, [4.0], 1.0, goal), "ours").met is met


def test_met_is_null_where_nothing_can_be_told():
    run = Run()
    run.record("m", "no peer here", [1.0], unit="ms", goal=">= 1 of best peer")
    run.record("m", "wrong machine", [1.0], unit="ms", goal="<= 5 ms", can_tell=False)
    assert [row.met for row in run.rows()] == [None, None]
    assert [row.goal for row in run.rows()] == [">= 1 of best peer", "<= 5 ms"]


@pytest.mark.parametrize("goal", ["< 2 ms", "<= 2 s", "2 ms", ">= 1 of peers", "<= 2"])
def test_an_unreadable_goal_is_refused_before_the_run(goal):
    with pytest.raises(ValueError, match="cannot be read"):
        Run().compare("m", {"a": pytest.fail}, goal=goal)


def test_a_missing_peer_is_a_row_that_says_so():
    run = Run(repetitions=1)
    run.compare("m", {"a": lambda: None}, peers={"liger": missing("no_such_module", "json") or pytest.fail})
    row = row_of(run, "liger")
    assert (row.n, row.median, row.role, row.note) == (0, None, Role.PEER, "not installed: no_such_module")


def test_missing_is_none_when_everything_is_installed():
    assert missing("json", "pathlib") is None


def test_a_rate_needs_an_amount_and_a_duration_takes_none():
    with pytest.raises(ValueError, match=r"'GB/s' with amount None"):
        Run().compare("m", {"a": pytest.fail}, unit="GB/s")
    with pytest.raises(ValueError, match=r"'ms' with amount 3"):
        Run().compare("m", {"a": pytest.fail}, unit="ms", amount=3)


def test_names_and_limits_are_unambiguous():
    with pytest.raises(ValueError, match="share a name"):
        Run().compare("m", {"a": pytest.fail}, peers={"a": pytest.fail})
    run = recorded("ms", 2.0, [], 1.0)
    with pytest.raises(ValueError, match="has a limit already"):
        run.record("m", "another", [1.0], unit="ms", role=Role.LIMIT)


def test_wall_and_cpu_seconds_are_of_one_call():
    run = Run(repetitions=2)
    run.compare("m", {"a": lambda: sum(range(100_000))}, unit="us", inner=3)
    row = row_of(run, "a")
    assert row.wall_s is not None
    assert row.cpu_s is not None
    assert row.median == pytest.approx(row.wall_s * 1e6)


def test_a_rate_is_the_amount_over_the_wall_seconds():
    run = Run(repetitions=3)
    run.compare("m", {"a": lambda: sum(range(10_000))}, unit="GB/s", amount=2.0)
    row = row_of(run, "a")
    assert row.median == pytest.approx(2.0 / row.wall_s)


def test_speed_ratio_of_nothing_is_nothing():
    assert speed_ratio(None, 1.0, "ms") is None
    assert speed_ratio(1.0, None, "ms") is None


def test_a_row_is_plain_values():
    assert set(asdict(row_of(recorded("ms", 1.0, [], 1.0), "ours"))) >= {
        *(
            "system",
            "metric",
            "unit",
            "median",
            "min",
            "max",
            "n",
            "ratio_to_limit",
            "ratio_to_best_peer",
            "goal",
            "met",
        )
    }


def test_interval_of_few_seeds_is_students():
    assert half_width_95([0.25]) is None
    assert half_width_95([0.0, 2.0]) == pytest.approx(12.706)  # deviation sqrt(2), over sqrt(2)
    assert half_width_95([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)
