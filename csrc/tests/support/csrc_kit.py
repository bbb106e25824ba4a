"""Test helpers: the kernels of a device, relative errors, and a random decoder."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl_csrc.native import has_cuda

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from torch import Tensor

    from rl_csrc.inference.decoder import Decoder, PackedLinear


class MissingImplementationError(ImportError):
    """Kernels that this build or machine does not have; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """Kernels of one device, behind the signatures that all devices share."""

    name: str
    """cpu or cuda."""
    device: torch.device
    """Device of its tensors."""
    module: ModuleType
    """`rl_csrc.cpu` or `rl_csrc.cuda`."""

    def call(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """Call one of its kernels; raises `MissingImplementationError` if it has none of that name."""
        found = getattr(self.module, function, None)
        if found is None:
            raise MissingImplementationError(f"{self.module.__name__} has no {function}: plain torch is used there.")
        return found(*args, **kwargs)


def implementation(name: str) -> Implementation:
    """Kernels of a device, "cpu" or "cuda"; raises `MissingImplementationError` if they cannot run here."""
    if name == "cuda" and not has_cuda():
        raise MissingImplementationError("rl-csrc was built without RL_CSRC_CUDA=ON.")
    if name == "cuda" and not torch.cuda.is_available():
        raise MissingImplementationError("torch sees no CUDA device here.")
    module = importlib.import_module(f"rl_csrc.{name}")
    return Implementation(name=name, device=torch.device(name), module=module)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference divided by max(1, largest expected value); infinite for a wrong NaN or infinity."""
    if found.shape != wanted.shape:
        raise ValueError(
            f"found has shape {list(found.shape)}, wanted {list(wanted.shape)}; compare results of one op."
        )
    if found.numel() == 0:
        return 0.0
    a, b = found.detach().double(), wanted.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    scale = max(1.0, float(torch.where(b.isfinite(), b.abs(), 0.0).max()))
    return float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf")).max()) / scale


def cu_seqlens(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Cumulative sequence lengths `[B + 1]` int64 of packed sequences."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(device)


def random_decoder(
    dtype: torch.dtype = torch.float32,
    hidden: int = 48,
    inner: int = 80,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    vocab_size: int = 70,
    windows: Sequence[int | None] = (None, None),
    num_positions: int = 64,
    *,
    has_bias: bool = False,
    has_head_norms: bool = True,
) -> Decoder:
    """Small decoder with random weights, one layer per entry of `windows`; the same values in every dtype."""
    from rl_csrc.inference.decoder import Decoder, DecoderLayer, pack_linear

    generator = torch.Generator().manual_seed(hidden * head_size)

    def numbers(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    def scales(size: int) -> Tensor:
        return (torch.rand(size, generator=generator, dtype=torch.float64) + 0.5).to(dtype)

    def linear(outputs: int, inputs: int) -> PackedLinear:
        return pack_linear(numbers(outputs, inputs, scale=inputs**-0.5), numbers(outputs) if has_bias else None)

    layers = [
        DecoderLayer(
            input_norm=scales(hidden),
            qkv=linear((num_heads + 2 * num_kv_heads) * head_size, hidden),
            query_norm=scales(head_size) if has_head_norms else None,
            key_norm=scales(head_size) if has_head_norms else None,
            out=linear(hidden, num_heads * head_size),
            post_norm=scales(hidden),
            gate_up=linear(2 * inner, hidden),
            down=linear(hidden, inner),
            window=window,
        )
        for window in windows
    ]
    frequencies = 100.0 ** -(torch.arange(head_size // 2, dtype=torch.float64) / head_size)
    angles = torch.arange(num_positions)[:, None] * frequencies
    return Decoder(
        embedding=numbers(vocab_size, hidden),
        layers=layers,
        norm=scales(hidden),
        head=pack_linear(numbers(vocab_size, hidden, scale=hidden**-0.5)),
        cos=angles.cos().to(dtype),
        sin=angles.sin().to(dtype),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        eps=1e-6,
    )
