"""Stand-ins of Transformer Engine's modules where neither it nor CUDA is, and two ranks that have its ring attention.

They compute in plain torch what the library documents. As a script: `megatron_te_ranks.py FOLDER`, one rank.
"""

import sys
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import EngineConfig, OptimizerConfig, ParallelConfig, Precision, create_engine
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch

stages = import_module("rl_engine.backends.megatron.model")  # which imports megatron-core without its warnings
SIZES = {
    "vocab_size": 160, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "initializer_range": 0.06,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
MODELS = {
    "dense": ("qwen3", {}),
    "window": ("mistral", {"sliding_window": 16}),
    "experts": ("qwen3_moe", {"num_experts": 8, "decoder_sparse_step": 1, "norm_topk_prob": True, **EXPERTS}),
    "sinks": ("gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16,
                          "intermediate_size": 128}),
    "latent": ("deepseek_v3", {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
                               "first_k_dense_replace": 1, "q_lora_rank": 96, "kv_lora_rank": 64, "head_dim": 32,
                               "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "num_mtp_layers": 0,
                               "num_key_value_heads": 4, **EXPERTS}),
}  # fmt: skip
RINGS = {"one key head": {"num_key_value_heads": 1}, "three layers": {}}
"""Changes of the dense model; a single key head is more than Ulysses could deal to two ranks."""
LENGTHS = ((9, 40), (3, 7), (30, 25), (1, 64), (12, 3))


def rows():
    draw = torch.Generator().manual_seed(5)
    parts = [[torch.randint(3, 150, (n,), generator=draw).tolist() for n in pair] for pair in LENGTHS]
    return ragged_batch([prompt for prompt, _ in parts], [completion for _, completion in parts])


def write(folder, kind, **more):
    torch.manual_seed(3)
    name, changes = MODELS[kind]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(SIZES | changes | more))).save_pretrained(folder)


class Grouped(torch.nn.Module):
    """Stands for Transformer Engine's `GroupedLinear` as megatron-core wraps it."""

    def __init__(self, num_gemms, input_size, output_size, *, config, bias, skip_bias_add, **_):
        super().__init__()
        self._count, self._is_apart = num_gemms, skip_bias_add
        empty = partial(torch.empty, dtype=config.params_dtype)
        for index in range(num_gemms):
            self.register_parameter(f"weight{index}", torch.nn.Parameter(empty(output_size, input_size)))
            self.register_parameter(f"bias{index}", torch.nn.Parameter(empty(output_size)) if bias else None)

    def forward(self, x, m_splits):
        biases = [getattr(self, f"bias{index}") for index in range(self._count)]
        parts = [
            torch.nn.functional.linear(part, getattr(self, f"weight{index}"), None if self._is_apart else biases[index])
            for index, part in enumerate(x.split(m_splits))
        ]
        return torch.cat(parts), biases if self._is_apart and biases[0] is not None else None


class Attention(torch.nn.Module):
    """Stands for `TEDotProductAttention`: packed rows (`thd`), over ranks by pieces r and 2 n - 1 - r of every row."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, *, pg_collection, softmax_scale=None, **_):
        super().__init__()
        self.window_size, self._scale, self._heads = None, softmax_scale, config.num_attention_heads
        self._group, self._size = pg_collection.cp, config.context_parallel_size

    def forward(self, q, k, v, mask, attn_mask_type, *, packed_seq_params):
        told, repeats = packed_seq_params, q.shape[1] // k.shape[1]
        assert (told.qkv_format, attn_mask_type.name, mask) == ("thd", "causal", None)
        assert (q.shape[1], told.max_seqlen_q) == (self._heads, int(told.cu_seqlens_q.diff().max()))
        bounds = list(pairwise(told.cu_seqlens_q_padded.tolist()))
        own = [self._own(start, stop) for start, stop in bounds]
        k, v = (self._whole(part, torch.cat(own), bounds[-1][1]) for part in (k, v))
        scale, outs = q.shape[-1] ** -0.5 if self._scale is None else self._scale, []
        for (start, stop), places, queries in zip(bounds, own, q.split([len(each) for each in own]), strict=True):
            keys, values = (part[start:stop].repeat_interleave(repeats, 1) for part in (k, v))
            far = (places - start)[:, None] - torch.arange(stop - start)
            unseen = (far < 0) | (far > (stop - start if self.window_size is None else self.window_size[0]))
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
            outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, float("-inf")).softmax(-1), values))
        return torch.cat(outs).flatten(1)

    def _own(self, start, stop):
        """Which tokens of a row are this rank's, in the order in which it has them."""
        if self._size == 1:
            return torch.arange(start, stop)
        piece, rank = (stop - start) // (2 * self._size), dist.get_rank(self._group)
        assert piece * 2 * self._size == stop - start
        return torch.cat([start + one * piece + torch.arange(piece) for one in (rank, 2 * self._size - 1 - rank)])

    def _whole(self, part, places, total):
        if self._size == 1:
            return part
        full = part.new_zeros(total, *part.shape[1:]).index_copy(0, places, part)
        return all_reduce(full, group=self._group)


def rotate(t, freqs, interleaved):
    """Stands for the fused rotation."""
    rope = import_module("megatron.core.models.common.embeddings.rope_utils")
    return rope._apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=interleaved)


@contextmanager
def stand_ins():
    """Stand-ins in the places of Transformer Engine's modules, and of its fused rotation."""
    layers = import_module("megatron.core.tensor_parallel")
    rope = import_module("megatron.core.models.common.embeddings.rope_utils")
    modules = {
        "TEColumnParallelLinear": layers.ColumnParallelLinear, "TERowParallelLinear": layers.RowParallelLinear,
        "TEColumnParallelGroupedLinear": Grouped, "TERowParallelGroupedLinear": Grouped,
        "TEDotProductAttention": Attention,
    }  # fmt: skip
    with (
        mock.patch.multiple(stages.transformer_engine, **modules),
        mock.patch.object(rope, "fused_apply_rotary_pos_emb", rotate),
    ):
        yield


def step(folder, case, *, is_ring):
    """What a step gives: of all rows on every rank of the ring, of one rank's share of them without."""
    stages.uses_transformer_engine = lambda config: is_ring
    options = {"precision": Precision.FLOAT64, "max_tokens_per_gpu": 90, "optimizer": OptimizerConfig(lr=1e-3)}
    layout = ParallelConfig(cp=2) if is_ring else ParallelConfig()
    engine = create_engine("megatron", EngineConfig(model_path=str(folder / case), parallel=layout, **options))
    engine.initialize()
    world = engine.parts.built.world
    mine = rows()[world.rank :: 2]
    engine.optimizer_zero_grad()
    output = engine.forward_backward_batch(mine, sft_loss)
    found = world.exchange([row.tolist() for row in output.columns["logprobs"].unbind()])
    seen = {
        "loss": output.metrics["loss"],
        "norm": engine.optimizer_step(),
        "logprobs": found,
    }
    seen["weights"] = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    engine.close()
    return seen


def main(folder):
    torch.set_num_threads(1)
    for case, changes in RINGS.items():
        write(folder / case, "dense", **changes)
    holder = create_engine("fsdp", EngineConfig(model_path=str(folder / "three layers"), optimizer=None))
    holder.initialize()  # makes the process group; the others join it
    seen = {}
    with stand_ins():
        for case in RINGS:
            for name, is_ring in (("alone", False), ("ring", True)):
                seen[f"{case} {name}"] = step(folder, case, is_ring=is_ring)
    rank = holder.parts.built.world.rank
    holder.close()
    if rank == 0:
        torch.save(seen, folder / "seen.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
