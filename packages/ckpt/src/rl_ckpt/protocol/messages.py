"""Control messages of WIRE.md: each class has its fields and the format of its body. Pure; knows no socket."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from rl_ckpt.errors import ProtocolError
from rl_ckpt.tensors.buckets import Span
from rl_ckpt.tensors.spec import DTYPE_CODES, TensorSpec
from rl_csrc.buffers.frames import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

MAGIC = b"RLCK"
WIRE_VERSION = 5
MAX_BODY_BYTES = 1 << 26
GREETING_BYTES = 1 << 16
"""Longest body of a message of a peer that is not authenticated yet."""
MAX_NDIM = 64
NO_ALIAS = 2**32 - 1
"""Means "none" where a manifest says of which tensor another is an alias."""
NO_VERSION = 2**64 - 1
"""Means "none" where a version is expected."""
NONCE_BYTES = 16
PROOF_BYTES = 32
HANDLE_BYTES = 64
"""Most bytes of a handle by which another process maps memory."""

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


class Tail(NamedTuple):
    """Form of a field of any length, behind the fields of fixed size: how to write it, and how to read it."""

    pack: Callable[[Any], bytes]
    read: Callable[[bytes, int, int], tuple[Any, int]]
    """Function from the body, a start and a count to the value and its end."""
    is_counted: bool = True
    """Whether the fixed part ends with its count, u32; else it goes to the end of the body."""


def _rows(form: str) -> Tail:
    """Tuples of one format each."""
    row = struct.Struct(form)

    def pack(rows: tuple[Any, ...]) -> bytes:
        return b"".join([row.pack(*values) for values in rows])

    def read(body: bytes, at: int, count: int) -> tuple[Any, int]:
        end = at + count * row.size
        if end > len(body):
            raise ValueError(f"{count} rows of {row.size} bytes do not fit it")
        return tuple(row.iter_unpack(body[at:end])), end

    return Tail(pack, read)


def _numbers(code: str, *, is_counted: bool) -> Tail:
    """Integers of one size."""
    size = struct.calcsize(f"<{code}")

    def pack(numbers: tuple[int, ...]) -> bytes:
        return struct.pack(f"<{len(numbers)}{code}", *numbers)

    def read(body: bytes, at: int, count: int) -> tuple[Any, int]:
        if not is_counted:
            count = (len(body) - at) // size
            if not count:
                raise ValueError("there is no number in it")
        return struct.unpack_from(f"<{count}{code}", body, at), at + count * size

    return Tail(pack, read, is_counted)


def _items(pack: Callable[[Any], bytes], read: Callable[[bytes, int], tuple[Any, int]]) -> Tail:
    """Items that say themselves how long they are."""

    def pack_all(items: tuple[Any, ...]) -> bytes:
        return b"".join([pack(item) for item in items])

    def read_all(body: bytes, at: int, count: int) -> tuple[Any, int]:
        found: list[Any] = []
        for _ in range(count):
            item, at = read(body, at)
            found.append(item)
        return tuple(found), at

    return Tail(pack_all, read_all)


def _read_bytes(body: bytes, at: int, _: int) -> tuple[bytes, int]:
    return body[at:], len(body)


def _read_text(body: bytes, at: int, _: int) -> tuple[str, int]:
    return body[at:].decode(), len(body)


_BYTES = Tail(bytes, _read_bytes, is_counted=False)
_TEXT = Tail(str.encode, _read_text, is_counted=False)


class Message:
    """Base of the messages. A body is `LAYOUT`, of the fields in order and the counts of tails; then the tails."""

    KIND: ClassVar[int]
    LAYOUT: ClassVar[struct.Struct]
    TAILS: ClassVar[tuple[Tail, ...]] = ()
    """Forms of the last fields."""
    __match_args__: ClassVar[tuple[str, ...]]
    """Names of the fields, which a dataclass sets."""

    def to_body(self) -> bytes:
        """The body as bytes; raises `struct.error` or `ValueError` where a field does not fit."""
        values = [getattr(self, name) for name in self.__match_args__]
        if not self.TAILS:
            return self.LAYOUT.pack(*values)
        fixed, last = values[: -len(self.TAILS)], values[-len(self.TAILS) :]
        fixed += [len(value) for tail, value in zip(self.TAILS, last, strict=True) if tail.is_counted]
        return self.LAYOUT.pack(*fixed) + b"".join(
            [tail.pack(value) for tail, value in zip(self.TAILS, last, strict=True)]
        )

    @classmethod
    def from_body(cls, body: bytes) -> Self:
        """The message of a body; raises `struct.error` or `ValueError` where it is none."""
        if not cls.TAILS:
            return cls(*cls.LAYOUT.unpack(body))
        values: list[Any] = list(cls.LAYOUT.unpack_from(body))
        num_counts = sum(tail.is_counted for tail in cls.TAILS)
        counts = iter(values[len(values) - num_counts :])
        del values[len(values) - num_counts :]
        at = cls.LAYOUT.size
        for tail in cls.TAILS:
            value, at = tail.read(body, at, next(counts) if tail.is_counted else 0)
            values.append(value)
        if at != len(body):
            raise ValueError(f"it ends at byte {at}")
        message = cls(*values)
        message.check()
        return message

    def check(self) -> None:
        """Raise `ValueError` where what was read contradicts itself."""


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
    TAILS = (_BYTES,)
    bucket_bytes: int
    num_slots: int
    num_streams: int = 0
    ticket: int = 0
    memory: bytes = b""
    """Description of the transport's memory for a receiver, to the end of the body."""


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


