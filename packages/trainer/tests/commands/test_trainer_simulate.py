"""The schedule simulator: step times worked out by hand, and what it takes from a run."""

import json
from dataclasses import replace

import pytest
import yaml

from rl_trainer.cli import main
from rl_trainer.commands.simulate import Rates, forecast, read_rates, simulate
from rl_trainer.config import as_tree, load_config
from rl_trainer.errors import ConfigError, InputError

# a step is 4 groups of 2 completions of 100 tokens: 800 tokens
EVEN = Rates(
    replica_tokens_per_s=100,
    sequence_tokens_per_s=100,
    update_tokens_per_s=200,
    mean_tokens=100,
    sigma=0.0,
    sync_s=0.5,
)


def configured(*overrides):
    sizes = ["batch.batch_size=4", "batch.mini_batch_size=4", "batch.group_size=2"]
    return load_config("quickstart", [*sizes, "rollout.max_new_tokens=100", *overrides])


def test_in_turns_a_step_takes_generation_learning_and_sync():
    found = simulate(configured("pipeline=sync"), EVEN)
    assert found.step_s == pytest.approx(8 + 4 + 0.5)
    assert found.seconds == pytest.approx({"generation": 8, "learning": 4, "weight sync": 0.5, "stragglers": 0})
    assert (found.bottleneck, found.staleness_max) == ("generation", 0)
    assert (found.generation_use, found.engine_use) == pytest.approx((8 / 12.5, 4 / 12.5))
    assert found.tokens_per_s == pytest.approx(800 / 12.5)


@pytest.mark.parametrize(("update_tokens_per_s", "seconds"), [(200, 8), (50, 16)])
def test_one_step_off_takes_the_longer_of_its_two_phases(update_tokens_per_s, seconds):
    found = simulate(configured("pipeline=one_step_off"), replace(EVEN, update_tokens_per_s=update_tokens_per_s))
    assert found.step_s == pytest.approx(seconds + 0.5)
    assert (found.staleness_mean, found.staleness_max) == (1, 1)


@pytest.mark.process
def test_engine_and_servers_sharing_processors_slow_each_other():
    # 8 s of generation beside 4 s of learning: at half the speed these take 8, in which 4 s' worth is generated
    shared = simulate(configured("pipeline=one_step_off"), replace(EVEN, overlap=0.5))
    assert shared.step_s == pytest.approx(8 + 4 + 0.5)
    assert shared.seconds == pytest.approx({"generation": 4, "learning": 8, "weight sync": 0.5, "stragglers": 0})
    in_turns = simulate(configured("pipeline=sync"), replace(EVEN, overlap=0.5))
    assert in_turns.step_s == pytest.approx(8 + 4 + 0.5)
    # and the longer one goes on alone: 4 s of generation beside 8 of learning
    less = replace(EVEN, replica_tokens_per_s=200, sequence_tokens_per_s=200, update_tokens_per_s=100, overlap=0.5)
    assert simulate(configured("pipeline=one_step_off"), less).step_s == pytest.approx(8 + 4 + 0.5)


def test_two_replicas_generate_in_half_the_time():
    found = simulate(configured("pipeline=sync", "rollout.num_replicas=2"), EVEN)
    assert found.seconds["generation"] == pytest.approx(4)


def test_sequences_beyond_the_places_of_a_replica_wait_for_one():
    rates = replace(EVEN, replica_tokens_per_s=1000)
    assert simulate(configured("rollout.max_num_seqs=8"), rates).step_s == pytest.approx(1 + 4 + 0.5)
    few = simulate(configured("rollout.max_num_seqs=3"), rates)  # 8 of 100 tokens, 3 at a time: three rounds at 100/s
    assert few.step_s == pytest.approx(3 + 4 + 0.5)
    assert few.seconds["stragglers"] == pytest.approx(3 - 0.8)
    assert few.seconds["generation"] == pytest.approx(0.8)


def test_scores_of_a_reference_cost_a_third_of_an_update():
    found = simulate(configured("algorithm.kl_coef=0.01"), EVEN)
    assert found.seconds["learning"] == pytest.approx(4 * 4 / 3)


def test_rewards_are_waited_for():
    assert simulate(configured(), replace(EVEN, reward_s=3)).step_s == pytest.approx(8 + 3 + 4 + 0.5)


def test_groups_without_signal_are_generated_again():
    config = configured("batch.dynamic_sampling=true", "batch.max_refills=50")
    found = simulate(config, replace(EVEN, no_signal=0.5))
    assert found.seconds["generation"] + found.seconds["stragglers"] == pytest.approx(16, rel=0.3)  # twice as many


