"""Mappings of Megatron-Bridge (tried: 0.3.1), for architectures that the built-in one does not know.

Taken from it are names: which Hugging Face tensors make up each megatron-core parameter. The layers are those of
`model`, so that an architecture is accepted only where three things hold: the mapping does nothing but join tensors,
the model's tensors are all mapped and of the shapes that the layers want, and a probe row is given the log-probs that
transformers' own model gives it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rl_engine.backends.megatron.weights import Form, plan_weights, shapes_of
from rl_engine.checkpoint import hf_folder
from rl_engine.errors import ModelFolderError
from rl_engine.types import Head, MatmulPrecision, Precision

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rl_engine.backends.megatron.architecture import Architecture, Registry
    from rl_engine.backends.megatron.weights import Entry
    from rl_engine.types import EngineConfig

_PROBE = 32  # tokens
# the mappings of its `param_mapping` that cut and join tensors and change no number in them
_JOINS = {
    Form.PLAIN: (("AutoMapping", "ColumnParallelMapping", "RowParallelMapping", "ReplicatedMapping"), None),
    Form.QKV: (("QKVMapping",), ("q", "k", "v")),
    Form.STACKED: (("GatedMLPMapping",), ("gate", "up")),
}
_NEEDED = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act",
)  # fmt: skip


def find_registry(folder: Path, kind: str) -> Registry:
    """Its mapping for the architecture of a model folder.

    Raises:
        ModelFolderError: there is none, or Megatron-Bridge cannot be imported.
    """
    try:
        from megatron.bridge.models.conversion.model_bridge import (  # pyright: ignore[reportMissingImports]
            get_model_bridge,  # pyright: ignore[reportUnknownVariableType]
        )
    except ImportError as error:
        raise ModelFolderError(
            f"Model type {kind!r} has no built-in mapping to megatron-core, and Megatron-Bridge, which has more, "
            f"cannot be imported ({error}). Use the fsdp backend, which takes any causal LM."
        ) from error
    model = hf_folder.empty_model(folder)
    try:
        return get_model_bridge(type(model)).mapping_registry()
    except NotImplementedError as error:
        raise ModelFolderError(
            f"Model type {kind!r} has neither a built-in mapping to megatron-core nor one of Megatron-Bridge. "
            "Use the fsdp backend, which takes any causal LM."
        ) from error


def check_bridged(config: Any, head: Head) -> None:
    """Refuse what a bridged architecture cannot have, before its config is read.

    Raises:
        ModelFolderError: says what.
    """
    kind = config.model_type
    if head != Head.LM:
        raise refusal(kind, f"head={head} is for the built-in mappings")
    missing = [name for name in _NEEDED if getattr(config, name, None) is None]
    if missing:
        raise refusal(kind, f"its config has no {', '.join(missing)}")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise refusal(kind, f"it has a sliding window of {window} tokens")


def with_tensors(arch: Architecture, folder: Path) -> Architecture:
    """`arch` with what the tensors of transformers' model tell: biases and norms of heads.

    Raises:
        ModelFolderError: a tensor is not mapped, or is not what the layers want.
    """
    found = {name: tuple(tensor.shape) for name, tensor in hf_folder.empty_model(folder).named_parameters()}
    registry = arch.registry
    assert registry is not None

    def has(parameter: str) -> bool:
        mapping = registry.megatron_to_hf_lookup(f"decoder.layers.0.self_attention.{parameter}")
        return mapping is not None and _names(mapping)[0] in found

    arch = replace(arch, has_qkv_bias=has("linear_qkv.bias"), has_qk_norm=has("q_layernorm.weight"))
    wanted = shapes_of(plan(arch, pp=1, vpp=1, ep=1))
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise refusal(
                arch.model_type, f"tensor {name} is {_shown(found, name)} there and {_shown(wanted, name)} here"
            )
    return arch


def plan(arch: Architecture, *, pp: int, vpp: int, ep: int) -> list[Entry]:
    """`plan_weights` under the names of the architecture's own tensors.

    Raises:
        ModelFolderError: a parameter has no mapping, or one that does more than join tensors.
    """
    entries, registry = plan_weights(arch, pp=pp, vpp=vpp, ep=ep), arch.registry
    if registry is None:
        return entries
    return [_renamed(entry, registry, arch.model_type) for entry in entries]


def _renamed(entry: Entry, registry: Registry, kind: str) -> Entry:
    first = next(iter(entry.tensors))
    layer = re.match(r"model\.layers\.(\d+)\.", first)
    _, _, name = entry.parameter.partition(".")
    if layer is not None:  # of the whole model, where the parameter counts those of its piece
        name = re.sub(r"^decoder\.layers\.\d+", f"decoder.layers.{layer[1]}", name)
    if entry.is_copy:
        name = "embedding.word_embeddings.weight"
    mapping, (classes, roles) = registry.megatron_to_hf_lookup(name), _JOINS[entry.form]
    if mapping is None:
        raise refusal(kind, f"Megatron-Bridge says nothing of {name}")
    given = mapping.hf_param
    is_plain = isinstance(given, str) if roles is None else not isinstance(given, str) and set(given) == set(roles)
    if type(mapping).__name__ not in classes or getattr(mapping, "permute_dims", None) or not is_plain:
        raise refusal(kind, f"{type(mapping).__name__} of {name} does more than join tensors")
    return replace(entry, tensors=dict(zip(_names(mapping, roles), entry.tensors.values(), strict=True)))


def _names(mapping: Any, roles: tuple[str, ...] | None = None) -> list[str]:
    given: str | Mapping[str, str] = mapping.hf_param
    return [given] if isinstance(given, str) else [given[role] for role in roles or sorted(given)]


def probe_row(arch: Architecture) -> list[int]:
    """Token ids that are not all alike."""
    return [(7 * place + 3) % arch.vocab_size for place in range(min(_PROBE, arch.context))]


def difference(config: EngineConfig, row: list[int], scored: torch.Tensor) -> str | None:
    """What is wrong with `scored`, the log-probs of a row's tokens but the first; None where nothing is."""
    try:
        model = hf_folder.load_model(config.model_path, init=config.init, dtype=torch.float32, seed=config.seed).eval()
    except ModelFolderError as error:  # for every rank to hear of
        return str(error)
    with torch.no_grad():
        logits = model(torch.tensor([row])).logits[0, :-1].double() / config.temperature
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]
    is_narrow = config.precision == Precision.BFLOAT16 or config.matmul_precision != MatmulPrecision.HIGHEST
    worst = float((scored.double().cpu() - wanted).abs().max())
    if worst <= (0.2 if is_narrow else 1e-3):
        return None
    return (
        f"log-probs of a probe row differ by {worst:.3g} from those of transformers' {type(model).__name__}: "
        "its layers compute something else than ours"
    )


def refusal(kind: str, what: str) -> ModelFolderError:
    """Of an architecture that has a mapping."""
    return ModelFolderError(
        f"Model type {kind!r} is mapped by Megatron-Bridge, but not trained by the megatron backend: {what}. "
        "Use the fsdp backend, which takes any causal LM."
    )


def _shown(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return "absent" if name not in shapes else f"of shape {list(shapes[name])}"
