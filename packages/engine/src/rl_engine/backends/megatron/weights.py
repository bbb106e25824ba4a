"""Which Hugging Face tensors make up which parameter of megatron-core, cut how, where.

One plan for the whole model, the same on every rank: reading takes this rank's entries from it, exporting walks all.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count, groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rl_engine.backends.megatron.architectures import split_layers
from rl_engine.checkpoint.hf_folder import SCORE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from rl_engine.backends.megatron.architectures import Architecture
    from rl_engine.backends.megatron.layout import Axis, Layout

GATHERED_BYTES = 1 << 28
"""Bytes of experts that are exported together: they are small, and one collective for each would mostly wait."""


_LOCAL_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.(\w+\.\w+)$")


class Cut(StrEnum):
    """How a Hugging Face tensor is split over tensor-parallel ranks."""

    WHOLE = "whole"
    """Every rank has all of it."""
    ROWS = "rows"
    """Along the first dimension (Megatron's column parallel)."""
    COLUMNS = "columns"
    """Along the second (Megatron's row parallel)."""


class Form(StrEnum):
    """Layout of several Hugging Face tensors in one parameter."""

    PLAIN = "plain"
    """One tensor, as it is."""
    QKV = "qkv"
    """Per key head: its queries, the key, the value."""
    STACKED = "stacked"
    """One below the other: gate, then up."""
    INTERLEAVED = "interleaved"
    """Gate and up side by side in the last dimension, turned round and taken apart."""
    TURNED = "turned"
    """The last two dimensions turned round."""


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
    """Layout of the tensors in the parameter."""
    stage: int
    """Pipeline rank that has it."""
    expert_rank: int | None = None
    """Expert-parallel rank that has it; None: all."""
    index: int | None = None
    """Of the expert in a tensor that has all of them along its first dimension; None: a separate tensor."""
    is_tied: bool = False
    """Another stage has the same tensor: the embedding that is also the head."""
    is_buffer: bool = False
    """Not trained: in checkpoints and exports, without optimizer state."""
    is_adapter: bool = False
    """One matrix of a LoRA adapter: in checkpoints, not in the folder."""
    is_head: bool = False
    """The scalar head, which is trained whole along with an adapter."""
    is_copy: bool = False
    """The last stage's copy of such a one: read, not exported, and not counted in the gradient norm."""
    is_mtp: bool = False
    """Of the layer for multi-token prediction: in checkpoints and saved models, not in exports."""


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of the embedding when every tensor-parallel rank has equally many."""
    return -(-vocab_size // tp) * tp


def plan_weights(arch: Architecture, *, pp: int, vpp: int, ep: int, is_grouped: bool = False) -> list[Entry]:
    """Every parameter of the model, in the order of the layers; experts are named as grouped ones where they are."""
    entries = _plan(arch, pp, vpp, ep)
    if arch.rename is not None:
        entries = list(map(arch.rename, entries))
    return [replace(entry, parameter=grouped(entry.parameter)) for entry in entries] if is_grouped else entries


def grouped(parameter: str) -> str:
    """`experts.local_experts.3.linear_fc1.weight` is `experts.linear_fc1.weight3` where products are grouped."""
    return _LOCAL_EXPERT.sub(r".experts.\2\1", parameter)


def _plan(arch: Architecture, pp: int, vpp: int, ep: int) -> list[Entry]:
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
        entries.append(
            Entry(parameter=f"{vpp - 1}.{SCORE}", tensors={SCORE: (1, arch.hidden_size)}, stage=pp - 1, is_head=True)
        )
    elif not arch.is_tied:
        entries.append(_head("lm_head.weight", vocab, pp, vpp))
    elif pp > 1:
        entries.append(_head("model.embed_tokens.weight", vocab, pp, vpp, is_copy=True))
    return [*entries, *_mtp(arch, f"{vpp - 1}.ahead", pp - 1, ep)] if arch.has_mtp else entries


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


def _mtp(arch: Architecture, target: str, stage: int, ep: int) -> list[Entry]:
    """The layer for multi-token prediction, behind the last: two norms, their product, a decoder layer, a norm."""
    source, hidden, layer = f"model.layers.{arch.num_layers}", arch.hidden_size, f"{target}.transformer_layer"
    found = {
        "enorm": ("enorm", (hidden,), Cut.WHOLE),
        "hnorm": ("hnorm", (hidden,), Cut.WHOLE),
        "eh_proj": ("eh_proj", (hidden, 2 * hidden), Cut.ROWS),
        "final_layernorm": ("shared_head.norm", (hidden,), Cut.WHOLE),
    }
    entries = [
        Entry(parameter=f"{target}.{own}.weight", tensors={f"{source}.{name}.weight": shape}, cut=cut, stage=stage)
        for own, (name, shape, cut) in found.items()
    ]
    entries += _layer(arch, source, layer, stage, is_sparse=True)
    entries += _experts(arch, f"{source}.mlp", f"{layer}.mlp", stage, ep)
    return [replace(entry, is_mtp=True) for entry in entries]


def _layer(arch: Architecture, source: str, target: str, stage: int, *, is_sparse: bool) -> list[Entry]:
    hidden = arch.hidden_size

    def whole(parameter: str, name: str, *shape: int) -> Entry:
        return Entry(parameter=f"{target}.{parameter}", tensors={f"{source}.{name}": shape}, stage=stage)

    attention = _attention if arch.latent is None else _latent_attention
    entries = [
        whole("input_layernorm.weight", "input_layernorm.weight", hidden),
        *attention(arch, f"{source}.self_attn", f"{target}.self_attention", stage),
        whole("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hidden),
    ]
    if is_sparse:
        name = "mlp.gate" if arch.swiglu_limit is None else "mlp.router"
        entries.append(whole("mlp.router.weight", f"{name}.weight", arch.num_experts, hidden))
        if arch.swiglu_limit is not None:
            entries.append(whole("mlp.router.bias", f"{name}.bias", arch.num_experts))
        if arch.router.is_sigmoid:
            bias = whole("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", arch.num_experts)
            entries.append(replace(bias, is_buffer=True))
        if arch.shared_size:
            shape, name = (arch.shared_size, hidden), "mlp.shared_experts"
            entries += _mlp(f"{source}.{name}", f"{target}.{name}", shape, stage, is_cut=True)
        return entries
    return entries + _mlp(f"{source}.mlp", f"{target}.mlp", (arch.ffn_size, hidden), stage, is_cut=True)


def _attention(arch: Architecture, source: str, target: str, stage: int) -> list[Entry]:
    hidden, size = arch.hidden_size, arch.head_dim
    widths = {"q": arch.num_heads * size, "k": arch.num_groups * size, "v": arch.num_groups * size}

    def qkv(kind: str, *rest: int) -> Entry:
        return Entry(
            parameter=f"{target}.linear_qkv.{kind}",
            tensors={f"{source}.{part}_proj.{kind}": (width, *rest) for part, width in widths.items()},
            cut=Cut.ROWS,
            form=Form.QKV,
            stage=stage,
        )

    entries = [qkv("weight", hidden)]
    if arch.has_qkv_bias:
        entries.append(qkv("bias"))
    if arch.has_qk_norm:
        entries += [
            Entry(
                parameter=f"{target}.{x}_layernorm.weight", tensors={f"{source}.{x}_norm.weight": (size,)}, stage=stage
            )
            for x in "qk"
        ]
    if arch.swiglu_limit is not None:
        for name, tensor, size, cut in (
            ("core_attention.sinks", "sinks", arch.num_heads, Cut.ROWS),
            ("linear_proj.bias", "o_proj.bias", hidden, Cut.WHOLE),
        ):
            tensors: dict[str, tuple[int, ...]] = {f"{source}.{tensor}": (size,)}
            entries.append(Entry(parameter=f"{target}.{name}", tensors=tensors, cut=cut, stage=stage))
    return [*entries, _projection(source, target, (hidden, widths["q"]), stage)]


def _projection(source: str, target: str, shape: tuple[int, int], stage: int) -> Entry:
    """The product behind the heads."""
    tensors: dict[str, tuple[int, ...]] = {f"{source}.o_proj.weight": shape}
    return Entry(parameter=f"{target}.linear_proj.weight", tensors=tensors, cut=Cut.COLUMNS, stage=stage)


def _latent_attention(arch: Architecture, source: str, target: str, stage: int) -> list[Entry]:
    sizes = arch.latent
    assert sizes is not None
    hidden, heads = arch.hidden_size, arch.num_heads
    queries, keys = heads * (sizes.key_dim + sizes.rope_dim), heads * (sizes.key_dim + sizes.value_dim)
    found: dict[str, tuple[str, tuple[int, ...], Cut]] = {}
    if sizes.query_rank is None:
        found["linear_q_proj"] = "q_proj", (queries, hidden), Cut.ROWS
    else:
        found["linear_q_down_proj"] = "q_a_proj", (sizes.query_rank, hidden), Cut.WHOLE
        found["q_layernorm"] = "q_a_layernorm", (sizes.query_rank,), Cut.WHOLE
        found["linear_q_up_proj"] = "q_b_proj", (queries, sizes.query_rank), Cut.ROWS
    found["linear_kv_down_proj"] = "kv_a_proj_with_mqa", (sizes.kv_rank + sizes.rope_dim, hidden), Cut.WHOLE
    found["kv_layernorm"] = "kv_a_layernorm", (sizes.kv_rank,), Cut.WHOLE
    found["linear_kv_up_proj"] = "kv_b_proj", (keys, sizes.kv_rank), Cut.ROWS
    entries = [
        Entry(
            parameter=f"{target}.{parameter}.weight", tensors={f"{source}.{name}.weight": shape}, cut=cut, stage=stage
        )
        for parameter, (name, shape, cut) in found.items()
    ]
    return [*entries, _projection(source, target, (hidden, heads * sizes.value_dim), stage)]


def _experts(arch: Architecture, source: str, target: str, stage: int, ep: int) -> list[Entry]:
    per_rank = arch.num_experts // ep
    shape = (arch.expert_size, arch.hidden_size)
    entries: list[Entry] = []
    for expert in range(arch.num_experts):
        owner, local = divmod(expert, per_rank)
        name = f"{target}.experts.local_experts.{local}"
        if arch.swiglu_limit is not None:
            entries += _joined_expert(arch, f"{source}.experts", name, stage, expert, owner)
            continue
        entries += _mlp(f"{source}.experts.{expert}", name, shape, stage, expert_rank=owner, is_cut=False)
    return entries


def _joined_expert(arch: Architecture, source: str, target: str, stage: int, expert: int, owner: int) -> list[Entry]:
    """One expert of tensors that have all of a layer's."""
    inner, hidden, count = arch.expert_size, arch.hidden_size, arch.num_experts
    return [
        Entry(
            parameter=f"{target}.{parameter}",
            tensors={f"{source}.{name}": (count, *shape)},
            form=form,
            stage=stage,
            expert_rank=owner,
            index=expert,
        )
        for parameter, name, shape, form in (
            ("linear_fc1.weight", "gate_up_proj", (hidden, 2 * inner), Form.INTERLEAVED),
            ("linear_fc1.bias", "gate_up_proj_bias", (2 * inner,), Form.INTERLEAVED),
            ("linear_fc2.weight", "down_proj", (inner, hidden), Form.TURNED),
            ("linear_fc2.bias", "down_proj_bias", (hidden,), Form.TURNED),
        )
    ]


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

    def __init__(
        self, arch: Architecture, layout: Layout, entries: list[Entry], adapters: Sequence[Entry] = ()
    ) -> None:
        """Take this rank's.

        Args:
            arch: The model.
            layout: Where this rank stands.
            entries: From `plan_weights`.
            adapters: Those of LoRA adapters.
        """
        self.entries, self.adapters = entries, list(adapters)
        self.shapes = shapes_of(self.entries)
        """Of the folder's tensors."""
        self.own = {entry.parameter: entry for entry in [*self.entries, *self.adapters] if self._is_mine(entry, layout)}
        """Entries of this rank, by the name of the parameter."""
        self._arch, self.layout = arch, layout

    def local_shape(self, entry: Entry) -> tuple[int, ...]:
        """Shape of this rank's part of a parameter that is one tensor."""
        (shape,) = entry.tensors.values()
        return tuple(part.stop - part.start for part in _bounds(_slices(shape, entry.cut, self.layout.tp), shape))

    def read_into(self, parameters: Mapping[str, Tensor], read: Callable[[str, tuple[slice, ...]], Tensor]) -> None:
        """Fill this rank's parameters; `read(name, slices)` gives part of a Hugging Face tensor."""
        with torch.no_grad():
            for entry in self._entries_of(parameters):
                parts = [read(name, self._slices(shape, entry)) for name, shape in entry.tensors.items()]
                joined, parameter = join(parts, entry.form, self._arch), parameters[entry.parameter]
                parameter[: joined.shape[0]].copy_(joined)
                parameter[joined.shape[0] :].zero_()  # rows that pad the vocabulary

    def export(
        self, parameters: Mapping[str, Tensor], entries: list[Entry] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Every Hugging Face tensor of the policy, or those of `entries`, whole, on every rank. Collective.

        One parameter at a time is gathered, or of a layer's experts as many as `GATHERED_BYTES` hold.
        """
        like, layout = next(iter(parameters.values())).detach(), self.layout
        is_alone = layout.ep.size == layout.pp.size == 1
        wanted = [entry for entry in self.entries if not entry.is_mtp] if entries is None else entries
        for _, found in groupby(wanted, key=lambda entry: entry.parameter.partition(".experts.")[0]):
            entries = list(found)
            if entries[0].index is not None:
                yield from _stacked(self._gather_experts(parameters, entries, like), self._arch.num_experts)
                continue
            if entries[0].expert_rank is not None and not is_alone:
                yield from ((name, part) for _, name, part in self._gather_experts(parameters, entries, like))
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

    def _gather_experts(
        self, parameters: Mapping[str, Tensor], entries: list[Entry], like: Tensor
    ) -> Iterator[tuple[Entry, str, Tensor]]:
        """The experts of one layer, equally many from each rank at a time. They are views of one tensor."""
        layout, stage = self.layout, entries[0].stage
        by_rank = [[entry for entry in entries if entry.expert_rank == rank] for rank in range(layout.ep.size)]
        largest = max(_count(entry) for entry in entries) * like.element_size() * layout.ep.size
        step = max(1, GATHERED_BYTES // largest)
        for first in range(0, len(by_rank[0]), step):
            chosen = [mine[first : first + step] for mine in by_rank]
            if stage == layout.pp.rank:
                mine = chosen[layout.ep.rank]
                own = [part.flatten() for entry in mine for part in self._split(parameters[entry.parameter], entry)]
                full = layout.ep.all_gather(torch.cat(own).detach())
            else:
                full = like.new_empty(layout.ep.size, sum(map(_count, chosen[0])))
            layout.pp.broadcast(full, stage)
            for mine, flat in zip(chosen, full, strict=True):
                shapes = [
                    (entry, name, shape if entry.index is None else shape[1:])
                    for entry in mine
                    for name, shape in entry.tensors.items()  # gate lies before up, as in `Form.STACKED`
                ]
                parts = flat.split([math.prod(shape) for *_, shape in shapes])
                for (entry, name, shape), part in zip(shapes, parts, strict=True):
                    yield entry, name, part.view(shape)

    def _slices(self, shape: tuple[int, ...], entry: Entry) -> tuple[slice, ...]:
        """Of a Hugging Face tensor, what one parameter is made of."""
        if entry.index is None:
            return _slices(shape, entry.cut, self.layout.tp)
        return (slice(entry.index, entry.index + 1), *[slice(None)] * (len(shape) - 1))

    def local_parts(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parts of Hugging Face tensors that this rank holds; those cut over tensor-parallel ranks as DTensors."""
        parts: dict[str, Tensor] = {}
        joined: dict[tuple[str, tuple[int, ...]], list[Tensor]] = {}
        for entry in self._entries_of(parameters):
            found = self._split(parameters[entry.parameter].detach(), entry)
            for (name, shape), part in zip(entry.tensors.items(), found, strict=True):
                if entry.index is None:
                    parts[name] = self._described(part, shape, entry.cut)
                else:
                    joined.setdefault((name, shape), []).append(part)
        return parts | {name: self._over_experts(torch.stack(found), shape) for (name, shape), found in joined.items()}

    def _over_experts(self, part: Tensor, shape: tuple[int, ...]) -> Tensor:
        """This rank's experts of a tensor that has all of a layer's."""
        return part if self.layout.ep.size == 1 else _as_dtensor(part, self.layout.ep_mesh, 0, shape)

    def _entries_of(self, parameters: Mapping[str, Tensor]) -> list[Entry]:
        """Entries of this rank that `parameters` has: optimizer state is of those that are trained."""
        return [entry for entry in self.own.values() if entry.parameter in parameters]

    def _described(self, part: Tensor, shape: tuple[int, ...], cut: Cut) -> Tensor:
        """Part of a tensor as a DTensor of its place in the whole, without rows that pad the vocabulary."""
        if cut == Cut.WHOLE or self.layout.tp.size == 1:
            return part[: shape[0]].contiguous()
        rows = _slices(shape, cut, self.layout.tp)[0]
        if cut == Cut.ROWS:
            part = part[: rows.stop - rows.start]
        return _as_dtensor(part, self.layout.tp_mesh, 0 if cut == Cut.ROWS else 1, shape)

    def _split(self, parameter: Tensor, entry: Entry) -> list[Tensor]:
        """The reverse of `join`."""
        if entry.form == Form.PLAIN:
            return [parameter]
        if entry.form == Form.STACKED:
            return list(parameter.chunk(2))
        if entry.form == Form.INTERLEAVED:
            return [torch.stack(parameter.chunk(2), 1).flatten(0, 1).movedim(0, -1)]
        if entry.form == Form.TURNED:
            return [parameter.movedim(0, -1)]
        arch = self._arch
        sizes = [arch.num_heads // arch.num_groups * arch.head_dim, arch.head_dim, arch.head_dim]
        grouped = parameter.unflatten(0, (arch.num_groups // self.layout.tp.size, -1))
        return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]

    @staticmethod
    def _is_mine(entry: Entry, layout: Layout) -> bool:
        return entry.stage == layout.pp.rank and entry.expert_rank in (None, layout.ep.rank)


def _stacked(experts: Iterator[tuple[Entry, str, Tensor]], num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer's experts as one of each name."""
    found: dict[str, Tensor] = {}
    for entry, name, part in experts:
        if name not in found:
            found[name] = part.new_empty(num_experts, *part.shape)
        assert entry.index is not None
        found[name][entry.index] = part
    yield from found.items()


def _as_dtensor(part: Tensor, mesh: DeviceMesh, dim: int, shape: tuple[int, ...]) -> Tensor:
    """This rank's part of a tensor of that shape, cut along one dimension."""
    return DTensor.from_local(
        part.contiguous(),
        mesh,
        [Shard(dim)],
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(torch.empty(shape, device="meta").stride()),
    )


def _count(entry: Entry) -> int:
    """Numbers in one parameter."""
    numbers = sum(map(math.prod, entry.tensors.values()))
    return numbers if entry.index is None else numbers // next(iter(entry.tensors.values()))[0]


def _slices(shape: tuple[int, ...], cut: Cut, tp: Axis) -> tuple[slice, ...]:
    """Slices of a full tensor that this rank holds; the last rank may have fewer rows of the vocabulary."""
    if cut == Cut.WHOLE:
        return (slice(None),) * len(shape)
    dim = 0 if cut == Cut.ROWS else 1
    size = -(-shape[dim] // tp.size)
    mine = slice(min(shape[dim], tp.rank * size), min(shape[dim], (tp.rank + 1) * size))
    return tuple(mine if axis == dim else slice(None) for axis in range(len(shape)))


def _bounds(slices: tuple[slice, ...], shape: tuple[int, ...]) -> list[slice]:
    return [slice(*part.indices(size)) for part, size in zip(slices, shape, strict=True)]


def join(parts: list[Tensor], form: Form, arch: Architecture) -> Tensor:
    """Tensors, or products with them, in the order that they have in one parameter along its first dimension."""
    if form == Form.PLAIN:
        return parts[0]
    if form == Form.STACKED:
        return torch.cat(parts)
    if form in (Form.INTERLEAVED, Form.TURNED):
        turned = parts[0][0].movedim(-1, 0)
        return turned if form == Form.TURNED else torch.cat([turned[0::2], turned[1::2]])
    groups = parts[1].shape[0] // arch.head_dim
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def _gather(part: Tensor, shape: tuple[int, ...], cut: Cut, tp: Axis) -> Tensor:
    if cut == Cut.WHOLE or tp.size == 1:
        return part.contiguous()
    dim = 0 if cut == Cut.ROWS else 1
    return torch.cat(list(tp.all_gather(part)), dim=dim).narrow(dim, 0, shape[dim]).contiguous()
