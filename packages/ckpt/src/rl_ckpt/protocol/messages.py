"""Control messages of WIRE.md: each class has the format of its body beside its fields. Pure; knows no socket."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

from rl_ckpt.errors import ProtocolError
from rl_ckpt.tensors.buckets import Span
from rl_ckpt.tensors.spec import DTYPE_CODES, TensorSpec
from rl_csrc.buffers.frames import DTYPES

if TYPE_CHECKING:
    from typing import Self

MAGIC = b"RLCK"
WIRE_VERSION = 5
MAX_BODY_BYTES = 1 << 26
GREETING_BYTES = 1 << 16
"""Longest body of a message of a peer that is not authenticated yet."""
MAX_NDIM = 64
NO_ALIAS = 2**32 - 1
"""Stands for "none" where a manifest says of which tensor another is an alias."""
NO_VERSION = 2**64 - 1
"""Stands for "none" where a version is expected."""
NONCE_BYTES = 16
PROOF_BYTES = 32
HANDLE_BYTES = 64
"""Of what another process maps memory by."""

HEADER = struct.Struct("<4sHHIII")
_CHECKED_BYTES = 16
"""Bytes of the header that its last field, the CRC, covers after the body."""


class AbortReason(IntEnum):
    """Why an end called a sync off; the code in `Abort`."""

    FAILED = 1
    """Its caller failed, stopped or was cancelled."""
    DIGEST = 2
    """The bytes that arrived are not those that were sent."""
    PROTOCOL = 3
    """A peer broke the protocol."""
    TIMEOUT = 4
    """A peer did not answer in time."""
    PEER_LOST = 5
    """A peer went away."""


class HelloRole(IntEnum):
    """Role of the end that says hello."""

    SENDER = 1
    RECEIVER = 2


class Message:
    """Base of the messages. A body is `LAYOUT`, the fields in order; classes with more to it override both methods."""

    KIND: ClassVar[int]
    LAYOUT: ClassVar[struct.Struct]
    __match_args__: ClassVar[tuple[str, ...]]
    """Names of the fields, which a dataclass sets."""

    def to_body(self) -> bytes:
        """The body as bytes; raises `struct.error` or `ValueError` where a field does not fit."""
        return self.LAYOUT.pack(*(getattr(self, name) for name in self.__match_args__))

    @classmethod
    def from_body(cls, body: bytes) -> Self:
        """The message of a body; raises `struct.error` or `ValueError` where it is none."""
        return cls(*cls.LAYOUT.unpack(body))


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """First message in each direction."""

    KIND = 1
    LAYOUT = struct.Struct(f"<HHI{NONCE_BYTES}s")
    wire_version: int
    role: int
    pid: int
    nonce: bytes = bytes(NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class Session(Message):
    """Sender to receiver: the ring, or the streams in its place. A shared ring's descriptor comes with it."""

    KIND = 2
    LAYOUT = struct.Struct("<QIIQ")
    bucket_bytes: int
    num_slots: int
    num_streams: int = 0
    ticket: int = 0
    memory: bytes = b""
    """To the end of the body: what the transport tells a receiver of its memory."""

    def to_body(self) -> bytes:
        """Head and memory."""
        return self.LAYOUT.pack(self.bucket_bytes, self.num_slots, self.num_streams, self.ticket) + self.memory

    @classmethod
    def from_body(cls, body: bytes) -> Self:
        """Head and memory."""
        bucket_bytes, num_slots, num_streams, ticket = cls.LAYOUT.unpack_from(body)
        return cls(bucket_bytes, num_slots, num_streams, ticket, body[cls.LAYOUT.size :])


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """Receiver to sender: a consumer waits for the next sync, under this header's sync number."""

    KIND = 3
    LAYOUT = struct.Struct("<QQQII")
    held: int = NO_VERSION
    version: int = NO_VERSION
    digest: int = 0
    opened: int = 0
    codecs: int = 0


@dataclass(frozen=True, slots=True)
class Begin(Message):
    """Sender to receiver: the sync starts; differences in it are from version `base`."""

    KIND = 4
    LAYOUT = struct.Struct("<QQ")
    version: int
    base: int = NO_VERSION


