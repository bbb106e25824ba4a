"""`Unpacker`: verifies the buckets of one sync and yields their tensors, or writes them to targets. No sockets.

Each piece of a bucket is verified before its tensor is yielded. A tensor that came in one piece is a view of the slot;
one that came in several is assembled in scratch memory, or directly in the consumer's target.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from rl_ckpt.errors import DigestError, ProtocolError, TensorError
from rl_ckpt.tensors import delta
from rl_ckpt.tensors.buckets import ALIGNMENT_BYTES, Codec, Span
from rl_ckpt.tensors.digest import LEAF_BYTES, combine, leaves_of, model_digest, unpack_leaves
from rl_ckpt.tensors.spec import TensorSpec, as_bytes, dense, from_bytes, is_plain_on, memory_key, require_memory
from rl_csrc.buffers.bucket import aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from rl_ckpt.protocol.messages import Bucket
    from rl_ckpt.receiver.slots import HeldBuckets
    from rl_ckpt.receiver.staging import Staging
    from rl_ckpt.transports.streams import UnpackedPiece
    from rl_ckpt.types import ReceiverState


@dataclass(slots=True, eq=False)
class Unpacker:
    """Receive state of one sync: verified tensors, digests and progress."""

    version: int
    """Version that is being received."""
    previous: ReceiverState
    """State to return to if the sync is aborted before the consumer got anything."""
    sender: str
    """Name of the sender, for messages."""
    bucket_bytes: int
    """Size of a full bucket, bytes."""
    specs: Sequence[TensorSpec]
    """Manifest, which grows during the sync."""
    scratch: Scratch
    """Scratch memory of the session."""
    held_buckets: HeldBuckets
    """Buckets that the consumer still uses."""
    has_base: bool
    """Whether deltas are allowed."""
    targets: Mapping[str, Tensor] | None
    """Tensors to write to, of the consumer or staging memory; None: the consumer iterates."""
    staging: Staging | None = None
    """Staging memory that receives the whole version before the consumer's tensors change."""
    is_called_off: bool = False
    """Whether the sender aborted the version after the vote."""
    verify_s: float = 0.0
    """Time spent verifying bytes, and copying them in the same pass, seconds."""
    install_s: float = 0.0
    """Time spent installing verified bytes, including the consumer's own, seconds."""
    num_buckets: int = 0
    """Verified buckets."""
    num_bytes: int = 0
    """Size of the verified tensors, bytes."""
    digests: dict[TensorSpec, int] = field(default_factory=dict[TensorSpec, int])
    """Digests of the complete tensors, computed here."""
    is_touched: bool = False
    """Whether the consumer got any tensor, or a target was written."""
    is_over: bool = False
    """Whether the sync was committed or aborted."""
    _names: set[str] = field(default_factory=set[str])
    begun: deque[_Begun] = field(default_factory=deque["_Begun"])
    """Buckets that were begun and are not finished."""
    _partial: Span | None = None
    """Last piece of a tensor that is incomplete, of the buckets that were begun."""
    _landed: Span | None = None
    """The same of those that are finished."""
    _pieces: list[int] = field(default_factory=list[int])
    """Leaf digests of the pieces of the current part."""
    _leaves: list[int] = field(default_factory=list[int])
    """Leaf digests of the complete parts of the current tensor."""
    _last: int | None = None
    """Index of the tensor completed last in the current bucket; aliases may refer to it."""
    _content: Callable[[], Tensor] | None = None
    """Content of that tensor, uint8: all of it, or its last part if it is in its target."""

    @property
    def digest(self) -> int:
        """Tree digest of all verified tensors."""
        return model_digest(self.digests.items())

    def can_begin(self, bucket: Bucket) -> bool:
        """Whether a bucket may be begun before those in front of it are finished: none of it shares scratch memory."""
        targets = self.targets
        return targets is not None and all(
            span.num_bytes == span.total_bytes
            or (span.codec == Codec.RAW and span.tensor < len(self.specs) and is_plain_on(self._target_of(span)))
            for span in bucket.spans
        )

    def begin(self, bucket: Bucket, memory: BucketSource, *, is_stop: bool = True) -> None:
        """Begin the next bucket: check what it says, and have it read, verified and unpacked.

        Raises:
            ProtocolError, TensorError: nothing of this bucket may be used.
        """
        slots, sequence = memory.slots, self.num_buckets + len(self.begun)
        if bucket.sequence != sequence or bucket.slot >= len(slots) or bucket.used_bytes > self.bucket_bytes:
            raise ProtocolError(
                f"{self.sender} sent bucket {bucket.sequence} of {bucket.used_bytes} bytes in slot {bucket.slot}; "
                f"{sequence} is due, of at most {self.bucket_bytes} in one of {len(slots)} slots"
            )
        device = slots[bucket.slot].device
        destinations = self._destinations(bucket, device, is_sender_memory=memory.is_sender_memory)
        self.is_touched = self.is_touched or any(
            destination.is_target for destination in destinations
        )  # from here on, whatever happens
        is_native = memory.begin(bucket, [destination.piece for destination in destinations], is_stop=is_stop)
        self.begun.append(_Begun(bucket, destinations, is_native))

    def finish(self, memory: BucketSource, meanwhile: Callable[[], None] = lambda: None) -> list[tuple[str, Tensor]]:
        """Finish the oldest bucket that was begun; return its complete tensors, unless they were written to targets.

        `meanwhile` is called when messages may have come during a wait.

        Raises:
            DigestError, TensorError, ProtocolError: nothing of this bucket may be used.
        """
        begun = self.begun[0]
        bucket, slot = begun.bucket, memory.slots[begun.bucket.slot]
        since = time.perf_counter()
        if not begun.is_native:
            memory.fetch(bucket)
        found = self._check(begun, slot, memory, meanwhile)
        checked = time.perf_counter()
        self.begun.popleft()
        self.num_buckets += 1
        items: list[tuple[str, Tensor]] = []
        for destination, leaves in zip(begun.destinations, found, strict=True):
            self._pieces += leaves
            if destination.span.is_last:
                self._complete(destination, partial(destination.content_in, slot), items)
        last = bucket.spans[-1] if bucket.spans else None
        self._landed = None if last is None or _is_whole(last, self.specs[last.tensor]) else last
        self._content = None
        self.is_touched = self.is_touched or bool(items)
        self.verify_s += 0.0 if begun.is_native else checked - since
        self.install_s += time.perf_counter() - checked
        return items

    def unpack(self, bucket: Bucket, memory: BucketSource) -> list[tuple[str, Tensor]]:
        """Begin a bucket and finish it."""
        self.begin(bucket, memory)
        return self.finish(memory)

    def begin_mapped(self, sequence: int, specs: Sequence[TensorSpec]) -> list[Tensor] | None:
        """Count a bucket of whole tensors that are read from the sender's memory; returns their targets, if any.

        Raises:
            ProtocolError, TensorError: it is out of order, repeats a tensor, or does not match the targets.
        """
        if sequence != self.num_buckets or self._partial is not None:
            raise ProtocolError(f"{self.sender} sent mapped tensors as bucket {sequence}; {self.num_buckets} is due")
        for spec in specs:
            if spec.name in self._names:
                raise ProtocolError(f"{self.sender} sent {spec.name!r} twice")
            self._names.add(spec.name)
        targets = None if self.targets is None else [self._target(spec) for spec in specs]
        self.num_buckets += 1
        self.num_bytes += sum(spec.num_bytes for spec in specs)
        self.is_touched = True
        return targets

    def progress(self) -> tuple[TensorSpec, int] | None:
        """Incomplete tensor, and how many of its bytes are verified and written to its target."""
        span = self._landed
        if span is None or self.targets is None:
            return None
        spec = self.specs[span.tensor]
        if not is_plain_on(self._target(spec)):
            return None
        if span.codec == Codec.RAW:
            return spec, span.start + span.offset + span.num_bytes
        return spec, end_of(span, spec) if span.is_last else span.start

    def missing(self) -> list[str]:
        """Names of targets that were not received."""
        return [] if self.targets is None else [name for name in self.targets if name not in self._names]

    def is_whole(self) -> bool:
        """Whether no tensor is incomplete."""
        return self._partial is None

    def _destinations(self, bucket: Bucket, device: torch.device, *, is_sender_memory: bool) -> list[Destination]:
        destinations: list[Destination] = []
        end = 0
        self._last = None
        for span in bucket.spans:
            if span.tensor >= len(self.specs):
                raise ProtocolError(f"{self.sender} sent tensor {span.tensor}; it has declared {len(self.specs)}")
            spec = self.specs[span.tensor]
            if span.bucket_offset != end or end + span.num_bytes > bucket.used_bytes or not self._follows(span, spec):
                raise ProtocolError(f"{self.sender} sent {span} of {spec}, which does not fit after what came before")
            end = aligned(span.bucket_offset + span.num_bytes)
            is_whole = _is_whole(span, spec)
            self._partial = None if is_whole else span
            destinations.append(self._choose(span, spec, device, is_sender_memory=is_sender_memory))
            if is_whole:
                self._names.add(spec.name)
                self._last = span.tensor if spec.alias_of is None else spec.alias_of
        if end != bucket.used_bytes:
            raise ProtocolError(f"{self.sender} sent a bucket of {bucket.used_bytes} bytes with spans for {end}")
        return destinations

    def _follows(self, span: Span, spec: TensorSpec) -> bool:
        """Whether the span continues the incomplete tensor, or begins a new one."""
        before = self._partial
        if not self._is_sized(span, spec) or span.num_bytes > span.total_bytes - span.offset:
            return False
        if span.bucket_offset % ALIGNMENT_BYTES:
            return False
        if span.num_bytes < span.total_bytes and (span.num_bytes == 0 or span.bucket_offset):
            return False
        if spec.alias_of is not None or span.codec == Codec.ALIAS:
            return before is None and self._is_alias(span, spec)
        if before is None:
            return span.start == span.offset == 0 and spec.name not in self._names
        if before.is_last:  # another part of the same tensor
            return (span.tensor, span.start, span.offset) == (before.tensor, end_of(before, spec), 0)
        return (span.tensor, span.codec, span.start, span.total_bytes, span.offset) == (
            before.tensor,
            before.codec,
            before.start,
            before.total_bytes,
            before.offset + before.num_bytes,
        )

    def _is_alias(self, span: Span, spec: TensorSpec) -> bool:
        """Whether the span is a valid alias of the tensor completed last."""
        if spec.alias_of is None or spec.alias_of != self._last or spec.name in self._names:
            return False
        first = self.specs[spec.alias_of]
        is_empty = span.codec == Codec.ALIAS and span.start == span.offset == 0
        return is_empty and (first.dtype, first.shape) == (spec.dtype, spec.shape)

    def _is_sized(self, span: Span, spec: TensorSpec) -> bool:
        """Whether a part of this tensor can have the length of the span."""
        if span.codec == Codec.RAW and span.start == 0 and span.total_bytes == spec.num_bytes:
            return True
        if span.codec == Codec.ALIAS:
            return span.total_bytes == 0
        if not self.has_base or span.start % LEAF_BYTES or span.start >= max(1, spec.num_bytes):
            return False
        num_bytes = leaf_bytes(span, spec)
        if span.codec == Codec.RAW:
            return span.total_bytes == num_bytes
        return span.codec in (Codec.DELTA, Codec.DELTA_ZSTD) and 0 < span.total_bytes < num_bytes

    def _target_of(self, span: Span) -> Tensor:
        return self._target(self.specs[span.tensor])

    def _choose(self, span: Span, spec: TensorSpec, device: torch.device, *, is_sender_memory: bool) -> Destination:
        """Destination of a piece: target, scratch memory, new memory or the slot."""
        is_whole = span.num_bytes == span.total_bytes
        target = None if self.targets is None else self._target(spec)
        if span.codec == Codec.RAW and target is not None and is_plain_on(target, device):
            return Destination(span, spec, dense(target), start=span.start, is_target=True)
        if span.codec == Codec.RAW and span.total_bytes < spec.num_bytes:
            raise ProtocolError(f"{self.sender} sent a leaf of {spec.name!r}, which this end did not ask for")
        if is_sender_memory and is_whole and self.targets is None:
            return Destination(span, spec, torch.empty(span.total_bytes, dtype=torch.uint8, device=device))
        return Destination(span, spec, None if is_whole else self.scratch.get(span.total_bytes, device))

    def _target(self, spec: TensorSpec) -> Tensor:
        targets = self.targets or {}
        if spec.name not in targets:
            raise TensorError(f"{spec.name!r} came, and the consumer has no tensor of that name to receive it into")
        target = targets[spec.name]
        if (target.dtype, tuple(target.shape)) != (spec.dtype, spec.shape):
            raise TensorError(
                f"{spec.name!r} came as {spec.dtype} {list(spec.shape)}; "
                f"the consumer's tensor is {target.dtype} {list(target.shape)}"
            )
        require_memory(spec.name, target)
        return target

    def _check(
        self, begun: _Begun, slot: Tensor, memory: BucketSource, meanwhile: Callable[[], None]
    ) -> list[list[int]]:
        """Verify a bucket, unpacking it if that was not done natively; returns leaf digests."""
        destinations = begun.destinations
        found = memory.finish(meanwhile) if begun.is_native else _bring(destinations, slot)
        wrong = _differing(destinations, found)
        if wrong is not None and memory.refresh(begun.bucket.slot):
            found = _bring(destinations, slot)
            wrong = _differing(destinations, found)
        if begun.is_native:
            torch.autograd.graph.increment_version([each.content for each in destinations if each.content is not None])
        if wrong is not None:
            span = destinations[wrong].span
            raise DigestError(
                f"bucket {begun.bucket.sequence} of version {self.version} landed with digest "
                f"{combine(found[wrong]):#018x} for {span.num_bytes} bytes of {destinations[wrong].spec.name!r}; "
                f"{self.sender} sent {span.digest:#018x}. None of its tensors is handed out"
            )
        return found

    def _complete(
        self, destination: Destination, contents: Callable[[], Tensor], items: list[tuple[str, Tensor]]
    ) -> None:
        """Finish a complete part: apply a delta, record digests, yield or copy the tensor."""
        span, spec = destination.span, destination.spec
        if span.codec == Codec.ALIAS:
            self._pieces = []
            self._copy_alias(spec, items)
            return
        if span.codec == Codec.RAW:
            is_cut_into_leaves = span.num_bytes == span.total_bytes or self.bucket_bytes % LEAF_BYTES == 0
            self._leaves += self._pieces if is_cut_into_leaves else leaves_of(contents())
        else:
            self._leaves.append(self._apply(contents(), span, spec))
        self._pieces = []
        if end_of(span, spec) < spec.num_bytes:
            return
        self.num_bytes += spec.num_bytes
        self.digests[spec], self._leaves = combine(self._leaves), []
        self._content = contents
        if self.targets is None:
            items.append((spec.name, from_bytes(contents(), spec)))
        elif span.codec == Codec.RAW and not destination.is_target:
            self.is_touched = True
            content = contents()
            self._target(spec).detach().copy_(from_bytes(content, spec))
            if content.is_cuda:  # the copy is asynchronous, and the sender may refill the slot after this
                torch.cuda.current_stream(content.device).synchronize()

    def _copy_alias(self, spec: TensorSpec, items: list[tuple[str, Tensor]]) -> None:
        """Copy an alias (tied tensor) from its original, which was just completed."""
        if spec.alias_of is None or self._content is None:
            raise ProtocolError(f"{self.sender} tied {spec.name!r} to nothing")
        content = self._content()
        first = self.specs[spec.alias_of]
        digest = self.digests[spec] = self.digests[first]
        self.num_bytes += spec.num_bytes
        if self.targets is None:
            items.append((spec.name, from_bytes(content, spec)))
            return
        target, source = self._target(spec), self._target(first)
        if memory_key(target) == memory_key(source):
            return
        if is_plain_on(source, content.device):
            content = as_bytes(source)
        self.is_touched = True
        if not is_plain_on(target, content.device):
            target.detach().copy_(from_bytes(content, spec))
            if content.is_cuda:
                torch.cuda.current_stream(content.device).synchronize()
        elif combine(unpack_leaves(content, [(as_bytes(target), 0, 0, spec.num_bytes)])[0]) != digest:
            raise DigestError(
                f"{first.name!r} of version {self.version} has other contents than landed for it, when they are to be "
                f"those of {spec.name!r} as well: something else writes to it, or their targets share memory"
            )

    def _apply(self, content: Tensor, span: Span, spec: TensorSpec) -> int:
        """Apply a delta to a leaf; returns the digest of the new leaf, read back from the target."""
        target = self._target(spec) if self.targets is not None else None
        if target is None or not is_plain_on(target):
            raise ProtocolError(f"{self.sender} sent {spec.name!r} as a difference, which this end did not ask for")
        leaf = as_bytes(target)[span.start : end_of(span, spec)]
        self.is_touched = True
        if span.codec == Codec.DELTA_ZSTD:
            content = delta.decompress(content, leaf.numel(), spec.name)
        return delta.apply(content, leaf, spec)


