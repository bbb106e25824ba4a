"""`BucketPacker`: plans the buckets of a sync, has them packed outside Python's lock, and announces them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import rl_csrc
from rl_ckpt.protocol.messages import Bucket, Buckets, Encoded, Manifest
from rl_ckpt.tensors.buckets import ALIGNMENT_BYTES, Codec, Span
from rl_ckpt.tensors.digest import LEAF_BYTES, combine, leaves_of
from rl_ckpt.tensors.spec import as_bytes
from rl_csrc.buffers.bucket import BucketPlan, aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from rl_ckpt.protocol.messages import Mapped
    from rl_ckpt.sender.membership import Peer
    from rl_ckpt.sender.peers import Peers
    from rl_ckpt.tensors.source import Clock, ManifestIndex
    from rl_ckpt.tensors.spec import TensorSpec
    from rl_ckpt.transports.streams import ByteRun
    from rl_csrc.buffers.bucket import Placement
    from rl_csrc.buffers.pipeline import Pipeline
    from rl_csrc.ipc import Waker

MANIFEST_CHUNK = 4096
"""Most tensors in one Manifest message."""
MAX_SPANS = 1 << 16
"""Most pieces in one Bucket message."""
DIRECT_BYTES = 1 << 20
"""Tensors of at least this size are sent directly from the source's memory where that saves a copy."""
_FILLING = bytes(ALIGNMENT_BYTES)
_NOTHING = rl_csrc.digest(b"")
MAX_BATCH = 16
"""Most buckets that are announced in one message."""
BATCH_SHARE = 16
"""Batch size is the number of earlier buckets times receivers divided by this, so that the first ones go at once."""
MIN_BATCH_RECEIVERS = 4
"""Least number of receivers that counts for the batch size: each batch takes the interpreter lock a few times."""
NUM_SLOTS = 4
"""Slots used while buckets are announced one by one: more would only be memory outside the CPU cache."""
EAGER_BYTES = 256 << 10
"""A bucket of deltas of at least this size is sent early to idle receivers."""


class RelayPipe(Protocol):
    """Weights that are still arriving at a relay, as its sender reads them."""

    @property
    def news(self) -> Waker:
        """Waker that fires when more bytes are verified."""
        ...

    def has_next(self) -> bool:
        """Whether the next tensor, or the end, is known."""
        ...

    def take(self) -> tuple[TensorSpec, Tensor] | None:
        """Next tensor, of which some bytes are verified; None after the last."""
        ...

    def alias_of(self, name: str) -> Sequence[str]:
        """Names of the aliases of a complete tensor."""
        ...

    def num_landed(self, spec: TensorSpec) -> int:
        """Number of verified bytes of a tensor, from its beginning."""
        ...


@dataclass(slots=True, eq=False)
class _Content:
    """Part of a tensor on its way into buckets."""

    raw: Tensor
    known: int | None
    then: Callable[[list[int]], None]
    leaves: list[int] = field(default_factory=list[int])


@dataclass(slots=True, eq=False)
class _Filling:
    """Bucket that is planned, and is being packed."""

    sequence: int
    spans: list[Span] = field(default_factory=list[Span])
    """Pieces; their digests are set when they are packed."""
    direct: dict[int, Tensor] = field(default_factory=dict[int, "Tensor"])
    """Pieces that streams send from the source's memory: their contents, by index."""
    end: int = 0
    """Number of jobs of the sync up to its last piece."""
    is_closed: bool = False


