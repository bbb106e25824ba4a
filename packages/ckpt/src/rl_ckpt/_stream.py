"""What transports without shared memory have in common: payload on streams, into memory of the receiver's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_ckpt.tensors.spec import memory_of
from rl_ckpt._transport import ListeningSend, ReceiveTransport
from rl_ckpt.errors import AddressError, ProtocolError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from torch import Tensor

    from rl_ckpt.protocol.channel import Link
    from rl_ckpt.protocol.messages import Session
    from rl_ckpt._transport import Listener
    from rl_ckpt.types import SessionConfig

MAX_BUCKET_BYTES = 1 << 30
"""A receiver allocates a bucket before it knows the sender well."""
MAX_STREAMS = 64
MAX_SLOTS = 64


def stream_count(options: dict[str, str], config: SessionConfig, default: int) -> int:
    """The option `streams` of a URL.

    Raises:
        AddressError: it is no number from 1 to 64.
    """
    text = options.get("streams", str(default))
    if not (text.isdecimal() and 1 <= int(text) <= MAX_STREAMS):
        raise AddressError(f"streams is {text!r} in {config.address!r}; allowed are 1 to {MAX_STREAMS}")
    return int(text)


class StreamSend(ListeningSend):
    """Owns a listener, and slots in ordinary memory, in which small tensors are packed."""

    is_direct = True
    bucket_bytes = 4 << 20
    """Small enough that what was read for its digest is still in the cache when it is sent."""

    def __init__(
        self, config: SessionConfig, listen: Callable[[SessionConfig], Listener], num_streams: int, token: bytes | None
    ) -> None:
        self.address = config.address
        self.num_streams = num_streams
        self.token = token
        self._config = config
        self._listen = listen
        self._views: list[memoryview] = []

    def open(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Take the address and allocate."""
        if bucket_bytes > MAX_BUCKET_BYTES:
            raise AddressError(f"bucket_bytes is {bucket_bytes}; on streams at most {MAX_BUCKET_BYTES} are allowed")
        self._listener = listener = self._listen(self._config)
        slots = self.allocate(num_slots, bucket_bytes)
        listener.listen()
        return slots

    def allocate(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """The ring, in memory of this process."""
        slots = [torch.empty(bucket_bytes, dtype=torch.uint8) for _ in range(num_slots)]
        self._views = [memory_of(slot) for slot in slots]
        return slots

    def write(self, connection: socket.socket, slot: int, start: int, end: int) -> int:
        """Let the kernel copy it."""
        return connection.send(self._views[slot][start:end])

    def close(self) -> None:
        """Give the address back."""
        super().close()
        self._views = []


class StreamReceive(ReceiveTransport):
    """Dials, and lands buckets in slots of its own."""

    def __init__(
        self,
        config: SessionConfig,
        dial: Callable[[SessionConfig], socket.socket | None],
        link_of: Callable[[socket.socket], Link],
        token: bytes | None,
    ) -> None:
        self.token = token
        self._config = config
        self._dial = dial
        self._link_of = link_of
        self._slots: list[Tensor] = []

    def dial(self) -> Link | None:
        """Connect, if there is a sender."""
        connection = self._dial(self._config)
        return None if connection is None else self._link_of(connection)

    def dial_stream(self) -> socket.socket:
        """Connect once more."""
        connection = self._dial(self._config)
        if connection is None:
            raise ConnectionRefusedError(f"nobody answers at {self._config.address}")
        return connection

    def map_slots(self, session: Session, link: Link) -> list[Tensor]:
        """As many slots of its own as the sender has; memory that is never written to costs nothing."""
        if not (1 <= session.num_streams <= MAX_STREAMS and 0 < session.bucket_bytes <= MAX_BUCKET_BYTES):
            raise ProtocolError(f"{link.peer} announced {session}, which is not a session with streams")
        num_slots = min(session.num_slots, MAX_SLOTS)
        if [slot.numel() for slot in self._slots] != [session.bucket_bytes] * num_slots:
            self._slots = [torch.empty(session.bucket_bytes, dtype=torch.uint8) for _ in range(num_slots)]
        return self._slots
