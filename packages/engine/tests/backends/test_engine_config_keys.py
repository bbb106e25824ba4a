"""Every key of the configuration does something on every backend, or is refused with a sentence.

A key that is not in the tables below fails. For each, an engine with another value of it must differ from one with the
default in the named part of what can be seen of an engine; a key that takes several ranks names the test that would
fail if it did nothing.
"""

from contextlib import suppress
from dataclasses import fields, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rl_engine import (
    CheckpointError,
    ConfigError,
    EngineConfig,
    Fp8,
    Head,
    LoraConfig,
    LoraExport,
    MatmulPrecision,
    ModelInit,
    OptimizerConfig,
    OptimizerKind,
    ParallelConfig,
    Precision,
    create_engine,
)
from rl_engine.layers import packed_attention as attention
from rl_engine.losses import token_mean, token_values
from rl_engine.testing import ragged_batch, write_tiny_model

_spec = spec_from_file_location("moe_oracle", Path(__file__).parents[1] / "support" / "moe_oracle.py")
moe_oracle = module_from_spec(_spec)
_spec.loader.exec_module(moe_oracle)

BACKENDS = ("fsdp", "megatron", "torchtitan")
TYPES = {"": EngineConfig, "optimizer.": OptimizerConfig, "lora.": LoraConfig, "parallel.": ParallelConfig}
OPTIMIZER = OptimizerConfig(lr=1e-2, total_steps=20, max_grad_norm=1e9)
LORA = LoraConfig(rank=2, export=LoraExport.ADAPTER)
DATA = ragged_batch([[5, 6, 7], [8], [3] * 9], [[9, 10], [11, 12, 13], [1, 2, 3, 4, 5]])

