"""Commands to the training processes and their answers: msgpack in frames of a length and a body."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec

from rl_tinker.types import AdamParams, AdapterSpec  # noqa: TC001  msgspec reads the annotations

if TYPE_CHECKING:
    import socket

LENGTH = struct.Struct(">Q")
"""Header of a frame: the bytes that follow."""


class Create(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Add a model with new weights, and write its state."""

    model: str
    adapter: AdapterSpec | None
    folder: str


class Restore(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Add a model with the weights of a folder."""

    model: str
    adapter: AdapterSpec | None
    folder: str
    optimizer: bool


class Save(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Write the state of a model."""

    model: str
    folder: str


class Drop(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Remove a model."""

    model: str


class Forward(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Run requests of several models in one pass."""

    requests: list[tuple[str, bytes]]
    backward: bool


class OptimStep(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Step the optimizer of a model, and write its new state."""

    model: str
    params: AdamParams
    folder: str


Command = Create | Restore | Save | Drop | Forward | OptimStep


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to one command, or the first message of rank 0, which is ready then."""

    error: str = ""
    is_user: bool = False
    """Whether the request caused the error."""
    results: list[bytes] = []
    """Of a pass: for each request the encoded output."""
    errors: list[str] = []
    """Of a pass: for each request its own error, or an empty string."""
    metrics: dict[str, float] = {}
    """Of an optimizer step."""


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