def _is_whole(span: Span, spec: TensorSpec) -> bool:
    """Whether a span completes its tensor."""
    return span.is_last and end_of(span, spec) == spec.num_bytes


def _bring(destinations: Sequence[Destination], slot: Tensor) -> list[list[int]]:
    """Copy pieces from the slot to their destinations; returns their leaf digests."""
    pieces = [
        (as_bytes(content), start, bucket_offset, num_bytes)
        for content, start, bucket_offset, num_bytes in (destination.piece for destination in destinations)
        if content is not None
    ]
    copied = iter(unpack_leaves(slot, pieces) if pieces else ())
    return [
        leaves_of(destination.content_in(slot)) if destination.content is None else next(copied)
        for destination in destinations
    ]


def _differing(destinations: Sequence[Destination], found: Sequence[list[int]]) -> int | None:
    """Index of the first piece whose digest differs from the sender's; None if all match."""
    digests = enumerate(zip(destinations, found, strict=True))
    return next((i for i, (destination, leaves) in digests if combine(leaves) != destination.span.digest), None)


class BucketSource(Protocol):
    """Source of bucket bytes: slots, or streams that fill them."""

    slots: Sequence[Tensor]
    """uint8 [bucket_bytes] each."""
    is_sender_memory: bool
    """Whether the slots are writable memory of the sender: tensors in them are not yielded as views."""

    def begin(self, bucket: Bucket, pieces: Sequence[UnpackedPiece], *, is_stop: bool) -> bool:
        """Have a native thread read, verify and unpack a bucket, after earlier ones. False: the caller does.

        `is_stop`: `finish` waits for it, and those in front of it, together.
        """
        ...

    def finish(self, meanwhile: Callable[[], None]) -> list[list[int]]:
        """Leaf digests of the pieces of the oldest bucket that was begun; `meanwhile` may begin others."""
        ...

    def fetch(self, bucket: Bucket) -> None:
        """Bring a bucket into its slot, for a caller that unpacks it."""
        ...

    def refresh(self, slot: int) -> bool:
        """Discard this process's private writes to a slot; False if there can be none."""
        ...


