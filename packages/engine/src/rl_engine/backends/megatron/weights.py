"""Architectures that are mapped to megatron-core: which Hugging Face tensors make up which parameter, cut how, where.

One plan for the whole model, the same on every rank: reading takes this rank's entries from it, exporting walks all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count, groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rl_engine.checkpoint.hf_folder import SCORE
from rl_engine.errors import ConfigError
from rl_engine.model.hf import check_mapped
from rl_engine.model.moe import Experts
from rl_engine.types import Head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from rl_engine.backends.megatron.layout import Axis, Layout
    from rl_engine.types import ParallelConfig


_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "glm4_moe")
GATHERED_BYTES = 1 << 28
"""Bytes of experts that are exported together: they are small, and one collective for each would mostly wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidRouter:
    """Routing by sigmoids and a bias per expert that counts in the choice alone (DeepSeek-V3, 2412.19437)."""

    scale: float
    """Factor of the chosen experts' weights, which sum to 1 before it."""
    num_groups: int
    """Groups of experts; 1: the choice is free."""
    top_groups: int
    """Groups from which a token's experts are chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer with grouped-query attention, gated SiLU MLPs (or experts), RMSNorm and rotary."""

    model_type: str
    """Model type, as in config.json."""
    num_layers: int
    """Decoder layers."""
    hidden_size: int
    """H."""
    num_heads: int
    """Query heads."""
    num_groups: int
    """Key and value heads."""
    head_dim: int
    """Size of a head."""
    ffn_size: int
    """Inner size of a dense MLP."""
    vocab_size: int
    """V."""
    pad_id: int | None
    """The token whose embedding is not trained, as in transformers; it still is as a row of a tied head."""
    context: int
    """Longest row."""
    norm_eps: float
    """Epsilon of RMSNorm."""
    is_tied: bool
    """The language-model head is the embedding."""
    has_scalar_head: bool
    """The head gives one number, as a sequence classifier with one label."""
    has_qkv_bias: bool
    """Query, key and value projections have a bias."""
    has_qk_norm: bool
    """RMSNorm of each query and key head."""
    num_experts: int
    """0: dense."""
    num_dense: int
    """First layers that have a dense MLP in the place of experts."""
    top_k: int
    """Experts per token."""
    expert_size: int
    """Inner size of an expert."""
    norm_top_k: bool
    """The chosen experts' probabilities are scaled to sum to 1."""
    shared_size: int
    """Inner size of the experts that every token goes to, taken together; 0: none."""
    sigmoid_router: SigmoidRouter | None
    """How routers choose by sigmoids; None: by softmax."""
    windows: tuple[int | None, ...]
    """By layer, the tokens that a query sees, itself included; None: all before it."""

    @property
    def experts(self) -> Experts | None:
        """Sizes of the mixture; None for a dense model, and for routers that are not replayed."""
        if not self.num_experts or self.sigmoid_router is not None:
            return None
        return Experts(num_layers=self.num_layers, num_experts=self.num_experts, top_k=self.top_k)


