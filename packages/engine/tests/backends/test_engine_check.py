"""`rl_engine.check` says beforehand, and without starting anything, what `initialize` would say."""

import json
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from rl_engine import (
    BackendError,
    ConfigError,
    EngineConfig,
    LoraConfig,
    ModelFolderError,
    ParallelConfig,
    check,
    create_engine,
)
from rl_engine.model import module_engine
from rl_engine.model.device_memory import idle_accelerator
from rl_engine.testing import write_tiny_model

_spec = spec_from_file_location("moe_oracle", Path(__file__).parents[1] / "support" / "moe_oracle.py")
moe_oracle = module_from_spec(_spec)
_spec.loader.exec_module(moe_oracle)
BACKENDS = ("fsdp", "megatron", "torchtitan")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    write_tiny_model(folder / "model")
    moe_oracle.write_model(folder / "experts")
    (folder / "nothing").mkdir()
    for name in ("no weights", "damaged"):
        write_tiny_model(folder / name)
    (folder / "no weights" / "model.safetensors").unlink()
    (folder / "damaged" / "model.safetensors").write_bytes(b"no tensors here")
    write_tiny_model(folder / "unknown")
    config = json.loads((folder / "unknown" / "config.json").read_text())
    (folder / "unknown" / "config.json").write_text(json.dumps(config | {"model_type": "qwen99"}))
    return folder


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a process group was asked for")

    monkeypatch.setattr(dist, "init_process_group", refuse)


FOR_ALL = [
    ("model", {"num_candidates": 79}, 1, ConfigError, "the model's vocabulary has 78 entries"),
    ("model", {"router_aux_loss_coef": 0.1}, 1, ConfigError, "the model has no router"),
    ("nowhere", {}, 1, ModelFolderError, "nowhere does not exist"),
    ("nothing", {}, 1, ModelFolderError, r"has no config\.json"),
    ("unknown", {}, 1, ModelFolderError, "qwen99"),
]
OWN = [
    ("fsdp", "model", {"parallel": ParallelConfig(sp=2)}, 3, ConfigError, "sp = 2 does not divide 3 ranks"),
    ("fsdp", "model", {"parallel": ParallelConfig(sp=4)}, 4, ConfigError, "does not divide .* key and value heads"),
    ("fsdp", "model", {"parallel": ParallelConfig(tp=2)}, 2, ConfigError, "takes sp, dp_replicate and ep only"),
    ("fsdp", "model", {"lora": LoraConfig(target_modules=("w9",))}, 1, ConfigError, r"target_modules is \['w9'\]"),
    ("fsdp", "experts", {"torch_compile": True}, 1, ConfigError, "has routers, images or layers that mix tokens"),
    ("megatron", "model", {"parallel": ParallelConfig(tp=2)}, 3, ConfigError, "= 2 does not divide 3 ranks"),
    ("megatron", "model", {"parallel": ParallelConfig(tp=3)}, 3, ConfigError, "does not divide .* 4 query heads"),
    ("megatron", "experts", {"parallel": ParallelConfig(ep=2)}, 3, ConfigError, "does not divide the 3 ranks"),
    ("megatron", "model", {"lora": LoraConfig(target_modules=("w9",))}, 1, ConfigError, r"target_modules is \['w9'\]"),
    ("torchtitan", "model", {"lora": LoraConfig()}, 1, ConfigError, "has no LoRA adapters"),
    ("torchtitan", "model", {"parallel": ParallelConfig(dp_replicate=2)}, 3, ConfigError, "does not divide 3 ranks"),
    ("torchtitan", "experts", {}, 1, ModelFolderError, "has no mapping to the torchtitan backend"),
]  # fmt: skip


