"""Output processor: chunks of streamed tokens after each step, and the extra outputs that requests asked for."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from rl_rollout.types import TokenChunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from rl_rollout.backends.embedded.batch_state import BatchState
    from rl_rollout.backends.embedded.scheduling.scheduler import Plan
    from rl_rollout.backends.embedded.scheduling.sequence import SequenceState
    from rl_rollout.types import TokenOutput


def new_chunks(
    streaming: Iterable[SequenceState], table: BatchState, verdict: np.ndarray, place: Mapping[int, int]
) -> Iterator[tuple[str, TokenChunk]]:
    """Chunks of new tokens for streaming requests, as (request id, chunk).

    Args:
        streaming: Sequences that report tokens before their end.
        table: Batch state after the step.
        verdict: For each sampled row, non-zero where it ends; its last tokens come with its output.
        place: Index of a row among the sampled ones.
    """
    chunks: list[tuple[SequenceState, range]] = []
    for sequence in streaming:
        row = sequence.row
        due = sequence.due(int(table.lengths_host[row]))
        if due and row in place and not verdict[place[row]]:
            chunks.append((sequence, due))
    if not chunks:
        return
    # One transfer per column: from a GPU, one per sequence would take longer than the step.
    width = table.tokens.shape[1]
    index = np.concatenate([np.arange(due.start, due.stop) + sequence.row * width for sequence, due in chunks])
    where = torch.from_numpy(index).to(table.device)
    columns = (table.tokens, table.logprobs, table.versions)
    ids, logprobs, versions = (column.view(-1).index_select(0, where).tolist() for column in columns)
    ends = accumulate((len(due) for _, due in chunks), initial=0)
    for (sequence, due), (start, end) in zip(chunks, pairwise(ends), strict=True):
        sequence.num_reported += len(due)
        yield (
            sequence.request.request_id,
            TokenChunk(
                token_ids=tuple(ids[start:end]),
                logprobs=tuple(logprobs[start:end]),
                weight_versions=tuple(versions[start:end]),
                finish_reason=None,
            ),
        )


def note_tokens(
    plan: Plan,
    reading: Iterable[SequenceState],
    table: BatchState,
    logits: Tensor,
    asked: Sequence[bool],
    experts: Tensor | None,
) -> None:
    """Record prompt log-probs and routed experts of the tokens that a step fed.

    Args:
        plan: Plan of the step.
        reading: Sequences that asked for extra outputs.
        table: Batch state before sampling.
        logits: [T, V] of the prompt tokens of the chunks in `asked`.
        asked: For each chunk, whether the logits of its prompt tokens are needed.
        experts: [T, N, K] of all tokens fed, or None.
    """
    at, at_logits = len(plan.rows), 0
    for chunk, is_asked in zip(plan.chunks, asked, strict=True):
        count = chunk.count if is_asked else 0
        logit_rows = logits[at_logits : at_logits + count] if count else None
        its_experts = None if experts is None else experts[at : at + chunk.count]
        chunk.sequence.extras.note_tokens(chunk.start, logit_rows, its_experts)
        at, at_logits = at + chunk.count, at_logits + count
    if experts is not None:
        place = dict(zip(plan.rows.tolist(), experts, strict=False))
        for sequence in reading:
            if sequence.row in place:
                start = int(table.lengths_host[sequence.row]) - 1
                sequence.extras.note_tokens(start, None, place[sequence.row][None])


def last_chunk(output: TokenOutput, num_reported: int) -> TokenChunk:
    """Last chunk of a stream: the tokens of its output that were not streamed yet."""
    return TokenChunk(
        token_ids=output.token_ids[num_reported:],
        logprobs=output.logprobs[num_reported:],
        weight_versions=output.weight_versions[num_reported:],
        finish_reason=output.finish_reason,
    )
