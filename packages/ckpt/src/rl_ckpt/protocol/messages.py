"""The control messages of a session, as values. `_wire` turns them to bytes and back.

Fields have the names, units and order of the tables in WIRE.md.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TypeAlias

from rl_ckpt.errors import ProtocolError
from rl_ckpt.tensors.buckets import Span
from rl_ckpt.tensors.spec import DTYPE_CODES, TensorSpec
from rl_csrc.buffers.frames import DTYPES

NO_VERSION = 2**64 - 1
"""Stands for "none" where a version is expected."""
NONCE_BYTES = 16
PROOF_BYTES = 32
HANDLE_BYTES = 64
"""Of what another process maps memory by."""


class AbortReason(IntEnum):
    """Why an end called a sync off; the code in `Abort`."""

    FAILED = 1
    """Its caller failed, stopped or was cancelled."""
    DIGEST = 2
    """What landed is not what was sent."""
    PROTOCOL = 3
    """A peer broke the protocol."""
    TIMEOUT = 4
    """A peer did not answer in time."""
    PEER_LOST = 5
    """A peer went away."""


class HelloRole(IntEnum):
    """Who says hello."""

    SENDER = 1
    RECEIVER = 2


@dataclass(frozen=True, slots=True)
class Hello:
    """First message in each direction."""

    wire_version: int
    role: int
    pid: int
    nonce: bytes = bytes(NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class Proof:
    """Either way, where the session has a token: that this end knows it."""

    mac: bytes


@dataclass(frozen=True, slots=True)
class Session:
    """Sender to receiver: the ring, or the streams that take its place. A shared ring's memory comes with it."""

    bucket_bytes: int
    num_slots: int
    num_streams: int = 0
    ticket: int = 0
    memory: bytes = b""


@dataclass(frozen=True, slots=True)
class Stream:
    """Receiver to sender, alone on a connection of its own: payload of the session with this ticket goes here."""

    ticket: int
    index: int
    opened: int


@dataclass(frozen=True, slots=True)
class NewGroup:
    """Sender to receiver: take this rank in a new group, whose members meet at that port of the sender's."""

    generation: int
    rank: int
    size: int
    port: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Receiver to sender: a consumer waits for the next sync, under this header's sync number."""

    held: int = NO_VERSION
    version: int = NO_VERSION
    digest: int = 0
    opened: int = 0
    codecs: int = 0


@dataclass(frozen=True, slots=True)
class Begin:
    """Sender to receiver: the sync starts; if some tensors are differences, then from version `base`."""

    version: int
    base: int = NO_VERSION


@dataclass(frozen=True, slots=True)
class Manifest:
    """Sender to receiver: tensors `first`, `first + 1`, ... of this connection, named once and referred to by index."""

    first: int
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sender to receiver: a slot is filled."""

    sequence: int
    slot: int
    used_bytes: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Free:
    """Receiver to sender: the consumer is done with this bucket."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Seal:
    """Sender to receiver: that was all of it."""

    num_buckets: int
    num_tensors: int
    num_bytes: int
    digest: int


@dataclass(frozen=True, slots=True)
class Staged:
    """Receiver to sender: everything landed, was verified and taken by the consumer."""

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
class Commit:
    """Sender to receiver: all receivers are staged; the version is in force."""

    version: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Receiver to sender: the commit arrived."""

    version: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Either way: the sync is off."""

    reason: AbortReason
    text: str


