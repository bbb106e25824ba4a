"""Output processor: new tokens of streams after each step, and what requests asked for beside tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_rollout.types import TokenChunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from torch import Tensor

    from rl_rollout.backends.embedded.batch_state import BatchState
    from rl_rollout.backends.embedded.scheduler import Plan
    from rl_rollout.backends.embedded.sequence import SequenceState
    from rl_rollout.types import TokenOutput


def new_chunks(
    streaming: Iterable[SequenceState], table: BatchState, verdict: np.ndarray, place: Mapping[int, int]
) -> Iterator[tuple[str, TokenChunk]]:
    """New tokens of those who want them before the end, by request id.

    Args:
        streaming: Those.
        table: After the draw.
        verdict: Of each drawn row, whether it ends.
        place: Where a row is among the drawn ones.
    """
    for sequence in streaming:
        row = sequence.row
        due = sequence.due(int(table.lengths_host[row]))
        if row not in place or not due or verdict[place[row]]:  # what ends now is told with its reason
            continue
        new = slice(due.start, due.stop)
        sequence.num_told += len(due)
        yield (
            sequence.request.request_id,
            TokenChunk(
                token_ids=tuple(table.tokens[row, new].tolist()),
                logprobs=tuple(table.logprobs[row, new].tolist()),
                weight_versions=tuple(table.versions[row, new].tolist()),
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
    """Keep what was asked about the tokens that were fed.

    Args:
        plan: Of the step.
        reading: Sequences that asked for something.
        table: Before the draw.
        logits: [T, V] of the chunks in `asked`.
        asked: Of each chunk, whether its logits are wanted.
        experts: [T, N, K] of all tokens fed, or None.
    """
    at, at_logits = len(plan.rows), 0
    for chunk, is_asked in zip(plan.chunks, asked, strict=True):
        count = chunk.count if is_asked else 0
        told = logits[at_logits : at_logits + count] if count else None
        its_experts = None if experts is None else experts[at : at + chunk.count]
        chunk.sequence.extras.note_tokens(chunk.start, told, its_experts)
        at, at_logits = at + chunk.count, at_logits + count
    if experts is not None:
        place = dict(zip(plan.rows.tolist(), experts, strict=False))
        for sequence in reading:
            if sequence.row in place:
                start = int(table.lengths_host[sequence.row]) - 1
                sequence.extras.note_tokens(start, None, place[sequence.row][None])


def last_chunk(output: TokenOutput, num_told: int) -> TokenChunk:
    """Last chunk of an output: the tokens that were not streamed yet."""
    return TokenChunk(
        token_ids=output.token_ids[num_told:],
        logprobs=output.logprobs[num_told:],
        weight_versions=output.weight_versions[num_told:],
        finish_reason=output.finish_reason,
    )
