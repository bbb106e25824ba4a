"""Continuous-batching engine: requests join and leave the batch between steps.

Synchronous and single-threaded; `engine_thread.py` runs it. The scheduler plans a step; one forward pass over packed
tokens (decode tokens and chunks of prompts) fills the cache and returns the logits of the sequences that get a token;
the sampler draws. The sequences in the batch are rows 0..n-1 of the batch state; when one leaves, the last row takes
its place. Keys and values never move.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_rollout.backends.embedded.batch_state import BatchState
from rl_rollout.backends.embedded.kv_cache import KVCache
from rl_rollout.backends.embedded.model.cpu_decoder import MOST_STEPS, SampledTokens, generate
from rl_rollout.backends.embedded.model.cuda_graphs import MOST_REPLAYS, DecodeGraphs
from rl_rollout.backends.embedded.model.model_runner import device_memory
from rl_rollout.backends.embedded.model.sampler import stream_seed
from rl_rollout.backends.embedded.output_processor import new_chunks
from rl_rollout.backends.embedded.scheduling.block_manager import BlockPool
from rl_rollout.backends.embedded.scheduling.history import DraftHistory
from rl_rollout.backends.embedded.scheduling.scheduler import Scheduler
from rl_rollout.backends.embedded.scheduling.sequence import SequenceState, SpecialSequences, finish_reason
from rl_rollout.backends.embedded.step_runner import StepRunner
from rl_rollout.errors import ConfigError, RequestError, RequestTimeoutError
from rl_rollout.types import FinishReason, TokenChunk, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

    from torch import Tensor

    from rl_rollout.backends.embedded.grammar import Matcher
    from rl_rollout.backends.embedded.image_prompt import ImagePrompt
    from rl_rollout.backends.embedded.model.model_runner import ServedModel
    from rl_rollout.base import PauseMode
    from rl_rollout.types import GenerateRequest, ServerConfig

BLOCK_SIZE = 16
"""Default of the option `block_size`: positions per block of the cache."""
CHUNK_TOKENS = {"cpu": 512, "cuda": 4096}
"""Default of the option `chunk_tokens`, by device: prompt tokens computed per step. A step of a GPU takes milliseconds
to launch however few tokens it has; on a CPU 512 tokens hold up the others' next token for long enough."""

GRAPH_TOKENS = 1024
"""Tokens per row that the batch state has room for from the start where CUDA graphs hold its address. A longer row
makes it move, and the graphs are captured anew."""

_log = logging.getLogger(__name__)

Event = TokenOutput | Exception | TokenChunk
"""Event of a request: chunks if it streams, then its whole output or an error."""


