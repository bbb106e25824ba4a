"""What a refusal advises, applied to what it refuses, leads to a run that is accepted, and not in a circle."""

import functools
import re

import pytest
from allpairspy import AllPairs

from rl_trainer import load_config
from rl_trainer.algorithms import POLICY_LOSSES
from rl_trainer.errors import ConfigError, PlanError
from rl_trainer.planning.plan import make_plan

pytestmark = pytest.mark.process  # no process, but hundreds of plans
FEATURES = [
    {"algorithm.loss": "luffy", "batch.given": "1"},
    {"algorithm.loss": "gspo"},
    {"algorithm.loss": "cispo"},
    {"algorithm.loss": "topr"},
    {"algorithm.loss": "reinforce"},
    {"algorithm.correction": "tis"},
    {"algorithm.rejection": "token_k1"},
    {"algorithm.rejection": "sequence_k3", "algorithm.rejection_counts": "after"},
    {"algorithm.old_logprobs": "rollout"},
    {"algorithm.top_entropy": "0.2"},
    {"algorithm.advantage": "optimal_token_baseline"},
    {"algorithm.kl_coef": "0.1", "algorithm.kl_in_reward": "true"},
    {"algorithm.kl_coef": "0.1", "algorithm.kl_estimator": "k3*", "algorithm.kl_in_reward": "true"},
    {"pipeline": "one_step_off"},
    {"pipeline": "fully_async", "staleness.max_staleness": "2"},
    {"batch.replay": "{share: 0.5, max_age: 4}"},
    {"batch.stream": "true"},
    {"batch.given": "1"},
    {"rollout.top_p": "0.9"},
    {"rollout.eval_samples": "4"},
    {"rollout.colocated": "true"},
    {"engine.min_lr_ratio": "0.1"},
    {"steps": "10", "epochs": "1"},
]
LEFT_TO_THE_USER = (
    "set teacher.path",
    "set batch.given",
    "set a key of critic",
    "set reward.parts",
    "takes runtime=ray",
)
"""Advice without a value, which depends on what the user has."""


def refusal_of(settings):
    return _refusal_of(tuple(sorted(settings.items())))


@functools.cache
def _refusal_of(settings):
    try:
        make_plan(load_config("quickstart", [f"{key}={value}" for key, value in settings]))
    except (ConfigError, PlanError) as error:
        return str(error)
    return None


def whole(name, settings):
    """The key of a name without its section."""
    sections = ("algorithm", "batch", "rollout", "staleness", "engine")
    known = [*settings, *(f"{section}.{name}" for section in sections)]
    if name == "stream":
        return "batch.stream"
    return name if "." in name or name in settings else next(key for key in known if key.endswith(f".{name}"))


def advice_of(message, settings):
    """Changes that a message advises, each alone: by key its value, or None to leave it out."""
    *_, tail = re.split(r"; |: (?=set |leave )", message)
    assert tail != message, f"no advice: {message}"
    found = [{whole(m[1], settings): m[2]} for m in re.finditer(r"([a-z_.]+)=([\w*.-]+)", tail)]
    if "leave" in tail:
        named = [name for name in re.findall(r"leave (\S+)", tail) if name not in ("it", "them", "one")]
        subjects = [key for key in settings if key in message and key != "pipeline"]
        found += [{whole(name, settings): None} for name in named] or [{key: None} for key in subjects]
    return found


def follow(settings, path=()):
    """Follow every advice to its end; raises AssertionError where one leads back or nowhere."""
    message = refusal_of(settings)
    if message is None or any(each in message for each in LEFT_TO_THE_USER):
        return
    path = (*path, settings)
    assert len(path) < 6, message
    ends = []
    for change in advice_of(message, settings):
        changed = {key: value for key, value in {**settings, **change}.items() if value is not None}
        if changed in path:
            ends.append(f"{change} leads back")
            continue
        follow(changed, path)
        ends.append(None)
    assert ends, f"no advice: {message}"
    assert None in ends, f"{message}: {ends}"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: " ".join(map("=".join, feature.items())))
def test_advice_leads_to_a_plan(feature):
    for other in FEATURES[FEATURES.index(feature) :]:  # those before it have tried themselves with it
        settings = {**feature, **other}
        if len(settings) == len(feature) + len(other):
            follow(settings)


def test_advice_on_losses_and_corrections_leads_to_a_plan():
    keys = ("algorithm.loss", "algorithm.correction", "algorithm.old_logprobs", "pipeline")
    values = (
        sorted(POLICY_LOSSES),
        ("none", "tis", "sequence_icepop"),
        ("recompute", "rollout"),
        ("sync", "fully_async"),
    )
    for each in AllPairs(values):
        follow(dict(zip(keys, each, strict=True)))


@pytest.mark.parametrize("needs", [{"algorithm.top_entropy": "0.2"}, {"batch.given": "1", "algorithm.loss": "ppo"}])
def test_sampler_log_probs_do_not_replace_a_required_pass(needs):
    message = refusal_of({"pipeline": "fully_async", "algorithm.old_logprobs": "recompute", **needs})
    assert "set algorithm.correction=tis" in message
    assert "old_logprobs=rollout" not in message
    assert "or algorithm.old_logprobs=rollout" in refusal_of(
        {"pipeline": "fully_async", "algorithm.old_logprobs": "recompute"}
    )