def test_generation_ahead_hides_a_long_tail_within_its_staleness():
    tail = replace(EVEN, replica_tokens_per_s=800, update_tokens_per_s=400, sigma=1.5)
    sizes = ("rollout.max_new_tokens=2000", "rollout.max_model_len=4096")
    in_turns = simulate(configured(*sizes), tail)
    ahead = simulate(configured(*sizes, "pipeline=fully_async", "staleness.max_staleness=2"), tail)
    assert ahead.step_s < 0.8 * in_turns.step_s
    assert 0 < ahead.staleness_mean <= ahead.staleness_max <= 2
    assert in_turns.seconds["stragglers"] > ahead.seconds["stragglers"]


def test_a_streamed_step_learns_while_the_rest_is_generated():
    tail = replace(EVEN, replica_tokens_per_s=800, sigma=1.5)
    sizes = ("rollout.max_new_tokens=2000", "rollout.max_model_len=4096", "batch.mini_batch_size=1")
    assert simulate(configured(*sizes, "batch.stream=true"), tail).step_s < simulate(configured(*sizes), tail).step_s


def test_what_is_thrown_away_as_too_old_is_told():
    config = configured("pipeline=fully_async", "staleness.policy=group_age", "staleness.max_staleness=1")
    sizes = replace(config.rollout, max_new_tokens=4000, max_model_len=8000)
    found = simulate(replace(config, rollout=sizes), replace(EVEN, sigma=1.5, replica_tokens_per_s=800))
    assert found.late_groups > 0
    assert found.staleness_max <= 1


@pytest.mark.promise("`--simulate` gives a run's step back by its own rates")
@pytest.mark.process
def test_rates_of_a_run_give_its_step_back(tmp_path):
    config = configured("pipeline=sync")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(as_tree(config)))
    phase_s = {"generate": 5.0, "update": 2.0, "weight_sync": 0.25, "advantage": 0.1}
    lines = [{"num_tokens": 0, "phase_s": {}}, *[{"num_tokens": 800, "phase_s": phase_s}] * 3]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rates = read_rates({"run": str(tmp_path), "sigma": "0"})
    assert (rates.mean_tokens, rates.update_tokens_per_s, rates.sync_s) == pytest.approx((100, 400, 0.25))
    assert rates.sequence_tokens_per_s == pytest.approx(rates.replica_tokens_per_s / 8)
    assert simulate(config, rates).step_s == pytest.approx(7.25, rel=0.01)
    quick = read_rates({"run": str(tmp_path), "sigma": "0", "saturation": "2"})
    twice = simulate(configured("pipeline=sync", "rollout.num_replicas=2"), quick)  # 4 each, and 2 are full use
    assert twice.step_s == pytest.approx(7.25 - 2.5, rel=0.01)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"mean_tokens": "5"}, "--simulate needs replica_tokens_per_s, sequence_tokens_per_s, update_tokens_per_s;"),
        ({"mean_tokens": "many"}, "mean_tokens=many is not a number"),
        ({"run": "nowhere"}, "run=nowhere is not an output folder of a run"),
        ({"cluster": "8"}, "cluster=8 is not of the form NODESxGPUS"),
        ({"cluster": "1x1"}, "cluster=1x1 has 1 GPUs, and the run asks for 5 .engine 1, rollout 4."),
    ],
)
def test_what_cannot_be_simulated_is_a_sentence(given, sentence):
    with pytest.raises(InputError, match=sentence):
        forecast(configured("rollout.num_replicas=4"), given)


@pytest.mark.parametrize("value", [0, -1])
def test_a_rate_is_above_zero(value):
    with pytest.raises(ConfigError, match="overlap="):
        replace(EVEN, overlap=value)
    with pytest.raises(ConfigError, match="update_tokens_per_s=.* must be above 0"):
        replace(EVEN, update_tokens_per_s=value)


@pytest.mark.process
def test_the_command_prints_placement_step_and_bottleneck(capsys):
    rates = ["replica_tokens_per_s=1000", "sequence_tokens_per_s=50", "update_tokens_per_s=9000", "mean_tokens=100"]
    assert main(["quickstart", "--simulate", "cluster=1x4", "rollout.num_replicas=3", *rates]) == 0
    shown = capsys.readouterr().out
    for words in ("4 for engine 1, rollout 3: each its own; 0 idle", "simulated step", "bottleneck"):
        assert words in shown
