"""Continuous batching: requests join and leave between decode steps.

Synchronous and single-threaded: `worker.py` runs it in a thread. A step admits waiting requests (prompts of one kind
are computed once and copied), then decodes one token for every sequence. Prefill covers all tokens of a sequence but
the last one, which enters the next decode step like any other: logits are computed and tokens drawn in one place
alone. The sequences in the batch are rows 0..n-1 of the table and the cache; when one leaves, the last row takes its
place.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING

import torch

from rl_rollout.backends.embedded.attention import DecodeBatch, PrefillBatch
from rl_rollout.backends.embedded.cache import KVCache, plan_capacity
from rl_rollout.backends.embedded.in_flight import InFlight, finish_reason
from rl_rollout.backends.embedded.sampler import sample, stream_seed
from rl_rollout.backends.embedded.table import BatchTable
from rl_rollout.errors import GenerationError, RequestError
from rl_rollout.types import FinishReason, TokenChunk, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from rl_rollout.backends.embedded.images import SeenPrompt
    from rl_rollout.backends.embedded.model import ServedModel
    from rl_rollout.base import PauseMode
    from rl_rollout.types import GenerateRequest, ServerConfig

MAX_PREFILL_TOKENS = 8192
"""Padded tokens of one prefill call, unless a single sequence is longer."""

Event = TokenOutput | Exception | TokenChunk
"""What a request gets: chunks if it streams, then its whole output or an error."""


class Engine:
    """The state of one replica between decode steps."""

    def __init__(self, model: ServedModel, config: ServerConfig) -> None:
        self.model = model
        self.config = config
        self.weight_version = 0
        self.cache = KVCache(model.layer_shapes, dtype=model.dtype, device=model.device)
        self.table = BatchTable(model.device)
        self.budget = _cache_budget(config, model.device) // self.cache.bytes_per_position
        self.is_frozen = False
        self.is_asleep = False
        self.has_weights = True
        self._is_holding = False
        self._is_cache_stale = False
        self._num_unseeded = 0
        self._running: list[InFlight] = []
        self._waiting: deque[InFlight] = deque()
        self._held: deque[InFlight] = deque()
        self._by_id: dict[str, InFlight] = {}
        self._leaders: dict[tuple[object, ...], InFlight] = {}
        self._streaming: set[InFlight] = set()
        self._truncating: set[InFlight] = set()
        self._reading: set[InFlight] = set()
        self._events: list[tuple[str, Event]] = []

    # ---- what is going on

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that are not in the batch yet."""
        return len(self._waiting) + len(self._held)

    @property
    def can_step(self) -> bool:
        """Whether `step` would do anything."""
        is_ready = self.has_weights and not self.is_frozen and not self.is_asleep
        return is_ready and bool(self._running or self._waiting)

    @property
    def is_paused(self) -> bool:
        """Whether new requests are held."""
        return self._is_holding

    @property
    def is_drained(self) -> bool:
        """Whether nothing is in flight but what came after a pause."""
        return not self._running and not self._waiting

    def take_events(self) -> list[tuple[str, Event]]:
        """What happened since the last call, by request id, in order."""
        events, self._events = self._events, []
        return events

    # ---- requests

    def submit(
        self, requests: Iterable[tuple[GenerateRequest, int]], images: Mapping[str, SeenPrompt] | None = None
    ) -> None:
        """Take requests that were checked, under ids that are not in flight, each with how often tokens are told.

        `images` are those of prompts that have some, by request id.
        """
        for request, told_every in requests:
            prompt_len = len(request.prompt_token_ids)
            limit = min(prompt_len + request.sampling_params.max_new_tokens, self.model.max_model_len)
            if limit > self.budget:
                message = f"it needs {limit} tokens of cache and there are {self.budget}; raise kv_cache_bytes"
                self._events.append((request.request_id, RequestError(f"request {request.request_id!r}: {message}")))
                continue
            sequence = InFlight(
                request=request,
                told_every=told_every,
                limit=limit,
                seed=self._seed_of(request),
                seen=images.get(request.request_id) if images else None,
            )
            self._by_id[request.request_id] = sequence
            (self._held if self._is_holding else self._waiting).append(sequence)

    def _seed_of(self, request: GenerateRequest) -> int:
        seed = request.sampling_params.seed
        if seed is not None:
            return seed
        self._num_unseeded += 1
        return stream_seed(self.config.seed, self._num_unseeded)

    @torch.inference_mode()
    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests, all when None, with what they have. Ids that are not in flight have ended already."""
        ids = list(self._by_id) if request_ids is None else request_ids
        found = [self._by_id[i] for i in dict.fromkeys(ids) if i in self._by_id]
        gone = {sequence for sequence in found if sequence.row < 0}
        self._waiting = deque(s for s in self._waiting if s not in gone)
        self._held = deque(s for s in self._held if s not in gone)
        for sequence in gone:
            self._end(sequence, sequence.output([], [], [], 0, FinishReason.ABORT))
        self._leave([(s.row, FinishReason.ABORT) for s in found if s not in gone])

    def fail(self, error: Exception) -> None:
        """End every request with an error, and forget the batch."""
        for sequence in list(self._by_id.values()):
            self._end(sequence, error)
        groups = (self._streaming, self._truncating, self._reading)
        for container in (self._running, self._waiting, self._held, self._leaders, *groups):
            container.clear()
        self.cache.release()

    # ---- control

    def pause(self, mode: PauseMode) -> None:
        """Hold new requests. `abort` ends those in flight, `keep` freezes them, `wait` lets them go on."""
        if mode == "abort":
            self.abort([*(s.request.request_id for s in (*self._running, *self._waiting))])
        self._is_holding = True
        self.is_frozen = mode == "keep"

    def resume(self) -> None:
        """Undo `pause`."""
        self._is_holding = self.is_frozen = False
        self._waiting.extend(self._held)
        self._held.clear()

    def set_version(self, version: int) -> None:
        """The model's weights are now of this version: whatever was computed from the old ones is dropped."""
        self.weight_version = version
        self.has_weights = True
        self._is_cache_stale = True

    def drop_cache(self) -> None:
        """Give the cache's memory back. What is in flight is computed anew by the next step."""
        self.cache.release()
        self._is_cache_stale = True

    # ---- one step

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, then decode one token of every sequence. Call only if `can_step`."""
        if self._is_cache_stale:
            self._rebuild_cache()
        self._admit()
        if self._running:
            self._decode()

    def _rebuild_cache(self) -> None:
        self._is_cache_stale = False
        self._leaders.clear()
        self.cache.clear()
        if self._running:
            self._make_room(num_used=0)
            self._prefill(self._running)

    def _admit(self) -> None:
        admitted = self._choose_waiting()
        if not admitted:
            return
        first = len(self._running)
        for row, sequence in enumerate(admitted, start=first):
            sequence.row = row
        self._running.extend(admitted)
        self._streaming.update(s for s in admitted if s.told_every)
        self._truncating.update(s for s in admitted if s.truncates)
        self._reading.update(s for s in admitted if s.reads_steps)
        stops = [self._stops(sequence) for sequence in admitted]
        self.table.reserve(
            len(self._running),
            max(len(sequence.request.prompt_token_ids) for sequence in admitted) + 1,
            max(len(each) for each in stops),
        )
        self.table.add(first, [sequence.row_values(ids) for sequence, ids in zip(admitted, stops, strict=True)])
        self._make_room(num_used=first)
        self._fill_cache(admitted)

    def _choose_waiting(self) -> list[InFlight]:
        """The waiting requests, in their order, that fit the batch and the memory."""
        chosen: list[InFlight] = []
        longest = max((s.limit for s in self._running), default=0)
        while self._waiting:
            count = len(self._running) + len(chosen) + 1
            longest = max(longest, self._waiting[0].limit)
            if count > self.config.max_num_seqs or count * longest > self.budget:
                break
            chosen.append(self._waiting.popleft())
        return chosen

    def _make_room(self, *, num_used: int) -> None:
        """Room in cache and table for every sequence's next token; `num_used` rows of the cache hold something."""
        count = len(self._running)
        rows, room = plan_capacity(
            count,
            self._longest(),
            rows=self.cache.num_rows,
            room=self.cache.length,
            max_rows=self.config.max_num_seqs,
            budget=self.budget,
        )
        self.cache.resize(rows, room, num_used=num_used)
        # One more: a token that is drawn from the logits of the last position is written down and never fed.
        self.table.reserve(rows, room + 1, 1)

    def _longest(self) -> int:
        return int(self.table.host_lengths[: len(self._running)].max())

    def _stops(self, sequence: InFlight) -> tuple[int, ...]:
        params = sequence.request.sampling_params
        return params.stop_token_ids if params.ignore_eos else (*self.model.eos_token_ids, *params.stop_token_ids)

    def _fill_cache(self, admitted: Sequence[InFlight]) -> None:
        """Compute each prompt once; whoever shares it gets a copy."""
        to_compute: list[InFlight] = []
        copies: list[tuple[int, int]] = []
        longest = 0
        for sequence in admitted:
            prompt = sequence.request.prompt_token_ids
            if sequence.reads_prompt:
                self._read_prompt(sequence)
                continue
            leader = self._leaders.setdefault(sequence.prompt_key, sequence)
            if leader is sequence:
                to_compute.append(sequence)
            else:
                copies.append((leader.row, sequence.row))
                longest = max(longest, len(prompt) - 1)
        self._prefill(to_compute)
        if copies and longest:
            source, target = self._tensor([c[0] for c in copies]), self._tensor([c[1] for c in copies])
            self.cache.copy_rows(source, target, longest)

    def _read_prompt(self, sequence: InFlight) -> None:
        """Prefill one sequence alone, and keep what it asked about its prompt."""
        length = len(sequence.request.prompt_token_ids) - 1
        if not length:
            return
        rows = self._tensor([sequence.row])
        batch = PrefillBatch(self.cache, rows, self._tensor([length]), length)
        self.model.experts.is_on = sequence.request.returns_routed_experts
        logits = self.model.logits(self.table.tokens[sequence.row, :length], batch.positions, batch)
        sequence.extras.note_prompt(logits, self.model.experts.take())

    def _prefill(self, sequences: Iterable[InFlight]) -> None:
        """Compute keys and values of all tokens but the last, of sequences of like length together."""
        self.model.experts.is_on = False
        lengths = self.table.host_lengths.tolist()
        todo: list[tuple[int, int]] = []
        for sequence in sequences:
            length, row = lengths[sequence.row] - 1, sequence.row
            if sequence.seen is not None:
                batch = PrefillBatch(self.cache, self._tensor([row]), self._tensor([length]), length)
                self.model.prefill_seen(self.table.tokens[row, :length], sequence.seen, batch)
            elif length:
                todo.append((length, row))
        todo.sort()
        while todo:
            count = 1
            while count < len(todo) and (count + 1) * todo[count][0] <= MAX_PREFILL_TOKENS:
                count += 1
            chunk, todo = todo[:count], todo[count:]
            rows, longest = self._tensor([row for _, row in chunk]), chunk[-1][0]
            batch = PrefillBatch(self.cache, rows, self._tensor([length for length, _ in chunk]), longest)
            ids = self.table.tokens[rows, :longest][batch.is_token]
            self.model.prefill(ids, batch.positions, batch)

    def _decode(self) -> None:
        self._make_room(num_used=len(self._running))
        table, count = self.table, len(self._running)
        lengths = table.lengths[:count]
        positions = lengths - 1
        batch = DecodeBatch(self.cache, positions, self._longest())
        self.model.experts.is_on = any(s.request.returns_routed_experts for s in self._reading)
        logits = self.model.logits(table.tokens[batch.rows, positions], positions + table.shifts[:count], batch)
        ids, logprobs, distribution = sample(
            logits,
            temperature=table.temperature[:count],
            seeds=table.seeds[:count],
            positions=lengths,
            top_k=table.top_k[:count] if self._truncating else None,
            top_p=table.top_p[:count] if self._truncating else None,
        )
        table.tokens[batch.rows, lengths] = ids
        table.logprobs[batch.rows, lengths] = logprobs
        table.versions[batch.rows, lengths] = self.weight_version
        lengths += 1
        table.host_lengths[:count] += 1
        is_stopped = (ids[:, None] == table.stop_ids[:count]).any(dim=1)
        is_full = lengths >= table.limits[:count]
        verdict = (is_stopped + 2 * is_full + 4 * ~logprobs.isfinite()).cpu()  # the one transfer of a step
        self._stream(verdict)
        self._read_step(distribution)
        self._leave([(row, finish_reason(int(verdict[row]))) for row in verdict.nonzero()[:, 0].tolist()])

    def _stream(self, verdict: Tensor) -> None:
        """Hand out new tokens of those who want them before the end."""
        for sequence in self._streaming:
            row = sequence.row
            due = sequence.due(int(self.table.host_lengths[row]))
            if not due or verdict[row]:  # what ends now is told with its reason
                continue
            new = slice(due.start, due.stop)
            chunk = TokenChunk(
                token_ids=tuple(self.table.tokens[row, new].tolist()),
                logprobs=tuple(self.table.logprobs[row, new].tolist()),
                weight_versions=tuple(self.table.versions[row, new].tolist()),
                finish_reason=None,
            )
            sequence.num_told += len(due)
            self._events.append((sequence.request.request_id, chunk))

    def _read_step(self, distribution: Tensor) -> None:
        """Keep what was asked about this step."""
        experts = self.model.experts.take()
        for sequence in self._reading:
            its_experts = None
            if experts is not None and sequence.request.returns_routed_experts:
                its_experts = experts[sequence.row]
            sequence.extras.note_step(distribution[sequence.row], its_experts)

    def _leave(self, ended: Sequence[tuple[int, FinishReason | None]]) -> None:
        """Take rows out of the batch, deliver what they have, close the gaps. No reason: logits were not finite."""
        if not ended:
            return
        rows = self._tensor([row for row, _ in ended])
        lengths = self.table.host_lengths[[row for row, _ in ended]].tolist()
        columns = (self.table.tokens, self.table.logprobs, self.table.versions)
        parts = [column[rows, : max(lengths)].tolist() for column in columns]
        for (row, reason), ids, logprobs, versions, length in zip(ended, *parts, lengths, strict=True):
            sequence = self._running[row]
            if reason is None:
                self._end(sequence, self._poisoned(sequence))
            else:
                self._end(sequence, sequence.output(ids, logprobs, versions, length, reason))
            if self._leaders.get(sequence.prompt_key) is sequence:
                del self._leaders[sequence.prompt_key]
        if poisoned := [row for row, reason in ended if reason is None]:
            self.cache.clear(self._tensor(poisoned))
        self._close_gaps({row for row, _ in ended})

    def _poisoned(self, sequence: InFlight) -> GenerationError:
        return GenerationError(
            f"request {sequence.request.request_id!r}: the model's logits are not finite; "
            f"check the weights of version {self.weight_version}"
        )

    def _close_gaps(self, free: set[int]) -> None:
        """Move the last rows into the free ones, so that the rows in use are 0..n-1 again."""
        count = len(self._running) - len(free)
        gaps = [row for row in free if row < count]
        movers = [sequence for sequence in self._running[count:] if sequence.row not in free]
        if gaps:
            source, target = self._tensor([s.row for s in movers]), self._tensor(gaps)
            longest = int(self.table.host_lengths[[s.row for s in movers]].max())
            self.table.move(source, target)
            if self.cache.num_rows:
                self.cache.copy_rows(source, target, min(longest, self.cache.length))
        for row, sequence in zip(gaps, movers, strict=True):
            sequence.row = row
            self._running[row] = sequence
        del self._running[count:]

    def _end(self, sequence: InFlight, event: TokenOutput | Exception) -> None:
        del self._by_id[sequence.request.request_id]
        self._streaming.discard(sequence)
        self._truncating.discard(sequence)
        self._reading.discard(sequence)
        self._events.append((sequence.request.request_id, event))

    def _tensor(self, numbers: Iterable[int]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=self.model.device)


def _cache_budget(config: ServerConfig, device: torch.device) -> int:
    """Bytes that keys and values may take."""
    if config.kv_cache_bytes:
        return config.kv_cache_bytes
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
