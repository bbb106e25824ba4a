"""Parts of layers that are recomputed or offloaded: the same steps from fewer activations on the device."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from rl_engine import ConfigError, EngineConfig, LoraConfig, check, create_engine
from rl_engine.losses import sft_loss
from rl_engine.model import activations, module_engine
from rl_engine.testing import ragged_batch, write_tiny_model

_spec = spec_from_file_location("moe_oracle", Path(__file__).parents[1] / "support" / "moe_oracle.py")
moe_oracle = module_from_spec(_spec)
_spec.loader.exec_module(moe_oracle)
ROWS = ragged_batch([[5, 6, 7], [8], [3] * 9], [[9, 10], [11, 12, 13], [1, 2, 3, 4, 5]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    write_tiny_model(folder / "dense")
    moe_oracle.write_model(folder / "experts")
    return folder


def stepped(folder, backend="fsdp", **changes):
    """Gradient norm, weights after a step, and bytes of activations that stay on the device."""
    engine, saved = create_engine(backend, EngineConfig(model_path=str(folder), **changes)), {}
    engine.initialize()

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with engine.train_mode(), saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(ROWS, sft_loss)
        norm = engine.optimizer_step()
    weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    engine.close()
    return norm, weights, sum(storage.nbytes() for storage in saved.values())


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:If you are using transformer_engine:UserWarning")  # megatron-core, of core_attn
@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_every_choice_gives_the_same_step(folders, monkeypatch, backend, kind):
    """megatron-core recomputes norms with Transformer Engine alone, and frees reentrantly, which hooks do not see."""
    monkeypatch.setattr(module_engine, "has_gpu", lambda: True)
    monkeypatch.setattr(activations, "_SMALL_BYTES", 0)
    inner = "mlp" if kind == "dense" else "moe"
    wanted = stepped(folders / kind, backend)
    parts = ["attention", inner] if backend == "megatron" else ["attention", inner, "norm"]
    choices = [(part,) for part in parts] + [tuple(parts)]
    for key in ("recompute", "activation_offload"):
        for choice in choices:
            found = stepped(folders / kind, backend, **{key: choice})
            assert found[0] == wanted[0]
            torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0)
            assert found[2] < wanted[2] or (backend, key) == ("megatron", "recompute")
    both = stepped(folders / kind, backend, recompute=(inner,), activation_offload=(inner,))
    torch.testing.assert_close(both[1], wanted[1], rtol=0, atol=0)


@pytest.mark.process
@pytest.mark.parametrize("changes", [{"lora": LoraConfig(rank=2, dropout=0.3)}, {"precision": "bfloat16"}], ids=str)
def test_parts_go_with_an_adapter_and_narrow_passes(folders, changes):
    wanted, found = (
        stepped(folders / "dense", recompute=parts, **changes) for parts in ((), ("attention", "mlp", "norm"))
    )
    assert found[0] == wanted[0]
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0)


@pytest.mark.process
def test_the_routing_of_recomputed_experts_is_counted_once(folders):
    given = {"router_aux_loss_coef": 0.5, "max_tokens_per_gpu": 15}
    wanted, found = (stepped(folders / "experts", recompute=parts, **given) for parts in ((), ("moe",)))
    assert found[0] == wanted[0]
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0)


REFUSED = [
    ("fsdp", "dense", {"recompute": ("moe",)}, "recompute names moe, which no layer of the model has; parts are att"),
    ("fsdp", "experts", {"activation_offload": ("mlp",)}, "activation_offload names mlp, which no layer"),
    ("fsdp", "dense", {"recompute": ("core_attn",)}, "recompute names core_attn"),
    ("fsdp", "dense", {"recompute": ("mlp",), "torch_compile": True}, "torch_compile is true, and recompute"),
    ("megatron", "dense", {"recompute": ("moe",)}, "recompute names moe, which no layer"),
    ("megatron", "experts", {"activation_offload": ("mlp",)}, "activation_offload names mlp, which no layer"),
    ("megatron", "dense", {"recompute": ("mla_up_proj",)}, "recompute names mla_up_proj, which no layer"),
    ("megatron", "dense", {"recompute": ("mlps",)}, "megatron-core refuses: Invalid choices for recompute_modules"),
    ("megatron", "dense", {"recompute": ("norm",)}, "calls Transformer Engine, which is not installed"),
    ("megatron", "experts", {"recompute": ("moe",), "router_aux_loss_coef": 0.1}, "recompute names moe, router_aux"),
    ("torchtitan", "dense", {"recompute": ("mlp",)}, "the torchtitan backend treats whole layers alone"),
]


@pytest.mark.parametrize(("backend", "kind", "changes", "said"), REFUSED)
def test_a_part_that_cannot_be_chosen_is_named_at_the_plan(folders, backend, kind, changes, said):
    with pytest.raises(ConfigError, match=said):
        check(backend, EngineConfig(model_path=str(folders / kind), **changes))


def test_whole_layers_and_parts_exclude_each_other(folders):
    for key in ("recompute", "activation_offload"):
        with pytest.raises(ConfigError, match="activation_checkpointing is true, which recomputes whole"):
            EngineConfig(model_path="m", activation_checkpointing=True, **{key: ("mlp",)})
