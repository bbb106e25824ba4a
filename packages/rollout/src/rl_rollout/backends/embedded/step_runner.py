"""Forward passes of the decode engine: one step's plan becomes the newest token of each row that gets one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from rl_csrc import sampling
from rl_rollout.backends.embedded.grammar import restricted
from rl_rollout.backends.embedded.model.cpu_decoder import SampledTokens
from rl_rollout.backends.embedded.model.model_runner import BatchBuilder, kept, offsets
from rl_rollout.backends.embedded.model.paged_attention import PagedBatch
from rl_rollout.backends.embedded.model.sampler import cut, shaped
from rl_rollout.backends.embedded.output_processor import note_tokens
from rl_rollout.errors import GenerationError

if TYPE_CHECKING:
    from torch import Tensor

    from rl_rollout.backends.embedded.batch_state import BatchState
    from rl_rollout.backends.embedded.kv_cache import KVCache
    from rl_rollout.backends.embedded.model.cuda_graphs import DecodeGraphs
    from rl_rollout.backends.embedded.model.model_runner import ServedModel
    from rl_rollout.backends.embedded.scheduling.scheduler import Chunk, Plan, Scheduler
    from rl_rollout.backends.embedded.scheduling.sequence import SpecialSequences


class StepRunner:
    """Runner of planned steps on the model: fills the cache, samples, and writes the batch state.

    Args:
        model: The served model.
        cache: KV cache.
        table: Batch state.
        scheduler: Its pool remembers the prompts that are computed.
        special: Running sequences that want more than plain sampling.
    """

    def __init__(
        self,
        model: ServedModel,
        cache: KVCache,
        table: BatchState,
        scheduler: Scheduler,
        special: SpecialSequences,
    ) -> None:
        self._model, self._cache, self._table, self._scheduler = model, cache, table, scheduler
        self._special = special
        self.batch_builder = BatchBuilder(table, cache)
        self.graphs: DecodeGraphs | None = None
        """CUDA graphs of decode steps; None on a CPU, and for models with experts."""
        self.weight_version = 0
        """Version of the tokens that are sampled without an adapter."""
        self.num_passes = 0
        """Forward passes so far."""
        self.num_drafted = 0
        """Drafted tokens that were checked so far."""
        self.num_accepted = 0
        """Drafted tokens so far that were sampled too."""

    def run(self, plan: Plan) -> tuple[np.ndarray, SampledTokens] | None:
        """Run the model over the planned tokens, and sample the sequences that get one.

        Returns:
            Rows, and the newest token of each; None where no row got one.
        """
        table, chunks = self._table, plan.chunks
        self._compute_images(plan)
        if not len(plan.rows) and not chunks:
            if not plan.images:
                raise GenerationError("nothing in the batch can be computed; this is a fault of the scheduler")
            return None
        can_replay = self.graphs is not None and not (
            plan.drafts
            or chunks
            or self._special.adapted
            or any(s.request.returns_routed_experts for s in self._special.reading)
        )
        if can_replay:
            self._model.active_adapters.tokens = {}
            self._model.experts.is_on = False
        if can_replay and self._special.are_plain:
            return self._replay(plan)
        last = [chunk.sequence for chunk in chunks if chunk.is_last]
        others = [each.row for each in last] + [split.sequence.row for split in plan.splits]
        drawn = np.concatenate([plan.rows, np.array(others, dtype=np.int64)]) if others else plan.rows
        single = self.batch_builder.rows(plan.rows)
        batch, ids = self.batch_builder.batch(plan, single)
        asked = [chunk.sequence.extras.wants_logits(chunk.start) for chunk in chunks]
        self.batch_builder.choose_adapters(self._model, batch.rows, self._special.adapted)
        self._model.experts.is_on = any(s.request.returns_routed_experts for s in self._special.reading)
        if can_replay and self.graphs is not None:
            logits = self.graphs.logits(plan.rows, batch.num_blocks)
        else:
            logits = self._model.logits(ids, batch.positions + table.shifts[batch.rows], batch, kept(plan, asked))
        self._cache.copy(plan.copies)
        table.copy_states([(chunks[split.chunk].sequence.row, split.sequence.row) for split in plan.splits])
        experts = self._model.experts.take()
        self.num_passes += 1
        if self._special.reading:
            note_tokens(plan, self._special.reading, table, logits[len(drawn) :], asked, experts)
        table.computed[plan.rows] += 1
        for chunk in chunks:
            self._note_computed(chunk)
        for split in plan.splits:
            table.computed[split.sequence.row] = self._table.length_of(split.sequence.row)
        if not len(drawn):
            return None
        if plan.drafts:
            return drawn, self._verify(plan, drawn, logits)
        rows = torch.from_numpy(drawn).to(single.device) if others else single
        return drawn, self._draw(drawn, rows, logits[: len(drawn)])

    def _replay(self, plan: Plan) -> tuple[np.ndarray, SampledTokens]:
        """Steps of decode tokens alone, by a CUDA graph that samples too; as many as no row is full before."""
        table, rows = self._table, plan.rows
        assert self.graphs is not None
        steps = max(1, min(plan.steps, int((table.limits[rows] - table.lengths_host[rows]).min())))
        table.reserve(0, int(table.lengths_host[rows].max()) + steps, 1)
        ids, logprobs = self.graphs.draw(rows, int(table.num_blocks[rows].max()), self.weight_version, steps)
        self._cache.copy(plan.copies)
        is_last = (ids[..., None] == table.stop_ids[rows]).any(-1) | ~np.isfinite(logprobs)
        counts = np.where(is_last.any(0), is_last.argmax(0) + 1, steps)
        table.computed[rows] += counts
        table.lengths_host[rows] += counts
        self.num_passes += steps
        newest = counts - 1, np.arange(len(rows))
        return rows, SampledTokens(ids=ids[newest], logprobs=logprobs[newest])

    def _note_computed(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        self._table.computed[sequence.row] += chunk.count
        if len(sequence.prompt) == self._table.length_of(sequence.row):
            known = sequence.prompt[: chunk.start + chunk.count]
            self._scheduler.pool.remember(sequence.root, known, sequence.blocks)

    def _compute_images(self, plan: Plan) -> None:
        """Prefill of prompts with images, each in a separate forward pass."""
        for chunk, seen in plan.images:
            row, positions = chunk.sequence.row, torch.arange(chunk.count, device=self._model.device)
            rows = torch.full_like(positions, row)
            self.batch_builder.choose_adapters(self._model, rows, self._special.adapted)
            self._model.experts.is_on = chunk.sequence.request.returns_routed_experts
            spans = [(row, 0, chunk.count)]
            batch = PagedBatch(
                self._cache,
                self._table.block_tables,
                rows,
                positions,
                num_single=0,
                num_blocks=0,
                chunks=spans,
                states=self._table.states,
            )
            self._model.prefill_seen(self._table.tokens[row, : chunk.count], seen, batch)
            chunk.sequence.extras.note_tokens(0, None, self._model.experts.take())
            self._note_computed(chunk)

    def _verify(self, plan: Plan, drawn: np.ndarray, logits: Tensor) -> SampledTokens:
        """Sample after the newest token of rows `drawn` and after each drafted one, up to the first that differs.

        A token's random number depends on its position alone, so that the tokens are those of single steps.

        Args:
            plan: Plan with drafts.
            drawn: Rows that get tokens: decoding ones, those of last chunks, those of splits.
            logits: [W, V], of the row's newest token and its drafted ones, row by row.
        """
        table, device = self._table, logits.device
        leaders = [chunk.sequence for chunk in plan.chunks if chunk.is_last]
        leaders += [plan.chunks[split.chunk].sequence for split in plan.splits]
        drafts = [plan.drafts.get(each, ()) for each in (*(self._scheduler.running[r] for r in plan.rows), *leaders)]
        widths = np.array([1 + len(each) for each in drafts])
        width, place = int(widths.max()), offsets(widths)
        table.reserve(0, int(table.lengths_host[drawn].max()) + width, 1)
        index = np.repeat(np.arange(len(drawn)), widths)
        rows = torch.from_numpy(drawn[index]).to(device)
        positions = table.lengths[rows] + torch.from_numpy(place).to(device)
        temperature, is_greedy = table.temperature[rows], table.is_greedy[rows]
        if self._special.truncating:
            logits, temperature = cut(logits, temperature, table.top_k[rows], table.top_p[rows], is_greedy)
        ids, logprobs = sampling.draw(
            logits, temperature=temperature, streams=table.streams[rows], positions=positions, is_greedy=is_greedy
        )
        sampled, drafted = (np.full((len(drawn), width), filler, dtype=np.int64) for filler in (-1, -2))
        sampled[index, place] = ids.cpu().numpy()
        for its, tokens in zip(drafted, drafts, strict=True):
            its[: len(tokens)] = tokens
        scores = np.zeros((len(drawn), width), dtype=np.float32)
        scores[index, place] = logprobs.cpu().numpy()
        is_end = (sampled[..., None] == table.stop_ids[drawn][:, None]).any(-1) | ~np.isfinite(scores)
        goes_on = (sampled == drafted) & ~is_end
        room = table.limits[drawn] - table.lengths_host[drawn]
        counts = np.minimum(1 + goes_on.cumprod(axis=1).sum(axis=1), room)
        is_new = torch.from_numpy(place < counts[index]).to(device)
        where = rows[is_new], positions[is_new]
        table.tokens[where], table.logprobs[where] = ids[is_new], logprobs[is_new]
        table.versions[where] = self._versions(where[0])
        table.lengths[torch.from_numpy(drawn).to(device)] += torch.from_numpy(counts).to(device)
        table.lengths_host[drawn] += counts
        table.computed[drawn] += counts - 1
        self.num_drafted += int(widths.sum()) - len(drawn)
        self.num_accepted += int(counts.sum()) - len(drawn)
        newest = np.arange(len(drawn)), counts - 1
        return SampledTokens(ids=sampled[newest], logprobs=scores[newest])

    def _versions(self, which: Tensor | slice) -> Tensor | int:
        """Versions of the weights that these rows' tokens are sampled from: the model's, or each row's adapter's."""
        if not self._special.adapted:
            return self.weight_version
        return self._model.adapters.versions[self._table.adapters[which]]

    def _draw(self, drawn: np.ndarray, rows: Tensor, logits: Tensor) -> SampledTokens:
        """Sample the next token of rows `drawn` (`rows` on the device) from logits [B, V], and record it."""
        table, count = self._table, len(drawn)
        table.reserve(0, int(table.lengths_host[drawn].max()) + 1, 1)
        # Nearly always the rows are 0..n-1, and a slice is a view where an index makes a copy.
        which = slice(count) if np.array_equal(drawn, np.arange(count)) else rows
        lengths = table.lengths[which]
        temperature = table.temperature[which]
        is_greedy = table.is_greedy[which] if self._special.greedy else None
        place = {} if self._special.are_plain else dict(zip(drawn.tolist(), range(count), strict=True))
        structured = [(place[s.row], matcher) for s, matcher in self._special.structured.items() if s.row in place]
        scaled = logits / temperature[:, None] if structured else logits
        if structured:
            logits = restricted(logits, structured)
        for sequence in self._special.shaped:  # after the restriction: min-p compares tokens that are allowed
            if sequence.row in place:
                start, length = sequence.completion_start, int(table.lengths_host[sequence.row])
                tokens, its = table.tokens[sequence.row, :length], place[sequence.row]
                logits[its] = shaped(logits[its], tokens[:start], tokens[start:], sequence.request.sampling_params)
        if self._special.truncating:
            logits, temperature = cut(logits, temperature, table.top_k[which], table.top_p[which], is_greedy)
        ids, logprobs = sampling.draw(
            logits, temperature=temperature, streams=table.streams[which], positions=lengths, is_greedy=is_greedy
        )
        if structured:
            its = torch.tensor([at for at, _ in structured], device=logits.device)
            of_model = scaled[its].log_softmax(dim=-1).gather(-1, ids[its, None])[:, 0]
            logprobs[its] = torch.where(logprobs[its].isfinite(), of_model, logprobs[its])
        table.tokens[rows, lengths] = ids
        table.logprobs[rows, lengths] = logprobs
        table.versions[rows, lengths] = self._versions(which)
        table.lengths[which] += 1
        table.lengths_host[drawn] += 1
        newest = SampledTokens(ids=ids.cpu().numpy(), logprobs=logprobs.cpu().numpy())  # the host waits for the step
        for at, matcher in structured:
            matcher.advance(int(newest.ids[at]))
        for sequence in self._special.reading:
            if sequence.row in place:
                its = place[sequence.row]
                is_of_model = sequence.matcher is not None
                sequence.extras.note_draw(scaled[its] if is_of_model else logits[its] / temperature[its])
        return newest
