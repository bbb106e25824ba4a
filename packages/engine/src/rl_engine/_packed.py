"""What a model is fed: the tokens of a micro-batch's rows end to end, without padding.

Legend: `B` rows, `C` completion tokens, `T` tokens fed. Where rows share prompts, those are fed once (`_prompts`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rl_engine._gather import Repeats
    from rl_engine._prompts import SharedPrompts


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """What a model is fed: B rows end to end."""

    token_ids: Tensor
    """(T,) int64."""
    position_ids: Tensor
    """(T,) int64, from 0 in each row."""
    lengths: tuple[int, ...]
    """B entries, tokens of each row that the model sees."""
    score_index: Tensor
    """(C,) int64, the position in T whose hidden state predicts completion token c, or with `feeds_last` follows it."""
    labels: Tensor
    """(C,) int64, the completion tokens."""
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
    """The `VISUAL` columns' entries of these rows, in their order; see `_sight`."""
    places: Tensor | None = None
    """(T, 3) int64, time, height and width of each token, where the batch has images; see `_sight`."""
    given_ids: Tensor | None = None
    """(T,) int64, `token_ids` with -1 where the model wrote the token (`loss_mask` 1); where `visual` has entries."""
    shared: SharedPrompts | None = None
    """How the tokens make up rows that begin with the same prompt; None: row by row."""

    @property
    def scored(self) -> Tensor | Repeats:
        """`score_index`, for `take_rows`."""
        return self.score_index if self.shared is None else self.shared.scored

    def padded(self, multiple: int) -> PackedRows:
        """With one more row, which nothing looks at, where T is no multiple of `multiple`."""
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
