"""The speed estimate of a plan, and the sample that a slow machine evaluates first."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rl_trainer.config import load_config
from rl_trainer.loop import begin
from rl_trainer.metrics import Evaluation, PhaseTimer
from rl_trainer.planning import speed
from rl_trainer.planning.gpus import settle
from rl_trainer.planning.speed import Speed, evaluation_s, first_rows, speed_facts, speed_of, step_s

ROWS = [{"prompt": "x" * 40, "number": number} for number in range(400)]
SPEED = Speed(num_parameters=1000, num_layers=0, width=8, decode_flops=1e3, pass_flops=1e6, weights_s=0.0)


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setattr(speed, "count_gpus", lambda config: 0)
    return settle(load_config("quickstart", ["rollout.max_new_tokens=10"]))


def test_generation_is_prefill_and_decode_by_hand():
    """2 x 1000 x 4 x 100 / 1e6 = 0.8 s of prompts, 8 x 2 x 1000 / 1e3 = 16 s a token, 0.5 ms a completion."""
    seconds = SPEED.generation_s(prompts=4, prompt_tokens=100, completions=8, new_tokens=10)
    assert seconds == pytest.approx(0.8 + 160 + 8 * 0.5e-3)
    from_memory = replace(SPEED, weights_s=20.0, num_layers=5)
    seconds = from_memory.generation_s(prompts=0, prompt_tokens=0, completions=8, new_tokens=10)
    assert seconds == pytest.approx(10 * (20 + 5 * 0.6e-3) + 8 * 0.5e-3), "the weights are read for each token"


def test_a_step_adds_the_passes_over_all_tokens(config):
    """An update is three passes, and four if activations are computed again; a token is a forward pass of 2 P."""
    prompts, completions = config.batch.batch_size, config.batch.batch_size * config.batch.group_size
    made = SPEED.generation_s(prompts=prompts, prompt_tokens=10, completions=completions, new_tokens=10)
    forward, optimizer = 2 * 1000 * completions * 20 / 1e6, 1000 * 7e-9 * prompts / config.batch.mini_batch_size
    assert step_s(config, SPEED, ROWS, 1.0) == pytest.approx(made + 3 * forward + optimizer + 0.1)
    again = replace(config, engine=replace(config.engine, activation_checkpointing=True))
    assert step_s(again, SPEED, ROWS, 1.0) == pytest.approx(made + 4 * forward + optimizer + 0.1)


def test_what_is_no_product_takes_as_long_in_each_format():
    """30 layers of width 576 on 2 threads: 30 x 576 x 29e-9 / 2 = 0.25 ms a token, with fast products or slow."""
    for flops, products in ((1e11, 0.02), (5e11, 0.004)):
        model = Speed(
            num_parameters=10**6, num_layers=30, width=576, num_threads=2, decode_flops=flops, pass_flops=flops,
            weights_s=0.0,
        )  # fmt: skip
        assert model.passes_s(1000, 1) == pytest.approx(products + 1000 * 30 * 576 * 29e-9 / 2)


def test_the_probe_counts_processor_time():
    assert speed._fastest(lambda: threading.Event().wait(0.02)) < 0.01, "a thread that waits computes nothing"


def test_the_probe_is_short_and_gives_a_rate(config):
    start = time.process_time()
    found = speed_of(config)
    assert time.process_time() - start < 5, "0.2 s, torch's import apart"
    assert isinstance(found, Speed)
    assert 1e8 < found.decode_flops < 1e14
    assert 1e8 < found.pass_flops < 1e14


@pytest.mark.promise("The first evaluation is bounded on slow machines")
def test_a_slow_machine_evaluates_a_seeded_sample_first(config, monkeypatch):
    monkeypatch.setattr(speed, "speed_of", lambda config: SPEED)
    assert evaluation_s(config, SPEED, ROWS, 1.0) == pytest.approx(400 * 20 + 400 * 20 / 1e3 + 400 * 0.5e-3)
    sample = first_rows(config, ROWS)
    assert len(sample) == 16, "never fewer"
    assert sample.where(0) == f"held-out row {sample[0]['number'] + 1}", "as in the file"
    assert sample == first_rows(config, ROWS)
    assert sample != first_rows(replace(config, seed=1), ROWS)
    facts = dict(speed_facts(config, SimpleNamespace(train=ROWS, eval=ROWS)))
    assert facts["first evaluation"].startswith(
        "16 prompts, about 3 to 5 min, a sample: all 400 may take longer than 5"
    )
    monkeypatch.setattr(speed, "speed_of", lambda config: replace(SPEED, decode_flops=1e6, pass_flops=1e9))
    assert first_rows(config, ROWS) is ROWS


def test_gpus_and_other_machines_are_not_estimated(config, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    found = speed_facts(replace(config, runtime="ray"), SimpleNamespace(train=ROWS, eval=ROWS))
    assert found == [("seconds a step", "not estimated: the nodes at RAY_ADDRESS are not this machine")]
    monkeypatch.setattr(speed, "count_gpus", lambda config: 1)
    (fact,) = speed_facts(config, SimpleNamespace(train=ROWS, eval=ROWS))
    assert fact[1] == "not estimated: the probe is of processors, and this run has GPUs"


def test_the_first_record_says_how_many_rows_it_covers():
    source = SimpleNamespace(
        evaluate=lambda rows: Evaluation(reward=0.5, accuracy=None, num_prompts=len(rows)), position=0
    )
    policy = SimpleNamespace(weights=SimpleNamespace(sync=lambda version: None))
    components = SimpleNamespace(by_policy={"": policy}, source=source)
    record = begin(components, ROWS[:16], 0, PhaseTimer())
    assert record.eval_prompts == 16
    assert record.is_evaluation
    assert record.scalars()["eval_prompts"] == 16
