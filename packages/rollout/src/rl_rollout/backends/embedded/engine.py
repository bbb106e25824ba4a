"""Engine of continuous batching: requests join and leave between steps.

Synchronous and single-threaded; `engine_thread.py` runs it. A step is planned by the scheduler, then one forward pass
over packed tokens of all kinds (newest tokens, chunks of prompts) fills the cache and gives the logits of those whose
turn it is to get a token. The sequences in the batch are rows 0..n-1 of the table; when one leaves, the last row
takes its place. Keys and values never move.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_csrc import sampling
from rl_rollout.backends.embedded.batch_state import BatchState
from rl_rollout.backends.embedded.block_manager import BlockPool
from rl_rollout.backends.embedded.kv_cache import KVCache
from rl_rollout.backends.embedded.model.attention import PagedBatch
from rl_rollout.backends.embedded.model.cpu_decoder import MOST_STEPS, Drawn, generate
from rl_rollout.backends.embedded.model.cuda_graphs import DecodeGraphs
from rl_rollout.backends.embedded.model.model_runner import BatchBuilder, device_memory, kept
from rl_rollout.backends.embedded.model.sampler import cut, stream_seed
from rl_rollout.backends.embedded.output_processor import new_chunks, note_tokens
from rl_rollout.backends.embedded.scheduler import Scheduler
from rl_rollout.backends.embedded.sequence import SequenceState, SpecialSequences, finish_reason
from rl_rollout.errors import GenerationError, RequestError, RequestTimeoutError
from rl_rollout.types import FinishReason, TokenChunk, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from torch import Tensor

    from rl_rollout.backends.embedded.model.model_runner import ServedModel
    from rl_rollout.backends.embedded.multimodal import ImagePrompt
    from rl_rollout.backends.embedded.scheduler import Chunk, Plan
    from rl_rollout.base import PauseMode
    from rl_rollout.types import GenerateRequest, ServerConfig

OPTIONS = {"block_size": 16, "chunk_tokens": 512}
"""Of `ServerConfig.options`, with defaults: positions per block of the cache, and prompt tokens computed per step."""

GRAPH_TOKENS = 1024
"""Tokens of a row that the table has room for where graphs hold its address; longer rows move it, and void them."""

_log = logging.getLogger(__name__)

Event = TokenOutput | Exception | TokenChunk
"""Event of a request: chunks if it streams, then its whole output or an error."""


class Engine:
    """The state of one replica between decode steps."""

    def __init__(self, model: ServedModel, config: ServerConfig) -> None:
        self.model = model
        self.config = config
        self.weight_version = 0
        options = OPTIONS | dict(config.options)
        self.cache = KVCache(
            model.layer_shapes,
            block_size=options["block_size"],
            dtype=model.dtype,
            device=model.device,
            new_memory=device_memory(model.device),
        )
        self.table = BatchState(model.device)
        self.batch_builder = BatchBuilder(self.table, self.cache)
        self._max_blocks = self.cache.most_blocks(config.kv_cache_bytes)
        self._is_reserved = False
        self.scheduler = Scheduler(
            self._new_pool(), self.table, max_num_seqs=config.max_num_seqs, chunk_tokens=options["chunk_tokens"]
        )
        self.graphs: DecodeGraphs | None = None
        """Of decode steps; on a GPU alone."""
        if model.device.type == "cuda" and not model.experts.num_routers:
            self.graphs = self.decode_graphs()
        self.is_frozen = False
        self.is_asleep = False
        self.has_weights = True
        self._is_holding = False
        self._num_unseeded = self._num_arrived = self._num_updates = 0
        self._held: OrderedDict[SequenceState, None] = OrderedDict()
        self._begun: OrderedDict[SequenceState, None] = OrderedDict()
        """Running requests without a deadline of their own, in the order of admission."""
        self._clock = 0.0
        """Seconds of stepping: it stands still while there is nothing to do, and while nothing may be computed."""
        self._stepped_at: float | None = None
        self._by_id: dict[str, SequenceState] = {}
        self._special = SpecialSequences()
        self._events: list[tuple[str, Event]] = []

    # ---- what is going on

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that are not in the batch yet."""
        return len(self.scheduler.waiting) + len(self._held)

    @property
    def can_step(self) -> bool:
        """Whether `step` would do anything."""
        is_ready = self.has_weights and not self.is_frozen and not self.is_asleep
        return is_ready and bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def is_paused(self) -> bool:
        """Whether new requests are held."""
        return self._is_holding

    @property
    def is_drained(self) -> bool:
        """Whether nothing is in flight but what came after a pause."""
        return not self.scheduler.running and not self.scheduler.waiting

    def take_events(self) -> list[tuple[str, Event]]:
        """Events since the last call, by request id, in order."""
        events, self._events = self._events, []
        return events

    # ---- requests

    def submit(
        self, requests: Iterable[tuple[GenerateRequest, int]], images: Mapping[str, ImagePrompt] | None = None
    ) -> None:
        """Take requests that were checked, under ids that are not in flight, each with how often tokens are told.

        `images` are those of prompts that have some, by request id.
        """
        for request, told_every in requests:
            prompt_len = len(request.prompt_token_ids)
            limit = min(prompt_len + request.sampling_params.max_new_tokens, self.model.max_model_len)
            room = self._max_blocks * self.cache.block_size
            if limit > room:
                message = f"it needs {limit} tokens of cache and there are {room}; raise kv_cache_bytes"
                self._events.append((request.request_id, RequestError(f"request {request.request_id!r}: {message}")))
                continue
            self._num_arrived += 1
            seen = images.get(request.request_id) if images else None
            sequence = SequenceState(
                request=request,
                told_every=told_every,
                limit=limit,
                seed=self._seed_of(request),
                arrival=self._num_arrived,
                seen=seen,
                root=self._root_of(request, seen),
            )
            self._by_id[request.request_id] = sequence
            sequence.since = self._clock
            (self._held if self._is_holding else self.scheduler.waiting)[sequence] = None

    def _root_of(self, request: GenerateRequest, seen: ImagePrompt | None) -> Hashable:
        # A count of updates, not the version: whatever callers number their weights by, old content is never found.
        return self._num_updates, request.adapter, request.images, () if seen is None else seen.sampled_places

    def _seed_of(self, request: GenerateRequest) -> int:
        seed = request.sampling_params.seed
        if seed is not None:
            return seed
        self._num_unseeded += 1
        return stream_seed(self.config.seed, self._num_unseeded)

    @torch.inference_mode()
    def abort(self, request_ids: Sequence[str] | None = None, *, reason: FinishReason = FinishReason.ABORT) -> None:
        """End these requests, all when None, with what they have. Ids that are not in flight have ended already."""
        ids = list(self._by_id) if request_ids is None else request_ids
        found = [self._by_id[i] for i in dict.fromkeys(ids) if i in self._by_id]
        for sequence in found:
            if sequence.row < 0:
                self._drop_waiting(sequence)
                self._end(sequence, sequence.output([], [], [], 0, reason))
        self._leave([(s.row, reason) for s in found if s.row >= 0])

    def _drop_waiting(self, sequence: SequenceState) -> None:
        """Take one out that is not in the batch, at the same cost whoever else waits."""
        self.scheduler.waiting.pop(sequence, None)
        self._held.pop(sequence, None)

    def fail(self, error: Exception) -> None:
        """End every request with an error, and forget the batch."""
        for sequence in list(self._by_id.values()):
            self._end(sequence, error)
        self.scheduler.running.clear()
        self.scheduler.waiting.clear()
        self._held.clear()
        self._begun.clear()
        self.drop_cache()

    # ---- control

    def pause(self, mode: PauseMode) -> None:
        """Hold new requests. `abort` ends those in flight, `keep` freezes them, `wait` lets them go on."""
        if mode == "abort":
            self.abort([*(s.request.request_id for s in (*self.scheduler.running, *self.scheduler.waiting))])
        self._is_holding = True
        self.is_frozen = mode == "keep"

    def resume(self) -> None:
        """Undo `pause`."""
        self._is_holding = self.is_frozen = False
        for sequence in self._held:
            sequence.since = self._clock
        self.scheduler.waiting.update(self._held)
        self._held.clear()

    def set_version(self, version: int, *, has_moved: bool = True) -> None:
        """The model's weights are now of this version: whatever was computed from the old ones is dropped.

        `has_moved` says that they lie elsewhere, which makes graphs void.
        """
        self.weight_version = version
        self.has_weights = True
        self._num_updates += 1
        if self.graphs is not None and has_moved:
            self.graphs.clear()
        for sequence in self._by_id.values():
            sequence.root = self._root_of(sequence.request, sequence.seen)
            if sequence.row < 0 or self._length(sequence) == len(sequence.prompt):
                sequence.extras.forget_prompt()
        self._forget_cache()

    def drop_cache(self) -> None:
        """Give the cache's memory back. What is in flight is computed anew by the next steps."""
        if self.graphs is not None and not self.cache.keeps_place:
            self.graphs.clear()
        self.cache.release()
        self._forget_cache()

    def close(self) -> None:
        """Give the memory of cache and graphs back for good."""
        if self.graphs is not None:
            self.graphs.clear()
        self.cache.close()

    def _forget_cache(self) -> None:
        for sequence in self.scheduler.running:
            self.scheduler.drop_blocks(sequence)
        self.scheduler.pool = self._new_pool()

    def decode_graphs(self, **options: Any) -> DecodeGraphs:
        """Graphs of decode steps, with `options` of their own. Cache and table get their room now, and stay in place.

        The cache's last block and the table's last row are nobody's from then on.
        """
        self._is_reserved = True
        self._max_blocks -= 1
        self.scheduler.pool = self._new_pool()
        rows, length = self.config.max_num_seqs, min(self.model.max_model_len + 1, GRAPH_TOKENS)
        columns = -(-self.model.max_model_len // self.cache.block_size)
        self.table.reserve(rows + 1, length, 1, min(columns, self._max_blocks))
        return DecodeGraphs(self.model, self.cache, self.table, rows, self._max_blocks, **options)

    def _new_pool(self) -> BlockPool:
        capacity = self._max_blocks if self._is_reserved else self.cache.num_blocks
        return BlockPool(self._max_blocks, self.cache.block_size, capacity)

    # ---- deadlines

    def rest(self) -> None:
        """Stop the clock until the next step."""
        self._stepped_at = None

    def _expire(self) -> None:
        """Let the clock go on, and end what brought no deadline and has had the server's."""
        now = time.monotonic()
        self._clock += 0.0 if self._stepped_at is None else now - self._stepped_at
        self._stepped_at = now
        queue_s, timeout_s = self.config.queue_timeout_s, self.config.timeout_s
        while self.scheduler.waiting and self._clock - next(iter(self.scheduler.waiting)).since > queue_s:
            sequence, _ = self.scheduler.waiting.popitem(last=False)
            message = f"waited for its turn for queue_timeout_s={queue_s:g} s; raise that, or ask for less at a time"
            self._end(sequence, RequestTimeoutError(f"request {sequence.request.request_id!r} {message}"))
        late: list[SequenceState] = []
        while self._begun and self._clock - next(iter(self._begun)).since > timeout_s:
            late.append(self._begun.popitem(last=False)[0])
        if late:
            ids = ", ".join(sequence.request.request_id for sequence in late[:3])
            _log.warning(
                "%d requests (%s%s) had generated for timeout_s=%g s and end with what they have; raise timeout_s, or "
                "ask for fewer tokens",
                *(len(late), ids, ", ..." if len(late) > 3 else "", timeout_s),
            )
            self._leave([(sequence.row, FinishReason.TIMEOUT) for sequence in late])

    # ---- one step

    @torch.inference_mode()
    def step(self, interrupt: Tensor | None = None) -> None:
        """Admit what fits, then one forward pass, or several where nothing has to be decided between them.

        Call only if `can_step`. Once `interrupt` [1] int64 is not 0, no further one begins.
        """
        self._expire()
        self._admit()
        if not (self.scheduler.running or self.scheduler.waiting):
            return
        native = None if self._special.truncating or self._special.reading else self.model.fused
        is_each_told = any(sequence.told_every == 1 for sequence in self._special.streaming)
        plan = self.scheduler.plan(self._tokens_of, 1 if native is None or is_each_told else MOST_STEPS)
        self.table.flush_blocks()
        self.cache.resize(self.scheduler.pool.capacity + self._is_reserved)
        if native is None or not plan.steps:
            self._compute(plan)
        else:
            self._settle(plan.rows, generate(native, self.cache, self.table, plan, self.weight_version, interrupt))

    def _tokens_of(self, sequence: SequenceState) -> list[int]:
        return self.table.tokens[sequence.row, : self._length(sequence)].tolist()

    def _length(self, sequence: SequenceState) -> int:
        return int(self.table.lengths_host[sequence.row])

    def _admit(self) -> None:
        first = len(self.scheduler.running)
        admitted = self.scheduler.admit()
        if not admitted:
            return
        for sequence in admitted:
            sequence.since = self._clock
        self._begun.update((sequence, None) for sequence in admitted if sequence.request.timeout_s is None)
        self._special.add(admitted)
        stops = [sequence.stops(self.model.eos_token_ids) for sequence in admitted]
        longest = max(len(sequence.prompt) for sequence in admitted)
        self.table.reserve(len(self.scheduler.running), longest + 1, max(len(each) for each in stops))
        names = (None, *self.model.adapters.names)
        values = [s.row_values(ids, names.index(s.request.adapter)) for s, ids in zip(admitted, stops, strict=True)]
        self.table.add(first, values)

    def _compute(self, plan: Plan) -> None:
        """Run the model over what is planned, and draw the tokens whose turn it is."""
        table, chunks = self.table, plan.chunks
        self._compute_images(plan)
        if not len(plan.rows) and not chunks:
            if not plan.images:
                raise GenerationError("nothing in the batch can be computed; this is a fault of the scheduler")
            return
        can_replay = self.graphs is not None and not (
            chunks or self._special.adapted or any(s.request.returns_routed_experts for s in self._special.reading)
        )
        if can_replay:
            self.model.active_adapters.tokens = {}
            self.model.experts.is_on = False
        if can_replay and not (self._special.truncating or self._special.reading):
            self._replay(plan)
            return
        others = [chunk.sequence.row for chunk in chunks if chunk.is_last] + [s.sequence.row for s in plan.splits]
        drawn = np.concatenate([plan.rows, np.array(others, dtype=np.int64)]) if others else plan.rows
        single = self.batch_builder.rows(plan.rows)
        batch, ids = self.batch_builder.batch(plan, single)
        asked = [chunk.sequence.extras.wants_logits(chunk.start) for chunk in chunks]
        self.batch_builder.choose_adapters(self.model, batch.rows, self._special.adapted)
        self.model.experts.is_on = any(s.request.returns_routed_experts for s in self._special.reading)
        if can_replay and self.graphs is not None:
            logits = self.graphs.logits(plan.rows, batch.num_blocks)
        else:
            logits = self.model.logits(ids, batch.positions + table.shifts[batch.rows], batch, kept(plan, asked))
        self.cache.copy(plan.copies)
        experts = self.model.experts.take()
        if self._special.reading:
            note_tokens(plan, self._special.reading, table, logits[len(drawn) :], asked, experts)
        table.computed[plan.rows] += 1
        for chunk in chunks:
            self._note_computed(chunk)
        for split in plan.splits:
            table.computed[split.sequence.row] = self._length(split.sequence)
        if len(drawn):
            self._draw(drawn, torch.from_numpy(drawn).to(single.device) if others else single, logits[: len(drawn)])

    def _replay(self, plan: Plan) -> None:
        """A step of newest tokens alone, by a graph that draws the next ones too."""
        table, rows = self.table, plan.rows
        assert self.graphs is not None
        table.reserve(0, int(table.lengths_host[rows].max()) + 1, 1)
        told = self.graphs.draw(rows, int(table.num_blocks[rows].max()), self.weight_version)
        self.cache.copy(plan.copies)
        table.computed[rows] += 1
        table.lengths_host[rows] += 1
        self._settle(rows, told)

    def _note_computed(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        self.table.computed[sequence.row] += chunk.count
        if len(sequence.prompt) == self._length(sequence):
            known = sequence.prompt[: chunk.start + chunk.count]
            self.scheduler.pool.remember(sequence.root, known, sequence.blocks)

    def _compute_images(self, plan: Plan) -> None:
        """Prompts with images, each in a pass of its own."""
        for chunk, seen in plan.images:
            row, positions = chunk.sequence.row, torch.arange(chunk.count, device=self.model.device)
            rows = torch.full_like(positions, row)
            self.batch_builder.choose_adapters(self.model, rows, self._special.adapted)
            self.model.experts.is_on = False
            spans = [(row, 0, chunk.count)]
            batch = PagedBatch(
                self.cache, self.table.block_tables, rows, positions, num_single=0, num_blocks=0, chunks=spans
            )
            self.model.prefill_seen(self.table.tokens[row, : chunk.count], seen, batch)
            self._note_computed(chunk)

    def _draw(self, drawn: np.ndarray, rows: Tensor, logits: Tensor) -> None:
        """The next token of these rows (here and on the device), from logits [B, V]."""
        table, count = self.table, len(drawn)
        table.reserve(0, int(table.lengths_host[drawn].max()) + 1, 1)
        # Nearly always the rows are 0..n-1, and a slice is a view where an index makes a copy.
        which = slice(count) if np.array_equal(drawn, np.arange(count)) else rows
        lengths = table.lengths[which]
        temperature = table.temperature[which]
        is_greedy = table.is_greedy[which] if self._special.greedy else None
        if self._special.truncating:
            logits, temperature = cut(logits, temperature, table.top_k[which], table.top_p[which], is_greedy)
        ids, logprobs = sampling.draw(
            logits, temperature=temperature, streams=table.streams[which], positions=lengths, is_greedy=is_greedy
        )
        table.tokens[rows, lengths] = ids
        table.logprobs[rows, lengths] = logprobs
        table.versions[rows, lengths] = self.weight_version
        table.lengths[which] += 1
        table.lengths_host[drawn] += 1
        told = Drawn(ids=ids.cpu().numpy(), logprobs=logprobs.cpu().numpy())  # here the host waits for the step
        place = dict(zip(drawn.tolist(), range(count), strict=True)) if self._special.reading else {}
        for sequence in self._special.reading:
            if sequence.row in place:
                its = place[sequence.row]
                sequence.extras.note_draw(logits[its] / temperature[its])
        self._settle(drawn, told)

    def _settle(self, drawn: np.ndarray, told: Drawn) -> None:
        """Tell of the tokens that these rows got, the newest of each being `told`, and end those that have ended."""
        table = self.table
        is_stopped = (told.ids[:, None] == table.stop_ids[drawn]).any(axis=1)
        is_full = table.lengths_host[drawn] >= table.limits[drawn]
        verdict = is_stopped + 2 * is_full + 4 * ~np.isfinite(told.logprobs)
        if self._special.streaming:
            place = dict(zip(drawn.tolist(), range(len(drawn)), strict=True))
            self._events.extend(new_chunks(self._special.streaming, table, verdict, place))
        ended = np.flatnonzero(verdict)
        self._leave([(int(drawn[i]), finish_reason(int(verdict[i]))) for i in ended])

    def _leave(self, ended: Sequence[tuple[int, FinishReason | None]]) -> None:
        """Take rows out of the batch, deliver what they have, close the gaps. No reason: logits were not finite."""
        if not ended:
            return
        leaving = [row for row, _ in ended]
        rows, lengths = torch.tensor(leaving, device=self.model.device), self.table.lengths_host[leaving].tolist()
        columns = (self.table.tokens, self.table.logprobs, self.table.versions)
        parts = [column[:, : max(lengths)].index_select(0, rows).tolist() for column in columns]
        for (row, reason), ids, logprobs, versions, length in zip(ended, *parts, lengths, strict=True):
            sequence = self.scheduler.running[row]
            if reason is None:
                self._end(sequence, sequence.poisoned(self.weight_version))
            else:
                self._end(sequence, sequence.output(ids, logprobs, versions, length, reason))
            known = ids[: int(self.table.computed[row])]
            if reason is not None:
                self.scheduler.pool.remember(sequence.root, known, sequence.blocks)
            released = self.scheduler.drop_blocks(sequence, is_spoiled=reason is None)
            if reason is None and released:
                self.cache.clear(released)
        self._close_gaps(set(leaving))

    def _close_gaps(self, free: set[int]) -> None:
        """Move the last rows into the free ones, so that the rows in use are 0..n-1 again."""
        count = len(self.scheduler.running) - len(free)
        gaps = [row for row in free if row < count]
        movers = [sequence for sequence in self.scheduler.running[count:] if sequence.row not in free]
        if gaps:
            self.table.move([sequence.row for sequence in movers], gaps)
        for row, sequence in zip(gaps, movers, strict=True):
            sequence.row = row
            self.scheduler.running[row] = sequence
        del self.scheduler.running[count:]

    def _end(self, sequence: SequenceState, event: TokenOutput | Exception) -> None:
        del self._by_id[sequence.request.request_id]
        self._begun.pop(sequence, None)
        self._special.discard(sequence)
        self._events.append((sequence.request.request_id, event))
