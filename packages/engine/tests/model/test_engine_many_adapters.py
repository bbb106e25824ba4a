from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import (
    AdamParams,
    BatchError,
    ConfigError,
    EngineConfig,
    LoraConfig,
    NonFiniteError,
    OptimizerConfig,
    TrainingRow,
    create_engine,
    create_loss,
    create_worker,
)
from rl_engine.losses import sft_loss
from rl_engine.testing import write_tiny_model

pytestmark = pytest.mark.process  # seconds of computation

SCRIPT = Path(__file__).parents[1] / "support" / "adapter_ranks.py"
_spec = spec_from_file_location("adapter_ranks", SCRIPT)
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)
NAMES = tuple(ranks.LORAS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("adapters") / "model").parent


@pytest.fixture
def worker(folder):
    with ranks.build(folder) as built:
        yield built


def states(worker):
    return {name: ranks.state(worker, name) for name in worker.adapters}


def moved(worker):
    """Adapters whose B is no longer 0, so that A has a gradient too."""
    ranks.steps(worker, list)
    return worker


@pytest.mark.promise("An adapter's gradient in a mixed batch is that of its rows alone")
def test_a_mixed_batch_gives_each_adapter_its_lone_gradient(worker):
    moved(worker)
    rows = ranks.mixed_rows(7)
    found = worker.forward_backward_rows(rows, ranks.LOSSES)
    mixed = {name: ranks.gradient(worker, name) for name in NAMES}
    for name in NAMES:
        worker.pool[name].drop_gradient()
        own = [index for index, row in enumerate(rows) if row.adapter == name]
        alone = worker.forward_backward_rows([rows[index] for index in own], {name: ranks.LOSSES[name]})
        torch.testing.assert_close(ranks.gradient(worker, name), mixed[name], rtol=1e-9, atol=1e-12)
        assert mixed[name].abs().max() > 1e-3
        assert alone.metrics[name]["loss"] == pytest.approx(found.metrics[name]["loss"], rel=1e-9)
        for index, logprobs in zip(own, alone.logprobs, strict=True):
            torch.testing.assert_close(logprobs, found.logprobs[index])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft 0.21 reads it
