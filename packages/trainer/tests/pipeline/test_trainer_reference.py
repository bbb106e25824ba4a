"""The policy that a KL penalty is against."""

import json

import pytest
from rich.console import Console

from rl_trainer import setup
from rl_trainer.config import load_config
from rl_trainer.run import run

pytestmark = pytest.mark.process


def metrics_of(output_dir, model, *overrides):
    settings = [
        "runtime=inline", "steps=2", "eval_every=0", "data.options.num_rows=200", "data.eval_size=4", "timeout_s=120",
        "batch.batch_size=4", "batch.mini_batch_size=4", "batch.group_size=2", "engine.lora.rank=4",
        "engine.optimizer.lr=1e-2", "engine.optimizer.warmup_steps=0", "engine.matmul_precision=highest",
        "algorithm.entropy_coef=0.1", "algorithm.kl_coef=0.1",
    ]  # fmt: skip
    run(
        load_config("quickstart", [*settings, *overrides, f"model.path={model}", f"output_dir={output_dir}"]),
        Console(quiet=True),
    )
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()][1:]
    return [(line["metrics"]["kl"], line["metrics"]["policy_loss"]) for line in lines]


def test_an_actor_without_its_adapter_is_a_reference_engine(model, tmp_path, monkeypatch):
    created = []
    create = setup.create_engine
    monkeypatch.setattr(setup, "create_engine", lambda *args, **kwargs: created.append(1) or create(*args, **kwargs))
    own = metrics_of(tmp_path / "own", model)
    assert len(created) == 1
    monkeypatch.setattr(setup, "has", lambda config, role: role == "reference")
    monkeypatch.setattr("rl_trainer.workers.engine_worker.EngineWorker._is_reference", lambda self, column: False)
    other = metrics_of(tmp_path / "other", model)
    assert len(created) == 3
    assert own[0][0] == pytest.approx(0.0, abs=1e-9), "an adapter begins as nothing"
    assert own[1][0] > 1e-4, "and does not stay so"
    assert other == [pytest.approx(step, abs=1e-6) for step in own]


def test_a_batch_learned_once_reports_its_own_old_log_probs(model, tmp_path, monkeypatch):
    recompute = ("algorithm.old_logprobs=recompute", "algorithm.correction=tis")
    once = metrics_of(tmp_path / "once", model, *recompute)
    for place in ("loop", "setup"):
        monkeypatch.setattr(f"rl_trainer.{place}.has_old_pass", lambda config: True)
    scored = metrics_of(tmp_path / "scored", model, *recompute)
    assert once == [pytest.approx(step, abs=1e-6) for step in scored]
    assert [phases(tmp_path / name) for name in ("once", "scored")] == [False, True]


def phases(output_dir):
    """Whether a step had a pass for old log-probs."""
    return "old_logprobs" in json.loads((output_dir / "metrics.jsonl").read_text().splitlines()[-1])["phase_s"]
