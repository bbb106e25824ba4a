"""One sync as the sender drives it: pack, publish, stage, commit. Knows no names and no threads."""

from __future__ import annotations

import struct
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import rl_csrc
from rl_ckpt._link import Deadline
from rl_ckpt._plan import BucketPlan, Span, aligned
from rl_ckpt._tensors import TensorSpec, as_bytes, spec_of
from rl_ckpt._wire import Begin, Bucket, Commit, Manifest, Seal
from rl_ckpt.errors import DigestError, SyncAbortedError, TensorError
from rl_ckpt.types import Receipt, SyncReport

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from torch import Tensor

    from rl_ckpt._peers import Peer, Peers

MANIFEST_CHUNK = 4096
"""Most tensors in one Manifest message."""


def tree_digest(bucket_digests: Sequence[int]) -> int:
    """64-bit digest over the digests of the buckets of one sync, in order."""
    return rl_csrc.digest(struct.pack(f"<{len(bucket_digests)}Q", *bucket_digests))


@dataclass(slots=True)
class Clock:
    """Where the time of a sync went, seconds. `with clock("pack_s"): ...` adds to a field."""

    export_s: float = 0.0
    pack_s: float = 0.0
    wire_s: float = 0.0
    verify_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        """Add the time spent inside to the field `name`."""
        since = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - since)