def test_gradients_and_steps_are_those_of_a_plain_peft_loop(folder, worker, tmp_path):
    worker.save_state(tmp_path / "ann", "ann")
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "ann", is_trainable=True, autocast_adapter_dtype=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
    for seed in (1, 2, 3):
        total = torch.zeros((), dtype=torch.float64)
        for row in ranks.draw_rows(seed, "ann", 5):
            logprobs = model(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
            scored = logprobs.gather(1, torch.tensor(row.target_token_ids)[:, None])[:, 0]
            total = total - (scored * torch.tensor(row.inputs["weights"])).sum()
        total.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in trained])
        found = worker.forward_backward_rows(ranks.mixed_rows(seed), ranks.LOSSES)
        assert found.metrics["ann"]["loss"] == pytest.approx(float(total.detach()), rel=1e-9)
        assert worker.optim_step(ranks.ADAM["ann"], "ann").grad_norm == pytest.approx(float(norm), rel=1e-6)
        adam.step()
        adam.zero_grad()
    ours = dict(worker.export_adapter("ann")[0])
    assert float(ours.pop("adapters.ann.scaling")) == 2.0
    theirs = peft.get_peft_model_state_dict(model)
    assert {name.removeprefix("adapters.ann.") for name in ours} == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[f"adapters.ann.{name}"], tensor.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_may_be_on_a_head_that_is_not_tied(tmp_path):
    """Along with an adapter that is not on it; the folder's head is no embedding."""
    write_tiny_model(tmp_path / "model", tie_word_embeddings=False)
    with ranks.build(tmp_path) as worker:
        worker.add_adapter("dan", LoraConfig(rank=4, target_modules=("q_proj", "lm_head")))
        losses = ranks.LOSSES | {"dan": create_loss("cross_entropy")}
        rows = [*(replace(row, adapter="dan") for row in ranks.draw_rows(1, "ann", 3)), *ranks.draw_rows(2, "cy", 2)]
        for _ in range(2):
            worker.forward_backward_rows(rows, losses)
            worker.optim_step(ranks.ADAM["ann"], "dan")
        worker.save_state(tmp_path / "dan", "dan")
        found = worker.forward_backward_rows(rows, losses)
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
        model = peft.PeftModel.from_pretrained(base, tmp_path / "dan", is_trainable=True, autocast_adapter_dtype=False)
        total = torch.zeros((), dtype=torch.float64)
        for row in rows[:3]:
            logprobs = model(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
            scored = logprobs.gather(1, torch.tensor(row.target_token_ids)[:, None])[:, 0]
            total = total - (scored * torch.tensor(row.inputs["weights"])).sum()
        total.backward()
        norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
        assert found.metrics["dan"]["loss"] == pytest.approx(float(total.detach()), rel=1e-6)
        assert worker.optim_step(ranks.ADAM["ann"], "dan").grad_norm == pytest.approx(float(norm), rel=1e-6)
        mixed = ranks.gradient(worker, "cy")
        worker.pool["cy"].drop_gradient()
        worker.forward_backward_rows(ranks.draw_rows(2, "cy", 2) * 3, losses)  # two steps and a third pass above
        torch.testing.assert_close(ranks.gradient(worker, "cy"), mixed, rtol=1e-6, atol=1e-9)


def test_an_adapter_begins_as_that_of_a_seeded_engine(folder, worker):
    lora = LoraConfig(rank=4, alpha=8.0, export="adapter")
    config = EngineConfig(model_path=str(folder / "model"), lora=lora, seed=5, precision="float64")
    worker.add_adapter("new", lora, seed=5)
    engine = create_engine("fsdp", config)
    engine.initialize()
    weights, described = engine.get_per_tensor_param()
    found, ours = worker.export_adapter("new")
    found = dict(found)
    del found["adapters.new.scaling"]
    for name, tensor in weights:
        torch.testing.assert_close(found.pop(f"adapters.new.{name}"), tensor.detach(), rtol=0, atol=0)
    engine.close()
    assert not found
    assert ours == described


@pytest.mark.promise("A NaN of one adapter touches no other's gradient or state")
@pytest.mark.parametrize("kind", ["loss", "weights"])
def test_a_nan_of_one_adapter_touches_no_other(worker, kind):
    moved(worker)
    rows = ranks.mixed_rows(8)
    if kind == "weights":
        worker.pool["bob"].flat["weights"][7] = float("inf")
    else:
        bad = next(row for row in rows if row.adapter == "bob")
        bad.inputs["advantages"][0] = float("nan")
    before = states(worker)
    found = worker.forward_backward_rows(rows, ranks.LOSSES)
    assert found.metrics["bob"]["loss"] != found.metrics["bob"]["loss"]
    mixed = {name: ranks.gradient(worker, name) for name in NAMES}
    for name in ("ann", "cy"):
        worker.pool[name].drop_gradient()
        worker.forward_backward_rows([row for row in rows if row.adapter == name], {name: ranks.LOSSES[name]})
        torch.testing.assert_close(ranks.gradient(worker, name), mixed[name], rtol=1e-9, atol=1e-12)
    with pytest.raises(NonFiniteError, match="gradient norm is"):
        worker.optim_step(ranks.ADAM["bob"], "bob")
    torch.testing.assert_close(states(worker), before, rtol=0, atol=0, equal_nan=True)
    for name in ("ann", "cy"):
        assert worker.optim_step(ranks.ADAM[name], name).step == 3
        assert ranks.weights(worker, name).isfinite().all()


@pytest.mark.promise("Idle adapters leave the device and come back bit for bit")
def test_idle_adapters_are_on_disk_and_come_back_equal(folder, worker, tmp_path):
    few = ranks.build(folder, max_resident=2, idle_folder=tmp_path)
    for seed in (1, 2):
        for name in NAMES:
            rows = ranks.draw_rows(seed, name, 3)
            for one in (few, worker):
                one.forward_backward_rows(rows, ranks.LOSSES)  # the gradient waits, on disk too
        for name in NAMES:
            for one in (few, worker):
                one.optim_step(ranks.ADAM[name], name)
        assert len(few.pool.resident) == 2
    assert not few.pool["ann"].flat
    wide = TrainingRow(adapter="cy", token_ids=[1], target_token_ids=[[2, 3]], inputs={"weights": [[1.0, 1.0]]})
    two_passes = [*ranks.draw_rows(1, "ann", 1), *ranks.draw_rows(1, "bob", 1), wide]
    with pytest.raises(BatchError, match="The rows have 3 adapters and max_resident is 2"):
        few.forward_backward_rows(ranks.mixed_rows(1), ranks.LOSSES)
    with pytest.raises(BatchError, match="The rows have 3 adapters"):
        few.forward_backward_rows(two_passes, dict.fromkeys(NAMES, create_loss("cross_entropy")))
    for name in NAMES:
        few.pool.open([name])
        torch.testing.assert_close(ranks.state(few, name), ranks.state(worker, name), rtol=0, atol=0)
        assert "grad" not in few.pool[name].flat
    few.close()


@pytest.mark.promise("Adapters are added and removed without touching others")
def test_coming_and_going_disturbs_nobody(folder, worker):
    base = {
        name: (parameter.data_ptr(), parameter)
        for name, parameter in worker.engine.parts.built.scorer.named_parameters()
    }
    undisturbed = ranks.build(folder)
    for one in (worker, undisturbed):
        one.forward_backward_rows(ranks.draw_rows(1, "ann", 3), ranks.LOSSES)
    pointer = worker.pool["ann"].flat["weights"].data_ptr()
    worker.add_adapter("dan", LoraConfig(rank=3))
    row = TrainingRow(adapter="dan", token_ids=[1], target_token_ids=[2], inputs={"weights": [1.0]})
    worker.forward_backward_rows([row], {"dan": create_loss("cross_entropy")})
    worker.remove_adapter("dan")
    worker.remove_adapter("cy")
    for one in (worker, undisturbed):
        one.forward_backward_rows(ranks.draw_rows(2, "ann", 3), ranks.LOSSES)
        one.optim_step(ranks.ADAM["ann"], "ann")
    torch.testing.assert_close(ranks.state(worker, "ann"), ranks.state(undisturbed, "ann"), rtol=0, atol=0)
    assert worker.pool["ann"].flat["weights"].data_ptr() == pointer
    assert base == {
        name: (parameter.data_ptr(), parameter)
        for name, parameter in worker.engine.parts.built.scorer.named_parameters()
    }
    assert [*worker.adapters] == ["ann", "bob"]
    undisturbed.close()


def test_a_saved_adapter_goes_on_as_if_nothing_had_happened(worker, tmp_path):
    moved(worker)
    worker.save_state(tmp_path / "full", "bob")
    worker.save_state(tmp_path / "bare", "bob", optimizer=False)
    kept = ranks.state(worker, "bob")
    after = ranks.steps(worker, list, seeds=[3])
    assert worker.load_state(tmp_path / "full", "bob") == 2
    torch.testing.assert_close(ranks.state(worker, "bob"), kept, rtol=0, atol=0)
    assert ranks.steps(worker, list, seeds=[3])[0]["bob"] == after[0]["bob"]
    worker.add_adapter("eve", ranks.LORAS["bob"], seed=9)
    assert worker.load_state(tmp_path / "bare", "eve", optimizer=False) == 0
    torch.testing.assert_close(ranks.weights(worker, "eve"), kept["weights"], rtol=0, atol=0)
    assert not ranks.state(worker, "eve")["exp_avg"].any()


@pytest.mark.parametrize(
    "changes",
    [{"activation_checkpointing": True}, {"recompute": ("attention", "mlp")}, {"max_tokens_per_gpu": 4096}],
)
def test_recomputing_and_packing_change_no_gradient(folder, worker, changes):
    other = ranks.build(folder, **changes)
    for one in (worker, other):
        moved(one).forward_backward_rows(ranks.mixed_rows(7), ranks.LOSSES)
    for name in NAMES:
        torch.testing.assert_close(ranks.gradient(other, name), ranks.gradient(worker, name), rtol=1e-6, atol=1e-9)
    other.close()


def test_activations_in_bfloat16_train_weights_in_float32(folder):
    with ranks.build(folder, precision="bfloat16") as worker:
        losses = [ranks.steps(worker, list, seeds=[1])[0]["ann"][0] for _ in range(8)]
        assert worker.pool["ann"].flat["weights"].dtype == torch.float32
    assert losses[-1] < 0.95 * losses[0]


def test_several_targets_of_a_token_are_weighed(folder, worker):
    """Cross-entropy with soft targets, along with rows that have one target each."""
    targets, weights = [[3, 4], [5, 6], [7, 8]], [[0.5, 0.5], [0.0, 0.0], [0.9, 0.1]]
    wide = TrainingRow(adapter="ann", token_ids=[1, 2, 3], target_token_ids=targets, inputs={"weights": weights})
    rows = [wide, *ranks.draw_rows(1, "bob", 2)]
    found = worker.forward_rows(rows, ranks.LOSSES)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    with torch.no_grad():  # B is 0: the adapter adds nothing yet
        logprobs = model(torch.tensor([[1, 2, 3]])).logits[0].log_softmax(-1).gather(1, torch.tensor(targets))
    torch.testing.assert_close(found.logprobs[0].double(), logprobs, rtol=1e-5, atol=1e-6)
    assert found.metrics["ann"]["loss"] == pytest.approx(-float((logprobs * torch.tensor(weights)).sum()), rel=1e-6)
    worker.forward_backward_rows(rows, ranks.LOSSES)
    assert worker.optim_step(ranks.ADAM["ann"], "ann").grad_norm > 0
    assert worker.optim_step(ranks.ADAM["bob"], "bob").grad_norm > 0


def test_a_mean_is_over_the_adapters_own_tokens(worker):
    rows = [
        replace(row, inputs={}) for name, count in (("ann", 3), ("bob", 4)) for row in ranks.draw_rows(1, name, count)
    ]
    mixed = worker.forward_rows(rows, {"ann": sft_loss, "bob": sft_loss}).metrics
    for name in ("ann", "bob"):
        alone = worker.forward_rows([row for row in rows if row.adapter == name], {name: sft_loss}).metrics
        assert alone[name] == pytest.approx(mixed[name], rel=1e-9)


def test_one_tenant_trains_the_model_itself(folder):
    """The adapter None: AdamW's numbers by step, as of an engine that is configured so."""
    rows = [TrainingRow(token_ids=[1, 2, 3], target_token_ids=[2, 3, 4], inputs={"weights": [1.0, 0.0, 1.0]})]
    adam = AdamParams(lr=1e-3, beta2=0.99, eps=1e-9, weight_decay=0.1, grad_clip_norm=0.5)
    optimizer = OptimizerConfig(lr=1e-3, betas=(0.9, 0.99), eps=1e-9, weight_decay=0.1, max_grad_norm=0.5)
    scores = []
    for settings, given in ((OptimizerConfig(), adam), (optimizer, None)):
        config = EngineConfig(model_path=str(folder / "model"), precision="float64", optimizer=settings)
        with create_worker(config) as worker:
            for _ in range(2):
                worker.forward_backward_rows(rows, {None: create_loss("cross_entropy")})
                outcome = worker.optim_step(given)
            assert (outcome.step, outcome.lr) == (2, 1e-3)
            scores.append(worker.forward_rows(rows).logprobs[0])
            with pytest.raises(ConfigError, match="Adapters by name are over a frozen model, and optimizer is set"):
                worker.add_adapter("ann", LoraConfig())
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=0)