@dataclass(frozen=True, slots=True)
class Manifest(Message):
    """Sender to receiver: tensors `first`, `first + 1`, ... of this connection, named once, then known by index."""

    KIND = 5
    LAYOUT = struct.Struct("<II")
    ENTRY = struct.Struct("<BBHI")
    first: int
    specs: tuple[TensorSpec, ...]

    def to_body(self) -> bytes:
        """Head and entries."""
        parts = [self.LAYOUT.pack(self.first, len(self.specs))]
        for spec in self.specs:
            name = spec.name.encode()
            alias_of = NO_ALIAS if spec.alias_of is None else spec.alias_of
            parts.append(self.ENTRY.pack(DTYPE_CODES[spec.dtype], len(spec.shape), len(name), alias_of))
            parts.append(struct.pack(f"<{len(spec.shape)}Q", *spec.shape) + name)
        return b"".join(parts)

    @classmethod
    def from_body(cls, body: bytes) -> Self:
        """Head and entries."""
        first, count = cls.LAYOUT.unpack_from(body)
        at = cls.LAYOUT.size
        specs: list[TensorSpec] = []
        for index in range(first, first + count):
            code, ndim, name_bytes, alias_of = cls.ENTRY.unpack_from(body, at)
            if not 1 <= code <= len(DTYPES) or ndim > MAX_NDIM:
                raise ValueError(f"tensor {index} has dtype code {code} and {ndim} axes")
            if index <= alias_of != NO_ALIAS:
                raise ValueError(f"tensor {index} is an alias of {alias_of}, which does not come before it")
            at += cls.ENTRY.size
            shape = struct.unpack_from(f"<{ndim}Q", body, at)
            at += 8 * ndim
            if at + name_bytes > len(body):
                raise ValueError(f"the name of tensor {index} runs over the end")
            specs.append(
                TensorSpec(
                    name=body[at : at + name_bytes].decode(),
                    dtype=DTYPES[code - 1],
                    shape=shape,
                    alias_of=None if alias_of == NO_ALIAS else alias_of,
                )
            )
            at += name_bytes
        if at != len(body):
            raise ValueError(f"{len(body) - at} bytes are left over")
        return cls(first, tuple(specs))


@dataclass(frozen=True, slots=True)
class Bucket:
    """A filled slot, as `Buckets` announces it."""

    sequence: int
    slot: int
    used_bytes: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Buckets(Message):
    """Sender to receiver: slots that are filled, or whose payload is being sent."""

    KIND = 6
    LAYOUT = struct.Struct("<II")
    BUCKET = struct.Struct("<IIQII")
    SPAN = struct.Struct("<IIQQQQQQ")
    buckets: tuple[Bucket, ...]

    def to_body(self) -> bytes:
        """Head, then each bucket and its spans."""
        parts = [self.LAYOUT.pack(len(self.buckets), 0)]
        for bucket in self.buckets:
            parts.append(self.BUCKET.pack(bucket.sequence, bucket.slot, bucket.used_bytes, len(bucket.spans), 0))
            parts += [self.SPAN.pack(*span) for span in bucket.spans]
        return b"".join(parts)

    @classmethod
    def from_body(cls, body: bytes) -> Self:
        """Head, then each bucket and its spans."""
        count, _ = cls.LAYOUT.unpack_from(body)
        at = cls.LAYOUT.size
        buckets: list[Bucket] = []
        for _ in range(count):
            sequence, slot, used_bytes, num_spans, _ = cls.BUCKET.unpack_from(body, at)
            at += cls.BUCKET.size
            end = at + num_spans * cls.SPAN.size
            if end > len(body):
                raise ValueError(f"{num_spans} spans do not fit it")
            spans = tuple(Span._make(values) for values in cls.SPAN.iter_unpack(body[at:end]))
            buckets.append(Bucket(sequence, slot, used_bytes, spans))
            at = end
        if at != len(body) or not buckets:
            raise ValueError(f"{len(buckets)} buckets end at byte {at}")
        return cls(tuple(buckets))


