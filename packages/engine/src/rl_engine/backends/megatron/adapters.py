"""LoRA adapters on megatron-core's linear layers, cut as the layer is; names and description are peft's.

Legend: `T` tokens, `R` rank of the adapter.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from rl_engine.backends.megatron.weights import Cut, Entry, join, shapes_of
from rl_engine.checkpoint import hf_folder
from rl_engine.errors import ConfigError
from rl_engine.layers.peft_lora import ADAPTER, adapted_layers, add_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rl_engine.backends.megatron.architectures import Architecture
    from rl_engine.backends.megatron.weights import WeightMap
    from rl_engine.types import EngineConfig, LoraConfig

_ATTRIBUTE = "adapter"


def describe_adapter(config: EngineConfig) -> tuple[dict[str, Any], list[str]]:
    """Peft's description of the adapter, and the names of the layers that have one. Nothing is loaded.

    Raises:
        BackendError: peft is not installed.
        ConfigError: no layer has one of the target names.
    """
    assert config.lora is not None
    model = hf_folder.empty_model(config.model_path, head=config.head)
    described = add_adapter(model, config.lora, config.seed, config.head)
    return described, [*adapted_layers(model)]


def adapter_entries(entries: list[Entry], layers: Sequence[str], rank: int) -> list[Entry]:
    """Both matrices of every adapter, cut over tensor-parallel ranks as the layer's own is.

    Raises:
        ConfigError: a layer that is no linear layer of the decoder, or an expert.
    """
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        for name, shape in entry.tensors.items():
            layer, module = name.removesuffix(".weight"), entry.parameter.removesuffix(".weight")
            if layer == name or layer not in layers or entry.expert_rank is not None or ".layers." not in layer:
                continue
            found[layer] = [
                Entry(
                    parameter=f"{module}.{_ATTRIBUTE}.{_last(layer)}.{part}",
                    tensors={f"{layer}.lora_{part}.{ADAPTER}.weight": size},
                    cut=entry.cut if entry.cut == cut else Cut.WHOLE,
                    stage=entry.stage,
                    is_adapter=True,
                )
                for part, size, cut in (("A", (rank, shape[1]), Cut.COLUMNS), ("B", (shape[0], rank), Cut.ROWS))
            ]
    if left := [layer for layer in layers if layer not in found]:
        raise ConfigError(
            f"lora.target_modules takes {left[0]}; the megatron backend has adapters on linear layers of the decoder, "
            "not on its experts. Name target_modules without it, or use the fsdp backend."
        )
    return [entry for layer in layers for entry in found[layer]]


def add_adapters(model: nn.Module, weights: WeightMap, arch: Architecture, config: EngineConfig) -> None:
    """Put this rank's adapters into its layers; they alone, and a scalar head, are trained."""
    assert config.lora is not None
    model.requires_grad_(False)
    by_module: dict[str, dict[str, Entry]] = {}
    for entry in weights.own.values():
        if entry.is_adapter:
            module, _, rest = entry.parameter.partition(f".{_ATTRIBUTE}.")
            by_module.setdefault(module, {})[rest] = entry
    modules = dict(model.named_modules())
    for name, entries in by_module.items():
        base = weights.own[f"{name}.weight"]
        adapter = _Adapter(
            modules[name],
            base,
            entries,
            weights,
            arch,
            config.lora,
            is_sequence_cut=config.parallel.sequence_parallel,
        )
        modules[name].add_module(_ATTRIBUTE, adapter)
        modules[name].register_forward_hook(_add)
    for name, parameter in model.named_parameters():
        if name in weights.own and weights.own[name].is_head:
            parameter.requires_grad_(True)


def adapters_of(model: nn.Module) -> Iterator[_Adapter]:
    """Adapters of this rank's layers."""
    return (module for module in model.modules() if isinstance(module, _Adapter))


def start_adapters(weights: WeightMap, parameters: Mapping[str, Tensor], seed: int) -> None:
    """Draw A as a linear layer's own weight, the same on every layout; B is zero, so that nothing is added."""
    shapes = shapes_of(weights.adapters)

    def draw(name: str, part: tuple[slice, ...]) -> Tensor:
        if f".lora_B.{ADAPTER}" in name:
            return torch.zeros(shapes[name])[part]
        generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
        bound = 1 / math.sqrt(shapes[name][1])
        return torch.empty(shapes[name]).uniform_(-bound, bound, generator=generator)[part]

    weights.read_into(parameters, draw)


