"""Schedules, and the staleness policies that they name; what the policies decide is tested in rl-tq."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from rl_tq.types import StalenessPolicy
from rl_trainer.config import load_config
from rl_trainer.errors import ConfigError
from rl_trainer.pipeline import staleness
from rl_trainer.pipeline.staleness import Schedule, create_schedule
from rl_trainer.planning.plan import make_plan


def config(*overrides):
    return load_config("quickstart", ["pipeline=fully_async", "batch.batch_size=8", *overrides])


def test_the_configuration_chooses():
    policy = create_schedule(config("staleness.policy=batch_ratio", "staleness.max_staleness=1.5")).policy
    assert (policy.name, policy.max_staleness, policy.batch_size) == ("batch_ratio", 1.5, 8)
    assert create_schedule(config()).policy.name == "admission"


@pytest.mark.parametrize("pipeline", ["sync", "one_step_off"])
def test_other_schedules_admit_one_batch_and_bound_ages(pipeline):
    schedule = create_schedule(config(f"pipeline={pipeline}"))
    assert [schedule.policy.admit(n) for n in (0, 8)] == [8, 0]
    lag = int(pipeline == "one_step_off")
    assert [tuple(schedule.bound_at(step)) for step in (1, 2)] == [(0, 0), (lag, lag)]


class Hoarder(StalenessPolicy):
    """Somebody else's."""

    name = "hoarder"


def install(monkeypatch, name, found, group):
    point = EntryPoint(name=name, value=f"{__name__}:{name}", group=group)
    monkeypatch.setattr(EntryPoint, "load", lambda self: found)
    monkeypatch.setattr("rl_trainer.plugins.entry_points", lambda group: EntryPoints([point]))


@pytest.mark.promise("and staleness policies")
def test_a_policy_from_outside_is_found_by_its_entry_point(monkeypatch):
    install(monkeypatch, "hoarder", Hoarder, staleness.POLICY_GROUP)
    make_plan(config("staleness.policy=hoarder", "batch.mini_batch_size=8"))
    given = config("staleness.policy=hoarder", "staleness.max_staleness=3")
    assert isinstance(create_schedule(given).policy, Hoarder)


@pytest.mark.promise("So are schedules")
def test_a_schedule_from_outside_is_found_by_its_entry_point(monkeypatch):
    def patient(config):
        return Schedule(policy=Hoarder(max_staleness=0, batch_size=config.batch.batch_size), lag=2)

    install(monkeypatch, "patient", patient, staleness.SCHEDULE_GROUP)
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