# key: (another value, the part of what `look` sees that it changes)
EFFECTS = {
    "model_path": ("other", "weights"),
    "init": (ModelInit.RANDOM, "weights"),
    "head": (Head.VALUE, "columns"),
    "lora": (LORA, "weights"),
    "optimizer": (None, "stepped"),
    "precision": (Precision.BFLOAT16, "dtype"),
    "matmul_precision": (MatmulPrecision.MEDIUM, "matmul"),
    "max_tokens_per_gpu": (15, "micro-batches"),
    "temperature": (0.5, "scores"),
    "entropy": (True, "columns"),
    "sum_pi_squared": (True, "columns"),
    "num_candidates": (2, "columns"),
    "router_aux_loss_coef": (0.5, "metrics"),
    "activation_checkpointing": (True, "times attended"),
    "async_checkpoints": (True, "bad save raised at once"),
    "seed": (3, "weights"),
    "timeout_s": (77.0, "timeout"),
    "optimizer.kind": (OptimizerKind.MUON, "stepped"),
    "optimizer.momentum": (0.5, "stepped"),
    "optimizer.lr": (2e-2, "stepped"),
    "optimizer.betas": ((0.5, 0.6), "stepped"),
    "optimizer.eps": (1e-2, "stepped"),
    "optimizer.weight_decay": (0.5, "stepped"),
    "optimizer.max_grad_norm": (1e-3, "stepped"),
    "optimizer.warmup_steps": (2, "rates"),
    "optimizer.total_steps": (3, "rates"),
    "optimizer.min_lr_ratio": (0.5, "rates"),
    "lora.rank": (3, "shapes"),
    "lora.alpha": (1.0, "stepped"),
    "lora.dropout": (0.9, "stepped"),
    "lora.target_modules": (("q_proj",), "shapes"),
    "lora.export": (LoraExport.MERGED, "shapes"),
}
# what a key's engine has beside it, and the one that it is compared with
BESIDE = {
    "init": {"seed": 5},  # the folder was drawn with seed 0
    "seed": {"init": ModelInit.RANDOM},
    "timeout_s": {"precision": Precision.BFLOAT16},  # on fsdp one rank in one format needs no group
    "lora": {"lora": None},
    "optimizer.momentum": {"optimizer": replace(OPTIMIZER, kind=OptimizerKind.MUON)},
}
LORA_KEYS = {"lora", *(f"lora.{field.name}" for field in fields(LoraConfig))}
REFUSED = {
    "fsdp": {},
    "megatron": dict.fromkeys(("optimizer.kind", "optimizer.momentum"), "the megatron backend shards AdamW alone"),
    "torchtitan": dict.fromkeys(LORA_KEYS, "The torchtitan backend has no LoRA adapters")
    | {"router_aux_loss_coef": "the model has no router that it could even out"},
}
# key: the tests, by backend, that fail where it does nothing; the other backends refuse it
ELSEWHERE = {
    "prefix_sharing": {
        "fsdp": "test_engine_prefix_sharing::test_a_budget_counts_a_shared_prompt_once",
        "torchtitan": "test_engine_prefix_sharing::test_a_backend_of_another_library_shares",
    },
    "torch_compile": {"fsdp": "test_engine_compile::test_compiled_layers_step_like_plain_ones"},
    "freeze_vision": {"fsdp": "test_engine_images::test_a_frozen_tower_has_no_gradients_and_no_adapters"},
    "cpu_offload": {"fsdp": "test_engine_offload::test_cpu_offload_is_what_every_layer_is_sharded_with"},
    "optimizer_offload": dict.fromkeys(
        BACKENDS, "test_engine_offload::test_the_optimizers_state_is_on_the_gpu_in_steps_alone"
    ),
    "activation_offload": dict.fromkeys(
        BACKENDS, "test_engine_offload::test_offloaded_activations_give_the_same_steps"
    ),
    "recompute": dict.fromkeys(BACKENDS[:2], "test_engine_parts::test_every_choice_gives_the_same_step"),
    **{
        key: dict.fromkeys(BACKENDS, "test_engine_mtp::test_layers_are_kept_as_they_were")
        for key in ("mtp", "exports_mtp")
    },
    "fp8": {
        "fsdp": "test_engine_fp8::test_torchao_is_told",
        "megatron": "test_engine_fp8::test_megatron_tells_transformer_engine",
    },
    "dropout": {"fsdp": "test_engine_dropout::test_dropout_of_the_model_is_asked_for"},
    "transformer_engine": {"megatron": "test_engine_megatron_te::test_it_is_taken_on_a_gpu_in_bfloat16"},
    "bridge": {"megatron": "test_engine_bridge::test_the_key_decides_about_a_family_of_its_list"},
    "dist_checkpoint": {
        "megatron": "test_engine_megatron_dist_checkpoint::test_megatron_core_reads_what_is_written_and_is_read_itself"
    },
    "parallel.tp": {"megatron": "test_engine_megatron::test_shards_cover_the_weights"},
    "parallel.pp": {"megatron": "test_engine_megatron::test_a_layout_is_what_it_says"},
    "parallel.vpp": {"megatron": "test_engine_megatron::test_a_layout_is_what_it_says"},
    "parallel.ep": {
        "fsdp": "test_engine_expert_parallel::test_a_rank_gathers_its_own_experts_alone",
        "megatron": "test_engine_megatron::test_shards_cover_the_weights",
    },
    "parallel.cp": {"megatron": "test_engine_megatron::test_a_layout_is_what_it_says"},
    "parallel.sequence_parallel": {"megatron": "test_engine_megatron::test_a_layout_is_what_it_says"},
    "parallel.sp": {"fsdp": "test_engine_fsdp_ranks::test_ranks_that_share_tokens_have_room_for_twice_as_many"},
    "parallel.dp_replicate": {
        "fsdp": "test_engine_fsdp_ranks::test_shards_cover_the_weights_and_replicas_hold_them_all",
        "torchtitan": "test_engine_torchtitan::test_two_ranks_give_the_oracles_gradient",
    },
}


def test_every_key_is_in_a_table():
    keys = {f"{prefix}{field.name}" for prefix, kind in TYPES.items() for field in fields(kind)}
    assert keys - {"parallel"} == EFFECTS.keys() | ELSEWHERE.keys()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    write_tiny_model(folder / "model")
    write_tiny_model(folder / "other", hidden_size=16)
    moe_oracle.write_model(folder / "experts")
    return folder


def base_of(folders, key):
    """What the engine with another value of a key is compared with."""
    folder = folders / ("experts" if key == "router_aux_loss_coef" else "model")
    lora = LORA if key in LORA_KEYS else None
    config = EngineConfig(model_path=str(folder), optimizer=OPTIMIZER, lora=lora)
    return replace(config, **BESIDE.get(key, {}))


def changed(config, folders, key, value):
    owner, _, name = key.rpartition(".")
    if key == "model_path":
        value = str(folders / value)
    return replace(config, **{owner: replace(getattr(config, owner), **{name: value})} if owner else {name: value})


@pytest.fixture(scope="module")
def looked_at():
    """What `look` saw of the engines that others are compared with."""
    return {}


STEPPED = ("stepped", "metrics", "rates", "times attended")


