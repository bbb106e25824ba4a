"""Results of micro-batches: scores of completion tokens, and their collection over a call.

Legend: `C` completion tokens, `K` candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

AUX_LOSS = "router_aux_loss"
"""The metric of the experts' load balance; every rank has a share of it, also those that hold one replica together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What a micro-batch's completion tokens were given, each `[C]`."""

    logprobs: Tensor | None = None
    """Of the tokens, with a language-model head."""
    entropy: Tensor | None = None
    """Of the predicting distributions, where asked for."""
    sum_pi_squared: Tensor | None = None
    """Sums of squared probabilities of the predicting distributions, where asked for; without gradient."""
    values: Tensor | None = None
    """Of the states, with a scalar head."""
    asked: Tensor | None = None
    """(C, K), of the tokens that the batch names as candidates; carries gradient."""
    candidate_token_ids: Tensor | None = None
    """(C, K) int64, the likeliest tokens, where wanted."""
    candidate_logprobs: Tensor | None = None
    """(C, K), theirs, without gradient."""

    @property
    def main(self) -> Tensor:
        """The one that carries the gradient."""
        scores = self.values if self.logprobs is None else self.logprobs
        assert scores is not None
        return scores


COLUMNS = ("logprobs", "entropy", "sum_pi_squared", "values", "candidate_token_ids", "candidate_logprobs")
"""Fields of `Scores` that an engine gives back, one entry per completion token."""


@dataclass(slots=True)
class MicroBatchResults:
    """What the micro-batches of one call have produced so far; stays on the device until the end."""

    rows: list[int] = field(default_factory=list[int])
    columns: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])
    metrics: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def add(self, rows: list[int], scores: Scores, metrics: Mapping[str, Tensor]) -> None:
        """One micro-batch's scores and shares of metrics."""
        self.rows += rows
        self.add_shares(metrics)
        for name in COLUMNS:
            if (column := getattr(scores, name)) is not None:
                self.columns.setdefault(name, []).append(column.detach())

    def add_shares(self, metrics: Mapping[str, Tensor]) -> None:
        """Shares of metrics alone."""
        for name, share in metrics.items():
            self.metrics[name] = self.metrics[name] + share.detach() if name in self.metrics else share.detach()

    def metric_values(self, *, is_leader: bool) -> dict[str, float]:
        """One transfer for all of them. Ranks that share a copy have the same, but for those of its experts."""
        named = {name: share for name, share in self.metrics.items() if is_leader or name == AUX_LOSS}
        if not named:
            return {}
        return dict(zip(named, torch.stack([share.double() for share in named.values()]).tolist(), strict=True))
