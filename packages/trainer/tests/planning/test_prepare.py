"""`prepare`: one pass over a configuration, for every way to start."""

import json

import pytest

from rl_rollout.testing import write_tiny_model
from rl_trainer.config import load_config
from rl_trainer.errors import ConfigError
from rl_trainer.planning import gpus, preflight, prepare
from rl_trainer.planning.prepare import prepare_policy


@pytest.fixture
def settings(tmp_path):
    """Overrides of a run on a file of 50 rows, for two epochs."""
    rows = [
        json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1), "data_source": "reasoning_gym/sum"})
        for n in range(50)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    data = ["data.format=rows", "data.options={}", f"data.path={tmp_path}/rows.jsonl", "data.eval_size=5"]
    return [*data, "epochs=2", "batch.batch_size=20", "batch.mini_batch_size=20", "runtime=inline"]


@pytest.mark.process
def test_each_stage_of_the_preparation_runs_once(settings, monkeypatch):
    calls = []
    for module, name in (
        (prepare, "load_datasets"),
        (prepare, "settle"),
        (prepare, "make_plan"),
        (preflight, "with_models"),
        (preflight, "check"),
        (preflight, "check_backends"),
    ):
        stage = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, s=stage, **k: calls.append(n) or s(*a, **k))
    found = prepare.prepare(load_config("quickstart", settings))
    assert sorted(calls) == sorted({*calls}), "each once"
    assert len(calls) == 6
    assert (found.config.steps, found.config.epochs) == (5, 0), "twice 45 rows, 20 a step"
    assert (len(found.datasets.train), len(found.datasets.eval)) == (45, 5)
    assert dict(found.facts)["run"].startswith("quickstart, seed 0, 5 steps")
    assert found.config == gpus.settle(found.config)


def test_a_policy_is_evaluated_with_what_a_run_settles(settings, tmp_path):
    model = write_tiny_model(tmp_path / "model", max_position_embeddings=4096)
    config, data = prepare_policy(load_config("quickstart", [*settings, f"model.path={model}"]))
    assert str(config.engine.precision) in ("float32", "bfloat16"), "auto is settled"
    assert len(data.eval) == 5
    with pytest.raises(ConfigError, match="model.path is not set"):
        prepare_policy(load_config("quickstart", settings))
    with pytest.raises(ConfigError, match="agent.loop='nowhere' is not known"):
        prepare_policy(load_config("quickstart", [*settings, f"model.path={model}", "agent.loop=nowhere"]))