@dataclass(slots=True)
class Scratch:
    """Scratch memory for tensors that arrive in several pieces, reused from one to the next."""

    _memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def get(self, num_bytes: int, device: torch.device) -> Tensor:
        """Scratch buffer uint8 [num_bytes], the same memory as before if it is large enough."""
        if self._memory.numel() < num_bytes or self._memory.device != device:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free it first
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._memory[:num_bytes]

    def forget(self) -> None:
        """Use new memory from now on, because the consumer holds a tensor in the present one."""
        self._memory = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Destination:
    """Destination of the piece of a span."""

    span: Span
    spec: TensorSpec
    content: Tensor | None
    """Contiguous memory of the part; None: the part is complete in the slot."""
    start: int = 0
    """Start of the part in it, bytes."""
    is_target: bool = False
    """Whether `content` is the consumer's own tensor."""

    @property
    def piece(self) -> UnpackedPiece:
        """Where the piece is in the content and in the slot."""
        span = self.span
        return self.content, self.start + span.offset, span.bucket_offset, span.num_bytes

    def content_in(self, slot: Tensor) -> Tensor:
        """Content of the part, uint8 [total_bytes]."""
        if self.content is None:
            return slot[self.span.bucket_offset : self.span.bucket_offset + self.span.num_bytes]
        return part_of(as_bytes(self.content), self.start, self.span.total_bytes)


