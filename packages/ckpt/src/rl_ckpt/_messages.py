"""The control messages of a session, as values. `_wire` turns them to bytes and back.

Fields have the names, units and order of the tables in WIRE.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rl_ckpt.tensors.buckets import Span
    from rl_ckpt.tensors.spec import TensorSpec

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
class Regroup:
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
    places: tuple[tuple[int, int, int], ...]
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
    | Regroup
    | Sources
    | Mapped
)
