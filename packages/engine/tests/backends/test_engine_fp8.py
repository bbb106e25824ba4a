"""Products in float8: what torchao and Transformer Engine are told, the published torchao's products, and refusals."""

import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rl_engine import BackendError, ConfigError, EngineConfig, LoraConfig, Precision, create_engine
from rl_engine.losses import sft_loss
from rl_engine.model import device_memory, module_engine
from rl_engine.testing import ragged_batch, write_tiny_model

_spec = spec_from_file_location("megatron_te_ranks", Path(__file__).parents[1] / "support" / "megatron_te_ranks.py")
DATA = ragged_batch([[5, 6, 7], [8]], [[9, 10], [11, 12, 13]])
BF16 = Precision.BFLOAT16


@pytest.fixture(scope="module")
def te():
    """Stand-ins of Transformer Engine's modules, which import Megatron-core."""
    module = module_from_spec(_spec)
    _spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("fp8") / "model")


@pytest.fixture
def float8_gpu(monkeypatch):
    """As where there is a GPU that has such products; the CPU has them too, slowly."""
    monkeypatch.setattr(module_engine, "has_float8", lambda: True)


def built(backend, folder, fp8="off"):
    engine = create_engine(backend, EngineConfig(model_path=str(folder), precision=BF16, fp8=fp8))
    engine.initialize()
    return engine


def largest(tensor, recipe):
    return tensor.abs().amax() if recipe == "tensorwise" else tensor.abs().amax(-1, keepdim=True)


def rounded(tensor, recipe):
    """A tensor as float8 numbers and a scale of the whole or of each row make of it, in float64."""
    scale = torch.finfo(torch.float8_e4m3fn).max / largest(tensor.float(), recipe)
    if recipe == "rowwise":
        scale = torch.exp2(torch.floor(torch.log2(scale)))  # torchao's scales of rows are powers of two
    return (tensor.float() * scale).to(torch.float8_e4m3fn).double() / scale.double()


@pytest.fixture(scope="module")
def torchao(tmp_path_factory):
    """The published wheel, for the last test alone: transformers and torchtitan import it where they find it."""
    place = tmp_path_factory.mktemp("torchao")
    command = ["uv", "pip", "install", "-q", "--no-deps", "--python", sys.executable, "--target", str(place)]
    subprocess.run([*command, "torchao==0.18.0"], check=True, timeout=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        yield


@dataclass(frozen=True)
class Recipe:
    """Stands for torchao's `Float8LinearConfig`."""

    name: str
    pad_inner_dim: bool = False

    @classmethod
    def from_recipe_name(cls, name):
        return cls(name)


@pytest.fixture
def told(monkeypatch):
    """What a stand-in of torchao is told, call by call: the recipe, and the names of the modules."""
    calls = []

    def convert(model, *, module_filter_fn, config):
        calls.append((config, [name for name, part in model.named_modules() if module_filter_fn(part, name)]))

    import_module("transformers.modeling_utils")  # looks for the real one, which the stand-in is not
    library = ModuleType("torchao.float8")
    library.Float8LinearConfig, library.convert_to_float8_training = Recipe, convert
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", library)
    return calls


@pytest.mark.usefixtures("float8_gpu")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchao_is_told(tmp_path, told, recipe):
    write_tiny_model(tmp_path, intermediate_size=72)  # no multiple of 16
    built("fsdp", tmp_path, recipe).close()
    names = [f"model.layers.{layer}.self_attn.{x}_proj" for layer in range(2) for x in "qkvo"]
    assert told[-1] == (Recipe(recipe, pad_inner_dim=True), names)


@pytest.mark.promise("`fp8` is refused on a machine without float8 products")
def test_a_machine_without_float8_products_is_refused(folder, told, monkeypatch):
    monkeypatch.setattr(device_memory, "has_gpu", lambda: False)
    message = r"fp8 is tensorwise and there is no GPU that has float8 products .* Set it to off\."
    with pytest.raises(ConfigError, match=message):
        built("fsdp", folder, "tensorwise")


@pytest.mark.process
@pytest.mark.parametrize(
    ("recipe", "wanted"),
    [("tensorwise", ("hybrid", "tensorwise")), ("blockwise", ("e4m3", "blockwise")), ("mxfp8", ("e4m3", "mxfp8"))],
)
def test_megatron_tells_transformer_engine(te, folder, float8_gpu, monkeypatch, recipe, wanted):
    """Its modules cannot be imported without CUDA: `megatron_te_ranks` has stand-ins."""
    stages, layers = import_module("rl_engine.backends.megatron.model"), import_module("megatron.core.tensor_parallel")
    entered = []

    class Column(layers.ColumnParallelLinear): ...

    class Row(layers.RowParallelLinear): ...

    @contextmanager
    def context(settings):
        entered.append((settings.fp8, settings.fp8_recipe))
        yield

    monkeypatch.setattr(stages.transformer_engine, "HAVE_TE", True)
    monkeypatch.setattr(stages.transformer_engine, "TEColumnParallelLinear", Column)
    monkeypatch.setattr(stages.transformer_engine, "TERowParallelLinear", Row)
    monkeypatch.setattr(stages, "get_fp8_context", context)
    rope = import_module("megatron.core.models.common.embeddings.rope_utils")
    monkeypatch.setattr(stages.transformer_engine, "TEDotProductAttention", te.Attention)
    monkeypatch.setattr(rope, "fused_apply_rotary_pos_emb", te.rotate)
    engine = built("megatron", folder, recipe)
    decoder = engine.parts.built.scorer.model[0].decoder.layers
    for layer in decoder:
        assert type(layer.self_attention.linear_qkv) is type(layer.mlp.linear_fc1) is Column
        assert type(layer.self_attention.linear_proj) is type(layer.mlp.linear_fc2) is Row
    fed = []
    decoder[0].register_forward_pre_hook(lambda _, given: fed.append(len(given[0])))
    engine.forward_backward_batch(DATA, sft_loss)
    assert entered == [wanted] * len(decoder)
    assert fed == [128]  # seven tokens, padded to the largest block of a recipe
    engine.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp8": "int8"}, r"fp8 is 'int8'; allowed are off, tensorwise, rowwise, blockwise, mxfp8\."),
        ({"precision": "float32"}, r"fp8 is tensorwise and precision is float32; it needs precision=bfloat16\."),
        ({"lora": LoraConfig()}, r"fp8 is tensorwise and lora is .*; it needs lora=None\."),
    ],
)
def test_settings_that_it_does_not_go_with_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**({"model_path": "model", "fp8": "tensorwise", "precision": BF16} | changes))


