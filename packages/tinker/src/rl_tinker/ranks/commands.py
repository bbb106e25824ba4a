"""Frames between the server and rank 0: a length, and a command or an answer in msgpack."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec

from rl_tinker.types import Answer, Command

if TYPE_CHECKING:
    import socket

LENGTH = struct.Struct(">Q")
"""Header of a frame: the bytes that follow."""
encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def read_frame(connection: socket.socket) -> bytes | None:
    """Next frame of a blocking socket; None when the peer has closed it.

    Raises:
        TimeoutError: no frame began within the timeout of the socket.
    """
    header = _read_exactly(connection, LENGTH.size, may_wait=True)
    return None if header is None else _read_exactly(connection, LENGTH.unpack(header)[0], may_wait=False)


def _read_exactly(connection: socket.socket, size: int, *, may_wait: bool) -> bytes | None:
    chunks: list[bytes] = []
    while size:
        try:
            chunk = connection.recv(min(size, 2**20))
        except TimeoutError:
            if may_wait and not chunks:
                raise
            continue
        except ConnectionError:
            return None
        if not chunk:
            return None
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)