def read_architecture(config: Any, head: Head) -> Architecture:
    """Take what is needed from a model folder's transformers config.

    Raises:
        ModelFolderError: an architecture, or a variant of one, that has no mapping.
    """
    kind = config.model_type
    dense = kind == "qwen3_moe" and bool(config.mlp_only_layers or config.decoder_sparse_step != 1)
    more = {"dense layers among expert layers": dense}
    if kind == "glm4_moe":
        groups = config.n_group > 1 and config.num_experts_per_tok != 2 * config.topk_group
        more |= {
            "norm_topk_prob=false": not config.norm_topk_prob,
            "num_experts_per_tok other than twice topk_group": groups,  # megatron-core weighs a group by so many
        }
    check_mapped(config, "megatron", _MODEL_TYPES, layers={"full_attention", "sliding_attention"}, more=more)
    num_experts, top_k, expert_size, num_dense, shared, router = 0, 0, 0, 0, 0, None
    if kind in ("qwen3_moe", "glm4_moe"):
        top_k, expert_size = config.num_experts_per_tok, config.moe_intermediate_size
        num_experts = config.num_experts if kind == "qwen3_moe" else config.n_routed_experts
    if kind == "glm4_moe":
        num_dense, shared = config.first_k_dense_replace, config.n_shared_experts * expert_size
        router = SigmoidRouter(
            scale=config.routed_scaling_factor, num_groups=config.n_group, top_groups=config.topk_group
        )
    heads = config.num_attention_heads
    return Architecture(
        model_type=kind,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_groups=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        pad_id=config.pad_token_id,
        context=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        is_tied=bool(config.tie_word_embeddings) and head == Head.LM,
        has_scalar_head=head != Head.LM,
        has_qkv_bias=kind == "qwen2" or (kind == "glm4_moe" and config.attention_bias),
        has_qk_norm=kind in ("qwen3", "qwen3_moe") or (kind == "glm4_moe" and config.use_qk_norm),
        num_experts=num_experts,
        num_dense=num_dense,
        top_k=top_k,
        expert_size=expert_size,
        shared_size=shared,
        sigmoid_router=router,
        norm_top_k=bool(getattr(config, "norm_topk_prob", False)),
        windows=_windows(config),
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    """By layer, the tokens that a query sees, itself included; None: all before it."""
    window = getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"  # Mistral names no layers
    kinds = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


class Cut(StrEnum):
    """How a Hugging Face tensor is split over tensor-parallel ranks."""

    WHOLE = "whole"
    """Every rank has all of it."""
    ROWS = "rows"
    """Along the first dimension (Megatron's column parallel)."""
    COLUMNS = "columns"
    """Along the second (Megatron's row parallel)."""


class Form(StrEnum):
    """How several Hugging Face tensors lie in one parameter."""

    PLAIN = "plain"
    """One tensor, as it is."""
    QKV = "qkv"
    """Per key head: its queries, the key, the value."""
    STACKED = "stacked"
    """One below the other: gate, then up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One parameter of one pipeline stage (and one expert-parallel rank)."""

    parameter: str
    """Name in the owner's list of GPTModels, which starts with the place in it."""
    tensors: dict[str, tuple[int, ...]]
    """Hugging Face names and full shapes."""
    cut: Cut = Cut.WHOLE
    """Split over tensor-parallel ranks."""
    form: Form = Form.PLAIN
    """How the tensors lie in the parameter."""
    stage: int
    """Pipeline rank that has it."""
    expert_rank: int | None = None
    """Expert-parallel rank that has it; None: all."""
    is_tied: bool = False
    """Another stage has the same tensor: the embedding that is also the head."""
    is_buffer: bool = False
    """Not trained: in checkpoints and exports, without optimizer state."""
    is_copy: bool = False
    """The last stage's copy of such a one: read, not exported, and not counted in the gradient norm."""


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of the embedding when every tensor-parallel rank has equally many."""
    return -(-vocab_size // tp) * tp


def split_layers(num_layers: int, pp: int, vpp: int) -> list[int]:
    """Layers of each piece of a pipeline, in order: equally many, or fewer in the first and the last.

    Those have the embedding and the head beside. As megatron-core splits them: all between are alike.
    """
    if num_layers % pp == 0 or pp == 1:
        return [num_layers // (pp * vpp)] * (pp * vpp)
    between = -(-num_layers // pp)
    rest = num_layers - (pp - 2) * between
    return [rest // 2, *[between] * (pp - 2), rest - rest // 2]


def check_divides(arch: Architecture, parallel: ParallelConfig) -> None:
    """Refuse sizes that the layout does not divide.

    Raises:
        ConfigError: says which.
    """
    wanted = [
        ("tp", parallel.tp, "query heads", arch.num_heads),
        ("tp", parallel.tp, "key and value heads", arch.num_groups),
        ("tp * cp", parallel.tp * parallel.cp, "query heads", arch.num_heads),
        ("tp * cp", parallel.tp * parallel.cp, "key and value heads", arch.num_groups),
        ("tp", parallel.tp, "MLP columns", arch.ffn_size),
        ("tp", parallel.tp, "columns of shared experts", arch.shared_size),
        ("pp * vpp", parallel.pp * parallel.vpp, "layers", arch.num_layers),
    ]
    if arch.num_experts:
        wanted.append(("ep", parallel.ep, "experts", arch.num_experts))
    for name, size, what, number in wanted:
        is_split = what == "layers" and parallel.vpp == 1  # unevenly, if need be
        if number % size and not is_split:
            raise ConfigError(f"parallel.{name} = {size} does not divide the model's {number} {what}.")
    if parallel.vpp == 1 and min(split_layers(arch.num_layers, parallel.pp, 1)) < 1:
        raise ConfigError(
            f"parallel.pp is {parallel.pp} and the model has {arch.num_layers} layers, too few for so many stages."
        )
    if arch.num_experts and parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            "Experts with parallel.tp above 1 need parallel.sequence_parallel=true: tokens are dealt to them."
        )
    if parallel.ep > 1 and not arch.num_experts:
        raise ConfigError(f"parallel.ep is {parallel.ep} and the {arch.model_type} model has no experts. Set it to 1.")


def plan_weights(arch: Architecture, *, pp: int, vpp: int, ep: int) -> list[Entry]:
    """Every parameter of the model, in the order of the layers."""
    vocab = (arch.vocab_size, arch.hidden_size)
    embedding = Entry(
        parameter="0.embedding.word_embeddings.weight",
        tensors={"model.embed_tokens.weight": vocab},
        cut=Cut.ROWS,
        stage=0,
        is_tied=arch.is_tied and pp > 1,
    )
    entries = [embedding]
    layers = count()
    for piece, size in enumerate(split_layers(arch.num_layers, pp, vpp)):
        chunk, stage = divmod(piece, pp)
        for local, layer in zip(range(size), layers, strict=False):
            target = f"{chunk}.decoder.layers.{local}"
            is_sparse = bool(arch.num_experts) and layer >= arch.num_dense
            entries += _layer(arch, f"model.layers.{layer}", target, stage, is_sparse=is_sparse)
            if is_sparse:
                entries += _experts(arch, f"model.layers.{layer}.mlp", f"{target}.mlp", stage, ep)
    norm = {"model.norm.weight": (arch.hidden_size,)}
    entries.append(Entry(parameter=f"{vpp - 1}.decoder.final_layernorm.weight", tensors=norm, stage=pp - 1))
    if arch.has_scalar_head:
        entries.append(Entry(parameter=f"{vpp - 1}.{SCORE}", tensors={SCORE: (1, arch.hidden_size)}, stage=pp - 1))
    elif not arch.is_tied:
        entries.append(_head("lm_head.weight", vocab, pp, vpp))
    elif pp > 1:
        entries.append(_head("model.embed_tokens.weight", vocab, pp, vpp, is_copy=True))
    return entries


def shapes_of(entries: list[Entry]) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor of the model, once."""
    return {name: shape for entry in entries for name, shape in entry.tensors.items()}


def _head(name: str, shape: tuple[int, ...], pp: int, vpp: int, *, is_copy: bool = False) -> Entry:
    return Entry(
        parameter=f"{vpp - 1}.output_layer.weight",
        tensors={name: shape},
        cut=Cut.ROWS,
        stage=pp - 1,
        is_tied=is_copy,
        is_copy=is_copy,
    )


def _layer(arch: Architecture, source: str, target: str, stage: int, *, is_sparse: bool) -> list[Entry]:
    hidden, size = arch.hidden_size, arch.head_dim
    widths = {"q": arch.num_heads * size, "k": arch.num_groups * size, "v": arch.num_groups * size}

    def qkv(kind: str, *rest: int) -> Entry:
        return Entry(
            parameter=f"{target}.self_attention.linear_qkv.{kind}",
            tensors={f"{source}.self_attn.{part}_proj.{kind}": (width, *rest) for part, width in widths.items()},
            cut=Cut.ROWS,
            form=Form.QKV,
            stage=stage,
        )

    def whole(parameter: str, name: str, *shape: int) -> Entry:
        return Entry(parameter=f"{target}.{parameter}", tensors={f"{source}.{name}": shape}, stage=stage)

    entries = [whole("input_layernorm.weight", "input_layernorm.weight", hidden), qkv("weight", hidden)]
    if arch.has_qkv_bias:
        entries.append(qkv("bias"))
    if arch.has_qk_norm:
        entries += [whole(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight", size) for x in "qk"]
    entries += [
        Entry(
            parameter=f"{target}.self_attention.linear_proj.weight",
            tensors={f"{source}.self_attn.o_proj.weight": (hidden, widths["q"])},
            cut=Cut.COLUMNS,
            stage=stage,
        ),
        whole("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hidden),
    ]
    if is_sparse:
        entries.append(whole("mlp.router.weight", "mlp.gate.weight", arch.num_experts, hidden))
        if arch.sigmoid_router is not None:
            bias = whole("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", arch.num_experts)
            entries.append(replace(bias, is_buffer=True))
        if arch.shared_size:
            shape, name = (arch.shared_size, hidden), "mlp.shared_experts"
            entries += _mlp(f"{source}.{name}", f"{target}.{name}", shape, stage, is_cut=True)
        return entries
    return entries + _mlp(f"{source}.mlp", f"{target}.mlp", (arch.ffn_size, hidden), stage, is_cut=True)


def _experts(arch: Architecture, source: str, target: str, stage: int, ep: int) -> list[Entry]:
    per_rank = arch.num_experts // ep
    shape = (arch.expert_size, arch.hidden_size)
    entries: list[Entry] = []
    for expert in range(arch.num_experts):
        owner, local = divmod(expert, per_rank)
        name = f"{target}.experts.local_experts.{local}"
        entries += _mlp(f"{source}.experts.{expert}", name, shape, stage, expert_rank=owner, is_cut=False)
    return entries


def _mlp(
    source: str, target: str, shape: tuple[int, int], stage: int, *, expert_rank: int | None = None, is_cut: bool
) -> list[Entry]:
    """Gate and up stacked, then down; `shape` is (inner, hidden)."""
    return [
        Entry(
            parameter=f"{target}.linear_fc1.weight",
            tensors={f"{source}.{part}_proj.weight": shape for part in ("gate", "up")},
            cut=Cut.ROWS if is_cut else Cut.WHOLE,
            form=Form.STACKED,
            stage=stage,
            expert_rank=expert_rank,
        ),
        Entry(
            parameter=f"{target}.linear_fc2.weight",
            tensors={f"{source}.down_proj.weight": shape[::-1]},
            cut=Cut.COLUMNS if is_cut else Cut.WHOLE,
            stage=stage,
            expert_rank=expert_rank,
        ),
    ]


class WeightMap:
    """Map between parameters of this rank and the Hugging Face tensors that they are made of."""

    def __init__(self, arch: Architecture, layout: Layout) -> None:
        self.entries = plan_weights(arch, pp=layout.pp.size, vpp=layout.vpp, ep=layout.ep.size)
        self.own = {entry.parameter: entry for entry in self.entries if self._is_mine(entry, layout)}
        """Entries of this rank, by the name of the parameter."""
        self.shapes = shapes_of(self.entries)
        self._arch, self._layout = arch, layout

    def read_into(self, parameters: Mapping[str, Tensor], read: Callable[[str, tuple[slice, ...]], Tensor]) -> None:
        """Fill this rank's parameters; `read(name, slices)` gives part of a Hugging Face tensor."""
        with torch.no_grad():
            for entry in self._entries_of(parameters):
                parts = [
                    read(name, _slices(shape, entry.cut, self._layout.tp)) for name, shape in entry.tensors.items()
                ]
                joined, parameter = _join(parts, entry.form, self._arch), parameters[entry.parameter]
                parameter[: joined.shape[0]].copy_(joined)
                parameter[joined.shape[0] :].zero_()  # rows that pad the vocabulary

    def export(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Every Hugging Face tensor, whole, on every rank. Collective.

        One parameter at a time is gathered, or of a layer's experts as many as `GATHERED_BYTES` hold.
        """
        like, layout = next(iter(parameters.values())).detach(), self._layout
        is_alone = layout.ep.size == layout.pp.size == 1
        for _, found in groupby(self.entries, key=lambda entry: entry.parameter.partition(".experts.")[0]):
            entries = list(found)
            if entries[0].expert_rank is not None and not is_alone:
                yield from self._export_experts(parameters, entries, like)
                continue
            for entry in entries:
                if entry.is_copy:
                    continue
                parts: list[Tensor] = []
                if entry is self.own.get(entry.parameter):
                    parts = self._split(parameters[entry.parameter].detach().to(like.dtype), entry)
                for index, (name, shape) in enumerate(entry.tensors.items()):
                    full = _gather(parts[index], shape, entry.cut, layout.tp) if parts else like.new_empty(shape)
                    yield name, layout.pp.broadcast(full, entry.stage)

    def _export_experts(
        self, parameters: Mapping[str, Tensor], entries: list[Entry], like: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """The experts of one layer, equally many from each rank at a time. They are views of one tensor."""
        layout, stage = self._layout, entries[0].stage
        by_rank = [[entry for entry in entries if entry.expert_rank == rank] for rank in range(layout.ep.size)]
        largest = max(_count(entry) for entry in entries) * like.element_size() * layout.ep.size
        step = max(1, GATHERED_BYTES // largest)
        for first in range(0, len(by_rank[0]), step):
            chosen = [mine[first : first + step] for mine in by_rank]
            if stage == layout.pp.rank:
                own = [parameters[entry.parameter].detach().flatten() for entry in chosen[layout.ep.rank]]
                full = layout.ep.all_gather(torch.cat(own))
            else:
                full = like.new_empty(layout.ep.size, sum(map(_count, chosen[0])))
            layout.pp.broadcast(full, stage)
            for mine, flat in zip(chosen, full, strict=True):
                shapes = [item for entry in mine for item in entry.tensors.items()]
                parts = flat.split(
                    [math.prod(shape) for _, shape in shapes]
                )  # gate lies before up, as in `Form.STACKED`
                yield from ((name, part.view(shape)) for (name, shape), part in zip(shapes, parts, strict=True))

    def local_parts(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parts of Hugging Face tensors that this rank holds; those cut over tensor-parallel ranks as DTensors."""
        parts: dict[str, Tensor] = {}
        for entry in self._entries_of(parameters):
            found = self._split(parameters[entry.parameter].detach(), entry)
            for (name, shape), part in zip(entry.tensors.items(), found, strict=True):
                parts[name] = self._described(part, shape, entry.cut)
        return parts

    def _entries_of(self, parameters: Mapping[str, Tensor]) -> list[Entry]:
        """Entries of this rank that `parameters` has: optimizer state has no buffers."""
        return [entry for entry in self.own.values() if not entry.is_buffer or entry.parameter in parameters]

    def _described(self, part: Tensor, shape: tuple[int, ...], cut: Cut) -> Tensor:
        """Part of a tensor as a DTensor of its place in the whole, without rows that pad the vocabulary."""
        if cut == Cut.WHOLE or self._layout.tp.size == 1:
            return part[: shape[0]].contiguous()
        rows = _slices(shape, cut, self._layout.tp)[0]
        if cut == Cut.ROWS:
            part = part[: rows.stop - rows.start]
        return DTensor.from_local(
            part.contiguous(),
            self._layout.tp_mesh,
            [Shard(0 if cut == Cut.ROWS else 1)],
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(torch.empty(shape, device="meta").stride()),
        )

    def _split(self, parameter: Tensor, entry: Entry) -> list[Tensor]:
        """The reverse of `_join`."""
        if entry.form == Form.PLAIN:
            return [parameter]
        if entry.form == Form.STACKED:
            return list(parameter.chunk(2))
        arch = self._arch
        sizes = [arch.num_heads // arch.num_groups * arch.head_dim, arch.head_dim, arch.head_dim]
        grouped = parameter.unflatten(0, (arch.num_groups // self._layout.tp.size, -1))
        return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]

    @staticmethod
    def _is_mine(entry: Entry, layout: Layout) -> bool:
        return entry.stage == layout.pp.rank and entry.expert_rank in (None, layout.ep.rank)


def _count(entry: Entry) -> int:
    return sum(map(math.prod, entry.tensors.values()))


def _slices(shape: tuple[int, ...], cut: Cut, tp: Axis) -> tuple[slice, ...]:
    """Slices of a full tensor that this rank holds; the last rank may have fewer rows of the vocabulary."""
    if cut == Cut.WHOLE:
        return (slice(None),) * len(shape)
    dim = 0 if cut == Cut.ROWS else 1
    size = -(-shape[dim] // tp.size)
    mine = slice(min(shape[dim], tp.rank * size), min(shape[dim], (tp.rank + 1) * size))
    return tuple(mine if axis == dim else slice(None) for axis in range(len(shape)))


def _join(parts: list[Tensor], form: Form, arch: Architecture) -> Tensor:
    if form == Form.PLAIN:
        return parts[0]
    if form == Form.STACKED:
        return torch.cat(parts)
    groups = parts[1].shape[0] // arch.head_dim
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def _gather(part: Tensor, shape: tuple[int, ...], cut: Cut, tp: Axis) -> Tensor:
    if cut == Cut.WHOLE or tp.size == 1:
        return part.contiguous()
    dim = 0 if cut == Cut.ROWS else 1
    return torch.cat(list(tp.all_gather(part)), dim=dim).narrow(dim, 0, shape[dim]).contiguous()
