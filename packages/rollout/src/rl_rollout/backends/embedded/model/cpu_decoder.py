"""CPU decoder: the forward pass of Llama-like models as one native call. The transformers module is the reference.

`rl_csrc.inference.decoder` computes it, over weights that are packed once per weight version.
Shapes: T packed tokens, B of them with logits, V vocabulary.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from rl_csrc.inference.decoder import Decoder, DecoderLayer, Drawing, PackedLinear, has_kernel, pack_linear
from rl_rollout.backends.embedded.kv_cache import KVCache
from rl_rollout.backends.embedded.model.paged_attention import PagedBatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from rl_rollout.backends.embedded.batch_state import BatchState
    from rl_rollout.backends.embedded.kv_cache import LayerShape
    from rl_rollout.backends.embedded.model.paged_attention import AttentionSettings, ProbeBatch
    from rl_rollout.backends.embedded.scheduling.scheduler import Plan


KNOWN = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""Classes of transformers that the CPU and the CUDA decoder compute."""
MOST_DIFFERENCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Tolerance between a decoder's logits and the module's, relative to the largest logit."""
_PROBED_TOKENS = 8

_log = logging.getLogger(__name__)


class FusedDecoder:
    """Forward pass of a module of one of the `KNOWN` classes; its weights are read at `repack`."""

    def __init__(self, module: Any, max_model_len: int, settings: Mapping[int, AttentionSettings]) -> None:
        self._module = module
        self.max_model_len = max_model_len
        self._settings = settings
        cos, sin = module.model.rotary_emb(torch.zeros(1), torch.arange(max_model_len)[None])
        half = cos.shape[-1] // 2
        self._cos, self._sin = (part[0, :, :half].contiguous() for part in (cos, sin))
        self._decoder: Decoder | None = None
        self.num_threads: int | None = None
        """Threads of a call; None: as many as torch uses."""
        self.repack()

    def repack(self) -> None:
        """Pack the module's weights after an update; drop the packed copy where the weights were released."""
        self._decoder = None
        module, config = self._module, self._module.config
        if not module.lm_head.weight.numel():
            return
        self._decoder = Decoder(
            embedding=module.model.embed_tokens.weight,
            layers=[self._packed(index, layer) for index, layer in enumerate(module.model.layers)],
            norm=module.model.norm.weight,
            head=_packed([module.lm_head]),
            cos=self._cos,
            sin=self._sin,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            eps=config.rms_norm_eps,
            scaling=self._settings[0].scaling,
        )

    def _packed(self, index: int, layer: Any) -> DecoderLayer:
        attention, mlp = layer.self_attn, layer.mlp
        has_norms = hasattr(attention, "q_norm")
        return DecoderLayer(
            input_norm=layer.input_layernorm.weight,
            qkv=_packed([attention.q_proj, attention.k_proj, attention.v_proj]),
            query_norm=attention.q_norm.weight if has_norms else None,
            key_norm=attention.k_norm.weight if has_norms else None,
            out=_packed([attention.o_proj]),
            post_norm=layer.post_attention_layernorm.weight,
            gate_up=_packed([mlp.gate_proj, mlp.up_proj]),
            down=_packed([mlp.down_proj]),
            window=self._settings[index].window,
        )

    def logits(self, ids: Tensor, batch: PagedBatch, which: Tensor | None = None) -> Tensor:
        """Fill the cache from `ids` [T]; logits [B, V] float32 of all tokens, or of those at `which` [B]."""
        assert self._decoder is not None
        places = (batch.positions, batch.rows, batch.block_tables, *self._caches(batch.cache))
        return self._decoder(ids, *places, which, num_threads=self.num_threads)

    def generate(
        self,
        ids: Tensor,
        positions: Tensor,
        block_tables: Tensor,
        cache: KVCache,
        drawing: Drawing,
        steps: int,
        interrupt: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Several decode steps in one native call: `Decoder.generate`. Row i of `block_tables` belongs to token i."""
        assert self._decoder is not None
        places = (positions, torch.arange(len(ids)), block_tables, *self._caches(cache))
        return self._decoder.generate(
            ids, *places, drawing=drawing, steps=steps, interrupt=interrupt, num_threads=self.num_threads
        )

    def _caches(self, cache: KVCache) -> tuple[list[Tensor], list[Tensor]]:
        return [cache.keys[layer] for layer in self._settings], [cache.values[layer] for layer in self._settings]


def _packed(layers: list[torch.nn.Linear]) -> PackedLinear:
    """Weights of several linear layers packed as one, concatenated along the output axis."""
    biases = [bias for layer in layers if (bias := _bias(layer)) is not None]
    return pack_linear(torch.cat([layer.weight for layer in layers]), torch.cat(biases) if biases else None)


def _bias(layer: torch.nn.Linear) -> Tensor | None:
    return layer.bias


def is_known(module: Any) -> bool:
    """Whether the module is of a class in `KNOWN`, with SiLU and a RoPE variant that the decoders compute."""
    if type(module).__name__ not in KNOWN:
        return False
    rope = getattr(module.config, "rope_parameters", None) or {}
    return (
        module.config.hidden_act == "silu"
        and rope.get("rope_type", "default") in {"default", "linear", "llama3", "yarn"}
        and rope.get("partial_rotary_factor", 1.0) == 1.0
    )


def fuse(module: Any, max_model_len: int, probe: ProbeBatch) -> FusedDecoder | None:
    """CPU decoder of a float32 module on a CPU; None elsewhere, and for architectures that are not in `KNOWN`.

    It is compared with the module once. If they differ, as a future transformers may compute something else under a
    known name, a warning is logged and None is returned.
    """
    if not (is_known(module) and has_kernel(module.lm_head.weight)):
        return None
    fused = FusedDecoder(module, max_model_len, probe.settings)
    return fused if agrees(module, fused, probe) else None


class KnownPass(Protocol):
    """Decoder that computes the forward pass of a module of a known class."""

    max_model_len: int

    def logits(self, ids: Tensor, batch: PagedBatch, which: Tensor | None = None) -> Tensor:
        """Logits [B, V] of all tokens of `ids` [T], or of those at `which` [B]."""
        ...


def agrees(module: Any, known: KnownPass, probe: ProbeBatch) -> bool:
    """Whether a decoder's logits are those of the module, within `MOST_DIFFERENCE`; logs a warning if not."""
    found = _difference(module, known, probe.shapes)
    if found <= MOST_DIFFERENCE[module.lm_head.weight.dtype]:
        return True
    _log.warning(
        "%s of this transformers differs from the decoder that was written for it, by %.1e of its logits; it is served "
        "without the %s, more slowly",
        type(module).__name__,
        found,
        type(known).__name__,
    )
    return False


@torch.inference_mode()
def _difference(module: Any, known: KnownPass, shapes: Mapping[int, LayerShape]) -> float:
    """Largest difference between the logits of module and decoder, relative to the largest logit."""
    count, weight = min(_PROBED_TOKENS, known.max_model_len), module.lm_head.weight
    positions = torch.arange(count, device=weight.device)
    rows = torch.zeros_like(positions)
    ids = (positions * 7919 + 1) % module.config.vocab_size

    def batch() -> PagedBatch:
        cache = KVCache(dict(shapes), block_size=count, dtype=weight.dtype, device=ids.device)
        cache.resize(1)
        tables = torch.zeros(1, 1, dtype=torch.int64, device=ids.device)
        return PagedBatch(cache, tables, rows, positions, num_single=0, num_blocks=0, chunks=[(0, 0, count)])

    want = module(input_ids=ids[None], position_ids=positions[None], use_cache=False, rl_batch=batch()).logits[0]
    got = known.logits(ids, batch())
    return float((got.float() - want.float()).abs().max() / want.abs().max())


MOST_STEPS = 16
"""Most decode steps of one call: a block of positions, so that a row holds at most one block more than it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Sampled tokens of a step: the newest token of each of B rows, on the host."""

    ids: np.ndarray
    """[B] int64"""
    logprobs: np.ndarray
    """[B] float32"""


def generate(
    decoder: FusedDecoder,
    cache: KVCache,
    table: BatchState,
    plan: Plan,
    weight_version: int,
    interrupt: Tensor | None,
) -> SampledTokens:
    """Run up to `plan.steps` decode steps of all rows in one native call, and update the batch state.

    Args:
        decoder: The model's CPU decoder.
        cache: Holds all tokens of the rows but the newest.
        table: Batch state; gets tokens, log-probs, weight versions and lengths.
        plan: Plan of the step: all rows, and how many steps.
        weight_version: Weight version to note for the new tokens.
        interrupt: [1] int64; no further step begins once it is not 0.
    """
    count, steps = len(plan.rows), plan.steps
    table.reserve(0, int(table.lengths_host[:count].max()) + steps, 1)
    lengths = table.lengths[:count]
    tokens, logprobs, versions = (column[:count] for column in (table.tokens, table.logprobs, table.versions))
    drawing = Drawing(
        temperature=table.temperature[:count],
        streams=table.streams[:count],
        is_greedy=table.is_greedy[:count],
        limits=torch.from_numpy(table.limits[:count]),
        stop_ids=torch.from_numpy(table.stop_ids[:count]),
    )
    newest = (lengths - 1)[:, None]
    ids, scored, counts = decoder.generate(
        tokens.gather(1, newest)[:, 0], newest[:, 0], table.block_tables[:count], cache, drawing, steps, interrupt
    )
    # Entries beyond a row's new tokens are garbage, and are overwritten before anything reads them.
    places = lengths[:, None] + torch.arange(steps)
    tokens.scatter_(1, places, ids)
    logprobs.scatter_(1, places, scored)
    versions.scatter_(1, places, weight_version)
    lengths += counts
    table.lengths_host[:count] += counts.numpy()
    table.computed[:count] += counts.numpy()
    last = (counts - 1)[:, None]
    return SampledTokens(ids=ids.gather(1, last)[:, 0].numpy(), logprobs=scored.gather(1, last)[:, 0].numpy())
