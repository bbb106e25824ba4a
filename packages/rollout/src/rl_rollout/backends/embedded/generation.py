"""Several decode steps in one native call, while nothing but tokens happens to a batch.

The rows of a call are those of the table from 0 on, each with its newest token to be fed. A row that ends leaves the
others to go on; all stop when somebody has a command for the engine. So Python is paid once for many tokens, and a
command waits for one step at most, as between single steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl_csrc.inference.decoder import Drawing

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from rl_rollout.backends.embedded.batch_state import BatchTable
    from rl_rollout.backends.embedded.cpu_decoder import FusedDecoder
    from rl_rollout.backends.embedded.kv_cache import KVCache
    from rl_rollout.backends.embedded.scheduler import Plan

MOST_STEPS = 16
"""Of a call: a block's worth, so that a row holds one block more than it needs at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The newest token of each of B rows."""

    ids: np.ndarray
    """[B] int64"""
    logprobs: np.ndarray
    """[B] float32"""


def generate(
    decoder: FusedDecoder,
    cache: KVCache,
    table: BatchTable,
    plan: Plan,
    weight_version: int,
    interrupt: Tensor | None,
) -> Drawn:
    """Take up to `plan.steps` steps with all rows, whose tokens are in the cache but for the newest.

    Tokens, log-probs, versions, lengths and what is computed are brought up to date in the table. `interrupt` is that
    of `Decoder.generate`.
    """
    count, steps = len(plan.rows), plan.steps
    table.reserve(0, int(table.lengths_host[:count].max()) + steps, 1)
    lengths = table.lengths[:count]
    tokens, logprobs, versions = (column[:count] for column in (table.tokens, table.logprobs, table.versions))
    drawing = Drawing(
        temperature=table.temperature[:count],
        streams=table.streams[:count],
        is_greedy=table.is_greedy[:count],
        limits=torch.from_numpy(table.limits[:count]),
        stop_ids=torch.from_numpy(table.stop_ids[:count]),
    )
    newest = (lengths - 1)[:, None]
    ids, scored, counts = decoder.generate(
        tokens.gather(1, newest)[:, 0], newest[:, 0], table.block_tables[:count], cache, drawing, steps, interrupt
    )
    # What is written behind a row's new tokens is written again before it is read.
    places = lengths[:, None] + torch.arange(steps)
    tokens.scatter_(1, places, ids)
    logprobs.scatter_(1, places, scored)
    versions.scatter_(1, places, weight_version)
    lengths += counts
    table.lengths_host[:count] += counts.numpy()
    table.computed[:count] += counts.numpy()
    last = (counts - 1)[:, None]
    return Drawn(ids=ids.gather(1, last)[:, 0].numpy(), logprobs=scored.gather(1, last)[:, 0].numpy())
