"""The forward pass of Llama's descendants in few operations, for CPUs; the transformers module stays the reference.

The projections of attention are one product, those of the MLP's gate another, over weights that oneDNN packed once per
weight version and that hold the scales of the norms before them; residuals are added by the products themselves. Rows
of query and key projections are reordered so that the two numbers which a rotation mixes lie side by side: one complex
product rotates all heads. Products of queries and keys do not change by that; the cached keys do, so that a server
takes this pass for everything or for nothing.
Letters: T packed tokens, B of them with logits, H query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import silu

from rl_rollout.backends.embedded.attention import PagedBatch
from rl_rollout.backends.embedded.cache import KVCache

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_rollout.backends.embedded.attention import AttentionSettings, Batch, ProbeBatch
    from rl_rollout.backends.embedded.cache import LayerShape

KNOWN = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""Classes of transformers whose layers are computed here."""
MOST_DIFFERENCE = 1e-3
"""Between the logits of this pass and those of the module, relative to the largest of them."""
_PROBED_TOKENS = 8

_log = logging.getLogger(__name__)


class Packed:
    """x -> x W^T + b, with the float32 weights of several layers one below the other.

    Args:
        layers: Those.
        norm: The RMSNorm in front of them, of which x has only been through `_direction`: the rest is in W.
        order: Rows of W.
    """

    def __init__(self, layers: list[torch.nn.Linear], norm: Any = None, order: Tensor | None = None) -> None:
        weight = torch.cat([layer.weight.detach() for layer in layers])
        if norm is not None:
            weight = weight * (norm.weight.detach() * weight.shape[1] ** 0.5)
        biases = [bias.detach() for layer in layers if (bias := _bias(layer)) is not None]
        self._bias = torch.cat(biases) if biases else None
        if order is not None:
            weight = weight[order]
            self._bias = None if self._bias is None else self._bias[order]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 64)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

    def added_to(self, x: Tensor, residual: Tensor) -> Tensor:
        """The same and a residual."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")


def _bias(layer: torch.nn.Linear) -> Tensor | None:
    return layer.bias


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One layer's packed weights."""

    qkv: Packed
    qk_norm: Tensor | None
    """[H + K, D] scales of queries and keys, for vectors of length 1."""
    out: Packed
    gate_up: Packed
    down: Packed