class BucketPacker:
    """Packs the buckets of one sync into slots, and announces them to the participating receivers.

    Args:
        peers: Receivers of the session.
        participants: Receivers that take part in the sync.
        slots: uint8 [bucket_bytes] each.
        pipeline: Packs and digests pieces, in order, where slots and contents are on the CPU.
        manifest: Specs of the tensors, by index.
        clock: Measures the phases.
        pipe: Source of the bytes if this is a relay; each byte is waited for.
    """

    def __init__(
        self,
        peers: Peers,
        participants: Sequence[Peer],
        slots: Sequence[Tensor],
        pipeline: Pipeline,
        manifest: ManifestIndex,
        clock: Clock,
        pipe: RelayPipe | None,
    ) -> None:
        self.num_buckets = 0
        """Buckets that were planned so far."""
        self.num_wire_bytes = 0
        """Bytes in these buckets."""
        self._peers = peers
        peers.num_freed.clear()
        self._participants = participants
        self._slots = slots
        self._pipeline = pipeline
        pipeline.cancel()  # a new sync finds all slots free
        self._busy_ns = pipeline.busy_ns()
        self._manifest = manifest
        self._clock = clock
        self._pipe = pipe
        self._max_batch = max(1, min(MAX_BATCH, len(slots) // 2))
        self._has_streams = peers.session.num_streams > 0
        self._plan = BucketPlan(peers.session.bucket_bytes)
        self._filling = _Filling(0)
        self._pieces: deque[tuple[_Filling, int, _Content]] = deque()
        """Pieces that the pipeline has not packed yet: their bucket, index in it, and content."""
        self._pending: deque[_Filling] = deque()
        """Closed buckets that are not packed yet."""
        self._batch: list[tuple[Bucket, list[ByteRun]]] = []
        """Packed buckets that are not announced yet, with their payload for streams."""
        self._in_use: list[int] = []
        """Announced buckets that occupy a slot."""
        self._num_put = self._num_seen = self._num_packed = 0

    def add(
        self,
        index: int,
        start: int,
        codec: Codec,
        raw: Tensor,
        *,
        stays: bool,
        then: Callable[[list[int]], None] = lambda _: None,
        is_awaited: bool = False,
        known: int | None = None,
        aliases: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        """Put a part of a tensor, contiguous, into buckets; `then` is called with its leaf digests once it is packed.

        `stays`: the content does not change before the sync ends; if not, or with `is_awaited`, it is packed when this
        returns. `known`: the digest of content that is a single leaf, if it was computed already. `aliases` is called
        at the end, and returns the indexes of tied tensors.
        """
        total = raw.nbytes
        is_direct = self._peers.transport.is_direct and total >= DIRECT_BYTES and raw.device.type == "cpu"
        content = _Content(raw, known if total <= self._plan.bucket_bytes else None, then)
        if len(self._filling.spans) >= MAX_SPANS:
            self._plan.close()
        if self._filling.spans and self._pipe is not None and not self._has_landed(self._pipe, index, total):
            self.close()  # do not hold back verified bytes
        for piece in self._plan.place(total):
            if piece.bucket > self._filling.sequence:
                self._close_bucket()
            if self._pipe is not None:
                end = piece.offset + piece.num_bytes
                self.wait_to_land(self._pipe, partial(self._has_landed, self._pipe, index, end), "more bytes")
            span = Span(index, codec, start, piece.offset, piece.bucket_offset, piece.num_bytes, total, 0)
            self._put(content, span, piece, is_direct=is_direct)
        for alias in aliases():  # in the last bucket of the tensor
            self._filling.spans.append(Span(alias, Codec.ALIAS, 0, 0, self._plan.offset, 0, 0, _NOTHING))
        if self._plan.offset == self._plan.bucket_bytes:  # full: do not wait for the next tensor
            self._close_bucket()
            self._plan.close()
        if is_direct and not stays:
            self.close()
            with self._clock("wire_s"):
                self._peers.wait_for_streams(self._participants)
        elif is_awaited or not stays:
            self._finish_jobs()

    def _put(self, content: _Content, span: Span, piece: Placement, *, is_direct: bool) -> None:
        """Have a piece packed into the bucket being filled, or digested where it is sent from the source's memory."""
        filling, raw = self._filling, content.raw
        filling.spans.append(span)
        position = len(filling.spans) - 1
        slot = self._slots[0]
        if slot.device.type == "cpu" and raw.device.type == "cpu":
            if is_direct:
                filling.direct[position] = raw
            is_digested = content.known is None
            self._num_put = self._pipeline.pack(
                filling.sequence, raw, piece.offset, piece.bucket_offset, piece.num_bytes, not is_direct, is_digested
            )
            self._pieces.append((filling, position, content))
            filling.end = self._num_put
            return
        self._finish_jobs()
        while (number := self._pipeline.assign(filling.sequence)) < 0:
            self._progress()
        with self._clock("pack_s"):
            into = self._slots[number][piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
            into.copy_(as_bytes(raw)[piece.offset : piece.offset + piece.num_bytes])
            leaves = leaves_of(into)
        self._note(filling, position, content, leaves)

    def _note(self, filling: _Filling, position: int, content: _Content, leaves: list[int]) -> None:
        """Note the leaf digests of a packed piece."""
        span = filling.spans[position]
        found = leaves or [content.known or 0]
        filling.spans[position] = span._replace(digest=combine(found))
        content.leaves += found
        if span.is_last:
            room = self._plan.bucket_bytes
            is_cut_into_leaves = span.total_bytes <= room or room % LEAF_BYTES == 0
            content.then(content.leaves if is_cut_into_leaves else leaves_of(as_bytes(content.raw)))

    def _finish_jobs(self) -> None:
        """Return when all pieces that were put are packed; this thread takes part."""
        while not self._pipeline.help(self._num_put):
            self._progress()
        self._collect()

    def close(self) -> None:
        """Close the bucket being filled, and announce all buckets."""
        self._close_bucket()
        self._plan.close()
        while self._pending:
            if len(self._pending) > 1 or not self._pipeline.help(self._num_put):
                self._progress()
            self._collect()
        self.flush()

    def flush(self) -> None:
        """Announce packed buckets, after the specs that a receiver does not know yet."""
        if not self._batch:
            return
        batch, self._batch = self._batch, []
        with self._clock("wire_s"):
            message = Encoded(Buckets(tuple(bucket for bucket, _ in batch)))
            for peer in self._participants:
                self.declare(peer)
                self._peers.send(peer, message)
                peer.num_sent += len(batch)
                if self._has_streams:
                    self._peers.put(peer, [(bucket.sequence, payload) for bucket, payload in batch])
            for bucket, _ in batch:
                self._in_use.append(bucket.sequence)
                slot = self._slots[bucket.slot]
                is_full = bucket.used_bytes == self._plan.bucket_bytes
                self._peers.transport.publish(slot if is_full else slot[: bucket.used_bytes])

    def announce(self, mapped: Mapped, num_bytes: int) -> None:
        """Announce tensors that receivers read from the source's memory, as one bucket."""
        message = Encoded(mapped)
        for peer in self._participants:
            self._peers.send(peer, message)
            peer.num_sent += 1
        self.num_buckets += 1
        self._filling = _Filling(self.num_buckets)
        self._plan = BucketPlan(self._plan.bucket_bytes, bucket=self.num_buckets)
        self.num_wire_bytes += num_bytes

    def close_if_awaited(self) -> None:
        """Send a partial bucket early if a receiver is idle."""
        if self._plan.offset < EAGER_BYTES:
            return
        self._peers.poll()
        if any(len(peer.freed) == self.num_buckets for peer in self._participants):
            self.close()

    def declare(self, peer: Peer) -> None:
        """Send a receiver the specs that it does not know yet."""
        specs = self._manifest.specs
        while peer.num_declared < len(specs) and peer.error is None:
            first = peer.num_declared
            chunk = tuple(specs[first : first + MANIFEST_CHUNK])
            self._peers.send(peer, Manifest(first, chunk))
            peer.num_declared += len(chunk)

    def wait(self, is_done: Callable[[Peer], bool], doing: str) -> None:
        """Wait until the condition holds for every receiver."""
        with self._clock("wire_s"):
            self._peers.wait_for_all(self._participants, is_done, doing)

    def wait_to_land(self, pipe: RelayPipe, is_there: Callable[[], bool], what: str) -> None:
        """Wait until a relay has the bytes to send on."""
        if is_there():
            return
        self._finish_jobs()
        self.flush()
        with self._clock("export_s"):
            self._peers.wait_for_news(self._participants, pipe.news, is_there, what)

    def end(self) -> None:
        """End the sync: nothing is packed any more, and no memory of the source is touched."""
        self._clock.pack_s += (self._pipeline.busy_ns() - self._busy_ns) / 1e9
        self._pipeline.cancel()
        self._busy_ns = self._pipeline.busy_ns()
        self._pieces.clear()
        self._pending.clear()

    def _has_landed(self, pipe: RelayPipe, index: int, num_bytes: int) -> bool:
        return pipe.num_landed(self._manifest.specs[index]) >= num_bytes

    def _close_bucket(self) -> None:
        """Close the bucket being filled, and let the pipeline pack it; announce those that are packed."""
        filling = self._filling
        if not filling.spans:
            return
        filling.is_closed = True
        self._pending.append(filling)
        self.num_buckets += 1
        self._filling = _Filling(self.num_buckets)
        self._pipeline.use_slots(max(NUM_SLOTS, 2 * self._batch_size()))
        if len(self._pending) > 1:
            self._pipeline.start()
        self._collect()
        while len(self._pending) >= len(self._slots):
            self._progress()

    def _collect(self) -> bool:
        """Take what the pipeline has packed; announce buckets once they are a batch. False if there was none."""
        done = self._pipeline.num_done()
        for error, found in self._pipeline.take(done - self._num_seen):
            assert error == 0, "nothing is read when buckets are packed"
            self._note(*self._pieces.popleft(), found[0])
        self._num_seen = done
        num_before = len(self._pending)
        while self._pending and self._pending[0].end <= done:
            filling = self._pending.popleft()
            last, slot = filling.spans[-1], self._pipeline.slot_of(filling.sequence)
            bucket = Bucket(filling.sequence, slot, aligned(last.bucket_offset + last.num_bytes), tuple(filling.spans))
            self._batch.append((bucket, self._payload(filling, bucket) if self._has_streams else []))
            self.num_wire_bytes += bucket.used_bytes
            self._num_packed += 1
            if len(self._batch) >= self._batch_size():
                self.flush()
        return len(self._pending) < num_before

    def _batch_size(self) -> int:
        """Current batch size: grows with the sync, and faster with many receivers."""
        num_receivers = max(MIN_BATCH_RECEIVERS, len(self._participants))
        return min(self._max_batch, 1 + self._num_packed * num_receivers // BATCH_SHARE)

    def _payload(self, filling: _Filling, bucket: Bucket) -> list[ByteRun]:
        """Byte runs of a bucket for streams, in order, from the slot or the source's memory."""
        file, slot = self._peers.transport.file, self._slots[bucket.slot]
        base = 0 if file is None else bucket.slot * self._plan.bucket_bytes
        ring = slot if file is None else file
        runs: list[ByteRun] = []
        packed = 0
        for i, raw in filling.direct.items():
            span = filling.spans[i]
            end = span.bucket_offset + span.num_bytes
            runs += [
                (ring, base + packed, span.bucket_offset - packed),
                (raw, span.offset, span.num_bytes),
                (_FILLING, 0, aligned(end) - end),
            ]
            packed = aligned(end)
        return [*runs, (ring, base + packed, bucket.used_bytes - packed)]

    def _progress(self) -> None:
        """Wait until a bucket is packed or freed."""
        if self._has_moved():
            return
        in_use = set(self._in_use)
        with self._clock("wire_s"):
            self._peers.wait_until(
                self._participants,
                self._has_moved,
                lambda peer: not peer.freed.issuperset(in_use),
                f"take the tensors of bucket {min(in_use, default=self.num_buckets)}",
            )

    def _has_moved(self) -> bool:
        """Release slots and take packed buckets; if there is no slot, announce what idle receivers wait for."""
        freed = [sequence for sequence in self._in_use if self._peers.num_freed[sequence] == len(self._participants)]
        for sequence in freed:
            self._pipeline.release(sequence)
            self._in_use.remove(sequence)
        if self._collect() or freed:
            return True
        if self._batch and self._pipeline.is_stalled() and self._is_anyone_idle():
            self.flush()
        if not self._pending:
            return False
        missing = max(1, self._batch_size() - len(self._batch))
        last = self._pending[min(len(self._pending), missing) - 1]
        while self._pipeline.wake_at(self._num_seen, last.end):
            if self._collect():
                return True
        return False

    def _is_anyone_idle(self) -> bool:
        """Whether a receiver may be idle: it has few of the buckets that were announced, and may hold those."""
        return any(peer.num_sent - len(peer.freed) < NUM_SLOTS for peer in self._participants)
