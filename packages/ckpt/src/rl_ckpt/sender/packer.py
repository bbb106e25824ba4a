"""`BucketPacker`: packs tensors into the slots of a sync and announces the buckets. Knows no transaction."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

import rl_csrc
from rl_ckpt.protocol.messages import Bucket, Buckets, Encoded, Manifest
from rl_ckpt.tensors.buckets import ALIGNMENT_BYTES, Codec, Span
from rl_ckpt.tensors.digest import LEAF_BYTES, combine, leaves_of, pack_leaves
from rl_ckpt.tensors.spec import memory_of
from rl_ckpt.transports.streams import ByteRun
from rl_csrc.buffers.bucket import BucketPlan, aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from rl_ckpt.protocol.messages import Mapped
    from rl_ckpt.sender.peers import Peer, Peers
    from rl_ckpt.tensors.source import Clock, ManifestIndex
    from rl_ckpt.tensors.spec import TensorSpec
    from rl_csrc.buffers.bucket import Placement
    from rl_csrc.ipc import Waker

MANIFEST_CHUNK = 4096
"""Most tensors in one Manifest message."""
MAX_SPANS = 1 << 16
"""Most pieces in one Bucket message."""
DIRECT_BYTES = 1 << 20
"""Tensors of at least this size are sent directly from the source's memory where that saves a copy."""
_FILLING = memoryview(bytes(ALIGNMENT_BYTES))
_NOTHING = rl_csrc.digest(b"")
MAX_BATCH = 16
"""Most buckets that are announced in one message."""
BATCH_SHARE = 16
"""Batch size for one receiver is the number of earlier buckets divided by this, so that the first ones go at once."""
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