class FusedDecoder:
    """The pass of a module of `KNOWN` classes, whose weights are read at `repack`."""

    def __init__(self, module: Any, max_model_len: int, settings: Mapping[int, AttentionSettings]) -> None:
        self._module = module
        self.max_model_len = max_model_len
        self._settings = settings
        config = module.config
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads: int = config.num_key_value_heads
        positions = torch.arange(max_model_len)
        cos, sin = module.model.rotary_emb(torch.zeros(1), positions[None])
        half = cos.shape[-1] // 2
        self._head_dim = 2 * half
        self._least_lengths = {
            size: torch.tensor((size * config.rms_norm_eps) ** 0.5) for size in (config.hidden_size, self._head_dim)
        }
        """By size, what RMSNorm's epsilon amounts to beside the length of a vector."""
        self._turns = torch.complex(cos[0, :, :half], sin[0, :, :half])[:, None]
        """[positions, 1, D / 2]"""
        self._side_by_side = torch.arange(self._head_dim).view(2, half).t().flatten()
        self._layers: list[FusedLayer] = []
        self._head: Packed | None = None
        self.repack()

    def repack(self) -> None:
        """The weights have changed; or are gone, and then the packed ones go too."""
        self._layers, self._head = [], None
        if self._module.lm_head.weight.numel():
            self._layers = [self._packed(layer) for layer in self._module.model.layers]
            self._head = Packed([self._module.lm_head], self._module.model.norm)

    def _packed(self, layer: Any) -> FusedLayer:
        attention, mlp = layer.self_attn, layer.mlp
        num_rotated = self._num_heads + self._num_kv_heads
        starts = torch.arange(num_rotated)[:, None] * self._head_dim
        values = torch.arange(num_rotated, num_rotated + self._num_kv_heads)[:, None] * self._head_dim
        order = torch.cat([starts + self._side_by_side, values + torch.arange(self._head_dim)]).flatten()
        qk_norm = None
        if hasattr(attention, "q_norm"):
            scales = (attention.q_norm, self._num_heads), (attention.k_norm, self._num_kv_heads)
            scale = torch.cat([norm.weight.detach()[self._side_by_side].expand(n, -1) for norm, n in scales])
            qk_norm = scale * self._head_dim**0.5
        return FusedLayer(
            qkv=Packed([attention.q_proj, attention.k_proj, attention.v_proj], layer.input_layernorm, order),
            qk_norm=qk_norm,
            out=Packed([attention.o_proj]),
            gate_up=Packed([mlp.gate_proj, mlp.up_proj], layer.post_attention_layernorm),
            down=Packed([mlp.down_proj]),
        )

    def logits(self, ids: Tensor, positions: Tensor, batch: Batch, which: Tensor | slice) -> Tensor:
        """Fill the cache from `ids` [T] at `positions` [T]; logits [B, V] of the tokens `which`."""
        turns = self._turns[positions]
        x = torch.nn.functional.embedding(ids, self._module.model.embed_tokens.weight)
        for index, layer in enumerate(self._layers):
            x = layer.out.added_to(self._attend(index, layer, self._direction(x), turns, batch), x)
            gate, up = layer.gate_up(self._direction(x)).chunk(2, dim=-1)
            x = layer.down.added_to(silu(gate).mul_(up), x)
        assert self._head is not None
        return self._head(self._direction(x[which]))

    def _direction(self, x: Tensor) -> Tensor:
        """The last dimension of size n at length 1; RMSNorm (1910.07467) is sqrt(n) and its weight times that.

        Torch's own RMSNorm is many operations on a CPU.
        """
        least = self._least_lengths[x.shape[-1]]
        return x / torch.hypot(vector_norm(x, dim=-1, keepdim=True), least)

    def _attend(self, index: int, layer: FusedLayer, x: Tensor, turns: Tensor, batch: Batch) -> Tensor:
        heads = layer.qkv(x).view(x.shape[0], -1, self._head_dim)
        mixed, value = heads[:, : -self._num_kv_heads], heads[:, -self._num_kv_heads :]
        if layer.qk_norm is not None:
            mixed = self._direction(mixed) * layer.qk_norm
        pairs = torch.view_as_complex(mixed.unflatten(-1, (-1, 2)))
        mixed = torch.view_as_real(pairs * turns).flatten(-2)
        query, key = mixed[:, : self._num_heads], mixed[:, self._num_heads :]
        query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
        return batch.attend(index, query, key, value, self._settings[index])[0].flatten(1)


def fuse(module: Any, max_model_len: int, probe: ProbeBatch) -> FusedDecoder | None:
    """The fused pass of a module on the CPU in float32; None where its architecture is not one of those known.

    It is run beside the module once: should they differ, as where a version of transformers computes something else
    under a known name, a warning is logged and the module is used.
    """
    config = module.config
    rope = getattr(config, "rope_parameters", None) or {}
    is_known = (
        type(module).__name__ in KNOWN
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in {"default", "linear", "llama3", "yarn"}
        and rope.get("partial_rotary_factor", 1.0) == 1.0
    )
    if not is_known:
        return None
    fused = FusedDecoder(module, max_model_len, probe.settings)
    found = _difference(module, fused, probe.shapes)
    if found <= MOST_DIFFERENCE:
        return fused
    _log.warning(
        "%s of this transformers differs from what is known of it by %.1e of its logits; it is served without the "
        "fused pass, more slowly",
        type(module).__name__,
        found,
    )
    return None


@torch.inference_mode()
def _difference(module: Any, fused: FusedDecoder, shapes: Mapping[int, LayerShape]) -> float:
    """Largest difference between the two passes' logits, over the largest logit."""
    count = min(_PROBED_TOKENS, fused.max_model_len)
    positions, rows = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    ids = (positions * 7919 + 1) % module.config.vocab_size

    def batch() -> PagedBatch:
        cache = KVCache(dict(shapes), block_size=count, dtype=torch.float32, device=ids.device)
        cache.resize(1)
        tables = torch.zeros(1, 1, dtype=torch.int64)
        return PagedBatch(cache, tables, rows, positions, num_single=0, num_blocks=0, chunks=[(0, 0, count)])

    want = module(input_ids=ids[None], position_ids=positions[None], use_cache=False, rl_batch=batch()).logits[0]
    got = fused.logits(ids, positions, batch(), slice(None))
    return float((got - want).abs().max() / want.abs().max())