@dataclass(frozen=True, slots=True)
class Free(Message):
    """Receiver to sender: the consumer is done with these buckets."""

    KIND = 7
    LAYOUT = struct.Struct("<")
    sequences: tuple[int, ...]
    """To the end of the body, u32 each."""

    def to_body(self) -> bytes:
        """The numbers, one after the other."""
        return struct.pack(f"<{len(self.sequences)}I", *self.sequences)

    @classmethod
    def from_body(cls, body: bytes) -> Self:
        """The numbers, one after the other."""
        if not body:
            raise ValueError("no bucket is named")
        return cls(struct.unpack(f"<{len(body) // 4}I", body))


@dataclass(frozen=True, slots=True)
class Seal(Message):
    """Sender to receiver: the totals of the sync; no more buckets come."""

    KIND = 8
    LAYOUT = struct.Struct("<IIQQ")
    num_buckets: int
    num_tensors: int
    num_bytes: int
    digest: int


@dataclass(frozen=True, slots=True)
class Staged(Message):
    """Receiver to sender, its vote: everything arrived, was verified and was taken by the consumer."""

    KIND = 9
    LAYOUT = struct.Struct("<QQIIQIIQQ")
    version: int
    digest: int
    num_tensors: int
    is_attested: int = 0
    held_digest: int = 0
    num_bound: int = 0
    num_expected: int = 0
    verify_ns: int = 0
    install_ns: int = 0


@dataclass(frozen=True, slots=True)
class Commit(Message):
    """Sender to receiver: all receivers voted; the version is committed."""

    KIND = 10
    LAYOUT = struct.Struct("<Q")
    version: int


@dataclass(frozen=True, slots=True)
class Committed(Message):
    """Receiver to sender: the commit arrived."""

    KIND = 11
    LAYOUT = struct.Struct("<Q")
    version: int


@dataclass(frozen=True, slots=True)
class Abort(Message):
    """Either way: the sync is off."""

    KIND = 12
    LAYOUT = struct.Struct("<HH")
    reason: AbortReason
    text: str

    def to_body(self) -> bytes:
        """Head and text."""
        return self.LAYOUT.pack(self.reason, 0) + self.text.encode()

    @classmethod
    def from_body(cls, body: bytes) -> Self:
        """Head and text."""
        reason, _ = cls.LAYOUT.unpack_from(body)
        return cls(AbortReason(reason), body[cls.LAYOUT.size :].decode())


@dataclass(frozen=True, slots=True)
class Proof(Message):
    """Either way, where the session has a token: proof that this end knows it."""

    KIND = 13
    LAYOUT = struct.Struct(f"<{PROOF_BYTES}s")
    mac: bytes


@dataclass(frozen=True, slots=True)
class Stream(Message):
    """Receiver to sender, alone on a connection of its own: payload of the session with this ticket goes here."""

    KIND = 14
    LAYOUT = struct.Struct("<QII")
    ticket: int
    index: int
    opened: int


@dataclass(frozen=True, slots=True)
class NewGroup(Message):
    """Sender to receiver: join a new broadcast group as this rank; its members meet at that port of the sender's."""

    KIND = 15
    LAYOUT = struct.Struct("<IIII")
    generation: int
    rank: int
    size: int
    port: int


@dataclass(frozen=True, slots=True)
class Sources(Message):
    """Sender to receiver: memory of the sender's that a receiver can map, and where tensors lie in it."""

    KIND = 16
    LAYOUT = struct.Struct("<II")
    SEGMENT = struct.Struct(f"<{HANDLE_BYTES}sQ")
    LOCATION = struct.Struct("<IIQ")
    segments: tuple[tuple[bytes, int], ...]
    """The handle and the size of each, bytes."""
    locations: tuple[tuple[int, int, int], ...]
    """Of each tensor: its index, the segment, and where it starts in that, bytes."""

    def to_body(self) -> bytes:
        """Head, segments, locations."""
        parts = [self.LAYOUT.pack(len(self.segments), len(self.locations))]
        parts += [self.SEGMENT.pack(*segment) for segment in self.segments]
        return b"".join(parts + [self.LOCATION.pack(*location) for location in self.locations])

    @classmethod
    def from_body(cls, body: bytes) -> Self:
        """Head, segments, locations."""
        num_segments, num_locations = cls.LAYOUT.unpack_from(body)
        middle = cls.LAYOUT.size + num_segments * cls.SEGMENT.size
        if len(body) != middle + num_locations * cls.LOCATION.size:
            raise ValueError(f"{num_segments} segments and {num_locations} tensors do not fit it")
        segments = tuple((handle, size) for handle, size in cls.SEGMENT.iter_unpack(body[cls.LAYOUT.size : middle]))
        locations = tuple((index, segment, at) for index, segment, at in cls.LOCATION.iter_unpack(body[middle:]))
        return cls(segments, locations)


