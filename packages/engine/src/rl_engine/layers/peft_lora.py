"""LoRA adapters by peft: put into a model, turned off, and taken out again."""

from __future__ import annotations

import json
import re
import warnings
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Linear

from rl_engine.checkpoint.hf_folder import empty_model, publish
from rl_engine.checkpoint.sharded import whole
from rl_engine.errors import BackendError, ConfigError, naming
from rl_engine.layers.multimodal import vision_tower
from rl_engine.types import Head, digest_files, write_manifest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping
    from pathlib import Path

    from torch import nn

    from rl_engine.types import EngineConfig, LoraConfig

EXPERTS = "experts"
"""Target of the weights of all experts of a mixture, where they are joined."""
ADAPTER = "default"
"""The only adapter, by peft's own name."""
_SCORE = "score"
"""The scalar head, as transformers' sequence classifiers name it."""


def add_adapter(
    model: nn.Module, config: LoraConfig, seed: int, head: Head = Head.LM, frozen: str | None = None
) -> dict[str, Any]:
    """Put an adapter into `model`, in place, and freeze the rest but a scalar head; peft's configuration of it.

    The module named `frozen` gets none.

    Raises:
        BackendError: peft is not installed.
        ConfigError: a target name is no layer's, or is that of a layer that cannot be merged.
    """
    try:
        import peft
    except ImportError as error:
        raise BackendError(f"lora needs peft ({error}); try: pip install 'rl-engine[lora]'") from error
    experts = _joined_experts(model) if EXPERTS in config.target_modules else []
    if experts and config.dropout:
        raise ConfigError(f"lora.dropout is {config.dropout}, and peft has none on {EXPERTS}. Set it to 0.")
    names = [name for name in config.target_modules if not (experts and name == EXPERTS)]
    layers = [f".{name}" for name, _ in model.named_modules() if frozen is None or not name.startswith(f"{frozen}.")]
    if unknown := [name for name in names if not any(layer.endswith(f".{name}") for layer in layers)]:
        raise ConfigError(
            f"lora.target_modules is {list(config.target_modules)}, and no layer that is trained is named "
            f"{' or '.join(unknown)}. Leave it out, or name others, such as {', '.join(_linear_names(model)[:4])}."
        )
    known = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType] - any number does
        lora_dropout=config.dropout,
        target_modules=names if config.target_modules else _linear_names(model),
        target_parameters=experts or None,
        exclude_modules=None if frozen is None else rf"{re.escape(frozen)}\..*",
        task_type="CAUSAL_LM" if head == Head.LM else "SEQ_CLS",
        modules_to_save=None if head == Head.LM else [_SCORE],
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        warnings.filterwarnings("ignore", module="peft")  # of tied weights, which `_check_layers` refuses
        try:
            peft.inject_adapter_in_model(known if head == Head.LM else _within(known), model, adapter_name=ADAPTER)
        except ValueError as error:
            message = " ".join(str(error).split())  # peft shows the module on many lines
            raise ConfigError(f"lora.target_modules is {list(config.target_modules)}: {message}") from error
    _check_layers(model)
    if head != Head.LM:
        model.get_submodule(_SCORE).requires_grad_(True)
    return json.loads(json.dumps(known.to_dict(), default=_plain))


def _joined_experts(model: nn.Module) -> list[str]:
    """Names of the weights, as `experts.gate_up_proj`, of experts that are joined in tensors of three axes."""
    return sorted(
        {
            f"{EXPERTS}.{name}"
            for path, module in model.named_modules()
            if path.rpartition(".")[2] == EXPERTS
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.ndim == 3
        }
    )


def _linear_names(model: nn.Module) -> list[str]:
    """Last parts of the names of every linear layer but the head; of attention's alone in a mixture of joined experts.

    A last part that other modules have too (a convolution of a vision tower) is written with the whole name. peft's
    "all-linear" would also take those experts, and so do the names of layers next to them.
    """
    from transformers import Conv1D

    head = getattr(model, "get_output_embeddings", lambda: None)()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (Linear, Conv1D)) and module is not head and name != _SCORE
    ]
    if any(name.endswith("experts") for name, module in model.named_modules() if [*module.parameters(recurse=False)]):
        linear = [name for name in linear if "attn" in name or "attention" in name]
    others = {name.rpartition(".")[2] for name, _ in model.named_modules() if name not in linear}
    last = {name: name.rpartition(".")[2] for name in linear}
    return sorted({name if part in others else part for name, part in last.items()})


