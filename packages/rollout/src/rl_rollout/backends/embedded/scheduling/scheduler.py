"""Scheduler: plans what each step computes, from numbers on the host. No model, no device.

First come, first served, but of requests in a row those expected to be longest first (`MOST_OVERTAKING`). A step feeds
the newest token of every sequence whose other tokens are cached (decode), and, within a budget, chunks of sequences
that are not cached yet (chunked prefill): a long prompt takes several steps, in each of which every decoding sequence
gets a token too. Of sequences with equal tokens (a group) only the first is computed; the others sample from its logits
and share its blocks. When blocks run out, the youngest sequence is preempted: it is computed again later.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from rl_rollout.backends.embedded.batch_state import BatchState
    from rl_rollout.backends.embedded.image_prompt import ImagePrompt
    from rl_rollout.backends.embedded.scheduling.block_manager import BlockPool
    from rl_rollout.backends.embedded.scheduling.sequence import SequenceState


MOST_OVERTAKING = 4096
"""Requests in a row among which those expected to be longest are admitted first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Chunk of a prompt: tokens [start, start + count) of a sequence, computed in one step."""

    sequence: SequenceState
    start: int
    count: int
    is_last: bool
    """Whether it ends the sequence, so that its last logits give the next token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Sequence with the same tokens as a chunk's sequence, whose blocks and logits it shares."""

    sequence: SequenceState
    chunk: int
    """Index among the step's chunks."""


