"""CUDA decoder: the forward pass of Llama-like models in ten kernel launches a layer.

The transformers module, which is the reference, takes 60 launches a layer, most of them over a few numbers: nearly all
the time of a decode step on a fast GPU. Matrix products are torch's, over the module's own weights; the kernels between
them are `rl_csrc.inference.layers`. Shapes: T packed tokens, B of them with logits, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from rl_csrc.inference.layers import MOST_HEAD_SIZE, add_norm, gated, rotate_to_pages
from rl_rollout.backends.embedded.model.linear import head_logits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_rollout.backends.embedded.model.paged_attention import AttentionSettings, PagedBatch
    from rl_rollout.backends.embedded.model.weights import WeightMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Weights of one decoder layer."""

    input_norm: Tensor
    qkv: Tensor
    """[(heads + 2 key heads) * head size, H]: a view of three weights that are stored back to back."""
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    settings: AttentionSettings


def joined_weights(module: Any) -> list[list[str]]:
    """Groups of weights that one matrix product reads as one, in its order: query, key, value; gate, up."""
    found: list[list[str]] = []
    for index, layer in enumerate(module.model.layers):
        prefix = f"model.layers.{index}"
        qkv = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        found.append([f"{name}.weight" for name in qkv])
        if layer.self_attn.q_proj.bias is not None:
            found.append([f"{name}.bias" for name in qkv])
        found.append([f"{prefix}.mlp.{name}_proj.weight" for name in ("gate", "up")])
    return found


class CudaDecoder:
    """Forward pass of a module of one of the `KNOWN` classes (cpu_decoder.py), over weights stored in `memory`."""

    def __init__(
        self, module: Any, max_model_len: int, settings: Mapping[int, AttentionSettings], memory: WeightMemory
    ) -> None:
        self.max_model_len = max_model_len
        self._embedding: Tensor = module.model.embed_tokens.weight
        self._norm: Tensor = module.model.norm.weight
        self._head: Tensor = module.lm_head.weight
        self._eps: float = module.config.rms_norm_eps
        self._layers = [self._layer(i, layer, settings[i], memory) for i, layer in enumerate(module.model.layers)]
        positions = torch.arange(max_model_len, device=self._embedding.device)[None]
        cos, sin = module.model.rotary_emb(self._embedding[:1], positions)
        half = cos.shape[-1] // 2
        self._cos, self._sin = (part[0, :, :half].contiguous() for part in (cos, sin))

    def _layer(self, index: int, layer: Any, settings: AttentionSettings, memory: WeightMemory) -> _Layer:
        attention, prefix = layer.self_attn, f"model.layers.{index}"
        has_norms = hasattr(attention, "q_norm")
        qkv = f"{prefix}.self_attn.q_proj"
        return _Layer(
            input_norm=layer.input_layernorm.weight,
            qkv=memory.joined(f"{qkv}.weight"),
            qkv_bias=None if attention.q_proj.bias is None else memory.joined(f"{qkv}.bias"),
            query_norm=attention.q_norm.weight if has_norms else None,
            key_norm=attention.k_norm.weight if has_norms else None,
            out=attention.o_proj.weight,
            out_bias=attention.o_proj.bias,
            post_norm=layer.post_attention_layernorm.weight,
            gate_up=memory.joined(f"{prefix}.mlp.gate_proj.weight"),
            down=layer.mlp.down_proj.weight,
            settings=settings,
        )

    def logits(self, ids: Tensor, batch: PagedBatch, which: Tensor | None = None) -> Tensor:
        """Fill the cache from `ids` [T]; logits [B, V] of all tokens, or of those at `which` [B]. See `head_logits`."""
        residual = embedding(ids, self._embedding)
        added: Tensor | None = None
        for index, layer in enumerate(self._layers):
            x = add_norm(residual, added, layer.input_norm, self._eps)
            keys, values = batch.cache.keys[index], batch.cache.values[index]
            query = rotate_to_pages(
                linear(x, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, keys.shape[-1])),
                *(layer.query_norm, layer.key_norm, self._cos, self._sin, keys, values),
                *(batch.block_tables, batch.rows, batch.positions, self._eps),
            )
            attended = batch.attend_to_cache(index, query, layer.settings)
            x = add_norm(residual, linear(attended.flatten(1), layer.out, layer.out_bias), layer.post_norm, self._eps)
            added = linear(gated(linear(x, layer.gate_up)), layer.down)
        if which is not None:
            residual = residual.index_select(0, which)
            added = None if added is None else added.index_select(0, which)
        return head_logits(add_norm(residual, added, self._norm, self._eps), self._head)


def can_decode(module: Any, probed: Mapping[int, Any]) -> bool:
    """Whether the decoder supports the dtypes, biases and head sizes of a module of a known class."""
    dtypes = {weight.dtype for weight in module.parameters()}
    biases = [
        layer.mlp.gate_proj.bias is not None or layer.mlp.down_proj.bias is not None for layer in module.model.layers
    ]
    sizes = {shape.key_dim for shape in probed.values()} | {shape.value_dim for shape in probed.values()}
    return (
        len(dtypes) == 1
        and dtypes <= {torch.float32, torch.bfloat16, torch.float16}
        and not any(biases)
        and len(sizes) == 1
        and all(size % 2 == 0 and size <= MOST_HEAD_SIZE for size in sizes)
    )