def test_settings_that_rows_with_adapters_do_not_allow(folder):
    for changes, told in (
        ({"dropout": True}, "dropout is true"),
        ({"lora": LoraConfig(), "optimizer": OptimizerConfig()}, "and lora is set"),
        ({"head": "value"}, "head is value"),
    ):
        options = {"optimizer": None, "model_path": str(folder / "model")} | changes
        with create_worker(EngineConfig(**options)) as other, pytest.raises(ConfigError, match=told):
            other.add_adapter("ann", LoraConfig())


def run_ranks(start_ranks, folder, size):
    write_tiny_model(folder / "model")
    with ranks.build(folder) as alone:
        found = {"steps": ranks.steps(alone, list), "states": states(alone)}
        alone.forward_backward_rows(ranks.draw_rows(3, "bob", 1), ranks.LOSSES)
        found["alone"] = alone.optim_step(ranks.ADAM["bob"], "bob").grad_norm
    ranks.moe_oracle.write_model(folder / "moe")
    found["experts"] = ranks.expert_steps(folder, list)
    return {"one": found} | start_ranks(SCRIPT, folder, size)


def test_two_ranks_step_as_one_does(two):
    for found, wanted in zip(two["steps"], two["one"]["steps"], strict=True):
        for name in NAMES:
            assert found[name] == pytest.approx(wanted[name], rel=1e-9)
    torch.testing.assert_close(two["states"], two["one"]["states"], rtol=1e-6, atol=1e-9)
    assert two["alone"] == pytest.approx(two["one"]["alone"], rel=1e-6)