@dataclass(slots=True)
class Plan:
    """Plan of one step: the tokens to compute, and the blocks to copy afterwards."""

    rows: np.ndarray
    """int64, rows whose newest token is fed; ascending."""
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    """Chunks of prompts to compute."""
    images: list[tuple[Chunk, ImagePrompt]] = field(default_factory=list["tuple[Chunk, ImagePrompt]"])
    """Prompts with images to prefill: all their tokens but the newest."""
    splits: list[Split] = field(default_factory=list[Split])
    """Sequences that take their blocks and their first token from a chunk of this step."""
    copies: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(source, target) blocks to copy after the forward pass: the last block of each split, which it will write to."""
    drafts: dict[SequenceState, Sequence[int]] = field(default_factory=dict["SequenceState", "Sequence[int]"])
    """Drafted tokens, fed after the newest token of a decoding sequence or after its last chunk."""
    steps: int = 0
    """Decode steps that all sequences hold the blocks for; 0 where the next step has to be planned."""

    def num_drafted(self, sequence: SequenceState) -> int:
        """Number of tokens drafted for a sequence."""
        return len(self.drafts.get(sequence, ()))

    def widths(self) -> np.ndarray:
        """Number of tokens fed of each of `rows`: the newest one and those drafted, int64."""
        widths = np.ones(len(self.rows), dtype=np.int64)
        for sequence, drafted in self.drafts.items():
            widths[self.rows == sequence.row] += len(drafted)
        return widths


class Scheduler:
    """Queue of waiting sequences, batch of running ones, and the plan of each step.

    Args:
        pool: Blocks of the KV cache.
        table: Batch state; running sequences are its rows 0..n-1, in no order.
        max_num_seqs: Most sequences in the batch.
        chunk_tokens: Most prompt tokens of a step.
    """

    def __init__(self, pool: BlockPool, table: BatchState, *, max_num_seqs: int, chunk_tokens: int) -> None:
        self.pool = pool
        self.table = table
        self.max_num_seqs = max_num_seqs
        self.chunk_tokens = chunk_tokens
        self.running: list[SequenceState] = []
        self.waiting: OrderedDict[SequenceState, None] = OrderedDict()
        """Waiting sequences in the order of arrival; any of them may leave."""
        self.num_preemptions = 0
        """Preemptions so far."""
        self.num_prompt_tokens = 0
        """Tokens of the prompts that entered the batch so far."""
        self.num_cached_tokens = 0
        """Tokens that need not be computed so far, as another request did, or this one before it was preempted."""

    def admit(self) -> list[SequenceState]:
        """Take waiting sequences into the batch, while there are rows and blocks for their tokens.

        Those whose prompts had the longest completions come first, then the oldest; of `MOST_OVERTAKING` arrivals only,
        so that later ones cannot keep a request waiting for ever.
        """
        admitted: list[SequenceState] = []
        # Blocks for running sequences that are not computed yet come first.
        promised = sum(self._num_missing(s, int(self.table.lengths_host[s.row])) for s in self._pending())
        seen: set[Hashable] = set()
        has_room = len(self.running) < self.max_num_seqs
        queue = sorted(self.waiting, key=lambda s: (s.arrival // MOST_OVERTAKING, -s.expected)) if has_room else []
        for sequence in queue[: self.max_num_seqs - len(self.running)]:
            key = (sequence.root, sequence.prompt)
            promised += 1 if key in seen else self._num_missing(sequence, len(sequence.prompt))
            if promised > self.pool.num_free:
                break
            seen.add(key)
            sequence.row = len(self.running)
            del self.waiting[sequence]
            self.running.append(sequence)
            self.num_prompt_tokens += len(sequence.prompt)
            admitted.append(sequence)
        return admitted

    def plan(
        self,
        tokens_of: Callable[[SequenceState], Sequence[int]],
        most_steps: int = 1,
        draft: Callable[[SequenceState], Sequence[int]] | None = None,
    ) -> Plan:
        """Plan the next step, and take the blocks for it.

        Args:
            tokens_of: Returns prompt and completion of a sequence. Called rarely.
            most_steps: Most decode steps to plan at once.
            draft: Drafts the next tokens of a sequence.
        """
        table, count, size = self.table, len(self.running), self.pool.block_size
        lengths, computed, held = table.lengths_host[:count], table.computed[:count], table.num_blocks[:count]
        is_next = lengths - computed == 1
        for sequence in self._by_age(np.flatnonzero(is_next & (lengths > held * size))):
            if table.computed[sequence.row] == table.lengths_host[sequence.row] - 1:  # not preempted meanwhile
                self._make_room(sequence, 1)
                if self.pool.num_free:
                    self._hold(sequence, self.pool.take(1))
        plan = Plan(rows=np.empty(0, dtype=np.int64))
        if not is_next.all():
            self._plan_chunks(plan, tokens_of, self.chunk_tokens, draft)
        is_fed = (lengths - computed == 1) & (lengths <= held * size)
        for chunk in plan.chunks:
            is_fed[chunk.sequence.row] = False
        plan.rows = np.flatnonzero(is_fed)
        if draft is not None:
            for row in plan.rows.tolist():
                self._add_draft(plan, self.running[row], draft)
        if is_fed.all() and len(plan.rows) >= 2 * sum(map(len, plan.drafts.values())):
            plan.steps = self._look_ahead(most_steps)
            if plan.steps > 1:  # several steps without the host are faster than one with few drafted tokens
                plan.drafts.clear()
        return plan

    def _add_draft(self, plan: Plan, sequence: SequenceState, draft: Callable[[SequenceState], Sequence[int]]) -> None:
        """Draft the next tokens of a sequence, where blocks for them are free."""
        drafted = draft(sequence)
        missing = self._num_missing(sequence, int(self.table.lengths_host[sequence.row]) + len(drafted))
        if drafted and missing <= self.pool.num_free:
            self._hold(sequence, self.pool.take(max(missing, 0)))
            plan.drafts[sequence] = drafted

    def _look_ahead(self, most_steps: int) -> int:
        """Take the blocks of further decode steps of all sequences; returns how many steps may follow one another."""
        table, count, size = self.table, len(self.running), self.pool.block_size
        if most_steps == 1 or self.waiting:  # a waiting sequence is admitted as soon as another ends
            return 1
        # The token at the limit is sampled, but never fed.
        fed = np.minimum(table.lengths_host[:count] + most_steps, table.limits[:count]) - 1
        missing = -(-fed // size) - table.num_blocks[:count]
        if missing.clip(0).sum() > self.pool.num_free:
            return 1
        for row in np.flatnonzero(missing > 0).tolist():
            self._hold(self.running[row], self.pool.take(int(missing[row])))
        return most_steps

    def _plan_chunks(
        self,
        plan: Plan,
        tokens_of: Callable[[SequenceState], Sequence[int]],
        budget: int,
        draft: Callable[[SequenceState], Sequence[int]] | None,
    ) -> None:
        leaders: dict[Hashable, int] = {}
        being_seen: set[Hashable] = set()
        size = self.pool.block_size
        for sequence in self._pending():
            length = int(self.table.lengths_host[sequence.row])
            key: Hashable = None
            if not sequence.blocks and not sequence.reads_prompt:
                tokens = sequence.prompt if length == len(sequence.prompt) else tuple(tokens_of(sequence))
                key = (sequence.root, tokens)
                if key in leaders:
                    self._split(plan, sequence, leaders[key], length)
                    continue
                if key in being_seen:  # in the next step it finds the prefix that this one computes
                    continue
                self._find_prefix(sequence, tokens)
                self.table.computed[sequence.row] = len(sequence.blocks) * size
            start = int(self.table.computed[sequence.row])
            seen = sequence.seen if sequence.seen is not None and start < sequence.seen.num_seen else None
            # Images cannot be cut into chunks: the whole prompt is one, and the rest, the newest token at least, later.
            count = min(length - 1, len(sequence.prompt)) if seen is not None else min(length - start, budget)
            needed = -(-(start + count) // size) - len(sequence.blocks)
            self._make_room(sequence, needed)
            if needed > self.pool.num_free:
                if seen is not None:
                    return
                needed = self.pool.num_free
                count = min(count, (len(sequence.blocks) + needed) * size - start)
            if count <= 0:
                return
            self._hold(sequence, self.pool.take(needed))
            if seen is not None:
                being_seen.add(key)
                plan.images.append((Chunk(sequence=sequence, start=0, count=count, is_last=False), seen))
                budget = max(budget - count, 0)
                if not budget:
                    return
                continue
            is_last = start + count == length
            if is_last and key is not None:
                leaders[key] = len(plan.chunks)
            plan.chunks.append(Chunk(sequence=sequence, start=start, count=count, is_last=is_last))
            if is_last and draft is not None:
                self._add_draft(plan, sequence, draft)
            budget -= count

    def _find_prefix(self, sequence: SequenceState, tokens: Sequence[int]) -> None:
        """Hold the cached blocks of the longest known prefix; with images, only if it reaches beyond them."""
        found = self.pool.find(sequence.root, tokens[:-1])
        if sequence.seen is not None and len(found) * self.pool.block_size < sequence.seen.num_seen:
            self.pool.give_back(found)
            return
        self._hold(sequence, found)
        self.num_cached_tokens += len(found) * self.pool.block_size

    def _split(self, plan: Plan, sequence: SequenceState, leader: int, length: int) -> None:
        num_full = length // self.pool.block_size
        shared = plan.chunks[leader].sequence
        blocks = shared.blocks
        num_own = -(-(length + plan.num_drafted(shared)) // self.pool.block_size) - num_full
        if num_own > self.pool.num_free:
            return
        own = self.pool.take(num_own)
        plan.copies.extend(zip(blocks[num_full : num_full + num_own], own, strict=True))
        self.pool.share(blocks[:num_full])
        self._hold(sequence, [*blocks[:num_full], *own])
        plan.splits.append(Split(sequence=sequence, chunk=leader))
        self.num_cached_tokens += length

    def drop_blocks(self, sequence: SequenceState, *, is_spoiled: bool = False) -> list[int]:
        """Release the blocks of a sequence, which must be computed again. Returns the blocks without holders."""
        released = self.pool.give_back(sequence.blocks, is_spoiled=is_spoiled)
        sequence.blocks = []
        self.table.computed[sequence.row] = self.table.num_blocks[sequence.row] = 0
        return released

    def remove(self, free: set[int]) -> None:
        """Remove rows from the batch; the last ones move into their places, so that rows 0..n-1 are in use again."""
        count = len(self.running) - len(free)
        gaps = [row for row in free if row < count]
        movers = [sequence for sequence in self.running[count:] if sequence.row not in free]
        if gaps:
            self.table.move([sequence.row for sequence in movers], gaps)
        for row, sequence in zip(gaps, movers, strict=True):
            sequence.row = row
            self.running[row] = sequence
        del self.running[count:]

    def _make_room(self, sequence: SequenceState, needed: int) -> None:
        """Preempt sequences younger than this one until so many blocks are free, as far as there are any."""
        while needed > self.pool.num_free:
            victim = max((s for s in self.running if s.blocks), key=lambda s: s.arrival, default=sequence)
            if victim.arrival < sequence.arrival or victim is sequence:
                return
            self.drop_blocks(victim)
            self.num_preemptions += 1

    def _hold(self, sequence: SequenceState, blocks: Sequence[int]) -> None:
        self.table.append_blocks(sequence.row, blocks)
        sequence.blocks.extend(blocks)

    def _pending(self) -> list[SequenceState]:
        """Sequences that are not cached up to their newest token, or lack a block for it; oldest first."""
        count, table = len(self.running), self.table
        lengths, computed, held = table.lengths_host[:count], table.computed[:count], table.num_blocks[:count]
        is_pending = (lengths - computed > 1) | (lengths > held * self.pool.block_size)
        return self._by_age(np.flatnonzero(is_pending))

    def _by_age(self, rows: np.ndarray) -> list[SequenceState]:
        return sorted((self.running[row] for row in rows.tolist()), key=lambda s: s.arrival)

    def _num_missing(self, sequence: SequenceState, length: int) -> int:
        return -(-length // self.pool.block_size) - len(sequence.blocks)