class Source:
    """The caller's weights, taken one by one."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], clock: Clock) -> None:
        self._iterator = iter(weights)
        self._clock = clock
        self._is_over = False

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        with self._clock("export_s"):
            try:
                return next(self._iterator)
            except BaseException:
                self._is_over = True
                raise

    def drain(self) -> None:
        """Take what is left: the other ranks of a collective export wait for this one at every tensor."""
        if not self._is_over:
            for _ in self:
                pass


class Schema:
    """The manifest of a session: every tensor of any sync so far, in the order of first appearance."""

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []
        self._index: dict[TensorSpec, int] = {}

    def index(self, spec: TensorSpec) -> int:
        """The number of a tensor, a new one if it is new."""
        if spec not in self._index:
            self._index[spec] = len(self.specs)
            self.specs.append(spec)
        return self._index[spec]


class Sync:
    """One version on its way to the receivers that take part.

    Errors of `stream` and `stage` mean that nothing is committed. After `stage` the decision stands, and `commit`
    raises nothing.
    """

    def __init__(
        self,
        *,
        version: int,
        peers: Peers,
        participants: Sequence[Peer],
        slots: Sequence[Tensor],
        schema: Schema,
        clock: Clock,
    ) -> None:
        self._version = version
        self._peers = peers
        self._participants = participants
        self._slots = slots
        self._schema = schema
        self._clock = clock
        self._plan = BucketPlan(peers.session.bucket_bytes)
        self._spans: list[Span] = []
        self._digests: list[int] = []
        self._names: set[str] = set()
        self._num_bytes = 0

    def stream(self, source: Source) -> None:
        """Send every tensor of the source, bucket by bucket."""
        for peer in self._participants:
            self._peers.send(peer, Begin(self._version))
        for name, tensor in source:
            self._pack(spec_of(name, tensor), tensor)
        if not self._names:
            raise TensorError("the source yielded no tensor; an iterator that was drained before yields none")
        self._publish()

    def stage(self) -> None:
        """Wait until every receiver holds all of it, and compare what each attests."""
        digest = tree_digest(self._digests)
        for peer in self._participants:
            self._peers.send(peer, Seal(len(self._digests), len(self._names), self._num_bytes, digest))
        self._wait(lambda peer: peer.staged is not None, "take every tensor")
        for peer in self._participants:
            staged = peer.staged
            if staged is None or (staged.version, staged.digest, staged.num_tensors) != (
                self._version,
                digest,
                len(self._names),
            ):
                raise DigestError(
                    f"{peer.name} attests {staged}; sent were {len(self._names)} tensors with digest {digest}"
                )

    def commit(self) -> SyncReport:
        """Tell every receiver, without waiting, that the version is in force; then wait for their confirmations."""
        for peer in self._participants:
            if peer.error is None and not peer.link.try_send(Commit(self._version), peer.sync):
                self._peers.drop(peer)
        with self._clock("wire_s"):
            self._confirm()
        clock = self._clock
        digest = tree_digest(self._digests)
        return SyncReport(
            version=self._version,
            num_tensors=len(self._names),
            num_bytes=self._num_bytes,
            export_s=clock.export_s,
            pack_s=clock.pack_s,
            wire_s=clock.wire_s,
            verify_s=clock.verify_s,
            wall_s=time.perf_counter() - clock.started,
            receipts=tuple(
                Receipt(peer=peer.name, version=self._version, digest=digest, num_tensors=len(self._names))
                for peer in self._participants
                if peer.is_committed
            ),
            lost=tuple(peer.name for peer in self._participants if not peer.is_committed),
        )

    def _pack(self, spec: TensorSpec, tensor: Tensor) -> None:
        if spec.name in self._names:
            raise TensorError(f"the source yielded {spec.name!r} twice; names must differ")
        self._names.add(spec.name)
        self._num_bytes += spec.num_bytes
        with self._clock("pack_s"):
            raw = as_bytes(tensor)
        for bucket, span in self._plan.place(self._schema.index(spec), spec.num_bytes):
            if bucket > len(self._digests):
                self._publish()
            if not self._spans:
                self._wait_for_slot(bucket)
            with self._clock("pack_s"):
                self._copy(raw, span, self._slots[bucket % len(self._slots)])
            self._spans.append(span)

    @staticmethod
    def _copy(raw: Tensor, span: Span, slot: Tensor) -> None:
        """Copy a piece and clear the gap behind it, so that equal weights always have equal digests."""
        end = span.bucket_offset + span.num_bytes
        slot[span.bucket_offset : end].copy_(raw[span.tensor_offset : span.tensor_offset + span.num_bytes])
        slot[end : aligned(end)].zero_()

    def _publish(self) -> None:
        """Digest the bucket that is filled and announce it, after the tensors that a receiver does not know yet."""
        sequence = len(self._digests)
        last = self._spans[-1]
        used_bytes = aligned(last.bucket_offset + last.num_bytes)
        slot = sequence % len(self._slots)
        with self._clock("verify_s"):
            digest = rl_csrc.digest(self._slots[slot][:used_bytes])
        bucket = Bucket(sequence, slot, used_bytes, digest, tuple(self._spans))
        with self._clock("wire_s"):
            for peer in self._participants:
                self._declare(peer)
                self._peers.send(peer, bucket)
        self._digests.append(digest)
        self._spans = []

    def _declare(self, peer: Peer) -> None:
        specs = self._schema.specs
        while peer.num_declared < len(specs) and peer.error is None:
            first = peer.num_declared
            chunk = tuple(specs[first : first + MANIFEST_CHUNK])
            self._peers.send(peer, Manifest(first, chunk))
            peer.num_declared += len(chunk)

    def _wait_for_slot(self, bucket: int) -> None:
        needed = bucket - len(self._slots) + 1
        self._wait(lambda peer: peer.num_freed >= needed, f"take the tensors of bucket {max(0, needed - 1)}")

    def _wait(self, is_done: Callable[[Peer], bool], doing: str) -> None:
        with self._clock("wire_s"):
            self._peers.wait_for_all(self._participants, is_done, doing)

    def _confirm(self) -> None:
        deadline = Deadline(self._peers.timeout_s)
        try:
            while any(not peer.is_committed and peer.error is None for peer in self._participants):
                if not self._peers.pump(deadline):
                    break
        except SyncAbortedError:
            pass  # cancelled or closed while waiting: the commit stands, and who did not confirm is reported as lost
        for peer in self._participants:
            if not peer.is_committed:
                self._peers.drop(peer)
