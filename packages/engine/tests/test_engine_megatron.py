"""The megatron backend on gloo: every layout steps as a plain Hugging Face model that sees one row at a time."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.core_model_loading import revert_weight_conversion

from rl_engine import (
    CheckpointError,
    ConfigError,
    EngineConfig,
    Head,
    LoraConfig,
    ModelFolderError,
    ModelInit,
    OptimizerConfig,
    ParallelConfig,
    Precision,
    create_engine,
)
from rl_engine._optimizer import build_optimizer
from rl_engine.losses import sft_loss
from rl_engine.testing import EngineConformance, ragged_batch, write_tiny_model

pytestmark = pytest.mark.timeout(600)  # fourteen engines in one start of two processes, on a machine that may be busy
SCRIPT = Path(__file__).with_name("megatron_ranks.py")
_spec = spec_from_file_location("megatron_ranks", SCRIPT)
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)
rows_of = ranks.ranks.draw_rows
TWO = ["tied:dp2", "tied:tp2", "tied:sp2", "tied:pp2", "moe:dp2", "moe:sp2", "moe:ep2", "bias:tp2", "bias:pp2",
       "deep:vpp2", "deep:cp2"]  # fmt: skip
FOUR = ["tied:tp2pp2", "tied:tp2dp2", "tied:pp2dp2", "tied:tp4", "moe:pp2ep2", "moe:tp2ep2", "moe:tp2pp2"]
MORE = ["tied:tp2cp2", "tied:pp2cp2", "moe:cp2ep2", "deep:vpp2dp2", "deep moe:vpp2ep2"]


@pytest.mark.contract
class TestMegatronEngine(EngineConformance):
    def make_engine(self, folder, **changes):
        return create_engine("megatron", EngineConfig(model_path=str(write_tiny_model(folder)), **changes))


def run_ranks(start_ranks, folder, size, cases):
    for kind in ranks.MODELS:
        ranks.write_model(folder, kind)
    ranks.write_critic(folder)
    ranks.ranks.moe_oracle.write_model(folder / "experts")
    return start_ranks(SCRIPT, folder, size, *cases)


@pytest.fixture(scope="module")
def two(tmp_path_factory, start_ranks):
    return run_ranks(start_ranks, tmp_path_factory.mktemp("two"), 2, TWO)


@pytest.fixture(scope="module")
def four(tmp_path_factory, start_ranks):
    return run_ranks(start_ranks, tmp_path_factory.mktemp("four"), 4, FOUR)


@pytest.fixture(scope="module")
def more(tmp_path_factory, start_ranks):
    return run_ranks(start_ranks, tmp_path_factory.mktemp("more"), 4, MORE)


class Oracle:
    """Scores, losses, norms and weights of two steps of a plain model and a plain AdamW."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        self.model.set_experts_implementation("eager")
        self.columns = self.scores()
        optimizer = build_optimizer(self.model.parameters(), ranks.OPTIMIZER)
        self.steps, self.weights = [], []
        for step in range(2):
            for group in optimizer.param_groups:
                group["lr"] = ranks.learning_rate(ranks.OPTIMIZER, step)
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.model.parameters()])
            optimizer.step()
            self.steps.append((float(loss.detach()), float(norm)))
            named = revert_weight_conversion(self.model, dict(self.model.named_parameters()))
            self.weights.append({name: tensor.detach().clone() for name, tensor in named.items()})

    def distributions(self):
        for prompt, completion, mask in rows_of(ranks.SEED):
            logits = self.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            yield logits.log_softmax(-1), torch.tensor(completion), torch.tensor(mask)

    def scores(self):
        with torch.no_grad():
            found = [(full, full.gather(1, labels[:, None])[:, 0]) for full, labels, _ in self.distributions()]
        likeliest = [full.topk(ranks.CANDIDATES, -1) for full, _ in found]
        return {
            "logprobs": [scored for _, scored in found],
            "entropy": [(-full.exp() * full).sum(-1) for full, _ in found],
            "sum_pi_squared": [full.exp().square().sum(-1) for full, _ in found],
            "candidate_token_ids": [top.indices for top in likeliest],
            "candidate_logprobs": [top.values for top in likeliest],
        }

    def loss(self):
        total, tokens = 0.0, 0
        for full, labels, mask in self.distributions():
            total = total - (full.gather(1, labels[:, None])[:, 0] * mask).sum()
            tokens += int(mask.sum())
        return total / tokens