def look(backend, config, folder, parts=STEPPED):
    """What can be seen of an engine, after steps if a part needs them; `folder` holds a file named `a file`."""
    seen, calls = {}, []

    def loss(output, rows):
        seen["matmul"] = torch.get_float32_matmul_precision()
        scores = output.token_values if output.token_logprobs is None else output.token_logprobs
        return -token_mean(scores, token_values(rows, "loss_mask", scores), output), {}

    attend = attention.attend
    attention.attend = lambda *given: calls.append(1) or attend(*given)
    engine = create_engine(backend, config)
    try:
        engine.initialize()
        group = dist.group.WORLD
        seen["timeout"] = None if group is None else group._get_backend(torch.device("cpu")).options._timeout
        seen["weights"] = exported(engine)
        seen["shapes"] = {name: tuple(tensor.shape) for name, tensor in seen["weights"].items()}
        seen["dtype"] = {tensor.dtype for tensor in seen["weights"].values()}
        with engine.eval_mode():
            output = engine.forward_backward_batch(DATA, loss, forward_only=True)
        columns = dict(output.columns.items())
        seen |= {"columns": sorted(columns), "micro-batches": output.num_micro_batches}
        seen["scores"] = columns.get("logprobs", columns.get("values")).values().clone()
        del calls[:]
        if set(parts) & set(STEPPED):
            seen |= steps(engine, loss, calls) if config.optimizer is not None else {"stepped": None}
        seen["bad save raised at once"] = is_refused_at_once(engine, folder)
    finally:
        attention.attend = attend
        with suppress(CheckpointError):  # that of the bad save
            engine.close()
    return seen


def steps(engine, loss, calls):
    seen = {"rates": []}
    with engine.train_mode():
        for _ in range(3):
            engine.optimizer_zero_grad()
            seen["metrics"] = sorted(engine.forward_backward_batch(DATA, loss).metrics)
            engine.optimizer_step()
            seen["rates"].append(engine.lr_scheduler_step())
    return seen | {"stepped": exported(engine), "times attended": len(calls)}


def exported(engine):
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}


def is_refused_at_once(engine, folder):
    try:
        engine.save_checkpoint(folder / "a file" / "checkpoint", 1)
    except CheckpointError:
        return True
    return False


def is_same(one, other):
    if not isinstance(one, dict) or not isinstance(other, dict):
        return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return one.keys() == other.keys() and all(is_same(value, other[name]) for name, value in one.items())


FIRST_OF_BACKENDS = [name if name == "fsdp" else pytest.param(name, marks=pytest.mark.slow) for name in BACKENDS]


@pytest.mark.promise("No key of `EngineConfig` is ignored")
@pytest.mark.process
@pytest.mark.parametrize("key", EFFECTS)
@pytest.mark.parametrize("backend", FIRST_OF_BACKENDS)
def test_a_key_does_something_or_is_refused(folders, looked_at, tmp_path, backend, key):
    value, part = EFFECTS[key]
    (tmp_path / "a file").write_text("")
    base = base_of(folders, key)
    other = changed(base, folders, key, value)
    if key in REFUSED[backend]:
        with pytest.raises(ConfigError, match=REFUSED[backend][key]):
            look(backend, other, tmp_path)
        return
    if (backend, base) not in looked_at:
        looked_at[backend, base] = look(backend, base, tmp_path)
    before, after = looked_at[backend, base], look(backend, other, tmp_path, (part,))
    assert not is_same(before[part], after[part]), f"{key}={value} changes nothing of {part} on {backend}"


@pytest.mark.parametrize("key", ELSEWHERE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_is_tested_elsewhere_or_refused(folders, backend, key):
    named = ELSEWHERE[key].get(backend)
    if named is not None:
        file, _, test = named.partition("::")
        assert f"def {test}(" in next(Path(__file__).parents[1].rglob(f"{file}.py")).read_text()
        return
    _, _, axis = key.rpartition("parallel.")
    flags = ("sequence_parallel", "torch_compile", "cpu_offload", "prefix_sharing", "dropout", "freeze_vision")
    value = True if axis in flags else 2
    value = {
        "fp8": Fp8.TENSORWISE,
        "transformer_engine": False,
        "dist_checkpoint": "a folder",
        "recompute": ("mlp",),
        "bridge": "own",
    }.get(key, value)
    config = EngineConfig(model_path=str(folders / "model"), precision=Precision.BFLOAT16)
    config = changed(config, folders, key, value)
    with pytest.raises(ConfigError, match=rf"^{key.split('.')[0]}"):
        create_engine(backend, config).initialize()
