"""The pass of a decoder of Llama's descendants over a paged cache, for inference on CPUs.

Each layer is RMSNorm (1910.07467), attention with rotated queries and keys (2104.09864), RMSNorm, and an MLP gated by
SiLU (2002.05202); both halves are added to what came in. That is Llama, Mistral, Qwen2 and Qwen3, with biases, norms of
queries and keys, grouped heads and sliding windows where they have them. In float32 the whole pass is one native call.

Legend: `T` new tokens of any sequences, `B` of them with logits, `V` vocabulary, `H` hidden size, `I` size of the MLP,
`Q` query heads, `K` key/value heads (Q is a multiple), `D` size of a head, `P` positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import embedding as look_up
from torch.nn.functional import linear, silu

from rl_csrc import _cpu, paged
from rl_csrc._memory import in_huge_pages
from rl_csrc.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

_native: Any = getattr(_cpu, "Decoder", None)
_PANEL = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """x -> x W^T + b, with W laid out for the pass."""

    panels: Tensor
    """[ceil(out / 32), in, 32]: the rows of W in groups of 32, each group transposed, 0 beyond the last row."""
    bias: Tensor | None
    """[out]"""
    num_outputs: int

    @property
    def weight(self) -> Tensor:
        """W again, [out, in]; a copy."""
        return self.panels.transpose(1, 2).flatten(0, 1)[: self.num_outputs].contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out] in plain torch."""
        return linear(x, self.weight, self.bias)


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Lay out a weight [out, in], as large again.

    Raises:
        ArgumentError: `weight` is no matrix, or the bias is not [out].
    """
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ArgumentError(
            f"weight has shape {list(weight.shape)} and bias {None if bias is None else list(bias.shape)}; "
            "wanted [out, in], and [out] or None."
        )
    weight, bias = weight.detach(), None if bias is None else bias.detach().contiguous()
    num_outputs, num_inputs = weight.shape
    num_panels = -(-num_outputs // _PANEL)
    if has_kernel(weight):
        panels = in_huge_pages(weight.new_empty(num_panels, num_inputs, _PANEL))
        _cpu.pack_linear(weight.contiguous(), panels, torch.get_num_threads())
    else:
        padded = torch.cat([weight, weight.new_zeros(num_panels * _PANEL - num_outputs, num_inputs)])
        panels = padded.view(num_panels, _PANEL, num_inputs).transpose(1, 2).contiguous()
    return PackedLinear(panels=panels, bias=bias, num_outputs=num_outputs)


def has_kernel(weight: Tensor) -> bool:
    """Whether a decoder of such weights runs natively, and not in plain torch."""
    return weight.is_cpu and weight.dtype == torch.float32 and _native is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Weights of one layer."""

    input_norm: Tensor
    """[H] scales before attention."""
    qkv: PackedLinear
    """H to (Q + 2 K) D: queries, keys and values, one below the other."""
    query_norm: Tensor | None = None
    """[D] scales of the RMSNorm of each query before it is rotated; None: there is none."""
    key_norm: Tensor | None = None
    """The same of keys."""
    out: PackedLinear
    """Q D to H."""
    post_norm: Tensor
    """[H] scales before the MLP."""
    gate_up: PackedLinear
    """H to 2 I: the gate's rows above the others."""
    down: PackedLinear
    """I to H."""
    window: int | None = None
    """A token sees itself and the `window - 1` positions before it; None: all."""


