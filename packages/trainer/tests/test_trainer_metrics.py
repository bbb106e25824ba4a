"""The metrics that every step has, of a real run; each is computed, and none is there that was not."""

import json

import pytest
from rich.console import Console

from rl_trainer.config import load_config
from rl_trainer.metrics import peak_flops
from rl_trainer.pipeline.roles import model_facts
from rl_trainer.planning.memory import count_parameters, learning_flops
from rl_trainer.run import run
from rl_trainer.workers import engine_worker as engine

SIZES = [
    "runtime=inline", "data.options.num_rows=200", "data.eval_size=4", "batch.batch_size=4", "batch.mini_batch_size=2",
    "batch.group_size=2", "steps=2", "eval_every=0",
]  # fmt: skip
ALWAYS = {
    "completion_tokens_mean", "completion_tokens_max", "truncated_share", "entropy_estimate", "reward_std",
    "groups_without_signal", "mismatch_k3", "grad_norm", "clipped_high", "clipped_low", "lr",
}  # fmt: skip
ON_DEMAND = {"entropy", "kl", "mfu"}


@pytest.mark.promise("Every step has the metrics that are computed, and no other")
@pytest.mark.process
def test_a_step_has_every_metric_that_is_computed_and_no_other(model, tmp_path, monkeypatch):
    plain, whole = tmp_path / "plain", tmp_path / "whole"
    run(load_config("quickstart", [*SIZES, f"model.path={model}", f"output_dir={plain}"]), Console(quiet=True))
    monkeypatch.setattr(engine, "_peak", lambda: 1e12)
    more = ["algorithm.kl_coef=0.01", "algorithm.entropy_coef=0.01"]
    run(load_config("quickstart", [*SIZES, *more, f"model.path={model}", f"output_dir={whole}"]), Console(quiet=True))
    found = [[json.loads(line) for line in (at / "metrics.jsonl").read_text().splitlines()] for at in (plain, whole)]
    for start, *steps in found:
        assert start["eval_reward"] is not None
        assert start["accuracy"] == start["eval_reward"], "the rule gives 0 or 1"
        for step in steps:
            assert step["metrics"].keys() >= ALWAYS
            assert step["reward"] is not None
            assert step["tokens_per_s"] > 0
    assert not found[0][1]["metrics"].keys() & ON_DEMAND
    metrics = found[1][1]["metrics"]
    assert metrics.keys() >= ON_DEMAND
    assert 0 < metrics["mfu"] < 1
    assert metrics["entropy"] == pytest.approx(metrics["entropy_estimate"], rel=1.0)


def test_peaks_are_known_by_the_names_that_drivers_give():
    assert peak_flops("NVIDIA H100 80GB HBM3") == peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H20") == 148e12, "not an H200"
    assert peak_flops("NVIDIA GeForce RTX 4090") is None


@pytest.mark.process
def test_operations_of_a_token(model):
    config = load_config("quickstart", [f"model.path={model}"])
    sizes = model_facts(model).config
    whole = learning_flops(config, sizes)
    assert whole == 6 * count_parameters(sizes)
    adapter = load_config("quickstart", [f"model.path={model}", "engine.lora.rank=4"])
    assert learning_flops(adapter, sizes) == whole * 4 / 6
    tensor_parallel = load_config(
        "quickstart", ["engine.backend=megatron", "engine.world_size=2", "engine.parallel.tp=2"]
    )
    assert learning_flops(tensor_parallel, sizes) == whole / 2
    experts = {**sizes, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": sizes["intermediate_size"]}
    assert whole < learning_flops(config, experts) < 3 * whole, "two experts of eight"
    del sizes["vocab_size"]
    assert learning_flops(config, sizes) is None
