"""Saved activations of layers: computed again in the backward pass, or kept in the memory of the CPU until then."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rl_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from rl_engine.types import EngineConfig

PARTS = ("attention", "mlp", "moe", "norm")
"""Parts of a decoder layer, by the names of `EngineConfig.recompute` and `EngineConfig.activation_offload`."""
_SMALL_BYTES = 1 << 16
"""Below it a tensor stays on its device."""


@contextmanager
def offload_activations(device: torch.device) -> Generator[None]:
    """Offload activations inside: what autograd saves on `device` goes to the CPU until the backward pass.

    What no operation with a gradient has made stays, such as parameters, gathered or not, and what is small. By torch's
    `save_on_cpu`.
    """
    saver = torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")

    def pack(saved: Tensor) -> Any:
        source = saved._base  # pyright: ignore[reportPrivateUsage] - None of an operation's own output
        is_made = not isinstance(saved, nn.Parameter) if source is None else source.grad_fn is not None
        return saver.pack_hook(saved) if is_made and saved.nbytes >= _SMALL_BYTES and saved.device == device else saved

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else saver.unpack_hook(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def treat_parts(layers: Sequence[nn.Module], config: EngineConfig, *, recomputes: bool = True) -> None:
    """Recompute or offload the activations of the parts that the config names, in each of the layers.

    Args:
        layers: Decoder layers; every named part is in one of them at least.
        config: Settings; `recompute` is read where `recomputes`, and `activation_offload` if it names parts.
        recomputes: False: the backend's library recomputes, and the backend has checked the names.

    Raises:
        ConfigError: a name that is not of `PARTS`, or that no layer has.
    """
    again, away = config.recompute if recomputes else (), offloaded_parts(config)
    if not again and not away:
        return
    found = [each for layer in layers for each in _parts_of(layer, {*again, *away})]
    for key, names in (("recompute", again), ("activation_offload", away)) if recomputes else ():
        check_parts(key, names, {name for name, _ in found})
    for name, module in found:
        module.forward = partial(_treated, module.forward, name in again, name in away)


def offloaded_parts(config: EngineConfig) -> tuple[str, ...]:
    """Parts of layers whose activations alone are offloaded."""
    return () if isinstance(config.activation_offload, bool) else config.activation_offload


def check_parts(key: str, names: Iterable[str], there: Iterable[str]) -> None:
    """Refuse names of parts that are not there.

    Raises:
        ConfigError: says which, and the names of all parts.
    """
    if missing := sorted({*names} - {*there}):
        raise ConfigError(
            f"{key} names {', '.join(missing)}, which no layer of the model has; parts are {', '.join(PARTS)}. Leave "
            "it out."
        )


def _parts_of(module: nn.Module, wanted: set[str]) -> Iterable[tuple[str, nn.Module]]:
    """Outermost modules that are a wanted part of a layer, with the part's name."""
    for name, child in module.named_children():
        part = _part(name, child)
        if part in wanted:
            yield part, child
        else:
            yield from _parts_of(child, wanted)


def _part(name: str, module: nn.Module) -> str:
    """Part of a layer that a module is, by its name in the layer; empty for none."""
    if next(module.parameters(), None) is None:
        return ""
    if "Norm" in type(module).__name__:
        return "norm"
    if hasattr(module, "experts"):
        return "moe"
    return next((part for part, word in _WORDS if word in name), "")


_WORDS = (("attention", "attn"), ("attention", "attention"), ("mlp", "mlp"), ("mlp", "feed_forward"))


def _treated(forward: Callable[..., Any], is_recomputed: bool, is_offloaded: bool, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    with offload_activations(device) if is_offloaded else nullcontext():
        if not is_recomputed:
            return forward(*args, **kwargs)

        def run(*values: Any) -> Any:  # positional, as checkpoint saves those alone where hooks see them
            return forward(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))

        return checkpoint(run, *args, *kwargs.values(), use_reentrant=False)
