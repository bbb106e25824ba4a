import os
import socket
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_engine import LoraConfig
from rl_engine.testing import write_tiny_model

SCRIPT = Path(__file__).with_name("engine_ranks.py")
_spec = spec_from_file_location("engine_ranks", SCRIPT)
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)


def run_ranks(folder, size):
    write_tiny_model(folder / "model")
    alone = ranks.build(folder / "model")
    ranks.one_step(alone, ranks.batch_of(ranks.draw_rows(7)))
    alone.save_checkpoint(folder / "written_by_one", 5)
    after = (*ranks.one_step(alone, ranks.batch_of(ranks.draw_rows(7))), ranks.weights(alone))
    alone.close()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder)],
            env=os.environ | shared | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        errors = [process.communicate(timeout=200)[1] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * size, "\n\n".join(error[-3000:] for error in errors)
    return {"folder": folder, "alone": after, "size": size} | torch.load(folder / "seen.pt", weights_only=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("two"), 2)


def oracle(folder, seed):
    """Loss and gradients of a plain Hugging Face model that sees one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    total, tokens = 0.0, 0
    for prompt, completion, mask in ranks.draw_rows(seed):
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        scored = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        total = total - (scored * torch.tensor(mask)).sum()
        tokens += sum(mask)
    (total / tokens).backward()
    return float(total.detach() / tokens), {name: parameter.grad for name, parameter in model.named_parameters()}


def check_against_oracle(seen):
    for seed in range(ranks.SEEDS):
        loss, gradients = oracle(seen["folder"] / "model", seed)
        assert seen["losses"][seed] == pytest.approx(loss, rel=1e-7)
        assert seen["gradients"][seed].keys() == gradients.keys()
        torch.testing.assert_close(
            seen["gradients"][seed], gradients, rtol=1e-5, atol=1e-7
        )  # transformers' norms are float32


def test_two_ranks_give_the_oracles_gradient_however_rows_are_dealt(two):
    check_against_oracle(two)


def test_a_checkpoint_of_one_rank_continues_on_two(two):
    loss, norm, weights = two["from_one"]
    assert (loss, norm) == pytest.approx(two["alone"][:2], rel=1e-7)
    torch.testing.assert_close(weights, two["alone"][2], rtol=1e-6, atol=1e-9)


def test_a_checkpoint_of_two_ranks_continues_on_two_and_on_one(two):
    straight, again = two["straight"], two["again"]
    assert again[:2] == straight[:2]
    torch.testing.assert_close(again[2], straight[2], rtol=0, atol=0)
    alone = ranks.build(two["folder"] / "model")
    assert alone.load_checkpoint(two["folder"] / "written_by_many") == 3
    loss, norm = ranks.one_step(alone, ranks.batch_of(ranks.draw_rows(7)))
    weights = ranks.weights(alone)
    alone.close()
    assert (loss, norm) == pytest.approx(straight[:2], rel=1e-7)
    torch.testing.assert_close(weights, straight[2], rtol=1e-6, atol=1e-9)


def test_a_model_saved_by_two_ranks_is_an_ordinary_folder(two):
    folder = two["folder"] / "model_by_many"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert (folder / "tokenizer.json").is_file()
    original = AutoModelForCausalLM.from_pretrained(two["folder"] / "model", dtype=torch.float64)
    moved = (model.lm_head.weight - original.lm_head.weight).abs().max()
    assert 0 < moved < 0.02  # one AdamW step of 1e-2


def test_a_bad_batch_on_one_rank_is_an_error_on_all(two):
    assert two["refusal"].startswith("Rank 1 refused its batch: completion_token_ids holds token id 999")


def test_bfloat16_trains_on_two_ranks(two):
    assert two["bfloat16"] == pytest.approx(two["first"], rel=0.03)
    assert two["bfloat16_dtypes"] == {"torch.bfloat16"}


def test_an_adapter_on_two_ranks_is_that_of_one(two):
    alone = ranks.build(two["folder"] / "model", lora=LoraConfig(rank=2))
    data = ranks.batch_of(ranks.draw_rows(7))
    steps = [ranks.one_step(alone, data) for _ in range(3)]
    merged = ranks.weights(alone)
    alone.close()
    assert two["without_adapter"] == pytest.approx(steps[0][0], rel=1e-9)  # B is zero at first
    assert two["adapted"] == [pytest.approx(step, rel=1e-6) for step in steps]
    torch.testing.assert_close(two["merged"], merged, rtol=1e-5, atol=1e-8)


def test_a_frozen_engine_scores_on_two_ranks(two):
    assert two["frozen_keys"] == ["entropy", "logprobs"]


@pytest.mark.slow
def test_four_ranks_give_the_oracles_gradient(tmp_path):
    check_against_oracle(run_ranks(tmp_path, 4))
