"""Packed input of a model: the tokens of a micro-batch's rows end to end, without padding.

Legend: `B` rows, `C` completion tokens, `T` tokens fed. Tokens that rows begin with in common may be fed once: `U`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rl_engine.types import BatchCounts, ModelOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_engine.batch.prefix_tree import PrefixTree

NO_COUNTS = BatchCounts(tokens=0.0, sequences=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Packed input of a model: B rows end to end."""

    token_ids: Tensor
    """(T,) int64."""
    position_ids: Tensor
    """(T,) int64, from 0 in each row."""
    lengths: tuple[int, ...]
    """B entries, tokens of each row that the model sees."""
    score_index: Tensor
    """(C,) int64, the position in T whose hidden state predicts completion token c, or with `feeds_last` follows it."""
    labels: Tensor
    """(C,) int64, the completion tokens; with `shared` those that rows share may be there once."""
    cu_seqlens: Tensor
    """(B + 1,) int64, row offsets into C."""
    completions: tuple[int, ...]
    """B entries, completion tokens per row; a row's last tokens fed are those that predict them."""
    num_valid: int
    """T without padding."""
    routed_experts: Tensor | None = None
    """(T, layers, experts of a token) int64, where the batch says which experts to take."""
    candidates: Tensor | None = None
    """(C, K) int64, more tokens to be scored in the place of each completion token."""
    visual: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The `VISUAL` columns' entries of these rows, in their order; see `rl_engine.layers.multimodal`."""
    sounds: tuple[int, ...] = ()
    """B entries, sounds of each row, where the batch has some; of whole rows also where `shared`."""
    places: Tensor | None = None
    """(T, 3) int64, time, height and width of each token, where the batch has images; T of whole rows also where
    `shared`, and so `given_ids`."""
    adapters: tuple[int, ...] | None = None
    """B entries, the number of each row's adapter, -1 for none; None: no row has one."""
    given_ids: Tensor | None = None
    """(T,) int64, `token_ids` with -1 where the model wrote the token (`loss_mask` 1); where `visual` has entries."""
    shared: PrefixSharing | None = None
    """Prefix sharing of rows that begin with the same tokens; None: row by row."""
    counts: BatchCounts = NO_COUNTS
    """Denominators of the whole logical batch."""

    @property
    def scored(self) -> Tensor | Repeats:
        """`score_index`, for `take_rows`."""
        return self.score_index if self.shared is None else self.shared.scored

    def output(self, **scores: Tensor | None) -> ModelOutput:
        """The micro-batch's output, with these fields of `ModelOutput`, of which rows may share entries."""
        if self.shared is not None and (index := self.shared.scores) is not None:
            scores = {name: None if score is None else take_rows(score, index) for name, score in scores.items()}
        return ModelOutput(cu_seqlens=self.cu_seqlens, counts=self.counts, **scores)

    def padded(self, multiple: int) -> PackedRows:
        """Rows with one more, which nothing looks at, where T is no multiple of `multiple`."""
        missing = -sum(self.lengths) % multiple
        if not missing:
            return self
        pad = self.token_ids.new_zeros(missing)
        routed = self.routed_experts
        if routed is not None:  # an expert comes once for each token
            routed = torch.cat(
                [routed, torch.arange(routed.shape[2], device=pad.device).expand(missing, *routed.shape[1:])]
            )
        return replace(
            self,
            token_ids=torch.cat([self.token_ids, pad]),
            position_ids=torch.cat([self.position_ids, torch.arange(missing, device=pad.device)]),
            lengths=(*self.lengths, missing),
            completions=(*self.completions, 0),
            routed_experts=routed,
        )


