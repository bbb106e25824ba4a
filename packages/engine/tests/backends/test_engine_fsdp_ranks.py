from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import EngineConfig, LoraConfig, create_engine
from rl_engine.testing import write_tiny_model

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.process,
]  # many engines in one start of two processes, on a machine that may be busy
SCRIPT = Path(__file__).parents[1] / "support" / "engine_ranks.py"
_spec = spec_from_file_location("engine_ranks", SCRIPT)
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)


def run_ranks(start_ranks, folder, size):
    write_tiny_model(folder / "model")
    write_tiny_model(folder / "odd heads", num_key_value_heads=1)
    ranks.moe_oracle.write_model(folder / "moe")
    ranks.images.write_model(folder / "sees", "qwen3_vl")
    wide = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_key_value_heads": 8}
    AutoConfig.for_model("qwen3", vocab_size=78, num_attention_heads=8, head_dim=64, **wide).save_pretrained(
        folder / "wide"
    )
    alone = ranks.build(folder / "model")
    ranks.one_step(alone, ranks.batch_of(ranks.draw_rows(7)))
    alone.save_checkpoint(folder / "written_by_one", 5)
    after = (*ranks.one_step(alone, ranks.batch_of(ranks.draw_rows(7))), ranks.weights(alone))
    alone.close()
    return {"alone": after} | start_ranks(SCRIPT, folder, size)


