"""LoRA adapters of a frozen model, each row of a packed batch under its own.

A weight is multiplied once with all tokens, A and B of an adapter with each run of tokens that has it. Joined experts
see each run by itself, with what its adapter adds to their weights. peft defines an
adapter (modules, shapes, first values, files); the model holds none of its layers here. Adapters are tensors outside
the model, so that adding one leaves modules, shards and compiled code as they are.

Legend: `T` tokens fed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear

from rl_engine.checkpoint.hf_folder import DTYPES, empty_model
from rl_engine.errors import ConfigError
from rl_engine.layers.peft_lora import ADAPTER, EXPERTS, adapted_layers, add_adapter, expert_product, parameter_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rl_engine.types import EngineConfig, LoraConfig, PeftConfig


@dataclass(frozen=True, slots=True)
class LowRank:
    """Adapter of one linear layer, or of one weight of all experts of a layer, whose A and B peft joins."""

    a: Tensor
    """(rank, in), trained."""
    b: Tensor
    """(out, rank), trained."""
    scaling: float
    """Factor of B @ A."""
    parameter: str | None = None
    """Name of the experts' weight; None: a linear layer's."""

    def __call__(self, x: Tensor) -> Tensor:
        """(tokens, in) to (tokens, out)."""
        return linear(linear(x, self.a.to(x.dtype)), self.b.to(x.dtype)) * self.scaling


def draw_adapter(config: EngineConfig, lora: LoraConfig, seed: int) -> tuple[PeftConfig, dict[str, LowRank]]:
    """Description of an adapter, and its first values by layer, on the CPU: those that a seeded engine begins with.

    Raises:
        BackendError: peft is not installed.
        ConfigError: the settings do not suit the model.
    """
    model = empty_model(config.model_path)
    zero = torch.zeros((), dtype=torch.promote_types(DTYPES[config.precision], torch.float32))

    def without_memory(tensor: Tensor) -> Tensor:
        return zero.expand(tensor.shape)

    model._apply(without_memory)  # pyright: ignore[reportPrivateUsage]
    model.tie_weights()
    described = add_adapter(model, lora, seed)
    if described["target_parameters"] and config.parallel.ep > 1:
        raise ConfigError(
            f"lora.target_modules takes {EXPERTS} and parallel.ep is {config.parallel.ep}; adapters want all experts "
            "on every rank. Set it to 1, or leave them out."
        )
    if inside := [name for name in adapted_layers(model) if ".linear_attn." in name]:
        raise ConfigError(
            f"lora.target_modules takes {inside[0]}, which sees rows in another order; rows with adapters of their own "
            "have none in linear attention. Name target_modules without it, or train one adapter, by EngineConfig.lora."
        )
    return described, {
        name: LowRank(
            layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight, layer.scaling[ADAPTER], parameter_of(layer)
        )
        for name, layer in adapted_layers(model).items()
    }


class RowAdapters:
    """Adds to each linear layer's output what the adapters of the rows in its input make of it.

    Args:
        model: The frozen model; adapters are on linear layers inside `layers`, and on its head.
        layers: Its decoder layers.
    """

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        self._model = model
        self._inside = {id(module) for layer in layers for module in layer.modules()}
        self._hooked: set[str] = set()
        self._used: Sequence[Mapping[str, LowRank]] = ()
        self._runs: list[tuple[int, int]] = []
        found: Any = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
        self._head = next((name for name, module in model.named_modules() if module is found), None)
        embedding: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
        embedding.register_forward_hook(_with_gradient)

    def check(self, names: Iterable[str]) -> None:
        """Refuse layers that do not see every token of every row.

        Raises:
            ConfigError: names one.
        """
        for name in names:
            if name != self._head and id(self._module(name)) not in self._inside:
                raise ConfigError(
                    f"lora.target_modules takes {name}, which is neither in a decoder layer nor the head; rows with "
                    "adapters of their own need layers that see every token. Leave it out."
                )

    def attach(self, names: Iterable[str]) -> None:
        """Let the named layers look for adapters; those that do so already stay as they are."""
        for name in set(names) - self._hooked:
            module: Any = self._module(name)
            if not hasattr(module, "num_experts"):
                module.register_forward_hook(self._hook(name))
            elif (own := _own_name(name)) not in self._hooked:
                module.forward = partial(self._experts, own, _Call(module))
                self._hooked.add(own)
            self._hooked.add(name)

    def _module(self, name: str) -> nn.Module:
        return self._model.get_submodule(_own_name(name))

    def use(self, adapters: Sequence[Mapping[str, LowRank]]) -> None:
        """Set the adapters that rows number from 0, each by layer."""
        self._used = adapters

    @property
    def need_logits(self) -> bool:
        """Whether an adapter in use is on the head, whose logits the model then makes itself, of every token."""
        return any(self._head in layers for layers in self._used)

    def begin(self, of_rows: Sequence[int] | None, lengths: Sequence[int]) -> None:
        """Begin a pass: the adapter of each row (-1: none; None: of no row), and its tokens in the layers' input."""
        numbers = [-1] * len(lengths) if of_rows is None else of_rows
        runs = groupby(zip(numbers, lengths, strict=True), key=lambda row: row[0])
        self._runs = [(number, sum(length for _, length in rows)) for number, rows in runs]

    def _hook(self, name: str) -> Any:
        def hook(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
            found = [None if number < 0 else self._used[number].get(name) for number, _ in self._runs]
            if not any(found):
                return output
            x = given[0].flatten(0, -2).split([length for _, length in self._runs])
            width = output.shape[-1]
            parts = [
                piece.new_zeros(len(piece), width) if low is None else low(piece)
                for low, piece in zip(found, x, strict=True)
            ]
            return output + torch.cat(parts).view(output.shape)

        return hook

    def _experts(self, name: str, call: _Call, hidden: Tensor, *routed: Tensor) -> Tensor:
        """Joined experts: each run with its adapter's weights. `hidden` and `routed` have a row for each token."""
        sizes, parts = [length for _, length in self._runs], list[Tensor]()
        for (number, _), *given in zip(self._runs, *(each.split(sizes) for each in (hidden, *routed)), strict=True):
            layers = {} if number < 0 else self._used[number]
            found = [low for layer, low in layers.items() if low.parameter and _own_name(layer) == name]
            weights = {f"module.{low.parameter}": call.adapted(low) for low in found}
            parts.append(functional_call(call, weights, tuple(given)) if found else call(*given))
        return torch.cat(parts)


class _Call(nn.Module):
    """Joined experts by their own `forward`, which another takes the place of."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.call = module, module.forward

    def forward(self, *given: Tensor) -> Tensor:
        """See the module's."""
        return self.call(*given)

    def adapted(self, low: LowRank) -> Tensor:
        """The adapter's weight, with what it adds."""
        weight = self.module.get_parameter(str(low.parameter))
        return weight + (expert_product(self.module, low.a, low.b) * low.scaling).to(weight.dtype)


def _own_name(name: str) -> str:
    """Name of a module in the model, of one that peft wraps once for each of its weights."""
    return name.replace(".base_layer", "")


def _with_gradient(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    """Every rank differentiates every layer, whatever adapters its rows have, so that collectives match."""
    return output.requires_grad_() if torch.is_grad_enabled() else output