@pytest.fixture(scope="module")
def oracles():
    return {}


def oracle_of(oracles, folder, kind):
    if kind not in oracles:  # the models are the same in every folder
        oracles[kind] = Oracle(folder / kind)
    return oracles[kind]


def check(seen, oracles, case, size):
    kind = case.split(":")[0]
    want, got = oracle_of(oracles, seen["folder"], kind), seen[case]
    for name, expected in want.columns.items():
        found = [iter(rows) for rows in got[name]]
        in_order = [next(found[rank]) for rank in ranks.owners(size)]
        for one, other in zip(in_order, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one, dtype=other.dtype), other, rtol=1e-5, atol=1e-6)
    assert got["lopsided"] == pytest.approx(want.steps[0][0], rel=1e-5)
    assert got["step"] == pytest.approx(want.steps[0], rel=1e-5)
    assert got["second"] == pytest.approx(want.steps[1], rel=1e-4)
    assert got["weights"].keys() == want.weights[0].keys()
    moved = ranks.initial(seen["folder"] / kind)
    for name, tensor in got["weights"].items():
        assert not torch.equal(tensor, moved[name]), name
    torch.testing.assert_close(got["weights"], want.weights[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got["second_weights"], want.weights[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", TWO)
def test_two_ranks_step_like_a_plain_model(two, oracles, case):
    check(two, oracles, case, 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR)
def test_four_ranks_step_like_a_plain_model(four, oracles, case):
    check(four, oracles, case, 4)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_four_ranks_of_more_layouts_step_like_a_plain_model(more, oracles, case):
    check(more, oracles, case, 4)


def check_resumed(seen, cases):
    resumed = [case for case in cases if "resumed" in seen[case]]
    assert len(resumed) == len(cases) - len({case.split(":")[0] for case in cases})
    for case in resumed:
        assert seen[case]["resumed"] == pytest.approx(seen[case]["second"], rel=1e-9)
        torch.testing.assert_close(seen[case]["resumed_weights"], seen[case]["second_weights"], rtol=1e-9, atol=1e-12)


def test_a_checkpoint_of_one_layout_continues_on_another(two):
    check_resumed(two, TWO)


@pytest.mark.slow
def test_a_checkpoint_of_one_layout_of_four_continues_on_another(four):
    check_resumed(four, FOUR)


@pytest.mark.slow
def test_a_checkpoint_of_cut_rows_continues_where_layers_are_dealt(more):
    check_resumed(more, MORE)


def test_a_layout_is_what_it_says(two):
    """Cut activations are half as long, and cut rows leave room for twice the tokens in a micro-batch."""
    assert two["tied:sp2"]["fed"] == pytest.approx(two["tied:tp2"]["fed"] / 2, abs=two["tied:tp2"]["micro-batches"])
    assert two["deep:cp2"]["fed"] == pytest.approx(two["tied:tp2"]["fed"] / 2, abs=two["deep:cp2"]["micro-batches"])
    assert 2 * two["deep:cp2"]["micro-batches"] <= two["tied:tp2"]["micro-batches"] + 1
    assert (two["tied:pp2"]["layers"], two["deep:vpp2"]["layers"]) == ([0], [0, 2])  # of rank 0


@pytest.mark.parametrize("case", ["tied:sp2", "tied:pp2", "moe:ep2", "bias:tp2", "deep:vpp2"])
def test_a_saved_model_is_an_ordinary_folder(two, case):
    kind, layout = case.split(":")
    model = AutoModelForCausalLM.from_pretrained(two["folder"] / f"{kind}-{layout}-model", dtype=torch.float64)
    named = revert_weight_conversion(model, dict(model.named_parameters()))
    torch.testing.assert_close(
        dict(named), two[case]["second_weights" if "resumed" not in two[case] else "resumed_weights"]
    )


def test_two_engines_of_a_process_share_a_layout(two):
    assert "Another engine of this process is laid out as ParallelConfig(tp=2" in two["refusal"]
    assert "Close the other engine first" in two["refusal"]


def test_a_bad_batch_on_one_rank_is_an_error_on_all(two):
    assert two["bad_batch"].startswith("Rank 1 refused its batch: completion_token_ids holds token id 999")


@pytest.mark.parametrize("layout", ["dp2", "sp2", "pp2", "ep2", "cp2"])
def test_experts_are_evened_out_and_replayed(two, layout):
    oracle = ranks.ranks.moe_oracle
    for is_routed, got in zip((False, True), two["experts"][layout], strict=True):
        rows = oracle.draw_rows()
        want = oracle.reference(two["folder"] / "experts", rows, is_routed=is_routed, coef=oracle.COEF)
        assert got == pytest.approx((want["loss"], want["aux"], want["norm"]), rel=1e-5)


def test_shards_cover_the_weights(two):
    shares = {layout: two["experts"][f"{layout} share"] for layout in ("dp2", "cp2", "sp2", "pp2", "ep2")}
    assert shares.pop("dp2") == shares.pop("cp2") == 1
    assert all(0.4 < share < 0.9 for share in shares.values())


def test_the_stream_of_weights_holds_one_parameter_at_a_time(two):
    most, largest = two["streamed"]
    assert most <= 3 * largest  # of a query, key and value that lie in one parameter, at most


def test_pairs_of_ranks_that_share_a_model_stay_apart(two):
    assert sorted(two["pairs"].count(pair) for pair in set(two["pairs"])) == [2, 2]


def build(folder, **changes):
    options = {"precision": Precision.FLOAT64, "optimizer": OptimizerConfig(lr=1e-2, eps=1e-3)}
    engine = create_engine(
        changes.pop("backend", "megatron"), EngineConfig(model_path=str(folder), **(options | changes))
    )
    engine.initialize()
    return engine


BATCH = ragged_batch([[5, 6, 7], [8], [3] * 9], [[9, 10], [11, 12, 13], [1, 2, 3, 4, 5]])


@pytest.mark.parametrize(("writer", "reader"), [("fsdp", "megatron"), ("megatron", "fsdp")])
def test_a_checkpoint_continues_on_the_other_backend(tmp_path, writer, reader):
    write_tiny_model(tmp_path / "model")
    first = build(tmp_path / "model", backend=writer)
    ranks.one_step(first, BATCH)
    first.save_checkpoint(tmp_path / "checkpoint", 4)
    straight = (*ranks.one_step(first, BATCH), ranks.ranks.weights(first))
    first.close()
    second = build(tmp_path / "model", backend=reader)
    assert second.load_checkpoint(tmp_path / "checkpoint") == 4
    loss, norm = ranks.one_step(second, BATCH)
    weights = ranks.ranks.weights(second)
    second.close()
    assert (loss, norm) == pytest.approx(straight[:2], rel=1e-6)
    torch.testing.assert_close(weights, straight[2], rtol=1e-5, atol=1e-7)


value_loss = ranks.value_loss


@pytest.mark.parametrize("layout", ["tp2", "sp2", "pp2", "cp2"])
def test_named_candidates_are_scored_with_their_gradient(two, layout):
    engine = build(two["folder"] / "tied", backend="fsdp", optimizer=ranks.OPTIMIZER)
    want = ranks.candidates_step(engine, rows_of(ranks.SEED))
    engine.close()
    assert two["candidates"][layout][:2] == pytest.approx(want[:2], rel=1e-5)
    torch.testing.assert_close(two["candidates"][layout][2], want[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["tp2", "sp2", "pp2", "cp2"])
def test_a_critic_on_two_ranks_steps_like_one_on_one(two, layout):
    engine = build(two["folder"] / "critic", backend="fsdp", head=Head.VALUE, optimizer=ranks.OPTIMIZER)
    want = ranks.critic_step(engine, rows_of(ranks.SEED))
    engine.close()
    assert two["critics"][layout][:2] == pytest.approx(want[:2], rel=1e-5)
    torch.testing.assert_close(two["critics"][layout][2], want[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head", [Head.VALUE, Head.REWARD])
def test_a_scalar_head_is_that_of_the_fsdp_backend(tmp_path, head):
    write_tiny_model(tmp_path / "policy")
    source, seen = tmp_path / "policy", []
    for backend in ("fsdp", "megatron"):  # from a policy, whose new head is zero
        engine = build(source, backend=backend, head=head)
        engine.forward_backward_batch(BATCH, value_loss)
        engine.optimizer_step()
        engine.save_model(tmp_path / backend)
        engine.close()
        step = ranks.initial(tmp_path / backend, AutoModelForSequenceClassification)
        engine = build(tmp_path / backend, head=head)
        seen.append((step, engine.forward_backward_batch(BATCH, None).columns["values"].values()))
        engine.close()
    assert seen[0][1].abs().max() > 0.01
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": True}, {"init": ModelInit.RANDOM, "seed": 4}])
def test_it_steps_like_the_fsdp_backend(tmp_path, changes):
    write_tiny_model(tmp_path)
    seen = []
    for backend in ("fsdp", "megatron"):
        engine = build(tmp_path, backend=backend, temperature=0.7, **changes)
        seen.append((*ranks.one_step(engine, BATCH), ranks.ranks.weights(engine)))
        engine.close()
    assert seen[0][:2] == pytest.approx(seen[1][:2], rel=1e-6)
    torch.testing.assert_close(seen[0][2], seen[1][2], rtol=1e-5, atol=1e-7)


def test_bfloat16_trains_on_a_float32_copy_and_resumes_exactly(tmp_path):
    write_tiny_model(tmp_path / "model")
    options = {"precision": Precision.BFLOAT16, "optimizer": OptimizerConfig(lr=1e-4)}
    engine = build(tmp_path / "model", **options)
    wide = build(tmp_path / "model", precision=Precision.FLOAT32, optimizer=None)
    expected = wide.forward_backward_batch(BATCH, sft_loss, forward_only=True).metrics["loss"]
    wide.close()
    assert ranks.one_step(engine, BATCH)[0] == pytest.approx(expected, rel=0.02)
    engine.save_checkpoint(tmp_path / "checkpoint", 1)
    for _ in range(3):  # steps smaller than bfloat16 can hold add up in the copy
        ranks.one_step(engine, BATCH)
    straight = ranks.ranks.weights(engine)
    assert {str(tensor.dtype) for tensor in straight.values()} == {"torch.bfloat16"}
    assert engine.load_checkpoint(tmp_path / "checkpoint") == 1
    for _ in range(3):
        ranks.one_step(engine, BATCH)
    torch.testing.assert_close(ranks.ranks.weights(engine), straight, rtol=0, atol=0)
    engine.close()


def test_rope_of_llama3_is_taken_over(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
    config = AutoConfig.for_model("llama", **(ranks.SIZES | {"rope_parameters": rope}))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    seen = []
    for backend in ("fsdp", "megatron"):
        engine = build(tmp_path, backend=backend, optimizer=None)
        seen.append(engine.forward_backward_batch(BATCH, None).columns["logprobs"].values())
        engine.close()
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": ParallelConfig(tp=2)}, r"parallel\.tp \* pp \* cp = 2 \* 1 \* 1 = 2 does not divide 1 ranks"),
        ({"parallel": ParallelConfig(tp=3)}, r"parallel\.tp = 3 does not divide the model's 4 query heads"),
        ({"parallel": ParallelConfig(pp=3)}, r"parallel\.pp = 3 does not divide the model's 2 layers"),
        ({"parallel": ParallelConfig(ep=2)}, "has no experts"),
        ({"parallel": ParallelConfig(cp=2)}, r"parallel\.tp \* pp \* cp = 1 \* 1 \* 2 = 2 does not divide 1 ranks"),
        ({"parallel": ParallelConfig(tp=2, cp=4)}, r"parallel\.tp \* cp = 8 does not divide the model's 4 query heads"),
        ({"parallel": ParallelConfig(pp=2, vpp=2)}, r"parallel\.pp \* vpp = 4 does not divide the model's 2 layers"),
        ({"parallel": ParallelConfig(vpp=2)}, r"parallel\.vpp is 2 and parallel\.pp is 1; pieces need a pipeline"),
        ({"parallel": ParallelConfig(tp=0)}, r"parallel\.tp is 0"),
        ({"parallel": ParallelConfig(sequence_parallel=True)}, "it would do nothing"),
        ({"head": Head.VALUE, "entropy": True}, "entropy is True; it needs head=lm"),
        ({"num_candidates": 79}, "num_candidates is 79; the model's vocabulary has 78 entries"),
        ({"lora": LoraConfig()}, "no LoRA adapters"),
    ],
)
def test_what_it_cannot_honour_is_refused(tmp_path, changes, message):
    write_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, **changes)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("layout", [{"sp": 2}, {"dp_replicate": 2}])
def test_layouts_of_fsdp_are_refused(tmp_path, layout):
    write_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match=f"parallel.{next(iter(layout))} is 2; it belongs to the fsdp backend"):
        build(tmp_path, parallel=ParallelConfig(**layout))


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(**{axis: 2}) for axis in ("tp", "pp", "vpp", "ep", "cp")],
)
def test_fsdp_refuses_layouts_that_it_has_not(tmp_path, parallel):
    write_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match="the fsdp backend takes sp and dp_replicate only"):
        build(tmp_path, backend="fsdp", parallel=parallel)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gpt2", None, "Model type 'gpt2' has no built-in mapping"),
        ("llama", {"attention_bias": True}, "attention_bias=true"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act=gelu"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "dense layers among expert layers"),
    ],
)
def test_models_without_a_mapping_are_refused(tmp_path, kind, changes, message):
    AutoConfig.for_model(kind, **({} if changes is None else ranks.SIZES | changes)).save_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match=message):
        build(tmp_path)


def test_a_folder_that_does_not_fit_is_refused(tmp_path):
    write_tiny_model(tmp_path, tie_word_embeddings=False)
    config = AutoConfig.from_pretrained(tmp_path)
    config.num_hidden_layers, config.layer_types = 3, ["full_attention"] * 3
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match=r"lacks 11 tensor\(s\): model\.layers\.2"):
        build(tmp_path)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match=r"has, beyond what the architecture takes, 11 tensor"):
        build(tmp_path)
    config.num_hidden_layers, config.layer_types, config.intermediate_size = 2, ["full_attention"] * 2, 60
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match=r"has with another shape 6 tensor"):
        build(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    write_tiny_model(tmp_path / "one")
    write_tiny_model(tmp_path / "other", hidden_size=16)
    engine = build(tmp_path / "one")
    engine.save_checkpoint(tmp_path / "checkpoint", 1)
    engine.close()
    other = build(tmp_path / "other")
    with pytest.raises(CheckpointError, match="belongs to another model"):
        other.load_checkpoint(tmp_path / "checkpoint")
    other.close()