@cache
def oracle(folder, seed):
    """Loss, gradients and log-probs of a plain Hugging Face model that sees one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    total, tokens, rows = 0.0, 0, []
    for prompt, completion, mask in ranks.draw_rows(seed):
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        scored = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        rows.append(scored.tolist())
        total = total - (scored * torch.tensor(mask)).sum()
        tokens += sum(mask)
    (total / tokens).backward()
    return float(total.detach() / tokens), {name: parameter.grad for name, parameter in model.named_parameters()}, rows


def check_against_oracle(seen, layout):
    for seed in range(ranks.SEEDS):
        loss, gradients, rows = oracle(seen["folder"] / "model", seed)
        assert seen[layout]["losses"][seed] == pytest.approx(loss, rel=1e-7)
        for got, want in zip(seen[layout]["logprobs"][seed], rows, strict=True):
            assert got == pytest.approx(want, rel=1e-6)
        assert seen[layout]["gradients"][seed].keys() == gradients.keys()
        torch.testing.assert_close(
            seen[layout]["gradients"][seed], gradients, rtol=1e-5, atol=1e-7
        )  # transformers' norms are float32


@pytest.mark.promise("They are those of a plain Hugging Face model in float64")
@pytest.mark.parametrize("layout", ["dp", "sp2", "replicas"])
def test_two_ranks_give_the_oracle_s_gradient_for_any_split(two, layout):
    check_against_oracle(two, layout)


@pytest.mark.promise("Every rank runs as many micro-batches")
def test_every_rank_runs_as_many_micro_batches(two):
    """Also where one of them passed all rows, or none."""
    counts = [counts for layout in ("dp", "sp2", "replicas") for counts in two[layout]["micro-batches"]]
    assert all(first == second for first, second in counts)
    assert max(first for first, _ in counts) > 1


@pytest.mark.parametrize("layout", ["dp", "sp2", "replicas"])
def test_experts_are_evened_out_and_replayed_over_ranks(two, layout):
    check_experts(two["folder"] / "moe", two[f"{layout} experts"])


def check_experts(folder, seen):
    for is_routed, got in zip((False, True), seen, strict=True):
        want = ranks.moe_oracle.reference(
            folder, ranks.moe_oracle.draw_rows(), is_routed=is_routed, coef=ranks.moe_oracle.COEF
        )
        assert got == pytest.approx((want["loss"], want["aux"], want["norm"]), rel=1e-5)


@pytest.mark.promise("`get_local_shards()` covers the weights, nothing gathered")
def test_shards_cover_the_weights_and_replicas_hold_them_all(two):
    assert two["dp share"] == pytest.approx(0.5, rel=0.1)
    assert two["replicas share"] == 1


def test_ranks_with_and_without_images_learn_together(two):
    folder = two["folder"] / "sees"
    alone = ranks.build(folder)
    numbers = ranks.images.patch_numbers(folder)
    rows = ranks.images.rows_of(numbers)
    want = ranks.one_step(alone, ranks.images.batch_of(rows))
    alone.close()
    alone = ranks.build(folder)
    videos = ranks.one_step(alone, ranks.images.batch_of_videos(ranks.images.with_videos(rows, numbers, "qwen3_vl")))
    alone.close()
    assert two["images"] == pytest.approx(want, rel=1e-6)
    assert two["videos"] == pytest.approx(videos, rel=1e-6)


def test_ranks_that_share_tokens_have_room_for_twice_as_many(two):
    refused = "Row 0 has 30 tokens; max_tokens_per_gpu is 20. Raise the budget or shorten the row."
    assert two["long row"] == {"dp": refused, "sp2": None, "replicas": refused}


def test_attention_with_its_tokens_cut_is_attention(two):
    whole, shared = two["attention"]
    torch.testing.assert_close(shared, whole)


def test_layouts_that_do_not_divide_are_refused(two):
    assert two["refused heads"].startswith("parallel.sp = 2 does not divide the model's 1 key and value heads")
    assert two["refused ranks"] == "parallel.dp_replicate = 3 does not divide 2 ranks."


def test_rows_that_meet_need_the_same_columns(two):
    assert two["odd columns"].startswith("Ranks passed different columns: ['completion_token_ids', ")


def test_a_checkpoint_of_one_rank_continues_on_two(two):
    loss, norm, weights = two["from_one"]
    assert (loss, norm) == pytest.approx(two["alone"][:2], rel=1e-7)
    torch.testing.assert_close(weights, two["alone"][2], rtol=1e-6, atol=1e-9)


@pytest.mark.promise("It loads on any number of ranks")
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


def test_only_rank_0_ever_holds_a_model_that_is_drawn(two):
    (first, second), whole, _ = two["memory"]
    assert first > whole
    assert second < 0.8 * whole  # half of it is its own shard


def test_the_stream_of_weights_holds_one_tensor_at_a_time(two):
    _, whole, (most, largest) = two["memory"]
    assert 4 * largest < 0.1 * whole
    assert most <= 2 * largest  # one that was handed out, and the next


def test_a_folder_that_cannot_be_read_is_an_error_on_every_rank(two):
    assert all("nowhere does not exist" in text for text in two["refused folder"])


def test_a_checkpoint_is_written_while_training_goes_on(two):
    straight, again, failure = two["background"]
    assert again[:2] == straight[:2]
    torch.testing.assert_close(again[2], straight[2], rtol=0, atol=0)
    assert "a file/checkpoint was not written" in failure
    alone = ranks.build(two["folder"] / "model")
    assert alone.load_checkpoint(two["folder"] / "in_background") == 6
    alone.close()


def test_a_model_saved_by_two_ranks_is_an_ordinary_folder(two):
    folder = two["folder"] / "model_by_many"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert (folder / "tokenizer.json").is_file()
    original = AutoModelForCausalLM.from_pretrained(two["folder"] / "model", dtype=torch.float64)
    moved = (model.lm_head.weight - original.lm_head.weight).abs().max()
    assert 0 < moved < 0.02  # one AdamW step of 1e-2


def test_a_two_rank_checkpoint_becomes_a_plain_folder(two, tmp_path):
    config = EngineConfig(model_path=str(two["folder"] / "model"), optimizer=None, precision="float64")
    engine = create_engine("fsdp", config)
    engine.initialize()
    engine.load_checkpoint(two["folder"] / "written_by_many")
    engine.save_model(tmp_path / "saved")
    engine.close()
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    torch.testing.assert_close(saved, load_file(two["folder"] / "model_by_many" / "model.safetensors"), rtol=0, atol=0)


def test_a_bad_batch_on_one_rank_is_an_error_on_all(two):
    assert two["refusal"].startswith("Rank 1 refused its batch: completion_token_ids holds token id 999")


def test_a_nan_on_one_rank_is_an_error_on_all_without_changes(two):
    for said, unchanged in two["nan"]:
        assert "The gradient norm is nan; the step was not taken" in said
        assert unchanged


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
    torch.testing.assert_close(two["merged"], merged, rtol=1e-5, atol=1e-7)  # norms are float32


def test_a_frozen_engine_scores_on_two_ranks(two):
    alone = ranks.build(two["folder"] / "model", optimizer=None, num_candidates=3, **ranks.EXTRAS)
    for rank, columns in enumerate(two["frozen"]):
        want = alone.forward_backward_batch(ranks.batch_of(ranks.draw_rows(7)[rank::2]), None).columns
        assert set(columns) == {"candidate_logprobs", "candidate_token_ids", "entropy", "logprobs", "sum_pi_squared"}
        for name, found in columns.items():
            torch.testing.assert_close(found, want[name].values(), rtol=1e-6, atol=1e-8)
    alone.close()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp", "sp2", "hybrid", "sp2 hybrid"])
def test_four_ranks_give_the_oracles_gradient(four, layout):
    check_against_oracle(four, layout)
    check_experts(four["folder"] / "moe", four[f"{layout} experts"])
