"""Messages on a TCP stream: a header of 16 bytes, the message, and a payload of raw bytes that nobody parses."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Any, TypeAlias

from rl_csrc.ipc import limit_sends
from rl_tq.memory.pool import new_memory
from rl_tq.protocol.codec import decode, encode
from rl_tq.protocol.limits import MAX_MESSAGE_BYTES, MAX_REPLY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

Payload: TypeAlias = "list[torch.Tensor]"
"""uint8 tensors, one after the other."""
ALIGNMENT = 64
"""Columns of a payload start at multiples of this many bytes."""
_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"RLTQ"
_CHUNK_BYTES = 1 << 16
_DEAD_S = 30
"""A peer whose host does not answer for so long counts as dead."""


def prepare(connection: socket.socket, timeout_s: float) -> None:
    """Set a connection up: no delays, a deadline for every send and receive, and probes that find a dead host."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 5),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 5),
        (socket.TCP_USER_TIMEOUT, 1000 * _DEAD_S),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    limit_sends(connection, timeout_s)


def encode_request(message: dict[str, Any]) -> bytes:
    """A request as bytes.

    Raises:
        ValueError: no server takes it, as it is too long.
    """
    text = encode(message)
    if len(text) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"this {message.get('op')!r} has {len(text)} bytes of names, tags and row numbers, and a server takes "
            f"{MAX_MESSAGE_BYTES}: use fewer rows at once"
        )
    return text


def send(connection: socket.socket, text: bytes, payload: Sequence[torch.Tensor] = ()) -> None:
    """Send one encoded message; the payload is uint8 tensors, one after the other."""
    nbytes = sum(len(part) for part in payload)
    head = _HEADER.pack(_MAGIC, len(text), nbytes) + text
    if not nbytes:
        connection.sendall(head)
        return
    connection.sendall(head, socket.MSG_MORE)
    for part in payload:
        connection.sendall(part.numpy().data)


def receive(
    connection: socket.socket,
    place: Callable[[dict[str, Any], int], torch.Tensor | None] | None = None,
    *,
    max_text_bytes: int = MAX_REPLY_BYTES,
    max_payload_bytes: int = 1 << 40,
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Receive one message and its payload, uint8 [n], into what `place(message, n)` gives, or into new memory.

    What a header announces is not believed: the text's memory grows with what has arrived, and the payload's is
    backed by the kernel page by page, as it is written.

    Raises:
        ConnectionError: the other side closed, speaks another language, or announces more than the limits.
    """
    head = bytearray(_HEADER.size)
    _fill(connection, memoryview(head))
    magic, text_bytes, payload_bytes = _HEADER.unpack(head)
    if magic != _MAGIC or text_bytes > max_text_bytes or payload_bytes > max_payload_bytes:
        raise ConnectionAbortedError(
            f"the other side sent {bytes(head)!r}, which begins no message of rl-tq of at most {max_text_bytes} bytes "
            f"and a payload of at most {max_payload_bytes}"
        )
    message = decode(_receive_text(connection, text_bytes))
    if not payload_bytes:
        return message, None
    payload = place(message, payload_bytes) if place is not None else None
    if payload is None:
        payload = new_memory(payload_bytes)
    _fill(connection, payload.numpy().data)
    return message, payload


def _receive_text(connection: socket.socket, nbytes: int) -> bytearray:
    """So many bytes, in memory of at most twice what has arrived."""
    text = bytearray(min(nbytes, _CHUNK_BYTES))
    start = 0
    while True:
        with memoryview(text) as view:
            _fill(connection, view[start:])
        start = len(text)
        if start == nbytes:
            return text
        text.extend(bytes(min(nbytes - start, start)))


def _fill(connection: socket.socket, target: memoryview) -> None:
    while target:
        size = connection.recv_into(target)
        if not size:
            raise ConnectionResetError("the other side closed the connection")
        target = target[size:]
