"""Rows that each name their adapter, as a batch: columns of an engine, and one loss made of every adapter's own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from rl_engine.base import is_token_local
from rl_engine.batch.packed import ragged
from rl_engine.batch.row_batch import ADAPTER, CANDIDATES, COMPLETION, MASK, PROMPT, TARGETS
from rl_engine.errors import BatchError
from rl_engine.types import BatchCounts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from rl_engine.base import LossFunction
    from rl_engine.types import ModelOutput, TrainingRow

_OWN = (PROMPT, COMPLETION, MASK, TARGETS, CANDIDATES, ADAPTER)


def width_of(row: TrainingRow) -> int:
    """Tokens that a row scores at each position."""
    first = row.target_token_ids[0] if len(row.target_token_ids) else 0
    return 1 if isinstance(first, int) else len(first)


def check_row(index: int, row: TrainingRow) -> None:
    """Refuse a row whose columns are not aligned.

    Raises:
        BatchError: names the row and the column.
    """
    num = len(row.token_ids)
    if num < 1:
        raise BatchError(f"Row {index} has no token; at least one is needed.")
    width = width_of(row)
    for name, column in {TARGETS: row.target_token_ids, **row.inputs}.items():
        if len(column) != num:
            raise BatchError(f"Row {index} has {num} tokens and {len(column)} entries of {name}; one belongs to each.")
        sizes = {1 if isinstance(entry, (int, float)) else len(entry) for entry in column}
        if sizes != {width} or width < 1:
            raise BatchError(f"Row {index} has entries of {sorted(sizes)} numbers in {name}; each has {width} tokens.")
        if name in _OWN and name != TARGETS:
            raise BatchError(f"Row {index} has a column {name} for its loss, which is the batch's own. Rename it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShare:
    """One adapter's share of a pass, over some ranks or all."""

    columns: tuple[str, ...] = ()
    """Columns that its loss reads."""
    tokens: int = 0
    """Tokens with `loss_mask` 1."""
    sequences: int = 0
    """Rows with at least one such token."""


def shares_of(rows: Sequence[TrainingRow]) -> dict[int, dict[str | None, AdapterShare]]:
    """Shares of adapters by the number of tokens that rows score at a position.

    Raises:
        BatchError: rows of one adapter have different columns.
    """
    found: dict[int, dict[str | None, AdapterShare]] = {}
    for row in rows:
        own = sum(_mask(row))
        share = AdapterShare(columns=tuple(sorted(row.inputs)), tokens=own, sequences=int(own > 0))
        _add(found.setdefault(width_of(row), {}), row.adapter, share)
    return found


def merge_shares(
    ranks: Sequence[Mapping[int, Mapping[str | None, tuple[Any, ...]]]],
) -> dict[int, dict[str | None, AdapterShare]]:
    """Shares of several ranks, each as its fields' values, added up; the same order on every rank.

    Raises:
        BatchError: as `shares_of`.
    """
    found: dict[int, dict[str | None, AdapterShare]] = {}
    for width, named in (item for rank in ranks for item in rank.items()):
        for name, (columns, tokens, sequences) in named.items():
            share = AdapterShare(columns=tuple(columns), tokens=tokens, sequences=sequences)
            _add(found.setdefault(width, {}), name, share)
    return {width: {name: found[width][name] for name in sorted(found[width], key=str)} for width in sorted(found)}


def _add(named: dict[str | None, AdapterShare], name: str | None, share: AdapterShare) -> None:
    before = named.get(name, replace(share, tokens=0, sequences=0))
    if before.columns != share.columns:
        raise BatchError(
            f"Rows of adapter {name!r} have the columns {', '.join(before.columns)}, and others of it "
            f"{', '.join(share.columns)}. Pass the same ones."
        )
    tokens, sequences = before.tokens + share.tokens, before.sequences + share.sequences
    named[name] = replace(share, tokens=tokens, sequences=sequences)