def one_token_row(device: torch.device) -> PackedRows:
    """A stand-in row for a rank that has run out of rows while others still compute together."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return PackedRows(
        token_ids=zero,
        position_ids=zero,
        lengths=(1,),
        score_index=zero,
        labels=zero,
        cu_seqlens=torch.tensor([0, 1], device=device),
        completions=(1,),
        num_valid=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Index of a source's rows that repeats some of them, with what its gradient needs."""

    index: Tensor
    """(N,) int64."""
    num_rows: int
    """Rows of the source."""
    sums: tuple[tuple[Tensor, Tensor], ...]
    """Rows that come n times each: (u,) int64 of the source, and the (u * n,) of the result that each became."""


def repeats(index: Tensor, num_rows: int, device: torch.device) -> Repeats:
    """`index` (on the CPU) into `num_rows` rows, made ready for `take_rows`."""
    order = index.sort(stable=True).indices
    counts = torch.bincount(index, minlength=num_rows)
    starts = counts.cumsum(0) - counts
    sums: list[tuple[Tensor, Tensor]] = []
    for count in counts.unique().tolist():
        if count:
            rows = (counts == count).nonzero()[:, 0]
            slots = order[(starts[rows, None] + torch.arange(count)).flatten()]
            sums.append((to_device(rows, device), to_device(slots, device)))
    return Repeats(index=to_device(index, device), num_rows=num_rows, sums=tuple(sums))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on `device`, without waiting for what that still computes."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def take_rows(source: Tensor, index: Tensor | Repeats) -> Tensor:
    """`source[index]` over the first dimension; an entry that comes twice needs `Repeats`."""
    if isinstance(index, Repeats):
        return _RepeatRows.apply(source, index)  # pyright: ignore[reportReturnType]
    return _TakeRows.apply(source, index)  # pyright: ignore[reportReturnType]


def spread_rows(source: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """`source[index]` where `index` repeats rows as padding; only the slots in `inverse` send a gradient back.

    `index[inverse]` is 0, 1, ...; nothing but zero may flow back into the other slots.
    """
    return _SpreadRows.apply(source, index, inverse)  # pyright: ignore[reportReturnType]


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = source.shape[0]
        return source.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        grad = grads[0].new_zeros((ctx.num_rows, *grads[0].shape[1:]))
        return grad.index_copy_(0, index, grads[0]), None


class _RepeatRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Repeats) -> Tensor:
        ctx.repeats = index
        return source.index_select(0, index.index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].new_zeros((ctx.repeats.num_rows, *grads[0].shape[1:]))
        for rows, slots in ctx.repeats.sums:
            copies = grads[0].index_select(0, slots)
            is_unique = len(slots) == len(rows)
            grad.index_copy_(0, rows, copies if is_unique else copies.unflatten(0, (len(rows), -1)).sum(1))
        return grad, None


class _SpreadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return source.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSharing:
    """Prefix sharing: the segments of U tokens that make up B rows, a tree."""

    fed: Tensor
    """(U,) int64 on the CPU, the tokens of T that are fed."""
    lengths: tuple[int, ...]
    """Tokens of each segment; they sum up to U."""
    before: tuple[int, ...]
    """Tokens of its rows in front of each segment; 0 where it is a beginning."""
    keys: Repeats
    """Keys of each segment, of the U tokens: those in front of it, then its own."""
    scored: Repeats
    """(S,), which of the U tokens predicts each scored token: a segment's last does so for all that go on from it."""
    scores: Repeats | None
    """(C,), which of the S scored tokens each completion token is; None: S is C, each is scored by itself."""