class StepClock:
    """Seconds spent stepping; it stops while the engine is idle, paused or asleep."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._stepped_at: float | None = None

    def advance(self) -> float:
        """Add the time since the last step; returns the seconds."""
        now = time.monotonic()
        self.seconds += 0.0 if self._stepped_at is None else now - self._stepped_at
        self._stepped_at = now
        return self.seconds

    def rest(self) -> None:
        """Stop until the next step."""
        self._stepped_at = None


class Engine:
    """Continuous-batching engine of one replica: scheduler, KV cache, batch state, model and pending events."""

    def __init__(self, model: ServedModel, config: ServerConfig) -> None:
        self.model = model
        self.config = config
        chunk_tokens = config.options.get("chunk_tokens", CHUNK_TOKENS.get(model.device.type, CHUNK_TOKENS["cpu"]))
        self.cache = KVCache(
            model.layer_shapes,
            block_size=config.options.get("block_size", BLOCK_SIZE),
            dtype=model.dtype,
            device=model.device,
            new_memory=device_memory(model.device),
        )
        self.table = BatchState(model.device, model.states)
        self._max_blocks = self.cache.most_blocks(config.kv_cache_bytes)
        self._num_spare = 0
        """Blocks at the end of the cache that no sequence ever gets."""
        self.scheduler = Scheduler(
            self._new_pool(), self.table, max_num_seqs=config.max_num_seqs, chunk_tokens=chunk_tokens
        )
        self._special = SpecialSequences()
        if model.states and config.options.get("num_speculative_tokens"):
            raise ConfigError(
                f"num_speculative_tokens={config.options['num_speculative_tokens']} and the model's linear attention "
                "has a state that cannot go back behind a rejected draft; leave it out"
            )
        self._history = DraftHistory(config.options.get("num_speculative_tokens", 0))
        self.steps = StepRunner(model, self.cache, self.table, self.scheduler, self._special)
        if model.device.type == "cuda" and not model.experts.num_routers and not model.states:
            self.steps.graphs = self.decode_graphs()
        self.is_frozen = False
        self.is_asleep = False
        self.has_weights = True
        self.weight_version = 0
        """Version of the last update."""
        self.is_paused = False
        """Whether new requests are held."""
        self._num_unseeded = self._num_arrived = self.num_updates = 0
        self._held: OrderedDict[SequenceState, None] = OrderedDict()
        self._begun: OrderedDict[SequenceState, None] = OrderedDict()
        """Running requests without a deadline of their own, in the order of admission."""
        self.clock = StepClock()
        self._by_id: dict[str, SequenceState] = {}
        self._events: list[tuple[str, Event]] = []

    # ---- state

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait to enter the batch."""
        return len(self.scheduler.waiting) + len(self._held)

    @property
    def can_step(self) -> bool:
        """Whether there is work, and the engine is neither paused, asleep nor without weights."""
        is_ready = self.has_weights and not self.is_frozen and not self.is_asleep
        return is_ready and bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def is_drained(self) -> bool:
        """Whether no request is in flight, those aside that arrived after a pause."""
        return not self.scheduler.running and not self.scheduler.waiting

    def take_events(self) -> list[tuple[str, Event]]:
        """Events since the last call, by request id, in order."""
        events, self._events = self._events, []
        return events

    # ---- requests

    def submit(
        self,
        requests: Iterable[tuple[GenerateRequest, int]],
        images: Mapping[str, ImagePrompt] | None = None,
        matchers: Mapping[str, Matcher] | None = None,
    ) -> None:
        """Queue requests.

        Args:
            requests: Validated requests under ids that are not in flight, each with the number of new tokens after
                which a chunk is reported (1: every token; 0: nothing before the end).
            images: Prepared images by request id, of the prompts that have some.
            matchers: Matchers by request id, of the outputs that are structured.
        """
        for request, report_every in requests:
            if (adapter := request.adapter) is not None and adapter not in self.model.adapters.names:
                self._events.append((request.request_id, _gone(request, self.model.adapters.names)))
                continue
            prompt_len = len(request.prompt_token_ids)
            limit = min(prompt_len + request.sampling_params.max_new_tokens, self.model.max_model_len)
            room = self._max_blocks * self.cache.block_size
            if limit > room:
                message = f"it needs {limit} tokens of cache and there are {room}; raise kv_cache_bytes"
                self._events.append((request.request_id, RequestError(f"request {request.request_id!r}: {message}")))
                continue
            self._num_arrived += 1
            if (seed := request.sampling_params.seed) is None:
                self._num_unseeded += 1
                seed = stream_seed(self.config.seed, self._num_unseeded)
            seen = images.get(request.request_id) if images else None
            sequence = SequenceState(
                request=request,
                report_every=report_every,
                limit=limit,
                seed=seed,
                arrival=self._num_arrived,
                seen=seen,
                matcher=matchers.get(request.request_id) if matchers else None,
                root=_root_of(self, request, seen),
            )
            self._by_id[request.request_id] = sequence
            sequence.since = self.clock.seconds
            sequence.expected = self._history.expected_length(sequence.draft_key)
            (self._held if self.is_paused else self.scheduler.waiting)[sequence] = None

    @torch.inference_mode()
    def abort(self, request_ids: Sequence[str] | None = None, *, reason: FinishReason = FinishReason.ABORT) -> None:
        """End these requests (None: all) with the tokens that they have. Ids that are not in flight are ignored."""
        ids = list(self._by_id) if request_ids is None else request_ids
        found = [self._by_id[i] for i in dict.fromkeys(ids) if i in self._by_id]
        for sequence in found:
            if sequence.row < 0:
                self.scheduler.waiting.pop(sequence, None)
                self._held.pop(sequence, None)
                self._end(sequence, sequence.output([], [], [], 0, reason))
        self._leave([(s.row, reason) for s in found if s.row >= 0])

    def fail(self, error: Exception) -> None:
        """End every request with an error, and drop the batch and the cache."""
        for sequence in list(self._by_id.values()):
            self._end(sequence, error)
        self.scheduler.running.clear()
        self.scheduler.waiting.clear()
        self._held.clear()
        self._begun.clear()
        self.drop_cache()

    # ---- control

    def pause(self, mode: PauseMode) -> None:
        """Hold new requests. Mode `abort` ends those in flight, `keep` freezes them, `wait` lets them finish."""
        if mode == "abort":
            self.abort([*(s.request.request_id for s in (*self.scheduler.running, *self.scheduler.waiting))])
        self.is_paused = True
        self.is_frozen = mode == "keep"

    def resume(self) -> None:
        """Undo `pause`."""
        self.is_paused = self.is_frozen = False
        for sequence in self._held:
            sequence.since = self.clock.seconds
        self.scheduler.waiting.update(self._held)
        self._held.clear()

    def set_version(self, version: int, *, has_moved: bool = True) -> None:
        """Note a weight update: the cache, computed by the old weights, is dropped.

        Args:
            version: Weight version of the tokens from now on.
            has_moved: Whether the weights' addresses changed, so that CUDA graphs have to be captured anew.
        """
        self.weight_version = self.steps.weight_version = version
        self.has_weights = True
        self.num_updates += 1
        if self.steps.graphs is not None and has_moved:
            self.steps.graphs.clear()
        for sequence in self._by_id.values():
            sequence.root = _root_of(self, sequence.request, sequence.seen)
            if sequence.row < 0 or self.table.length_of(sequence.row) == len(sequence.prompt):
                sequence.extras.forget_prompt()
        self._forget_cache()

    @torch.inference_mode()
    def set_adapters(self, version: int, changed: Collection[str]) -> None:
        """Note an update of adapters alone: their sequences are recomputed, or end if the adapter is gone."""
        self.weight_version = version
        for sequence in [each for each in self._by_id.values() if each.request.adapter in changed]:
            if sequence.request.adapter in self.model.adapters.names:
                sequence.root = _root_of(self, sequence.request, sequence.seen)
                if sequence.row >= 0:
                    self.scheduler.drop_blocks(sequence)
                if sequence.row < 0 or self.table.length_of(sequence.row) == len(sequence.prompt):
                    sequence.extras.forget_prompt()
                continue
            self.scheduler.waiting.pop(sequence, None)
            self._held.pop(sequence, None)
            if sequence.row >= 0:
                self.scheduler.drop_blocks(sequence)
                self.scheduler.remove({sequence.row})
            self._end(sequence, _gone(sequence.request, self.model.adapters.names))

    def drop_cache(self) -> None:
        """Free the cache's memory. The next steps recompute the sequences in flight."""
        if self.steps.graphs is not None and not self.cache.keeps_place:
            self.steps.graphs.clear()
        self.cache.release()
        self._forget_cache()

    def close(self) -> None:
        """Free the memory of cache and graphs for good."""
        if self.steps.graphs is not None:
            self.steps.graphs.clear()
        self.cache.close()

    def _forget_cache(self) -> None:
        for sequence in self.scheduler.running:
            self.scheduler.drop_blocks(sequence)
        self.scheduler.pool = self._new_pool()

    def decode_graphs(self, **options: Any) -> DecodeGraphs:
        """Create the CUDA graphs of decode steps; cache and batch state get their full size, so that they do not move.

        The cache's last block and the batch state's last row are reserved for padding from now on. `options` go to
        `DecodeGraphs`.
        """
        self._num_spare = 1
        self._max_blocks -= 1
        self.scheduler.pool = self._new_pool()
        rows, length = self.config.max_num_seqs, min(self.model.max_model_len + 1, GRAPH_TOKENS)
        columns = -(-self.model.max_model_len // self.cache.block_size)
        self.table.reserve(rows + 1, length, 1, min(columns, self._max_blocks))
        return DecodeGraphs(self.model, self.cache, self.table, rows, self._max_blocks, **options)

    def _new_pool(self) -> BlockPool:
        # A cache in one allocation, or one whose address graphs hold, cannot grow with its content.
        is_whole = self.cache.keeps_place or self._num_spare
        return BlockPool(
            self._max_blocks,
            self.cache.block_size,
            self._max_blocks if is_whole else self.cache.num_blocks,
            remembers=not self.model.states,
        )

    # ---- deadlines

    def _expire(self) -> None:
        """Advance the clock, and end the requests without a deadline of their own that are over the server's."""
        now = self.clock.advance()
        queue_s, timeout_s = self.config.queue_timeout_s, self.config.timeout_s
        while self.scheduler.waiting and now - next(iter(self.scheduler.waiting)).since > queue_s:
            sequence, _ = self.scheduler.waiting.popitem(last=False)
            message = f"waited for its turn for queue_timeout_s={queue_s:g} s; raise that, or ask for less at a time"
            self._end(sequence, RequestTimeoutError(f"request {sequence.request.request_id!r} {message}"))
        late: list[SequenceState] = []
        while self._begun and now - next(iter(self._begun)).since > timeout_s:
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
        """Admit requests, then run one forward pass, or several where nothing has to be decided between them.

        Call only if `can_step`. Once `interrupt` [1] int64 is not 0, no further pass begins.
        """
        self._expire()
        self._admit()
        if not (self.scheduler.running or self.scheduler.waiting):
            return
        is_plain = self._special.are_plain
        native = self.model.fused if is_plain else None
        most_steps = 1 if native is None else MOST_STEPS
        if native is None and is_plain and self.steps.graphs is not None and not self._special.adapted:
            most_steps = MOST_REPLAYS
        reports_each = any(sequence.report_every == 1 for sequence in self._special.streaming)
        plan = self.scheduler.plan(
            lambda sequence: self.table.tokens_of(sequence.row),
            1 if reports_each else most_steps,
            partial(self._history.of, self.table) if self._history.most and self._special.take_drafts else None,
        )
        for sequence, drafted in plan.drafts.items():
            self.table.write_draft(sequence.row, drafted)
        self.table.flush_blocks()
        self.cache.resize(self.scheduler.pool.capacity + self._num_spare)
        if native is None or not plan.steps:
            drawn = self.steps.run(plan)
        else:
            first = self.table.lengths_host[plan.rows]
            drawn = plan.rows, generate(native, self.cache, self.table, plan, self.steps.weight_version, interrupt)
            self.steps.num_passes += int((self.table.lengths_host[plan.rows] - first).max())
        if drawn is not None:
            self._settle(*drawn)

    def _admit(self) -> None:
        first = len(self.scheduler.running)
        admitted = self.scheduler.admit()
        if not admitted:
            return
        for sequence in admitted:
            sequence.since = self.clock.seconds
        self._begun.update((sequence, None) for sequence in admitted if sequence.request.timeout_s is None)
        self._special.add(admitted)
        stops = [sequence.stops(self.model.eos_token_ids) for sequence in admitted]
        longest = max(len(sequence.prompt) for sequence in admitted)
        self.table.reserve(len(self.scheduler.running), longest + 1, max(len(each) for each in stops))
        slots = [self.model.adapters.slot(sequence.request.adapter) for sequence in admitted]
        values = [s.row_values(ids, slot) for s, ids, slot in zip(admitted, stops, slots, strict=True)]
        self.table.add(first, values)

    def _settle(self, drawn: np.ndarray, newest: SampledTokens) -> None:
        """After a step: report the new tokens of streams, and end the rows that have finished.

        Args:
            drawn: Row numbers.
            newest: Newest token of each.
        """
        table = self.table
        is_stopped = (newest.ids[:, None] == table.stop_ids[drawn]).any(axis=1)
        is_full = table.lengths_host[drawn] >= table.limits[drawn]
        verdict = is_stopped + 2 * is_full + 4 * ~np.isfinite(newest.logprobs)
        if self._special.streaming:
            place = dict(zip(drawn.tolist(), range(len(drawn)), strict=True))
            self._events.extend(new_chunks(self._special.streaming, table, verdict, place))
        ended = np.flatnonzero(verdict)
        self._leave([(int(drawn[i]), finish_reason(int(verdict[i]))) for i in ended])

    def _leave(self, ended: Sequence[tuple[int, FinishReason | None]]) -> None:
        """Remove rows from the batch and deliver their outputs; a reason of None means that logits were not finite."""
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
                if self._history.most and reason in (FinishReason.STOP, FinishReason.LENGTH):
                    self._history.add(sequence.draft_key, ids[len(sequence.draft_key) : length])
            known = ids[: int(self.table.computed[row])]
            if reason is not None:
                self.scheduler.pool.remember(sequence.root, known, sequence.blocks)
            released = self.scheduler.drop_blocks(sequence, is_spoiled=reason is None)
            if reason is None and released:
                self.cache.clear(released)
        self.scheduler.remove(set(leaving))

    def _end(self, sequence: SequenceState, event: TokenOutput | Exception) -> None:
        del self._by_id[sequence.request.request_id]
        self._begun.pop(sequence, None)
        self._special.discard(sequence)
        self._events.append((sequence.request.request_id, event))


def _root_of(engine: Engine, request: GenerateRequest, seen: ImagePrompt | None) -> Hashable:
    """Key of a request's prefix in the cache."""
    # The number of updates, not the version: callers may repeat versions, and old content must never be found.
    adapter = request.adapter, engine.model.adapters.installation(request.adapter)
    return engine.num_updates, adapter, request.images, () if seen is None else seen.sampled_places


def _gone(request: GenerateRequest, names: Sequence[str]) -> RequestError:
    """Error of a request whose adapter a weight update has removed."""
    loaded = ", ".join(names) or "none"
    return RequestError(
        f"request {request.request_id!r}: adapter {request.adapter!r} was removed; loaded are: {loaded}"
    )