@dataclass(frozen=True, slots=True)
class Sources:
    """Sender to receiver: memory of the sender's that a receiver can map, and which tensors lie where in it."""

    segments: tuple[tuple[bytes, int], ...]
    """The handle and the size of each, bytes."""
    locations: tuple[tuple[int, int, int], ...]
    """Of each tensor: its index, the segment, and where it starts in that, bytes."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """Sender to receiver: tensors that lie in its sources are ready to be read there."""

    sequence: int
    first: int
    digests: tuple[int, ...]


Message: TypeAlias = (
    Hello
    | Session
    | Ready
    | Begin
    | Manifest
    | Bucket
    | Free
    | Seal
    | Staged
    | Commit
    | Committed
    | Abort
    | Proof
    | Stream
    | NewGroup
    | Sources
    | Mapped
)

MAGIC = b"RLCK"
WIRE_VERSION = 4
MAX_BODY_BYTES = 1 << 26
GREETING_BYTES = 1 << 16
"""Longest body of a message of a peer that is not known yet."""
MAX_NDIM = 64
NOT_ALIAS = 2**32 - 1
"""Stands for "none" where the tensor that another is tied to is expected."""

_HEADER = struct.Struct("<4sHHIII")
_CHECKED_BYTES = 16
"""Bytes of the header that its last field, the CRC, covers before the body."""
_MANIFEST = struct.Struct("<II")
_SPEC = struct.Struct("<BBHI")
_BUCKET = struct.Struct("<IIQII")
_SPAN = struct.Struct("<IIQQQQQQ")
_ABORT = struct.Struct("<HH")
_SESSION = struct.Struct("<QIIQ")
_SOURCES = struct.Struct("<II")
_SEGMENT = struct.Struct(f"<{HANDLE_BYTES}sQ")
_PLACE = struct.Struct("<IIQ")
_MAPPED = struct.Struct("<IIII")

_KINDS: dict[int, type[Message]] = {
    1: Hello,
    2: Session,
    3: Ready,
    4: Begin,
    5: Manifest,
    6: Bucket,
    7: Free,
    8: Seal,
    9: Staged,
    10: Commit,
    11: Committed,
    12: Abort,
    13: Proof,
    14: Stream,
    15: NewGroup,
    16: Sources,
    17: Mapped,
}
_CODES = {message: kind for kind, message in _KINDS.items()}
_FIXED: dict[type[Message], struct.Struct] = {
    Hello: struct.Struct(f"<HHI{NONCE_BYTES}s"),
    Proof: struct.Struct(f"<{PROOF_BYTES}s"),
    Stream: struct.Struct("<QII"),
    NewGroup: struct.Struct("<IIII"),
    Ready: struct.Struct("<QQQII"),
    Begin: struct.Struct("<QQ"),
    Free: struct.Struct("<I"),
    Seal: struct.Struct("<IIQQ"),
    Staged: struct.Struct("<QQIIQIIQQ"),
    Commit: struct.Struct("<Q"),
    Committed: struct.Struct("<Q"),
}

_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in _FIXED}


def encode(message: Message, sync: int) -> bytes:
    """The message as bytes, with its header. `sync` is the receiver's number of the sync, 0 outside of one.

    Raises:
        ProtocolError: a field does not fit the wire, for example a name of more than 65,535 bytes.
    """
    try:
        body = _encode_body(message)
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be put on the wire: {error}") from error
    if len(body) > MAX_BODY_BYTES:
        raise ProtocolError(f"{type(message).__name__} has {len(body)} bytes; allowed are {MAX_BODY_BYTES}")
    head = _HEADER.pack(MAGIC, _CODES[type(message)], 0, len(body), sync, 0)[:_CHECKED_BYTES]
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body


class Decoder:
    """Cuts a stream of bytes into messages."""

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
        while len(self._buffer) >= _HEADER.size:
            magic, kind, zero, length, sync, crc = _HEADER.unpack_from(self._buffer)
            if magic != MAGIC or zero != 0 or kind not in _KINDS or length > self.max_body_bytes:
                raise ProtocolError(
                    f"a message starts with {bytes(self._buffer[: _HEADER.size])!r}, which is no header of rl-ckpt"
                )
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[_HEADER.size : end])
            if zlib.crc32(body, zlib.crc32(self._buffer[:_CHECKED_BYTES])) != crc:
                raise ProtocolError(f"a {_KINDS[kind].__name__} message of {length} bytes fails its CRC")
            messages.append((sync, decode(kind, body)))
            del self._buffer[:end]
        return messages


def decode(kind: int, body: bytes) -> Message:
    """The message of one body.

    Raises:
        ProtocolError: the body is not what the wire format allows.
    """
    message = _KINDS[kind]
    try:
        if message is Manifest:
            return _decode_manifest(body)
        if message is Bucket:
            return _decode_bucket(body)
        if message is Session:
            bucket_bytes, num_slots, num_streams, ticket = _SESSION.unpack_from(body)
            return Session(bucket_bytes, num_slots, num_streams, ticket, body[_SESSION.size :])
        if message is Sources:
            return _decode_sources(body)
        if message is Mapped:
            sequence, first, count, _ = _MAPPED.unpack_from(body)
            return Mapped(sequence, first, struct.unpack(f"<{count}Q", body[_MAPPED.size :]))
        if message is Abort:
            reason, _ = _ABORT.unpack_from(body)
            return Abort(AbortReason(reason), body[_ABORT.size :].decode())
        return message(*_FIXED[message].unpack(body))
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"a {message.__name__} message of {len(body)} bytes cannot be read: {error}") from error


def _encode_body(message: Message) -> bytes:
    if isinstance(message, Manifest):
        parts = [_MANIFEST.pack(message.first, len(message.specs))]
        for spec in message.specs:
            name = spec.name.encode()
            alias_of = NOT_ALIAS if spec.alias_of is None else spec.alias_of
            parts.append(_SPEC.pack(DTYPE_CODES[spec.dtype], len(spec.shape), len(name), alias_of))
            parts.append(struct.pack(f"<{len(spec.shape)}Q", *spec.shape) + name)
        return b"".join(parts)
    if isinstance(message, Bucket):
        spans = message.spans
        head = _BUCKET.pack(message.sequence, message.slot, message.used_bytes, len(spans), 0)
        return head + b"".join(_SPAN.pack(*span) for span in spans)
    if isinstance(message, Session):
        head = _SESSION.pack(message.bucket_bytes, message.num_slots, message.num_streams, message.ticket)
        return head + message.memory
    if isinstance(message, Sources):
        parts = [_SOURCES.pack(len(message.segments), len(message.locations))]
        parts += [_SEGMENT.pack(*segment) for segment in message.segments]
        return b"".join(parts + [_PLACE.pack(*location) for location in message.locations])
    if isinstance(message, Mapped):
        count = len(message.digests)
        return _MAPPED.pack(message.sequence, message.first, count, 0) + struct.pack(f"<{count}Q", *message.digests)
    if isinstance(message, Abort):
        return _ABORT.pack(message.reason, 0) + message.text.encode()
    kind = type(message)
    return _FIXED[kind].pack(*(getattr(message, name) for name in _FIELDS[kind]))


def _decode_manifest(body: bytes) -> Manifest:
    first, count = _MANIFEST.unpack_from(body)
    at = _MANIFEST.size
    specs: list[TensorSpec] = []
    for _ in range(count):
        index = first + len(specs)
        code, ndim, name_bytes, alias_of = _SPEC.unpack_from(body, at)
        if not 1 <= code <= len(DTYPES) or ndim > MAX_NDIM:
            raise ValueError(f"tensor {index} has dtype code {code} and {ndim} axes")
        if index <= alias_of != NOT_ALIAS:
            raise ValueError(f"tensor {index} is tied to {alias_of}, which does not come before it")
        at += _SPEC.size
        shape = struct.unpack_from(f"<{ndim}Q", body, at)
        at += 8 * ndim
        if at + name_bytes > len(body):
            raise ValueError(f"the name of tensor {index} runs over the end")
        specs.append(
            TensorSpec(
                name=body[at : at + name_bytes].decode(),
                dtype=DTYPES[code - 1],
                shape=shape,
                alias_of=None if alias_of == NOT_ALIAS else alias_of,
            )
        )
        at += name_bytes
    if at != len(body):
        raise ValueError(f"{len(body) - at} bytes are left over")
    return Manifest(first, tuple(specs))


def _decode_bucket(body: bytes) -> Bucket:
    sequence, slot, used_bytes, count, _ = _BUCKET.unpack_from(body)
    if len(body) != _BUCKET.size + count * _SPAN.size:
        raise ValueError(f"{count} spans do not fit it")
    spans = tuple(Span._make(fields) for fields in _SPAN.iter_unpack(body[_BUCKET.size :]))
    return Bucket(sequence, slot, used_bytes, spans)


def _decode_sources(body: bytes) -> Sources:
    num_segments, num_locations = _SOURCES.unpack_from(body)
    locations_at = _SOURCES.size + num_segments * _SEGMENT.size
    if len(body) != locations_at + num_locations * _PLACE.size:
        raise ValueError(f"{num_segments} segments and {num_locations} tensors do not fit it")
    segments = tuple((handle, size) for handle, size in _SEGMENT.iter_unpack(body[_SOURCES.size : locations_at]))
    locations = tuple((tensor, segment, offset) for tensor, segment, offset in _PLACE.iter_unpack(body[locations_at:]))
    return Sources(segments, locations)
