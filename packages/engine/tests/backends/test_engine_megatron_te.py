"""Layers by Transformer Engine: beside megatron-core's own on a GPU, and over stand-ins of its modules on a CPU."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from rl_engine import (
    ConfigError,
    EngineConfig,
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
    Precision,
    create_engine,
)
from rl_engine.losses import sft_loss
from rl_engine.model.device_memory import has_float8

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parents[1] / "support" / "megatron_te_ranks.py"
_spec = spec_from_file_location("megatron_te_ranks", SCRIPT)
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)
stages, rows, write, MODELS = ranks.stages, ranks.rows, ranks.write, ranks.MODELS
FP8 = [("dense", "blockwise"), ("experts", "tensorwise"), ("experts", "blockwise"), ("latent", "blockwise")]


def trained(folder, **changes):
    """Loss and gradient norm of three steps, the kinds of modules, and the weights before and after."""
    options = {"precision": Precision.BFLOAT16, "optimizer": OptimizerConfig(lr=3e-4)} | changes
    engine = create_engine("megatron", EngineConfig(model_path=str(folder), **options))
    engine.initialize()
    kinds = {type(module).__name__ for module in engine.parts.built.scorer.model.modules()}
    weights, steps = [{name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}], []
    for _ in range(3):
        engine.optimizer_zero_grad()
        loss = engine.forward_backward_batch(rows(), sft_loss).metrics["loss"]
        steps.append((loss, engine.optimizer_step()))
    weights.append(dict(engine.get_per_tensor_param()[0]))
    engine.close()
    return steps, kinds, weights


def gpu(test):
    test = pytest.mark.filterwarnings("default")(pytest.mark.gpu(test))
    has_both = torch.cuda.is_available() and stages.transformer_engine.HAVE_TE
    return pytest.mark.skipif(not has_both, reason="needs CUDA and Transformer Engine")(test)


@gpu
@pytest.mark.parametrize("kind", MODELS)
def test_steps_are_those_of_megatron_cores_own_layers(tmp_path, kind):
    write(tmp_path, kind)
    steps, kinds, weights = trained(tmp_path)
    assert {"TEColumnParallelLinear", "TERowParallelLinear"} <= kinds
    assert ("TEGroupedMLP" in kinds) == (kind in ("experts", "sinks", "latent"))
    assert ("FusedRowAttention" in kinds) == (kind != "sinks")
    want, others, before = trained(tmp_path, transformer_engine=False)
    assert not any(name.startswith("TE") for name in others)
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in want], rel=0.01)
    assert [norm for _, norm in steps] == pytest.approx([norm for _, norm in want], rel=0.05)
    for got, expected in zip(weights, before, strict=True):
        assert got.keys() == expected.keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, before[0][name])


@gpu
@pytest.mark.parametrize(("kind", "recipe"), FP8)
def test_losses_in_float8_are_near_those_in_bfloat16(tmp_path, kind, recipe):
    """Less near after a step: AdamW's have the size of the rate, however small the gradient that float8 moves."""
    if not has_float8():
        pytest.skip("no GPU that has float8 products")
    write(tmp_path, kind)
    found = {fp8: [loss for loss, _ in trained(tmp_path, fp8=fp8)[0]] for fp8 in ("off", recipe)}
    assert found[recipe][0] == pytest.approx(found["off"][0], rel=0.01)
    assert found[recipe] == pytest.approx(found["off"], rel=0.05)
    assert found[recipe] != found["off"]


@gpu
def test_an_adapter_steps_as_on_megatron_cores_own_layers(tmp_path):
    write(tmp_path, "dense")
    lora = {"lora": LoraConfig(rank=4, alpha=8.0)}
    steps, _, _ = trained(tmp_path, **lora)
    want, _, _ = trained(tmp_path, transformer_engine=False, **lora)
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in want], rel=0.01)


@pytest.fixture
def stand_ins():
    with ranks.stand_ins():
        yield


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile, in megatron-core's activation of GPT-OSS
@pytest.mark.parametrize("kind", MODELS)
def test_what_its_modules_are_told_is_the_model(tmp_path, monkeypatch, kind):
    """Steps over stand-ins that compute what the library documents are those of megatron-core's own layers."""
    write(tmp_path, kind)
    found = []
    for is_fused in (True, False):
        monkeypatch.setattr(stages, "uses_transformer_engine", lambda config, is_fused=is_fused: is_fused)
        found.append(trained(tmp_path, precision=Precision.FLOAT64))
    assert ("Grouped" in found[0][1]) == (kind in ("experts", "sinks", "latent"))
    assert ("FusedRowAttention" in found[0][1]) == (kind != "sinks")
    assert not {"Grouped", "FusedRowAttention"} & found[1][1]
    torch.testing.assert_close(*(one[0] for one in found), rtol=1e-9, atol=0)
    torch.testing.assert_close(*(one[2] for one in found), rtol=1e-7, atol=1e-9)


@pytest.fixture(scope="module")
def seen(tmp_path_factory, start_ranks):
    return start_ranks(SCRIPT, tmp_path_factory.mktemp("ring"), 2)


@pytest.mark.parametrize("case", ranks.RINGS)
def test_a_ring_of_two_ranks_steps_like_one_that_has_all_tokens(seen, case):
    """Over a stand-in that has of each row the two pieces that Transformer Engine documents."""
    alone, ring = seen[f"{case} alone"], seen[f"{case} ring"]
    torch.testing.assert_close(ring, alone, rtol=1e-9, atol=1e-12)


def test_a_ring_is_taken_where_its_kernel_can(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "has_gpu", lambda: True)
    monkeypatch.setattr(stages.transformer_engine, "HAVE_TE", True)
    from rl_engine.backends.megatron.megatron_engine import MegatronBackend

    taken = {}
    for kind in MODELS:
        write(tmp_path / kind, kind)
        config = EngineConfig(model_path=str(tmp_path / kind), precision="bfloat16", parallel=ParallelConfig(cp=2))
        arch = MegatronBackend(config).read_config()[1]
        taken[kind] = stages.uses_ring(config, arch)
    assert taken == {"dense": True, "window": False, "experts": False, "sinks": False, "latent": False}


def test_float8_wants_it(tmp_path, monkeypatch):
    write(tmp_path, "dense")
    config = EngineConfig(model_path=str(tmp_path), precision="bfloat16", fp8="tensorwise", transformer_engine=False)
    with pytest.raises(ConfigError, match=r"fp8 is tensorwise and transformer_engine is false"):
        create_engine("megatron", config).initialize()


def test_it_is_taken_on_a_gpu_in_bfloat16(monkeypatch):
    monkeypatch.setattr(stages, "has_gpu", lambda: True)
    monkeypatch.setattr(stages.transformer_engine, "HAVE_TE", True)
    taken = {one: stages.uses_transformer_engine(EngineConfig(model_path="m", precision=one)) for one in Precision}
    assert [one for one, is_taken in taken.items() if is_taken] == [Precision.BFLOAT16]
    monkeypatch.setattr(stages.transformer_engine, "HAVE_TE", False)
    assert not stages.uses_transformer_engine(EngineConfig(model_path="m", precision="bfloat16"))
    monkeypatch.setattr(stages.transformer_engine, "HAVE_TE", True)
    off = EngineConfig(model_path="m", precision="bfloat16", transformer_engine=False)
    assert not stages.uses_transformer_engine(off)