class Decoder:
    """The pass. Weights are read where they lie at every call: make another one when they have changed.

    Args:
        embedding: [V, H].
        layers: In order.
        norm: [H] scales before the head.
        head: H to V.
        cos: [P, D / 2]; number i of a head is rotated with number i + D / 2.
        sin: The same.
        num_heads: Q.
        num_kv_heads: K.
        eps: Of every RMSNorm.
        scaling: Multiplies query-key products; None: 1 / sqrt(D).

    Raises:
        ArgumentError: tensors that do not fit together, or are not contiguous.
    """

    def __init__(
        self,
        *,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        norm: Tensor,
        head: PackedLinear,
        cos: Tensor,
        sin: Tensor,
        num_heads: int,
        num_kv_heads: int,
        eps: float,
        scaling: float | None = None,
    ) -> None:
        for layer in layers:
            if layer.window is not None and layer.window < 1:
                raise ArgumentError(f"window is {layer.window}; wanted at least 1, or None for no window.")
        self.embedding, self.layers, self.norm, self.head = embedding.detach(), tuple(layers), norm.detach(), head
        self.cos, self.sin = cos, sin
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, 2 * cos.shape[-1]
        self.eps = eps
        self.scaling = self.head_size**-0.5 if scaling is None else scaling
        self._kernel: Any = None
        if has_kernel(embedding):
            self._kernel = _native(
                *(self.embedding, tuple(map(_of_layer, layers)), self.norm, _of_linear(head), cos, sin),
                *(num_heads, num_kv_heads, eps, self.scaling),
            )

    @torch.no_grad()
    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        block_tables: Tensor,
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
        which: Tensor | None = None,
        *,
        num_threads: int | None = None,
    ) -> Tensor:
        """Write the tokens' keys and values into their pages; logits [B, V] of what follows each, or each of `which`.

        Pages are those of `paged.attention`. No gradient. In the native pass the bits of a token's logits depend
        neither on the other tokens nor on the number of threads.

        Args:
            ids: [T] int64.
            positions: [T] int64, of each token in its sequence.
            rows: [T] int64, row of `block_tables` of each token's sequence.
            block_tables: [rows, pages] int64, the pages of each sequence in the order of positions.
            key_caches: Of each layer, [pages, page size, K, D].
            value_caches: The same.
            which: [B] int64, the tokens whose logits are wanted; None: all.
            num_threads: Of the native pass, which are not OpenMP's; None: as many as torch has.

        Raises:
            ArgumentError: a shape or dtype is wrong, or an id, a position or a page out of range; nothing was written.
        """
        if self._kernel is None:
            return self.reference(ids, positions, rows, block_tables, key_caches, value_caches, which)
        num_tokens = ids.shape[0]
        num_logits = num_tokens if which is None else which.shape[0]
        num_columns = self.head.num_outputs
        logits = in_huge_pages(self.norm.new_empty(num_logits, -(-num_columns // _PANEL) * _PANEL))
        workspace = in_huge_pages(self.norm.new_empty(self._kernel.workspace(num_tokens, num_logits)))
        self._kernel.decode(
            *(ids, positions, rows, block_tables, key_caches, value_caches, which),
            *(workspace, logits, num_threads or torch.get_num_threads()),
        )
        return logits[:, :num_columns]

    @torch.no_grad()
    def reference(
        self,
        ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        block_tables: Tensor,
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
        which: Tensor | None = None,
    ) -> Tensor:
        """The same in plain torch, in the weights' dtype and on their device."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        num_rotated = self.num_heads + self.num_kv_heads
        x = look_up(ids, self.embedding)
        for layer, keys, values in zip(self.layers, key_caches, value_caches, strict=True):
            heads = layer.qkv(self._normed(x, layer.input_norm)).unflatten(-1, (-1, self.head_size))
            query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
            query, key = self._normed(query, layer.query_norm), self._normed(key, layer.key_norm)
            left, right = torch.cat([query, key], dim=1).chunk(2, dim=-1)
            turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
            query, key = turned[:, : self.num_heads], turned[:, self.num_heads : num_rotated]
            pages = (keys, values, block_tables, rows, positions)
            seen = paged.reference(query, key, value, *pages, scaling=self.scaling, window=layer.window)
            x = x + layer.out(seen.flatten(1))
            gate, up = layer.gate_up(self._normed(x, layer.post_norm)).chunk(2, dim=-1)
            x = x + layer.down(silu(gate) * up)
        return self.head(self._normed(x if which is None else x[which], self.norm))

    def _normed(self, x: Tensor, scales: Tensor | None) -> Tensor:
        if scales is None:
            return x
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps) * scales


def _of_linear(packed: PackedLinear) -> tuple[Tensor, Tensor | None, int]:
    return packed.panels, packed.bias, packed.num_outputs


def _of_layer(layer: DecoderLayer) -> tuple[Any, ...]:
    """As the native decoder takes it."""
    return (
        layer.input_norm.detach(),
        _of_linear(layer.qkv),
        None if layer.query_norm is None else layer.query_norm.detach(),
        None if layer.key_norm is None else layer.key_norm.detach(),
        _of_linear(layer.out),
        layer.post_norm.detach(),
        _of_linear(layer.gate_up),
        _of_linear(layer.down),
        layer.window or 0,
    )