@pytest.mark.parametrize(
    ("backend", "recipe", "message"),
    [
        ("fsdp", "mxfp8", r"fp8 is mxfp8; the fsdp backend has off, tensorwise, rowwise\."),
        ("megatron", "rowwise", r"fp8 is rowwise; the megatron backend has off, tensorwise, blockwise, mxfp8\."),
        ("torchtitan", "tensorwise", r"fp8 is tensorwise; the torchtitan backend has off\."),
    ],
)
def test_recipes_that_a_backend_has_not_are_refused(folder, backend, recipe, message):
    with pytest.raises(ConfigError, match=message):
        built(backend, folder, recipe)


def test_torchao_is_asked_for(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(BackendError, match=r"fp8 is rowwise and fsdp needs torchao for it .*; try: pip install"):
        built("fsdp", folder, "rowwise")


@pytest.mark.process  # the import of Megatron-core takes seconds
def test_megatron_asks_for_transformer_engine(folder, float8_gpu, monkeypatch):
    stages = import_module("rl_engine.backends.megatron.model")
    monkeypatch.setattr(stages.transformer_engine, "HAVE_TE", False)
    with pytest.raises(BackendError, match=r"fp8 is mxfp8 and megatron needs Transformer Engine for it, .* pip"):
        built("megatron", folder, "mxfp8")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of torchao's sources, where no bytecode is kept
@pytest.mark.parametrize(
    ("backend", "recipe"),
    [("fsdp", "tensorwise"), ("fsdp", "rowwise"), ("megatron", "tensorwise"), ("megatron", "blockwise")],
)
def test_losses_on_a_gpu_are_near_those_without_it(tmp_path, backend, recipe):
    if not device_memory.has_float8():
        pytest.skip("no GPU that has float8 products")
    write_tiny_model(tmp_path, hidden_size=256, intermediate_size=512, head_dim=64)
    losses = {}
    for fp8 in ("off", recipe):
        engine = built(backend, tmp_path, fp8)
        losses[fp8] = []
        for _ in range(3):
            engine.optimizer_zero_grad()
            losses[fp8].append(engine.forward_backward_batch(DATA, sft_loss).metrics["loss"])
            engine.optimizer_step()
        engine.close()
    assert losses[recipe] == pytest.approx(losses["off"], rel=0.02)
    assert losses[recipe] != losses["off"]


@pytest.mark.promise("on `fsdp` it makes the layers' products in float8")
@pytest.mark.integration
@pytest.mark.usefixtures("torchao", "float8_gpu")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_products_of_layers_are_in_float8(folder, recipe):
    plain, engine = built("fsdp", folder), built("fsdp", folder, recipe)
    model = engine.parts.built.scorer.model
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if hasattr(module, "weight")}
    found = {name for name, kind in kinds.items() if "Float8Linear" in kind}
    assert found == {name for name in kinds if ".layers." in name and name.endswith("_proj")}
    seen = []

    def keep(module, given, output):
        seen.append([part.detach().clone() for part in (given[0].flatten(0, -2), module.weight, output.flatten(0, -2))])

    model.model.layers[0].mlp.gate_proj.register_forward_hook(keep)
    before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    assert before.keys() == dict(plain.get_per_tensor_param()[0]).keys()
    losses = []
    for each in (plain, engine):
        each.optimizer_zero_grad()
        losses.append(each.forward_backward_batch(DATA, sft_loss).metrics["loss"])
        each.optimizer_step()
    states, weight, output = seen[0]
    by_hand = rounded(states, recipe) @ rounded(weight, recipe).T
    step = {"rtol": 0.005, "atol": 1e-5}  # results are bfloat16
    torch.testing.assert_close(output.double(), by_hand, **step)
    assert not torch.allclose(states.double() @ weight.double().T, by_hand, **step)
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]
    after = dict(engine.get_per_tensor_param()[0])
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert not torch.equal(*(weights["model.layers.0.mlp.gate_proj.weight"] for weights in (before, after)))
    plain.close()
    engine.close()
