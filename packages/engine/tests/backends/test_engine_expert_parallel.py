"""Expert parallelism of the fsdp backend: the numbers of one process, less memory, and what is refused."""

from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import ConfigError, EngineConfig, LoraConfig, ParallelConfig, check
from rl_engine.testing import write_tiny_model

pytestmark = pytest.mark.timeout(600)  # many engines in one start of two processes, on a machine that may be busy
SCRIPT = Path(__file__).parents[1] / "support" / "expert_ranks.py"
_spec = spec_from_file_location("expert_ranks", SCRIPT)
support = module_from_spec(_spec)
_spec.loader.exec_module(support)
ranks, oracle = support.ranks, support.oracle
SIZES_OF_GROUPS = [pytest.param("two", marks=pytest.mark.process), pytest.param("four", marks=pytest.mark.slow)]
SIZES = {
    "vocab_size": 79, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS = {
    "gpt_oss": {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip


def everything():
    return oracle.batch_of(oracle.draw_rows(), is_routed=False)


def run_ranks(start_ranks, folder, size):
    oracle.write_model(folder / "moe")
    for kind, sizes in KINDS.items():
        torch.manual_seed(5)
        config = AutoConfig.for_model(kind, **SIZES, **sizes)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / kind)
    alone = ranks.build(folder / "moe", optimizer=support.STEP)
    ranks.one_step(alone, everything())
    alone.save_checkpoint(folder / "by one", 3)
    after = (*ranks.one_step(alone, everything()), ranks.weights(alone))
    alone.close()
    return {"alone": after} | start_ranks(SCRIPT, folder, size)


@cache
def reference(folder, is_routed):
    return oracle.reference(folder, oracle.draw_rows(), is_routed=is_routed, coef=oracle.COEF)


def check_against_one_process(seen, layout):
    """Loss, auxiliary loss, norm, every gradient and every stepped weight."""
    for precision, tolerance in (("float64", 1e-5), ("float32", 1e-4)):  # transformers' norms are float32 in both
        for is_routed in (False, True):
            want, got = reference(seen["folder"] / "moe", is_routed), seen[layout][precision][is_routed]
            assert got["numbers"] == pytest.approx((want["loss"], want["aux"], want["norm"]), rel=tolerance)
            found = {name: grad.double() for name, grad in got["gradients"].items()}
            torch.testing.assert_close(found, want["gradients"], rtol=tolerance, atol=tolerance * 1e-2)
            plain = seen["ep1"][precision][is_routed]["weights"]
            torch.testing.assert_close(got["weights"], plain, rtol=tolerance, atol=tolerance)


@pytest.mark.promise("Experts divided over ranks give the gradients of one process")
@pytest.mark.process
@pytest.mark.parametrize("layout", ["ep1", "ep2", "ep2 sp2"])
def test_two_ranks_give_the_gradients_of_one_process(two, layout):
    check_against_one_process(two, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep1", "ep2", "ep4", "ep2 hybrid", "ep2 sp2"])
def test_four_ranks_give_the_gradients_of_one_process(four, layout):
    check_against_one_process(four, layout)


LAYER = 4 * 3 * 32 * 16 * 8
"""Bytes of a layer's experts: 4 of 3 * 32 * 16 numbers of 8 bytes."""


@pytest.mark.promise("and a rank gathers its own experts alone")
@pytest.mark.process
def test_a_rank_gathers_its_own_experts_alone(two):
    assert two["gathered"] == {"ep1": [LAYER] * 2, "ep2": [LAYER // 2] * 2, "ep2 sp2": [LAYER // 2] * 2}


@pytest.mark.slow
def test_a_rank_of_four_gathers_its_own_experts_alone(four):
    assert four["gathered"]["ep1"] == [LAYER] * 4
    assert four["gathered"]["ep2"] == four["gathered"]["ep2 hybrid"] == [LAYER // 2] * 4
    assert four["gathered"]["ep4"] == [LAYER // 4] * 4


@pytest.mark.parametrize("size", SIZES_OF_GROUPS)
def test_every_rank_holds_its_share_of_the_weights(request, size):
    share = {"two": 0.5, "four": 0.25}[size]
    assert request.getfixturevalue(size)["share"] == pytest.approx(share, rel=0.1)


@pytest.mark.parametrize("size", SIZES_OF_GROUPS)
def test_a_rank_whose_experts_get_no_token_takes_part(request, size):
    seen = request.getfixturevalue(size)
    want = oracle.reference(seen["folder"] / "moe", support.lopsided(), is_routed=True, coef=0.0)
    assert seen["lopsided"] == pytest.approx((want["loss"], want["norm"]), rel=1e-5)


@pytest.mark.parametrize("size", SIZES_OF_GROUPS)
def test_checkpoints_move_between_layouts(request, size):
    seen = request.getfixturevalue(size)
    loss, norm, weights = seen["alone"]
    for name in ("straight", "again", "from one"):
        assert seen[name][:2] == pytest.approx((loss, norm), rel=1e-6)
        torch.testing.assert_close(seen[name][2], weights, rtol=1e-5, atol=1e-7)
    alone = ranks.build(seen["folder"] / "moe", optimizer=support.STEP)
    assert alone.load_checkpoint(seen["folder"] / "by ep2") == 3
    assert ranks.one_step(alone, everything()) == pytest.approx((loss, norm), rel=1e-6)
    alone.close()
    model = AutoModelForCausalLM.from_pretrained(seen["folder"] / "model by ep2", dtype=torch.float64)
    assert model.model.layers[0].mlp.experts.num_experts == oracle.EXPERTS


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
def test_experts_with_biases_and_shared_experts_are_dispatched(two, kind):
    (steps, weights), (plain_steps, plain_weights) = two[f"{kind} ep2"], two[f"{kind} ep1"]
    assert [number for step in steps for number in step] == pytest.approx(
        [number for step in plain_steps for number in step], rel=1e-5
    )
    torch.testing.assert_close(weights, plain_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.process
def test_drawn_weights_and_bfloat16_are_those_of_one_process(two):
    folder = two["folder"] / "moe"
    alone = ranks.build(folder, init="random")
    torch.testing.assert_close(two["drawn"], ranks.weights(alone), rtol=0, atol=0)
    alone.close()
    alone = ranks.build(folder)
    assert two["bfloat16"] == pytest.approx(ranks.one_step(alone, everything()), rel=0.05)
    alone.close()


@pytest.mark.parametrize(
    ("ep", "size", "said"),
    [
        (3, 3, "parallel.ep = 3 does not divide the model's 4 experts."),
        (2, 3, "parallel.ep = 2 does not divide 3 ranks."),
        (2, 6, "parallel.ep = 2 leaves 3 ranks to share each expert, and 3 does not divide the 32 rows of its"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(tmp_path, ep, size, said):
    config = EngineConfig(model_path=str(oracle.write_model(tmp_path)), parallel=ParallelConfig(ep=ep))
    with pytest.raises(ConfigError, match=said):
        check("fsdp", config, size)


def test_an_adapter_is_refused(tmp_path):
    folder = str(oracle.write_model(tmp_path))
    config = EngineConfig(model_path=folder, parallel=ParallelConfig(ep=2), lora=LoraConfig(rank=2))
    with pytest.raises(ConfigError, match=r"^parallel.ep is 2 and lora is set"):
        check("fsdp", config, 2)


def test_a_model_without_experts_is_refused(tmp_path):
    config = EngineConfig(model_path=str(write_tiny_model(tmp_path)), parallel=ParallelConfig(ep=2))
    with pytest.raises(ConfigError, match=r"^parallel.ep is 2 and Qwen3ForCausalLM has no experts"):
        check("fsdp", config, 2)