def stored_name(name: str, layers: frozenset[str]) -> str:
    """Name of a tensor in a checkpoint, where peft names the weight below an adapter `base_layer`."""
    layer, _, kind = name.rpartition(".")
    return f"{layer}.base_layer.{kind}" if layer in layers else name


def merged(
    named: Iterator[tuple[str, Tensor]], adapters: Mapping[str, Tensor], lora: LoraConfig
) -> Iterator[tuple[str, Tensor]]:
    """`named` with the adapters added in."""
    for name, tensor in named:
        layer = name.removesuffix(".weight")
        if (up := adapters.get(f"{layer}.lora_B.{ADAPTER}.weight")) is not None:
            down = adapters[f"{layer}.lora_A.{ADAPTER}.weight"]
            tensor = tensor + (up @ down) * (lora.alpha / lora.rank)
        yield name, tensor


def _add(module: nn.Module, given: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    adapter = getattr(module, _ATTRIBUTE)
    return (output[0] + adapter(given[0]), output[1]) if adapter.is_on else output


class _Adapter(nn.Module):
    """LoRA update of one linear layer: for each Hugging Face layer in it, B A x, scaled."""

    def __init__(
        self,
        linear: Any,
        base: Entry,
        entries: Mapping[str, Entry],
        weights: WeightMap,
        arch: Architecture,
        lora: LoraConfig,
        *,
        is_sequence_cut: bool,
    ) -> None:
        super().__init__()
        self.is_on = True
        self._base, self._arch, self._scale = base, arch, lora.alpha / lora.rank
        self._is_cut = weights.layout.tp.size > 1 and base.cut != Cut.WHOLE
        self._is_sequence_cut = is_sequence_cut
        self._drop = nn.Dropout(lora.dropout)
        self._sizes: dict[str, int] = {}
        for name, shape in base.tensors.items():
            part = _last(name.removesuffix(".weight"))
            self._sizes[part] = shape[0] // (weights.layout.tp.size if base.cut == Cut.ROWS else 1)
            if f"{part}.A" in entries:
                self.add_module(part, _Pair(linear.weight, entries[f"{part}.A"], entries[f"{part}.B"], weights))
                self._mark(part)

    def _mark(self, part: str) -> None:
        """Mark for megatron-core the gradients of this rank's tokens alone."""
        pair: Any = getattr(self, part)
        for matrix, cut in ((pair.A, Cut.COLUMNS), (pair.B, Cut.ROWS)):
            matrix.sequence_parallel = self._is_sequence_cut and self._base.cut != cut

    def forward(self, x: Tensor) -> Tensor:
        """(T, ..., in) to (T, ..., out), this rank's tokens and columns as the layer itself has them."""
        parts = [self._part(part, size, x) for part, size in self._sizes.items()]
        like = next(found for found in parts if found is not None)
        whole = [
            like.new_zeros(size, *like.shape[:-1]) if found is None else found.movedim(-1, 0)
            for found, size in zip(parts, self._sizes.values(), strict=True)
        ]
        return join(whole, self._base.form, self._arch).movedim(0, -1) * self._scale

    def _part(self, part: str, size: int, x: Tensor) -> Tensor | None:
        if not hasattr(self, part):
            return None
        pair: Any = getattr(self, part)
        down = nn.functional.linear(self._drop(x), pair.A)
        return nn.functional.linear(self._exchange(down), pair.B)

    def _exchange(self, down: Tensor) -> Tensor:
        """`(T, ..., R)` as B wants it: of all tokens where its rows are cut, summed where A's columns are."""
        if not self._is_cut:
            return down
        if self._base.cut == Cut.ROWS:
            exchange = gather_from_sequence_parallel_region if self._is_sequence_cut else _copy
        else:
            exchange = reduce_scatter_to_sequence_parallel_region if self._is_sequence_cut else _reduce
        found = exchange(down)
        assert isinstance(found, Tensor)
        return found


_copy, _reduce = copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region


class _Pair(nn.Module):
    """A, which makes R numbers of a token, and B, which makes the output's of those."""

    def __init__(self, like: Tensor, first: Entry, second: Entry, weights: WeightMap) -> None:
        super().__init__()
        self.A = nn.Parameter(like.new_empty(weights.local_shape(first)))
        self.B = nn.Parameter(like.new_empty(weights.local_shape(second)))


def _last(layer: str) -> str:
    return layer.rpartition(".")[2]
