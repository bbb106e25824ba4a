"""Messages on a TCP stream: a header of 16 bytes, the message, and a payload of raw bytes that nobody parses."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Any

from rl_tq._codec import decode, encode
from rl_tq._warm import new_memory
from rl_tq._wire import limit_sends

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"RLTQ"
_MAX_TEXT_BYTES = 1 << 30
_MAX_PAYLOAD_BYTES = 1 << 40
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


def send(connection: socket.socket, message: dict[str, Any], payload: Sequence[torch.Tensor] = ()) -> None:
    """Send one message; the payload is uint8 tensors, one after the other."""
    text = encode(message)
    nbytes = sum(len(part) for part in payload)
    head = _HEADER.pack(_MAGIC, len(text), nbytes) + text
    if not nbytes:
        connection.sendall(head)
        return
    connection.sendall(head, socket.MSG_MORE)
    for part in payload:
        connection.sendall(part.numpy().data)


def receive(
    connection: socket.socket, place: Callable[[dict[str, Any], int], torch.Tensor | None] | None = None
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Receive one message and its payload, uint8 [n], into what `place(message, n)` gives, or into new memory.

    Raises:
        ConnectionError: the other side closed, or speaks another language.
    """
    head = bytearray(_HEADER.size)
    _fill(connection, memoryview(head))
    magic, text_bytes, payload_bytes = _HEADER.unpack(head)
    if magic != _MAGIC or text_bytes > _MAX_TEXT_BYTES or payload_bytes > _MAX_PAYLOAD_BYTES:
        raise ConnectionAbortedError(f"the other side sent {bytes(head)!r}, which begins no message of rl-tq")
    text = bytearray(text_bytes)
    _fill(connection, memoryview(text))
    message = decode(text)
    if not payload_bytes:
        return message, None
    payload = place(message, payload_bytes) if place is not None else None
    if payload is None:
        payload = new_memory(payload_bytes)
    _fill(connection, payload.numpy().data)
    return message, payload


def _fill(connection: socket.socket, target: memoryview) -> None:
    while target:
        size = connection.recv_into(target)
        if not size:
            raise ConnectionResetError("the other side closed the connection")
        target = target[size:]
