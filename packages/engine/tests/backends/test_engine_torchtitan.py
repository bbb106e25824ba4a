"""The torchtitan backend on gloo: its model definitions and sharding, compared with plain Hugging Face models."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import ConfigError, EngineConfig, LoraConfig, ModelFolderError, ParallelConfig, create_engine
from rl_engine.losses import token_mean, token_values
from rl_engine.testing import EngineConformance, ragged, ragged_batch, write_tiny_model

pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install 'rl-engine[torchtitan]'")
pytestmark = pytest.mark.timeout(600)  # two processes that import a compiler each, on a machine that may be busy
SCRIPT = Path(__file__).parents[1] / "support" / "torchtitan_ranks.py"
_spec = spec_from_file_location("torchtitan_ranks", SCRIPT)
titan = module_from_spec(_spec)
_spec.loader.exec_module(titan)
ranks = titan.ranks
LLAMA = {
    "vocab_size": 78, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}  # fmt: skip


def write_llama(folder, **changes):
    torch.manual_seed(2)
    config = AutoConfig.for_model("llama", **(LLAMA | changes))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def value_loss(output, rows):
    wanted, mask = (token_values(rows, name, output.values) for name in ("returns", "loss_mask"))
    return token_mean((output.values - wanted) ** 2, mask, output), {}


@pytest.mark.process
@pytest.mark.contract
class TestTorchtitanEngine(EngineConformance):
    def make_engine(self, folder, **changes):
        return create_engine("torchtitan", EngineConfig(model_path=str(write_tiny_model(folder)), **changes))


@pytest.fixture(scope="module")
def two(tmp_path_factory, start_ranks):
    folder = tmp_path_factory.mktemp("titan")
    write_tiny_model(folder / "qwen3")
    write_llama(folder / "llama")
    data = ranks.batch_of(ranks.draw_rows(titan.SEED))
    alone = ranks.build(folder / "qwen3")
    ranks.one_step(alone, data)
    alone.save_checkpoint(folder / "by fsdp", 9)
    after = (*ranks.one_step(alone, data), ranks.weights(alone))
    alone.close()
    return {"fsdp": after} | start_ranks(SCRIPT, folder, 2)


def oracle(folder):
    """Loss, gradients and log-probs of a plain Hugging Face model that sees one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    total, tokens, rows = 0.0, 0, []
    for prompt, completion, mask in ranks.draw_rows(titan.SEED):
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        scored = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        rows.append(scored.tolist())
        total, tokens = total - (scored * torch.tensor(mask)).sum(), tokens + sum(mask)
    (total / tokens).backward()
    return float(total.detach() / tokens), {name: parameter.grad for name, parameter in model.named_parameters()}, rows


@pytest.mark.process
@pytest.mark.parametrize("case", titan.CASES)
def test_two_ranks_give_the_oracles_gradient(two, case):
    loss, gradients, rows = oracle(two["folder"] / case.split()[0])
    assert two[case]["loss"] == pytest.approx(loss, rel=1e-6)
    for got, want in zip(two[case]["logprobs"], rows, strict=True):
        assert got == pytest.approx(want, rel=1e-5)
    assert two[case]["gradients"].keys() == gradients.keys()
    torch.testing.assert_close(two[case]["gradients"], gradients, rtol=1e-4, atol=1e-6)  # rotary is in float32
    assert two[case]["share"] == (1 if "replicas" in case else pytest.approx(0.5, rel=0.1))


@pytest.mark.process
def test_the_stream_of_weights_holds_one_tensor_at_a_time(two):
    most, largest = two["llama dp"]["streamed"]
    assert most <= 2 * largest  # one that was handed out, and the next