@dataclass(frozen=True, slots=True)
class Mapped(Message):
    """Sender to receiver: tensors that lie in its sources are ready to be read there."""

    KIND = 17
    LAYOUT = struct.Struct("<IIII")
    sequence: int
    first: int
    digests: tuple[int, ...]

    def to_body(self) -> bytes:
        """Head and digests."""
        count = len(self.digests)
        return self.LAYOUT.pack(self.sequence, self.first, count, 0) + struct.pack(f"<{count}Q", *self.digests)

    @classmethod
    def from_body(cls, body: bytes) -> Self:
        """Head and digests."""
        sequence, first, count, _ = cls.LAYOUT.unpack_from(body)
        return cls(sequence, first, struct.unpack(f"<{count}Q", body[cls.LAYOUT.size :]))


_ALL = (Hello, Session, Ready, Begin, Manifest, Buckets, Free, Seal, Staged, Commit, Committed, Abort, Proof, Stream)
KINDS: dict[int, type[Message]] = {kind.KIND: kind for kind in (*_ALL, NewGroup, Sources, Mapped)}


class Encoded:
    """A message's body, made once for all the receivers that it goes to.

    Raises:
        ProtocolError: a field does not fit the wire, for example a name of more than 65,535 bytes.
    """

    def __init__(self, message: Message) -> None:
        name = type(message).__name__
        try:
            self._body = message.to_body()
        except (struct.error, ValueError) as error:
            raise ProtocolError(f"{name} cannot be put on the wire: {error}") from error
        if len(self._body) > MAX_BODY_BYTES:
            raise ProtocolError(f"{name} has {len(self._body)} bytes; allowed are {MAX_BODY_BYTES}")
        self.message = message
        self._crc = zlib.crc32(self._body)

    def for_sync(self, sync: int) -> bytes:
        """Header and body. `sync` is the receiver's number of the sync, 0 outside of one."""
        kind, length = self.message.KIND, len(self._body)
        head = HEADER.pack(MAGIC, kind, 0, length, sync, 0)
        crc = zlib.crc32(head[:_CHECKED_BYTES], self._crc)
        return HEADER.pack(MAGIC, kind, 0, length, sync, crc) + self._body


def encode(message: Message, sync: int) -> bytes:
    """One message as bytes; see `Encoded`."""
    return Encoded(message).for_sync(sync)


class Decoder:
    """Incremental parser: cuts a stream of bytes into messages."""

    def __init__(self, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.max_body_bytes = max_body_bytes
        """Longer messages are refused before they are here."""
        self._buffer = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether no part of a message is left over."""
        return not self._buffer

    def feed(self, data: bytes) -> list[tuple[int, Message]]:
        """Take the next bytes and return `(sync, message)` for every message that is now whole.

        Raises:
            ProtocolError: the bytes are not what the wire format allows.
        """
        self._buffer += data
        messages: list[tuple[int, Message]] = []
        while len(self._buffer) >= HEADER.size:
            magic, kind, zero, length, sync, crc = HEADER.unpack_from(self._buffer)
            if magic != MAGIC or zero != 0 or kind not in KINDS or length > self.max_body_bytes:
                raise ProtocolError(
                    f"a message starts with {bytes(self._buffer[: HEADER.size])!r}, which is no header of rl-ckpt"
                )
            end = HEADER.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[HEADER.size : end])
            if zlib.crc32(self._buffer[:_CHECKED_BYTES], zlib.crc32(body)) != crc:
                raise ProtocolError(f"a {KINDS[kind].__name__} message of {length} bytes fails its CRC")
            messages.append((sync, decode(kind, body)))
            del self._buffer[:end]
        return messages


def decode(kind: int, body: bytes) -> Message:
    """The message of one body.

    Raises:
        ProtocolError: the body is not what the wire format allows.
    """
    message = KINDS[kind]
    try:
        return message.from_body(body)
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"a {message.__name__} message of {len(body)} bytes cannot be read: {error}") from error