def share_prefixes(packed: PackedRows, tree: PrefixTree, rows: Sequence[int], *, merges_scores: bool) -> PackedRows:
    """Feed tokens that several rows begin with once; the rows as they were where none do.

    Args:
        packed: Rows end to end.
        tree: What they share.
        rows: Number of each in the tree.
        merges_scores: Score a completion token once that several rows share: labels are the tokens that are fed.
    """
    lengths = torch.tensor(packed.lengths)
    starts: list[int] = (lengths.cumsum(0) - lengths).tolist()
    place = dict(zip(rows, range(len(rows)), strict=True))
    fed_at = torch.arange(sum(packed.lengths))  # which of T is fed in the place of each
    segments: list[tuple[int, int, int]] = []  # tokens in front, tokens, the first of them in T
    for together, start, stop in tree.runs(rows):
        first, *others = (place[row] for row in together)
        stop = stop if others else packed.lengths[first]
        if stop > start:
            segments.append((start, stop - start, starts[first] + start))
        own = torch.arange(starts[first] + start, starts[first] + stop)
        for other in others:
            fed_at[starts[other] + start : starts[other] + stop] = own
    if sum(length for _, length, _ in segments) == len(fed_at):
        return packed
    # beginnings first; then neighbours of like shape, which are attended together
    segments.sort(key=lambda segment: (segment[0] > 0, -segment[0], -segment[1]))
    return _regroup(packed, segments, fed_at, merges_scores=merges_scores)


def _regroup(
    packed: PackedRows, segments: Sequence[tuple[int, int, int]], fed_at: Tensor, *, merges_scores: bool
) -> PackedRows:
    before, lengths, starts = torch.tensor(segments).unbind(1)
    fed = _ranges(starts, lengths)
    place = torch.empty(len(fed_at), dtype=torch.int64)  # of each of T among U
    place[fed] = torch.arange(len(fed))
    place = place[fed_at]
    completions, ends = torch.tensor(packed.completions), torch.tensor(packed.lengths).cumsum(0)
    predicting, device, scores, labels = (
        _ranges(ends - completions, completions),
        packed.token_ids.device,
        None,
        packed.labels,
    )
    if merges_scores:  # one that two rows share is fed to both, unless it is the last of a row
        following = torch.cat([fed_at[1:], fed_at[:1]])
        following[ends - 1] = len(fed_at) + ends
        _, same = following[predicting].unique(return_inverse=True)
        first = torch.full((int(same.max()) + 1,), len(same)).scatter_reduce(0, same, torch.arange(len(same)), "amin")
        if len(first) < len(same):
            predicting, labels = predicting[first], labels[to_device(first, device)]
            scores = repeats(same, len(first), device)
    here = to_device(fed, device)
    shared = PrefixSharing(
        fed=fed,
        lengths=tuple(lengths.tolist()),
        before=tuple(before.tolist()),
        keys=repeats(place[_ranges(starts - before, before + lengths)], len(fed), device),
        scored=repeats(place[predicting], len(fed), device),
        scores=scores,
    )
    return replace(
        packed,
        token_ids=packed.token_ids[here],
        position_ids=packed.position_ids[here],
        score_index=shared.scored.index,
        labels=labels,
        num_valid=len(fed),
        shared=shared,
    )


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """`start, start + 1, ...` of each length, end to end."""
    return torch.arange(int(lengths.sum())) + (starts - lengths.cumsum(0) + lengths).repeat_interleave(lengths)


def ragged(rows: Sequence[Sequence[float]] | Sequence[Tensor], dtype: torch.dtype = torch.int64) -> Tensor:
    """Rows as one jagged nested tensor."""
    if not rows:
        return torch.nested.nested_tensor_from_jagged(torch.empty(0, dtype=dtype), torch.zeros(1, dtype=torch.int64))
    return torch.nested.nested_tensor([torch.as_tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def ragged_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    loss_mask: Sequence[Sequence[int]] | None = None,
) -> TensorDict:
    """A batch as an engine takes it; every completion token counts unless `loss_mask` says otherwise."""
    mask = [[1] * len(row) for row in completions] if loss_mask is None else loss_mask
    columns = {
        "prompt_token_ids": ragged(prompts),
        "completion_token_ids": ragged(completions),
        "loss_mask": ragged(mask),
    }
    return TensorDict(columns, batch_size=[len(prompts)])  # pyright: ignore[reportArgumentType]
