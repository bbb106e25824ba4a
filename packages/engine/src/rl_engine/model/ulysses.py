"""Sequence parallelism by trading heads for tokens (DeepSpeed-Ulysses, Jacobs et al., 2309.14509).

The ranks of a group hold neighbouring slices of one packed micro-batch. Attention alone needs whole rows: there each
rank has all tokens for its share of the heads.

Legend: `n` ranks of the group, `T` tokens of the micro-batch, `t = T / n`, `H` heads, `D` head size, `C` completion
tokens of the micro-batch, `c` those of this rank's slice.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_engine.errors import ConfigError

if TYPE_CHECKING:
    from rl_engine.batch.packed import PackedRows
    from rl_engine.batch.results import Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroup:
    """The ranks that share the tokens of one micro-batch."""

    group: Any
    """torch.distributed process group."""
    rank: int
    """This process's place, from 0: the slice that it holds."""
    size: int
    """n."""

    def to_heads(self, part: Tensor) -> Tensor:
        """`[t, H, D]` of this rank's tokens to `[T, H / n, D]` of its heads."""
        traded = _Trade.apply(part.unflatten(1, (self.size, -1)).transpose(0, 1), self.group)
        return traded.flatten(0, 1)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]

    def to_tokens(self, part: Tensor) -> Tensor:
        """The reverse of `to_heads`."""
        traded = _Trade.apply(part.unflatten(0, (self.size, -1)), self.group)
        return traded.transpose(0, 1).flatten(1, 2)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]

    def own_heads(self, values: Tensor) -> Tensor:
        """This rank's share of `[H]` numbers, one per head."""
        return values.chunk(self.size)[self.rank]

    def token_range(self, rows: PackedRows) -> tuple[int, int]:
        """The first and one past the last of this rank's tokens."""
        share = sum(rows.lengths) // self.size
        return self.rank * share, (self.rank + 1) * share

    def gather_scores(self, local: Scores, rows: PackedRows) -> Scores:
        """Scores of this rank's completion tokens to those of all; every rank takes its own gradient back."""
        ends = self._score_ends(rows)
        counts = [stop - start for start, stop in zip([0, *ends], ends, strict=False)]
        found = {field.name: getattr(local, field.name) for field in fields(local)}
        gathered = {
            name: _GatherScores.apply(column, counts, self.rank, self.group)
            for name, column in found.items()
            if column is not None
        }
        return replace(local, **gathered)

    def score_range(self, rows: PackedRows) -> tuple[int, int]:
        """The first and one past the last of the completion tokens that this rank's tokens predict."""
        ends = [0, *self._score_ends(rows)]
        return ends[self.rank], ends[self.rank + 1]

    def _score_ends(self, rows: PackedRows) -> list[int]:
        """By rank, completion tokens predicted up to the end of its slice. A row's last tokens predict them."""
        share = sum(rows.lengths) // self.size
        ends: list[int] = []
        for rank in range(self.size):
            stop, start, found = (rank + 1) * share, 0, 0
            for inputs, scored in zip(rows.lengths, rows.completions, strict=True):
                start += inputs
                found += min(max(0, stop - (start - scored)), scored)
            ends.append(found)
        return ends


def check_heads(sp: int, heads: int, key_heads: int) -> None:
    """Refuse a model whose heads cannot be dealt to `sp` ranks.

    Raises:
        ConfigError: says how many heads of which kind there are.
    """
    for count, what in ((heads, "query heads"), (key_heads, "key and value heads")):
        if count % sp:
            raise ConfigError(
                f"parallel.sp = {sp} does not divide the model's {count} {what}, which Ulysses deals to the ranks. "
                f"Use a divisor of {key_heads}."
            )


class _Trade(torch.autograd.Function):
    """`[n, ...]`: slice r goes to rank r, and what comes back in slice r is from it. Its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _trade(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _trade(grads[0], ctx.group), None


def _trade(parts: Tensor, group: Any) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _GatherScores(torch.autograd.Function):
    """Every rank computes the same loss from all scores, so the gradient of its own is whole already."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, counts: list[int], rank: int, group: Any) -> Tensor:
        ctx.start, ctx.stop = sum(counts[:rank]), sum(counts[: rank + 1])
        missing = max(counts) - counts[rank]
        padded = torch.cat([local.detach(), local.new_zeros(missing, *local.shape[1:])])
        found = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(found, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][ctx.start : ctx.stop], None, None, None