_ENTRY = struct.Struct("<BBHI")


def _pack_spec(spec: TensorSpec) -> bytes:
    name = spec.name.encode()
    alias_of = NO_ALIAS if spec.alias_of is None else spec.alias_of
    entry = _ENTRY.pack(DTYPE_CODES[spec.dtype], len(spec.shape), len(name), alias_of)
    return entry + struct.pack(f"<{len(spec.shape)}Q", *spec.shape) + name


def _read_spec(body: bytes, at: int) -> tuple[TensorSpec, int]:
    code, ndim, name_bytes, alias_of = _ENTRY.unpack_from(body, at)
    if not 1 <= code <= len(DTYPES) or ndim > MAX_NDIM:
        raise ValueError(f"a tensor has dtype code {code} and {ndim} axes")
    at += _ENTRY.size
    shape = struct.unpack_from(f"<{ndim}Q", body, at)
    at += 8 * ndim
    end = at + name_bytes
    if end > len(body):
        raise ValueError("the name of a tensor runs over the end")
    alias = None if alias_of == NO_ALIAS else alias_of
    return TensorSpec(name=body[at:end].decode(), dtype=DTYPES[code - 1], shape=shape, alias_of=alias), end


@dataclass(frozen=True, slots=True)
class Manifest(Message):
    """Sender to receiver: tensors `first`, `first + 1`, ... of this connection, named once, then known by index."""

    KIND = 5
    LAYOUT = struct.Struct("<II")
    TAILS = (_items(_pack_spec, _read_spec),)
    first: int
    specs: tuple[TensorSpec, ...]

    def check(self) -> None:
        """An alias is of a tensor before it."""
        for index, spec in enumerate(self.specs, self.first):
            if spec.alias_of is not None and index <= spec.alias_of:
                raise ValueError(f"tensor {index} is an alias of {spec.alias_of}, which does not come before it")


@dataclass(frozen=True, slots=True)
class Bucket:
    """A filled slot, as `Buckets` announces it."""

    sequence: int
    slot: int
    used_bytes: int
    spans: tuple[Span, ...]


_BUCKET = struct.Struct("<IIQI4x")
_SPAN = struct.Struct("<IIQQQQQQ")


def _pack_bucket(bucket: Bucket) -> bytes:
    spans = bucket.spans
    head = _BUCKET.pack(bucket.sequence, bucket.slot, bucket.used_bytes, len(spans))
    return head + (_SPAN.pack(*spans[0]) if len(spans) == 1 else b"".join([_SPAN.pack(*span) for span in spans]))


def _read_bucket(body: bytes, at: int) -> tuple[Bucket, int]:
    sequence, slot, used_bytes, num_spans = _BUCKET.unpack_from(body, at)
    at += _BUCKET.size
    end = at + num_spans * _SPAN.size
    if end > len(body):
        raise ValueError(f"{num_spans} spans do not fit it")
    return Bucket(sequence, slot, used_bytes, tuple(map(Span._make, _SPAN.iter_unpack(body[at:end])))), end


@dataclass(frozen=True, slots=True)
class Buckets(Message):
    """Sender to receiver: slots that are filled, or whose payload is being sent."""

    KIND = 6
    LAYOUT = struct.Struct("<I4x")
    TAILS = (_items(_pack_bucket, _read_bucket),)
    buckets: tuple[Bucket, ...]

    def check(self) -> None:
        """There is one."""
        if not self.buckets:
            raise ValueError("there is no bucket in it")


@dataclass(frozen=True, slots=True)
class Free(Message):
    """Receiver to sender: the consumer is done with these buckets."""

    KIND = 7
    LAYOUT = struct.Struct("<")
    TAILS = (_numbers("I", is_counted=False),)
    sequences: tuple[int, ...]
    """Sequence numbers to the end of the body, u32 each."""


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
    LAYOUT = struct.Struct("<H2x")
    TAILS = (_TEXT,)
    reason: AbortReason
    text: str

    def check(self) -> None:
        """The reason is one that there is."""
        AbortReason(self.reason)


@dataclass(frozen=True, slots=True)
class Proof(Message):
    """Either way, where the session has a token: proof that this end knows it."""

    KIND = 13
    LAYOUT = struct.Struct(f"<{PROOF_BYTES}s")
    mac: bytes


@dataclass(frozen=True, slots=True)
class Stream(Message):
    """Receiver to sender, alone on its own connection: payload of the session with this ticket goes here."""

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
    """Sender to receiver: memory of the sender that a receiver can map, and the tensors' offsets in it."""

    KIND = 16
    LAYOUT = struct.Struct("<II")
    TAILS = (_rows(f"<{HANDLE_BYTES}sQ"), _rows("<IIQ"))
    segments: tuple[tuple[bytes, int], ...]
    """The handle and the size of each, bytes."""
    locations: tuple[tuple[int, int, int], ...]
    """Location of each tensor: its index, the segment, and its start there, bytes."""


@dataclass(frozen=True, slots=True)
class Mapped(Message):
    """Sender to receiver: tensors of its sources are ready to be read there."""

    KIND = 17
    LAYOUT = struct.Struct("<III4x")
    TAILS = (_numbers("Q", is_counted=True),)
    sequence: int
    first: int
    digests: tuple[int, ...]


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
    """Encode one message; see `Encoded`."""
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
                    f"a message starts with {bytes(self._buffer[: HEADER.size])!r}, which is not a header of rl-ckpt"
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