@pytest.mark.process
def test_a_checkpoint_moves_between_fsdp_and_torchtitan(two):
    loss, norm, weights = two["from fsdp"]
    assert (loss, norm) == pytest.approx(two["fsdp"][:2], rel=1e-5)
    torch.testing.assert_close(weights, two["fsdp"][2], rtol=1e-4, atol=1e-6)
    alone = ranks.build(two["folder"] / "qwen3")
    assert alone.load_checkpoint(two["folder"] / "by titan") == 4
    assert ranks.one_step(alone, ranks.batch_of(ranks.draw_rows(titan.SEED))) == pytest.approx(
        two["straight"][:2], rel=1e-5
    )
    torch.testing.assert_close(ranks.weights(alone), two["straight"][2], rtol=1e-4, atol=1e-6)
    alone.close()


@pytest.mark.process
def test_a_model_saved_by_it_is_an_ordinary_folder(two):
    model = AutoModelForCausalLM.from_pretrained(two["folder"] / "saved", dtype=torch.float64)
    original = AutoModelForCausalLM.from_pretrained(two["folder"] / "qwen3", dtype=torch.float64)
    assert (two["folder"] / "saved" / "tokenizer.json").is_file()
    assert 0 < (model.lm_head.weight - original.lm_head.weight).abs().max() < 0.02  # one AdamW step of 1e-2


@pytest.mark.process
def test_a_critic_and_the_outputs_of_a_policy_are_those_of_fsdp(tmp_path):
    write_tiny_model(tmp_path)
    data = ragged_batch([[5, 6, 7], [8]], [[9, 10], [11, 12, 13]])
    data["returns"] = ragged([[0.5, 1.0], [0.0, 1.0, 2.0]], torch.float64)
    data["candidate_token_ids"] = ragged([torch.tensor([[1, 2]] * 2), torch.tensor([[3, 4]] * 3)])
    policy = {"entropy": True, "sum_pi_squared": True, "num_candidates": 2, "temperature": 0.7}
    for options, loss in (({"head": "value"}, value_loss), (policy, None)):
        rows, seen = data.copy(), []
        if loss is not None:
            del rows["candidate_token_ids"]
        for backend in ("fsdp", "torchtitan"):
            engine = create_engine(backend, EngineConfig(model_path=str(tmp_path), precision="float64", **options))
            engine.initialize()
            output = engine.forward_backward_batch(rows, loss)
            norm = 0.0 if loss is None else engine.optimizer_step()
            columns = {name: column.values() for name, column in output.columns.items()}
            seen.append((columns, output.metrics, norm, dict(engine.get_per_tensor_param()[0])))
            engine.close()
        torch.testing.assert_close(*(part[0] for part in seen), rtol=1e-5, atol=1e-6)
        assert seen[1][1] == pytest.approx(seen[0][1], rel=1e-5)
        assert seen[1][2] == pytest.approx(seen[0][2], rel=1e-5)
        torch.testing.assert_close(seen[0][3], seen[1][3], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"parallel": ParallelConfig(tp=2)}, "takes dp_replicate only"),
        ({"parallel": ParallelConfig(dp_replicate=2)}, r"parallel.dp_replicate = 2 does not divide 1 ranks"),
        ({"lora": LoraConfig()}, "has no LoRA adapters"),
        ({"router_aux_loss_coef": 0.1}, "no router"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(tmp_path, changes, sentence):
    engine = create_engine("torchtitan", EngineConfig(model_path=str(write_tiny_model(tmp_path)), **changes))
    with pytest.raises(ConfigError, match=sentence):
        engine.initialize()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"attention_bias": True}, "has attention_bias=true, which the torchtitan backend does not map"),
        ({"hidden_act": "gelu"}, "has hidden_act=gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "has rope type 'dynamic'"),
    ],
)
def test_variants_without_a_mapping_are_refused(tmp_path, changes, sentence):
    engine = create_engine("torchtitan", EngineConfig(model_path=str(write_llama(tmp_path, **changes))))
    with pytest.raises(ModelFolderError, match=sentence):
        engine.initialize()


def test_an_architecture_without_a_mapping_is_refused(tmp_path):
    ranks.moe_oracle.write_model(tmp_path)
    engine = create_engine("torchtitan", EngineConfig(model_path=str(tmp_path)))
    with pytest.raises(ModelFolderError, match=r"has no mapping to the torchtitan backend; mapped are llama, qwen3\."):
        engine.initialize()