def _check_layers(model: nn.Module) -> None:
    """Refuse adapters on anything but linear layers with a weight of their own.

    Raises:
        ConfigError: names the layer.
    """
    from transformers import Conv1D

    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for name, layer in adapted_layers(model).items():
        if parameter_of(layer) is not None:
            continue
        base, last = layer.get_base_layer(), name.rpartition(".")[2]
        if not isinstance(base, (Linear, Conv1D)):
            raise ConfigError(
                f"lora.target_modules takes {last}, and {name} is of type {type(base).__name__}; adapters are on "
                "linear layers. Leave it out."
            )
        others = [other for other in owners[id(base.weight)] if other != f"{name}.base_layer"]
        if others:
            raise ConfigError(
                f"lora.target_modules takes {last}, whose weight is that of {others[0]} too (tie_word_embeddings), so "
                "that the adapter cannot be added to it. Leave it out, or train the whole model."
            )


def adapter_layers(config: EngineConfig) -> list[str]:
    """Names of the layers that an engine of this configuration has adapters on; nothing is loaded."""
    assert config.lora is not None
    model = empty_model(config.model_path, head=config.head)
    tower = vision_tower(model) if config.freeze_vision else None
    add_adapter(model, config.lora, config.seed, config.head, tower)
    return [*adapted_layers(model)]


def _within(known: Any) -> Any:
    """The configuration without the head that is trained whole, which stays the module that it is."""
    frozen = "" if known.exclude_modules is None else f"|{known.exclude_modules}"
    return replace(known, modules_to_save=None, exclude_modules=rf"(.*\.)?{_SCORE}{frozen}")


@contextmanager
def without_adapter(model: nn.Module) -> Generator[None]:
    """Turn the adapter off inside: the model computes as without it."""
    layers = adapted_layers(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for layer in layers.values():
        layer.enable_adapters(False)
    for parameter in trained:  # peft freezes them; FSDP, should this be its first pass, would take them for frozen
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers.values():
            layer.enable_adapters(True)


def merged_weights(model: nn.Module, named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """`named`, the weights of a model with an adapter, as those of one without: names, sums, whole tensors."""
    layers = {
        f"{_without_wrappers(name)}.{parameter_of(layer) or 'weight'}": name
        for name, layer in adapted_layers(model).items()
    }
    for name, tensor in named.items():
        if ".lora_" in name:
            continue
        full, own = whole(tensor), _without_wrappers(name)
        if (owner := layers.get(own)) is not None:
            down, up = (whole(named[f"{owner}.lora_{part}.{ADAPTER}.weight"]) for part in "AB")
            full = full + _product(model.get_submodule(owner), down, up)
        yield own, full


def _product(layer: Any, down: Tensor, up: Tensor) -> Tensor:
    """What an adapter adds to its weight: B @ A, of each expert if the weight is that of joined ones."""
    scaling = layer.scaling[ADAPTER]
    if parameter_of(layer) is None:
        added = (up @ down) * scaling
        return added.T if layer.fan_in_fan_out else added
    return expert_product(layer.get_base_layer(), down, up) * scaling


def expert_product(experts: Any, down: Tensor, up: Tensor) -> Tensor:
    """B @ A of each of a module's joined experts, shaped as their weight; peft has all of A in one matrix, and of B."""
    num = experts.num_experts
    added = up.unflatten(1, (-1, num)).permute(2, 0, 1) @ down.unflatten(0, (num, -1))
    return added.transpose(1, 2) if getattr(experts, "is_transposed", False) else added


def parameter_of(layer: Any) -> str | None:
    """Name of the parameter that peft adapts in the place of a module's product; None of a linear layer."""
    return getattr(layer, "parameter_name", None)


def _without_wrappers(name: str) -> str:
    """Name of a module or parameter in the model without peft's wrappers."""
    return name.replace(".base_layer", "")


def adapter_weights(named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The adapter's tensors under the names that peft writes into adapter_model.safetensors."""
    for name, tensor in named.items():
        if ".lora_" in name or name == f"{_SCORE}.weight":
            yield f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}", whole(tensor)


def write_adapter(
    path: str | Path,
    weights: dict[str, Tensor],
    config: Mapping[str, Any],
    base: str,
    more: Mapping[str, dict[str, Tensor]] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder that peft loads; it appears complete or not at all.

    Args:
        path: The folder.
        weights: Tensors of the adapter, by peft's names.
        config: peft's description of it.
        base: Folder of the model under it.
        more: Tensors of further files, by the file's name.
        fields: Of a manifest with the digest of every file; None: no manifest.
    """
    from safetensors.torch import save_file

    def write(draft: Path) -> None:
        for name, tensors in {"adapter_model.safetensors": weights, **(more or {})}.items():
            with naming(draft / name):
                save_file({key: each.contiguous() for key, each in tensors.items()}, draft / name)
        described = {**config, "base_model_name_or_path": base, "inference_mode": True}
        (draft / "adapter_config.json").write_text(json.dumps(described, indent=2, sort_keys=True))
        if fields is not None:
            write_manifest(draft / "manifest.json", fields, digest_files(draft))

    publish(path, write)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """By name, the layers of a model that have an adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def _plain(value: Any) -> Any:
    """Sets and enums of a configuration."""
    return sorted(value) if isinstance(value, set) else str(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