def test_ranks_refuse_and_fail_together(two):
    assert two["refused"].startswith("Rank 1 refused its rows: Row 0 is for adapter 'dan'")
    assert "nan" in two["not finite"]
    assert two["after"] > 0


def test_adapters_on_experts_are_sharded_as_the_rest_is(two):
    (steps, weights), (wanted, theirs) = two["experts"], two["one"]["experts"]
    assert steps == [pytest.approx(each, rel=1e-9) for each in wanted]
    torch.testing.assert_close(weights, theirs, rtol=1e-6, atol=1e-9)


def test_rows_have_no_adapters_in_linear_attention(tmp_path):
    delta = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "head_dim": 8}
    delta |= {"linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "vocab_size": 79}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("qwen3_5_text", num_hidden_layers=2, **delta, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder := tmp_path / "model")
    with create_worker(EngineConfig(model_path=str(folder), optimizer=None)) as worker:
        with pytest.raises(ConfigError, match=r"takes \S+linear_attn\S+, which sees rows in another order"):
            worker.add_adapter("ann", LoraConfig())
        worker.add_adapter("ann", LoraConfig(target_modules=("q_proj",)))
        worker.forward_backward_rows(ranks.draw_rows(1, "ann", 3), ranks.LOSSES)
        assert worker.optim_step(ranks.ADAM["ann"], "ann").grad_norm > 0


ON_EXPERTS = {
    "ann": LoraConfig(rank=2, alpha=4.0, target_modules=("q_proj", "experts")),
    "bob": LoraConfig(rank=3, alpha=6.0, target_modules=("experts",)),
    "cy": LoraConfig(rank=2),
}


@pytest.mark.promise("Adapters on experts share a batch, each with its rows' gradient")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft 0.21 reads it
@pytest.mark.parametrize("changes", [{}, {"recompute": ("moe",)}, {"activation_checkpointing": True}], ids=str)
def test_rows_have_adapters_on_experts(tmp_path, changes):
    """Gradients of a mixed batch after a step are those of peft's eager model of each adapter's rows alone."""
    folder = ranks.moe_oracle.write_model(tmp_path / "moe")
    config = EngineConfig(model_path=str(folder), optimizer=None, precision="float64", **changes)
    loss = create_loss("cross_entropy")
    rows = [replace(row, adapter=name) for name in ON_EXPERTS for row in ranks.draw_rows(1, "ann", 4)]
    rows.insert(3, replace(rows[0], adapter=None))
    with create_worker(config) as worker:
        for seed, (name, lora) in enumerate(ON_EXPERTS.items()):
            worker.add_adapter(name, lora, seed)
        losses = dict.fromkeys(ON_EXPERTS, loss)
        worker.forward_backward_rows([row for row in rows if row.adapter], losses)
        for name in ON_EXPERTS:
            assert worker.optim_step(AdamParams(lr=1e-2), name).grad_norm > 0
        base = worker.forward_rows([rows[3]], {None: loss}).logprobs[0]
        worker.forward_backward_rows([row for row in rows if row.adapter], losses)
        grads = {name: dict(worker.pool[name].views(ranks.gradient(worker, name))) for name in ON_EXPERTS}
        for name in ON_EXPERTS:
            worker.save_state(tmp_path / name, name, optimizer=False)
    for name, found in grads.items():
        eager = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        eager.set_experts_implementation("eager")
        model = peft.PeftModel.from_pretrained(eager, tmp_path / name, is_trainable=True, autocast_adapter_dtype=False)
        for row in (row for row in rows if row.adapter == name):
            logprobs = model(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
            scored = logprobs.gather(1, torch.tensor(row.target_token_ids)[:, None])[:, 0]
            (-(scored * torch.tensor(row.inputs["weights"])).sum()).backward()
        wanted = {
            key.replace(".default.weight", "").removeprefix("base_model.model."): parameter.grad
            for key, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        assert wanted.keys() == found.keys()
        for key, gradient in wanted.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-6, atol=1e-9)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    plain.set_experts_implementation("eager")
    with torch.no_grad():
        full = plain(torch.tensor([rows[3].token_ids])).logits[0].log_softmax(-1)
    wanted = full.gather(1, torch.tensor(rows[3].target_token_ids)[:, None])[:, 0]
    torch.testing.assert_close(base.double(), wanted, rtol=1e-6, atol=1e-6)
