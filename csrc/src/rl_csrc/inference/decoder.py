"""Decoder forward pass (Llama family) over a paged KV cache, for inference on CPUs.

Each layer is RMSNorm (1910.07467), attention with rotated queries and keys (2104.09864), RMSNorm, and an MLP gated by
SiLU (2002.05202), both with residual connections. That covers Llama, Mistral, Qwen2 and Qwen3, with their biases, norms
of queries and keys, grouped heads and sliding windows. In float32 the whole pass is one native call, and so is
generation: many steps of forward pass and sampling.

Legend: `T` new tokens of any sequences, `B` of them with logits, `V` vocabulary, `H` hidden size, `I` size of the MLP,
`Q` query heads, `K` key/value heads (Q is a multiple), `D` size of a head, `P` positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import embedding as look_up
from torch.nn.functional import linear, silu

from rl_csrc.errors import ArgumentError
from rl_csrc.inference import paged, sampling
from rl_csrc.native import cpu, in_huge_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

_native: Any = getattr(cpu, "Decoder", None)
_PANEL = 32


def longrope_limit(rope: Mapping[str, Any] | None, original: int | None = None) -> int | None:
    """Longest context for which longrope does not depend on the batch; None: the model does not use longrope.

    transformers chooses the longrope frequencies by the largest position in a forward pass, for all rows of it. Beyond
    the original context length a token's log-probs therefore depend on the other rows.

    Args:
        rope: `rope_parameters` (or `rope_scaling`) of a model's text config, for all layers or by kind of layer.
        original: The config's `original_max_position_embeddings`, used where `rope` has none.
    """
    limits = [
        kind.get("original_max_position_embeddings", original)
        for kind in (rope or {}, *(rope or {}).values())  # where kinds of layers differ, one each
        if isinstance(kind, Mapping) and "longrope" in (kind.get("rope_type"), kind.get("type"))
    ]
    return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """Linear layer x W^T + b, with W packed for the native kernel."""

    panels: Tensor
    """[ceil(out / 32), in, 32]: the rows of W in groups of 32, each group transposed, 0 beyond the last row."""
    bias: Tensor | None
    """[out]"""
    num_outputs: int

    @property
    def weight(self) -> Tensor:
        """Copy of W as [out, in]."""
        return self.panels.transpose(1, 2).flatten(0, 1)[: self.num_outputs].contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Linear layer in plain torch: [..., in] to [..., out]."""
        return linear(x, self.weight, self.bias)


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Pack a weight [out, in] for the native kernel; the result is a copy of the same size.

    Raises:
        ArgumentError: `weight` is not a matrix, or the bias is not [out].
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
        cpu.pack_linear(weight.contiguous(), panels, torch.get_num_threads())
    else:
        padded = torch.cat([weight, weight.new_zeros(num_panels * _PANEL - num_outputs, num_inputs)])
        panels = padded.view(num_panels, _PANEL, num_inputs).transpose(1, 2).contiguous()
    return PackedLinear(panels=panels, bias=bias, num_outputs=num_outputs)


def has_kernel(weight: Tensor) -> bool:
    """Whether a decoder with such weights has a native kernel; else it runs in plain torch."""
    return weight.is_cpu and weight.dtype == torch.float32 and _native is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Weights of one decoder layer."""

    input_norm: Tensor
    """[H] scales before attention."""
    qkv: PackedLinear
    """H to (Q + 2 K) D: rows of queries, keys and values, concatenated."""
    query_norm: Tensor | None = None
    """[D] scales of the RMSNorm of each query head before the rotation; None: no norm."""
    key_norm: Tensor | None = None
    """[D] scales of the RMSNorm of each key head; None: no norm."""
    out: PackedLinear
    """Q D to H."""
    post_norm: Tensor
    """[H] scales before the MLP."""
    gate_up: PackedLinear
    """H to 2 I: rows of the gate, then of the up projection."""
    down: PackedLinear
    """I to H."""
    window: int | None = None
    """A token sees itself and the `window - 1` positions before it; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Sampling parameters and end conditions of `B` sequences."""

    temperature: Tensor
    """[B] float32, above 0."""
    streams: Tensor
    """[B] int64 random streams, from `sampling.streams_of`."""
    is_greedy: Tensor | None = None
    """[B] bool, sequences with greedy sampling; None: none."""
    limits: Tensor
    """[B] int64, maximum length of each sequence, in tokens from position 0."""
    stop_ids: Tensor
    """[B, S] int64, stop token ids of each sequence, padded with -1."""

    def of(self, which: Tensor) -> dict[str, Any]:
        """Sampling parameters of a batch, as `sampling.draw` takes them."""
        is_greedy = None if self.is_greedy is None else self.is_greedy[which]
        return {"temperature": self.temperature[which], "streams": self.streams[which], "is_greedy": is_greedy}

    def columns(self) -> tuple[Tensor | None, ...]:
        """Tensors in the order of the native decoder's arguments."""
        return self.temperature, self.streams, self.is_greedy, self.limits, self.stop_ids


