"""Candidates of completion tokens whose logits are cut over tensor-parallel ranks.

Legend: `C` completion tokens, `V` vocabulary, `K` candidates, `tp` tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor

if TYPE_CHECKING:
    from rl_engine.backends.megatron.layout import Axis
    from rl_engine.batch.packed import PackedRows
    from rl_engine.batch.results import Scores
    from rl_engine.model.logprobs import ScoreOptions


class VocabShard:
    """This rank's `[C, V / tp]` logits."""

    def __init__(self, logits: Tensor, tp: Axis, start: int, wanted: ScoreOptions) -> None:
        """Look at them, whose column 0 is token `start`."""
        self._logits, self._tp, self.start, self._wanted = logits, tp, start, wanted

    def with_labels(self, rows: PackedRows) -> Tensor:
        """(C, 1 + K) float32 logits of each label and of the candidates that the batch names, with gradient."""
        asked = [rows.labels[:, None]] + ([] if rows.candidates is None else [rows.candidates])
        column = torch.cat(asked, 1) - self.start
        count = self._logits.shape[1]
        mine = self._logits.gather(1, column.clamp(0, count - 1))
        mine = torch.where((column >= 0) & (column < count), mine, 0).to(self._wide())
        whole = reduce_from_tensor_model_parallel_region(mine)
        assert isinstance(whole, Tensor)
        return whole / self._wanted.temperature

    def add_candidates(self, scores: Scores, logits: Tensor) -> Scores:
        """`scores` with what `with_labels` gave, as log-probs, and with the likeliest tokens where they are wanted."""
        lse = logits[:, :1] - scores.main[:, None]
        if logits.shape[1] > 1:
            scores = replace(scores, asked=logits[:, 1:] - lse)
        if not self._wanted.num_candidates:
            return scores
        with torch.no_grad():
            values, token_ids = self._likeliest(self._wanted.num_candidates)
        return replace(scores, candidate_token_ids=token_ids, candidate_logprobs=values - lse.detach())

    def _likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        """(C, K) logits and token ids, over all ranks."""
        here = min(count, self._logits.shape[1])
        found = self._logits.detach().to(self._wide()).topk(here, -1)
        values = found.values.new_full((len(found.values), count), float("-inf"))
        token_ids = torch.zeros_like(values, dtype=torch.int64)
        values[:, :here], token_ids[:, :here] = found.values / self._wanted.temperature, found.indices + self.start
        values, token_ids = (self._tp.all_gather(part).transpose(0, 1).flatten(1) for part in (values, token_ids))
        best = values.topk(count, -1)
        return best.values, token_ids.gather(1, best.indices)

    def _wide(self) -> torch.dtype:
        return torch.promote_types(self._logits.dtype, torch.float32)