@dataclass(frozen=True, slots=True)
class _Begun:
    """Bucket that was begun."""

    bucket: Bucket
    destinations: Sequence[Destination]
    is_native: bool


def leaf_bytes(span: Span, spec: TensorSpec) -> int:
    """Length of the leaf that a span starts in."""
    return min(LEAF_BYTES, spec.num_bytes - span.start)


def end_of(span: Span, spec: TensorSpec) -> int:
    """End of the part of a span in its tensor, bytes."""
    if span.codec == Codec.ALIAS:
        return spec.num_bytes
    return span.start + (span.total_bytes if span.codec == Codec.RAW else leaf_bytes(span, spec))


def readable_codecs() -> int:
    """Bit mask of the `Codec`s that this end can read."""
    is_unreadable = {Codec.DELTA_ZSTD} if not delta.is_installed() else set[Codec]()
    return sum(1 << codec for codec in Codec if codec not in is_unreadable)


def is_base(targets: Mapping[str, Tensor]) -> bool:
    """Whether deltas can be applied to all of these targets."""
    return all(is_plain_on(target) for target in targets.values())


def part_of(content: Tensor, start: int, num_bytes: int) -> Tensor:
    """Run of bytes of a buffer; the buffer itself if it is all of it."""
    return content if num_bytes == content.numel() else content[start : start + num_bytes]