class Decoder:
    """Decoder forward pass. It refers to the weights given and does not copy them: build another after an update.

    Args:
        embedding: [V, H].
        layers: Decoder layers, in order.
        norm: [H] scales before the head.
        head: H to V.
        cos: [P, D / 2]; element i of a head is rotated with element i + D / 2.
        sin: [P, D / 2].
        num_heads: Q.
        num_kv_heads: K.
        eps: Epsilon of every RMSNorm.
        scaling: Multiplies query-key products; None: 1 / sqrt(D).

    Raises:
        ArgumentError: shapes do not match, or a tensor is not contiguous.
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
        """Run the decoder: next-token logits [B, V] of all tokens or of `which`; keys and values go to their pages.

        Pages are those of `paged.attention`. No gradient. In the native pass the bits of a token's logits depend
        neither on the other tokens nor on the number of threads.

        Args:
            ids: [T] int64.
            positions: [T] int64, position of each token in its sequence.
            rows: [T] int64, row of `block_tables` of each token's sequence.
            block_tables: [rows, pages] int64, the pages of each sequence in the order of positions.
            key_caches: One per layer, [pages, page size, K, D].
            value_caches: One per layer, [pages, page size, K, D].
            which: [B] int64, indexes of the tokens whose logits are wanted; None: all.
            num_threads: Threads of the native pass (not OpenMP's); None: as many as torch uses.

        Raises:
            ArgumentError: a shape or dtype is wrong, or an id, position or page is out of range; nothing was written.
        """
        if self._kernel is None:
            return self.reference(ids, positions, rows, block_tables, key_caches, value_caches, which)
        num_tokens = ids.shape[0]
        logits, workspace = self._room(num_tokens, num_tokens if which is None else which.shape[0])
        self._kernel.decode(
            *(ids, positions, rows, block_tables, key_caches, value_caches, which),
            *(workspace, logits, num_threads or torch.get_num_threads()),
        )
        return logits[:, : self.head.num_outputs]

    def _room(self, num_tokens: int, num_logits: int) -> tuple[Tensor, Tensor]:
        """Buffers of a native call: logits in whole panels, and the workspace of intermediate results."""
        logits = self.norm.new_empty(num_logits, -(-self.head.num_outputs // _PANEL) * _PANEL)
        workspace = self.norm.new_empty(self._kernel.workspace(num_tokens, num_logits))
        return in_huge_pages(logits), in_huge_pages(workspace)

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        block_tables: Tensor,
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
        *,
        drawing: Drawing,
        steps: int,
        interrupt: Tensor | None = None,
        num_threads: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Generate up to `steps` tokens for each sequence, starting from its newest token, until the sequence ends.

        Tokens are sampled as by `sampling.draw`. A sequence ends with a stop id, at its limit, or when its logits are
        not finite (its last log-prob is not finite either). In the native pass its bits depend neither on the other
        sequences, nor on the number of threads, nor on the steps per call; threads may be some steps apart.

        Args:
            ids: [B] int64, the newest tokens, of different sequences.
            positions: [B] int64, positions of these tokens.
            rows: [B] int64, as in `__call__`.
            block_tables: As in `__call__`, with pages for the positions to be generated.
            key_caches: As in `__call__`.
            value_caches: As in `__call__`.
            drawing: Sampling parameters and end conditions.
            steps: Most new tokens per sequence, at least 1.
            interrupt: [1] int64; once it is not 0, every sequence finishes its current step and stops. Another thread
                may write to it during the call.
            num_threads: As in `__call__`.

        Returns:
            Token ids [B, steps] int64, log-probs [B, steps] float32, and tokens per sequence [B] int64, at least 1.
            Entries beyond that number are undefined.

        Raises:
            ArgumentError: as `__call__`; or a limit is beyond P, or the head does not have V outputs.
        """
        if steps < 1:
            raise ArgumentError(f"steps is {steps}; wanted at least 1.")
        new_ids = ids.new_zeros(len(ids), steps)
        drawn = new_ids, torch.zeros_like(new_ids, dtype=torch.float32), torch.zeros_like(ids)
        places = block_tables, key_caches, value_caches
        if self._kernel is None:
            self._generate(drawn, ids, positions, rows, places, drawing, steps, interrupt)
            return drawn
        logits, workspace = self._room(len(ids), len(ids))
        self._kernel.generate(
            *(ids, positions, rows, *places, (*drawing.columns(), interrupt), steps),
            *(workspace, logits, drawn, num_threads or torch.get_num_threads()),
        )
        return drawn

    def _generate(
        self,
        drawn: tuple[Tensor, Tensor, Tensor],
        ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        places: tuple[Tensor, Sequence[Tensor], Sequence[Tensor]],
        drawing: Drawing,
        steps: int,
        interrupt: Tensor | None,
    ) -> None:
        """`generate` in plain torch, for weights without a native kernel."""
        live = torch.arange(len(ids), device=ids.device)
        for step in range(steps):
            logits = self.reference(ids, positions[live] + step, rows[live], *places)
            ids, logprobs = sampling.reference(logits, **drawing.of(live), positions=positions[live] + step + 1)
            for column, new in zip(drawn, (ids, logprobs), strict=False):
                column[live, step] = new
            drawn[2][live] += 1
            is_over = (positions[live] + step + 2 >= drawing.limits[live]) | ~logprobs.isfinite()
            is_over |= (ids[:, None] == drawing.stop_ids[live]).any(dim=1)
            ids, live = ids[~is_over], live[~is_over]
            if not len(live) or (interrupt is not None and interrupt.any()):
                return

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
        """Forward pass in plain torch, in the weights' dtype and on their device. Arguments as in `__call__`."""
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
    """Layer as the native decoder takes it."""
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