def batch_of(
    rows: Sequence[TrainingRow], width: int, numbers: Mapping[str | None, int], columns: Iterable[str]
) -> TensorDict:
    """Columns of rows that score `width` tokens at each position.

    The model is fed all of a row's tokens: the first is its prompt, and the completion ends with one more that is
    never fed. `loss_mask` is 1 where `weights` are not 0, and everywhere in rows without them. A column that a row's
    adapter does not have is 0 there, which its loss is not shown.
    """
    found: dict[str, Any] = {
        PROMPT: ragged([row.token_ids[:1] for row in rows]),
        COMPLETION: ragged([[*row.token_ids[1:], row.token_ids[-1]] for row in rows]),
        MASK: ragged([_mask(row) for row in rows]),
        TARGETS if width == 1 else CANDIDATES: ragged([torch.tensor(row.target_token_ids) for row in rows]),
        ADAPTER: torch.tensor([numbers[row.adapter] for row in rows], dtype=torch.int64),
    }
    for name in columns:
        empty = 0.0 if width == 1 else [0.0] * width
        given = [row.inputs.get(name) or [empty] * len(row.token_ids) for row in rows]
        found[name] = ragged([torch.tensor(each) for each in given], torch.float32)
    return TensorDict(found, batch_size=[len(rows)])  # pyright: ignore[reportArgumentType]


def _mask(row: TrainingRow) -> list[int]:
    weights = row.inputs.get("weights")
    if weights is None:
        return [1] * len(row.token_ids)
    return [int(bool(entry) if isinstance(entry, (int, float)) else any(entry)) for entry in weights]


@dataclass(slots=True, kw_only=True)
class LossByAdapter:
    """Loss function of a batch: the sum of each adapter's, which sees its rows, its counts and nothing else.

    Rows of one adapter follow each other in a micro-batch. A metric `NUMBER/NAME` is that of an adapter, by its number.
    """

    losses: Mapping[int, LossFunction]
    """By the adapter's number."""
    shares: Mapping[int, AdapterShare]
    """Its columns and counts, over all ranks."""
    cut: tuple[TensorDict, list[tuple[int, slice, slice, TensorDict]]] | None = field(default=None, init=False)
    """Runs of the last micro-batch: number, rows, tokens and columns."""

    @property
    def is_token_local(self) -> bool:
        """See `rl_engine.base.LossFunction`."""
        return all(map(is_token_local, self.losses.values()))

    def __call__(self, output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of one micro-batch."""
        if self.cut is None or self.cut[0] is not rows:
            self.cut = rows, _runs(rows, output.cu_seqlens, self.shares)
        shares: dict[str, Tensor] = {}
        total = output.scores.new_zeros(())
        for number, of_rows, of_tokens, columns in self.cut[1]:
            share = self.shares[number]
            counts = BatchCounts(tokens=float(share.tokens), sequences=float(share.sequences))
            loss, found = self.losses[number](_part(output, of_rows, of_tokens, counts), columns)
            total = total + loss
            shares |= {f"{number}/{name}": share for name, share in {**found, "loss": loss}.items()}
        return total, shares


def _part(output: ModelOutput, rows: slice, tokens: slice, counts: BatchCounts) -> ModelOutput:
    """Output of neighbouring rows."""
    offsets = output.cu_seqlens[rows.start : rows.stop + 1]
    names = ("token_logprobs", "token_values", "entropy", "sum_pi_squared", "token_candidate_logprobs")
    columns = {name: column[tokens] for name in names if (column := getattr(output, name)) is not None}
    return replace(output, **columns, cu_seqlens=offsets - offsets[0], counts=counts)


def _runs(
    rows: TensorDict, cu_seqlens: Tensor, shares: Mapping[int, AdapterShare]
) -> list[tuple[int, slice, slice, TensorDict]]:
    numbers, ends = rows.get(ADAPTER).tolist(), cu_seqlens.tolist()
    found: list[tuple[int, slice, slice, TensorDict]] = []
    first = 0
    for number, run in groupby(numbers):
        last = first + len(list(run))
        of_rows, of_tokens = slice(first, last), slice(ends[first], ends[last])
        offsets = cu_seqlens[first : last + 1] - ends[first]
        columns = {
            name: torch.nested.nested_tensor_from_jagged(rows.get(name).values()[of_tokens], offsets)
            for name in (COMPLETION, MASK, *shares[number].columns)
        }
        found.append((number, of_rows, of_tokens, TensorDict(columns, batch_size=[last - first])))  # pyright: ignore[reportArgumentType]
        first = last
    return found