class BucketPacker:
    """Packs the buckets of one sync into slots, and announces them to the participating receivers.

    Args:
        peers: Receivers of the session.
        participants: Receivers that take part in the sync.
        slots: uint8 [bucket_bytes] each.
        manifest: Specs of the tensors, by index.
        clock: Measures the phases.
        pipe: Source of the bytes if this is a relay; each byte is waited for.
    """

    def __init__(
        self,
        peers: Peers,
        participants: Sequence[Peer],
        slots: Sequence[Tensor],
        manifest: ManifestIndex,
        clock: Clock,
        pipe: RelayPipe | None,
    ) -> None:
        self.num_buckets = 0
        """Buckets that were filled so far."""
        self.num_wire_bytes = 0
        """Bytes in these buckets."""
        self._peers = peers
        peers.num_freed.clear()
        self._participants = participants
        self._slots = slots
        self._manifest = manifest
        self._clock = clock
        self._pipe = pipe
        self._max_batch = max(1, min(MAX_BATCH, len(slots) // 2))
        self._batch: list[tuple[Bucket, list[ByteRun]]] = []
        """Filled buckets that are not announced yet, with their payload for streams."""
        self._has_streams = peers.session.num_streams > 0
        self._plan = BucketPlan(peers.session.bucket_bytes)
        self._slot = 0
        """Slot of the bucket being filled."""
        self._in_slot: dict[int, int] = {}
        """Last bucket of each slot."""
        self._spans: list[Span] = []
        self._direct: dict[int, memoryview] = {}
        """Pieces of the bucket being filled that are sent from the source's memory, by index in `_spans`."""

    def add(
        self,
        index: int,
        start: int,
        codec: Codec,
        raw: Tensor,
        *,
        stays: bool,
        known: int | None = None,
        aliases: Callable[[], Iterable[int]] = tuple,
    ) -> list[int]:
        """Pack a part of a tensor into buckets; returns its leaf digests.

        `stays`: the content does not change before the sync ends. `known`: the digest of content that is a single leaf,
        if it was computed already. `aliases` is called at the end, and returns the indexes of tied tensors.
        """
        total = raw.numel()
        is_direct = self._peers.transport.is_direct and total >= DIRECT_BYTES and raw.device.type == "cpu"
        leaves: list[int] = []
        if len(self._spans) == MAX_SPANS:
            self._plan.close()
        if self._spans and self._pipe is not None and not self._has_landed(self._pipe, index, total):
            self.close()  # do not hold back verified bytes
        for piece in self._plan.place(total):
            if piece.bucket > self.num_buckets:
                self._publish()
            if not self._spans:
                self._wait_for_slot()
            if self._pipe is not None:
                end = piece.offset + piece.num_bytes
                self.wait_to_land(self._pipe, partial(self._has_landed, self._pipe, index, end), "more bytes")
            if is_direct:
                part = raw[piece.offset : piece.offset + piece.num_bytes]
                self._direct[len(self._spans)] = memory_of(part)
                with self._clock("verify_s"):
                    found = leaves_of(part)
            else:
                with self._clock("pack_s"):
                    found = self._copy(raw, piece, known)
            leaves += found
            digest = combine(found)
            self._spans.append(
                Span(index, codec, start, piece.offset, piece.bucket_offset, piece.num_bytes, total, digest)
            )
        for alias in aliases():  # in the last bucket of the tensor
            self._spans.append(Span(alias, Codec.ALIAS, 0, 0, self._plan.offset, 0, 0, _NOTHING))
        if self._plan.offset == self._plan.bucket_bytes:  # full: do not wait for the next tensor
            self._publish()
            self._plan.close()
        if is_direct and not stays:
            self._publish()
            self._plan.close()
            self.flush()
            with self._clock("wire_s"):
                self._peers.wait_for_streams(self._participants)
        is_cut_into_leaves = total <= self._plan.bucket_bytes or self._plan.bucket_bytes % LEAF_BYTES == 0
        return leaves if is_cut_into_leaves else leaves_of(raw)

    def _copy(self, raw: Tensor, piece: Placement, known: int | None) -> list[int]:
        """Copy a piece into the slot; returns its leaf digests."""
        slot = self._slots[self._slot]
        if known is None or piece.num_bytes < raw.numel():
            return pack_leaves(raw, piece.offset, slot, piece.bucket_offset, piece.num_bytes)
        slot[piece.bucket_offset : piece.bucket_offset + piece.num_bytes].copy_(raw)
        if slot.is_cuda:  # the copy is asynchronous, and no digest waits for it
            torch.cuda.current_stream(slot.device).synchronize()
        return [known]

    def close(self) -> None:
        """Close the bucket being filled, and announce all buckets."""
        self._publish()
        self._plan.close()
        self.flush()

    def flush(self) -> None:
        """Announce filled buckets, after the specs that a receiver does not know yet."""
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
        self.flush()
        with self._clock("wire_s"):
            self._peers.wait_for_all(self._participants, is_done, doing)

    def wait_to_land(self, pipe: RelayPipe, is_there: Callable[[], bool], what: str) -> None:
        """Wait until a relay has the bytes to send on."""
        if not is_there():
            self.flush()
        with self._clock("export_s"):
            self._peers.wait_for_news(self._participants, pipe.news, is_there, what)

    def _has_landed(self, pipe: RelayPipe, index: int, num_bytes: int) -> bool:
        return pipe.num_landed(self._manifest.specs[index]) >= num_bytes

    def _publish(self) -> None:
        """Close the filled bucket; announce it with earlier ones once they are a batch."""
        if not self._spans:
            return
        sequence, slot, last = self.num_buckets, self._slot, self._spans[-1]
        bucket = Bucket(sequence, slot, aligned(last.bucket_offset + last.num_bytes), tuple(self._spans))
        self._batch.append((bucket, self._payload(slot, bucket.used_bytes) if self._has_streams else []))
        self.num_wire_bytes += bucket.used_bytes
        self.num_buckets += 1
        self._spans = []
        self._direct = {}
        if len(self._batch) >= self._batch_size():
            self.flush()

    def _batch_size(self) -> int:
        """Current batch size: grows with the sync, and faster with many receivers."""
        return min(self._max_batch, 1 + self.num_buckets * len(self._participants) // BATCH_SHARE)

    def _payload(self, slot: int, used_bytes: int) -> list[ByteRun]:
        """Byte runs of a bucket for streams, in order, from the slot or the source's memory."""
        runs: list[ByteRun] = []
        packed = 0
        for i, view in self._direct.items():
            span = self._spans[i]
            end = span.bucket_offset + span.num_bytes
            runs += [
                ByteRun(span.bucket_offset - packed, slot, packed),
                ByteRun(view.nbytes, view=view),
                ByteRun(aligned(end) - end, view=_FILLING[: aligned(end) - end]),
            ]
            packed = aligned(end)
        return [run for run in (*runs, ByteRun(used_bytes - packed, slot, packed)) if run.num_bytes]

    def _wait_for_slot(self) -> None:
        """Choose a slot that all receivers have freed for the next bucket."""
        while (slot := self._free_slot()) is None:
            if self._is_anyone_idle():
                self.flush()
            self._wait_for_free(set(self._in_slot.values()) - {bucket.sequence for bucket, _ in self._batch})
        self._slot = slot
        self._in_slot[self._slot] = self.num_buckets

    def _wait_for_free(self, in_use: set[int]) -> None:
        """Wait until one of these buckets is free, or a receiver is idle while filled buckets are unannounced."""
        with self._clock("wire_s"):
            self._peers.wait_until(
                self._participants,
                lambda: self._free_slot() is not None or self._is_anyone_idle(),
                lambda peer: not peer.freed.issuperset(in_use),
                f"take the tensors of bucket {min(in_use)}",
            )

    def _is_anyone_idle(self) -> bool:
        """Whether buckets are unannounced and a receiver may be idle (it may hold those announced to it)."""
        return bool(self._batch) and any(peer.num_sent - len(peer.freed) < NUM_SLOTS for peer in self._participants)

    def _free_slot(self) -> int | None:
        num_freed, num_peers = self._peers.num_freed, len(self._participants)
        for slot in range(min(len(self._slots), max(NUM_SLOTS, 2 * self._batch_size()))):
            sequence = self._in_slot.get(slot)
            if sequence is None or num_freed[sequence] == num_peers:
                return slot
        return None
