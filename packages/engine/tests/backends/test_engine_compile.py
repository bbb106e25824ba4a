"""Layers compiled by torch step as they do without; what cannot be compiled is refused."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from rl_engine import ConfigError
from rl_engine.testing import write_tiny_model

SCRIPT = Path(__file__).parents[1] / "support" / "compile_ranks.py"
_spec = spec_from_file_location("compile_ranks", SCRIPT)
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)
of_engines = ranks.ranks


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # of inductor's own imports
def test_compiled_layers_step_like_plain_ones(tmp_path):
    write_tiny_model(tmp_path)
    seen = []
    for torch_compile in (False, True):
        torch._dynamo.utils.counters.clear()
        engine = of_engines.build(tmp_path, torch_compile=torch_compile)
        steps = [of_engines.one_step(engine, of_engines.batch_of(of_engines.draw_rows(seed))) for seed in range(6)]
        seen.append((steps, of_engines.weights(engine)))
        engine.close()
        frames = dict(torch._dynamo.utils.counters["frames"])
        assert frames.get("ok", 0) == (frames.get("total", 0) if torch_compile else 0)
    assert frames["total"] < 8  # six batches of other lengths: hardly anything is compiled twice
    assert seen[1][0] == [pytest.approx(step, rel=1e-6) for step in seen[0][0]]
    torch.testing.assert_close(seen[1][1], seen[0][1], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_layers_step_like_plain_ones_on_two_ranks(tmp_path, start_ranks):
    write_tiny_model(tmp_path / "model")
    seen = start_ranks(SCRIPT, tmp_path, 2)
    for case in ranks.CASES:
        (want, weights), (steps, others) = seen[f"{case} plain"], seen[f"{case} compiled"]
        assert steps == [pytest.approx(step, rel=1e-6) for step in want]
        torch.testing.assert_close(others, weights, rtol=1e-5, atol=1e-7)


def test_a_model_whose_layers_change_with_the_batch_is_refused(tmp_path):
    of_engines.moe_oracle.write_model(tmp_path)
    with pytest.raises(ConfigError, match="torch_compile is true and Qwen3MoeForCausalLM has routers"):
        of_engines.build(tmp_path, torch_compile=True)


def test_a_missing_compiler_is_a_sentence(tmp_path, monkeypatch):
    def compiled(function):
        raise RuntimeError("no g++ here")

    monkeypatch.setattr(torch, "compile", compiled)
    with pytest.raises(ConfigError, match=r"torch finds no compiler that works .*: no g\+\+ here\. Install one, or"):
        of_engines.build(write_tiny_model(tmp_path), torch_compile=True)