@pytest.mark.process
@pytest.mark.promise("`rl_engine.check` says what `initialize` would")
@pytest.mark.parametrize(
    ("backend", "folder", "changes", "world_size", "error", "sentence"),
    [(backend, *case) for case in FOR_ALL for backend in BACKENDS] + OWN,
)
def test_what_it_says_is_what_initialize_says(
    folders, monkeypatch, backend, folder, changes, world_size, error, sentence
):
    config = EngineConfig(model_path=str(folders / folder), **changes)
    with pytest.raises(error, match=sentence) as before:
        check(backend, config, world_size)
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    with pytest.raises(error) as after:
        create_engine(backend, config).initialize()
    assert str(after.value) == str(before.value)


@pytest.mark.process
@pytest.mark.parametrize("folder", ["no weights", "damaged"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_that_cannot_be_read_are_found_by_their_headers(folders, backend, folder):
    sentence = {"no weights": r"has no \.safetensors file", "damaged": "model.safetensors cannot be read"}[folder]
    config = EngineConfig(model_path=str(folders / folder))
    with pytest.raises(ModelFolderError, match=sentence):
        check(backend, config)
    check(backend, EngineConfig(model_path=str(folders / folder), init="random"))


@pytest.mark.process
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_can_run_is_not_refused(folders, backend):
    layouts = {"fsdp": ParallelConfig(sp=2, dp_replicate=2), "megatron": ParallelConfig(tp=2, pp=2)}
    parallel = layouts.get(backend, ParallelConfig(dp_replicate=2))
    check(backend, EngineConfig(model_path=str(folders / "model"), parallel=parallel), 4)
    assert not dist.is_initialized()


def test_foreign_tensors_are_found_before_megatron_starts(tmp_path):
    write_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 60}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match=r"has with another shape 6 tensor"):
        check("megatron", EngineConfig(model_path=str(tmp_path)))


def test_what_is_not_there_is_named(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(BackendError, match=r"lora needs peft .*pip install 'rl-engine\[lora\]'"):
        check("fsdp", EngineConfig(model_path=str(folders / "model"), lora=LoraConfig()))
    with pytest.raises(BackendError, match="No engine backend is named 'fsdpp'"):
        check("fsdpp", EngineConfig(model_path=str(folders / "model")))
    with pytest.raises(ConfigError, match="world_size is 0"):
        check("fsdp", EngineConfig(model_path=str(folders / "model")), 0)


# as published
QWEN3_235B = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.process
def test_the_layouts_of_large_mixtures_are_taken(tmp_path):
    """Nothing is loaded: the config alone is there. DeepSeek-V3's sizes are the defaults of its config."""
    for kind, sizes in (("qwen3_moe", QWEN3_235B), ("deepseek_v3", {})):
        AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path / kind)
    layout = ParallelConfig(tp=4, sequence_parallel=True, pp=8, ep=8)
    qwen, deepseek = (
        EngineConfig(model_path=str(tmp_path / kind), init="random") for kind in ("qwen3_moe", "deepseek_v3")
    )
    check("megatron", replace(qwen, parallel=layout), world_size=64)
    check("fsdp", qwen, world_size=64)
    check("fsdp", deepseek, world_size=512)
    check("megatron", replace(deepseek, parallel=ParallelConfig(pp=16, ep=64)), world_size=2048)  # of its report


def test_a_gpu_of_rocm_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(BackendError, match=r"torch is built for ROCm 6\.4 and sees a GPU.* Hide it"):
        check("fsdp", EngineConfig(model_path=str(write_tiny_model(tmp_path))))


@pytest.mark.parametrize("kind", ["mps", "npu", "cuda", None])
def test_an_accelerator_that_is_not_computed_on_is_said(tmp_path, monkeypatch, kind):
    device = None if kind is None else SimpleNamespace(type=kind)
    with monkeypatch.context() as patched:
        patched.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
        idle = idle_accelerator()
    assert idle == (kind if kind in ("mps", "npu") else None)
    monkeypatch.setattr(module_engine, "idle_accelerator", lambda: idle)
    found = check("fsdp", EngineConfig(model_path=str(write_tiny_model(tmp_path))))
    assert found.get("device") == (idle and f"cpu, as engines here do not compute on {kind}")
