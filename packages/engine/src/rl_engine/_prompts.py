"""Rows of a micro-batch that begin with the same prompt are fed it once.

What belongs to a token alone (embedding, norms, projections, MLP, head) is then computed once for all rows. Attention
reads a row's keys and values, the prompt's among them, through an index (`SharedPrompts.keys`); gradients of the copies
are summed there. The tokens fed are cut into segments: shared prompts, what rows add to one, and rows that share none.

Legend: `T` tokens of all rows end to end, `U` tokens fed (each shared prompt once), `B` rows, `C` completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_engine._gather import Repeats, repeats, to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_engine._packed import PackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompts:
    """How U tokens make up B rows."""

    lengths: tuple[int, ...]
    """Tokens of each segment; they sum up to U."""
    before: tuple[int, ...]
    """By segment, the tokens of the prompt that it goes on from; 0 where it is a beginning."""
    keys: Repeats
    """By segment, which of the U tokens its queries look at: the prompt that it goes on from, then its own."""
    scored: Repeats
    """(C,), which of the U tokens predicts each completion token: a prompt's last does so for all of its rows."""


@dataclass(frozen=True, slots=True)
class _Segment:
    start: int
    """Its first token of T."""
    length: int
    before: int
    """Tokens of T in front of `start` that it goes on from."""


def share_prompts(packed: PackedRows, prompts: Sequence[int], groups: Sequence[int]) -> PackedRows:
    """Feed each prompt that several rows begin with once; the rows as they were where none does.

    Args:
        packed: Rows end to end.
        prompts: Prompt tokens of each.
        groups: A number for each; rows of the same number have the same prompt.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    if len(members) == len(groups):
        return packed
    lengths = torch.tensor(packed.lengths)
    starts: list[int] = (lengths.cumsum(0) - lengths).tolist()
    beginnings, ends = list[_Segment](), list[_Segment]()
    first_of = list(starts)  # where in T each row's prompt is fed
    for rows in members.values():
        first, prompt = rows[0], prompts[rows[0]]
        if len(rows) == 1:
            beginnings.append(_Segment(starts[first], packed.lengths[first], 0))
            continue
        beginnings.append(_Segment(starts[first], prompt, 0))
        for row in rows:
            first_of[row] = starts[first]
            if packed.lengths[row] > prompt:
                ends.append(_Segment(starts[row] + prompt, packed.lengths[row] - prompt, prompt))
    beginnings.sort(key=lambda segment: -segment.length)
    ends.sort(key=lambda segment: (-segment.before, -segment.length))  # neighbours of like shape are attended together
    return _regroup(packed, [*beginnings, *ends], _fed_at(prompts, starts, first_of, sum(packed.lengths)))


def _fed_at(prompts: Sequence[int], starts: Sequence[int], first_of: Sequence[int], total: int) -> Tensor:
    """(T,) int64, which of T is fed in the place of each."""
    counts = torch.tensor(prompts)
    fed_at = torch.arange(total)
    fed_at[_ranges(torch.tensor(starts), counts)] = _ranges(torch.tensor(first_of), counts)
    return fed_at


def _regroup(packed: PackedRows, segments: Sequence[_Segment], fed_at: Tensor) -> PackedRows:
    lengths = torch.tensor([segment.length for segment in segments])
    before = torch.tensor([segment.before for segment in segments])
    starts = torch.tensor([segment.start for segment in segments])
    fed = _ranges(starts, lengths)
    place = torch.empty(len(fed_at), dtype=torch.int64)  # of each of T among U
    place[fed] = torch.arange(len(fed))
    place = place[fed_at]
    completions = torch.tensor(packed.completions)
    predicting = _ranges(torch.tensor(packed.lengths).cumsum(0) - completions, completions)
    device = packed.token_ids.device
    here = to_device(fed, device)
    shared = SharedPrompts(
        lengths=tuple(lengths.tolist()),
        before=tuple(before.tolist()),
        keys=repeats(place[_ranges(starts - before, before + lengths)], len(fed), device),
        scored=repeats(place[predicting], len(fed), device),
    )
    return replace(
        packed,
        token_ids=packed.token_ids[here],
        position_ids=packed.position_ids[here],
        score_index=shared.scored.index,
        num_valid=len(fed),
        shared=shared,
    )


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """`start, start + 1, ...` of each length, end to end."""
    return torch.arange(int(lengths.sum())) + (starts - lengths.cumsum(0) + lengths).repeat_interleave(lengths)
