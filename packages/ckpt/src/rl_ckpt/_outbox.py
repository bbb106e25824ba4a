"""The payload streams to one receiver, and the bytes that wait to be written to them."""

from __future__ import annotations

import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BUFFER_BYTES = 4 << 20
"""Wish for the kernel's buffer of a UNIX socket; net.core.wmem_max bounds it."""
PATIENCE_S = 0.02
"""Longest stay in one call to the kernel, after which an end looks up: at its other peers, its deadline, its caller."""


def set_patience(connection: socket.socket) -> socket.socket:
    """Let calls on a socket wait inside the kernel, which moves a bucket in one call, and end by `PATIENCE_S`."""
    connection.setblocking(True)
    patience = struct.pack("ll", 0, int(PATIENCE_S * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
    return connection


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of a slot, or of a tensor of the source."""

    num_bytes: int
    """How many."""
    slot: int = 0
    """Number of the slot."""
    start: int = 0
    """Where they start in the slot."""
    view: memoryview | None = None
    """The tensor's memory, instead."""


class Outbox:
    """Writes slots to sockets, as far as these take them. Owns the sockets."""

    def __init__(self) -> None:
        self._streams: dict[int, tuple[int, socket.socket]] = {}
        self._queues: dict[int, deque[tuple[Run, int]]] = {}
        """Of each stream what it has not taken yet, in order, and how much it has taken of the first."""

    @property
    def is_empty(self) -> bool:
        """Whether everything was taken by the kernel, so that tensors may change."""
        return not any(self._queues.values())

    def attach(self, index: int, opened: int, connection: socket.socket) -> None:
        """Use a connection for stream `index`, in place of an earlier one. `opened` tells generations apart."""
        set_patience(connection)
        if connection.family == socket.AF_UNIX:  # TCP finds its own size
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        if index in self._streams:
            self._streams[index][1].close()
        self._streams[index] = (opened, connection)
        self._queues[index] = deque()

    def is_open(self, num_streams: int, opened: int) -> bool:
        """Whether all streams of a generation are there."""
        return num_streams == 0 or {i: o for i, (o, _) in self._streams.items()} == dict.fromkeys(
            range(num_streams), opened
        )

    def put(self, sequence: int, payload: Sequence[Run]) -> None:
        """Queue the payload of a bucket. Slots must not change before it is freed, tensors before they are taken."""
        self._queues[sequence % len(self._queues)].extend((run, 0) for run in payload if run.num_bytes)

    def flush(self, write: Callable[[socket.socket, int, int, int], int], *, is_patient: bool) -> None:
        """Write what the sockets take now or, if patient, a moment later.

        Args:
            write: Of a transport: puts bytes `start` to `end` of a slot on a stream and returns how many went.
            is_patient: Whether to wait a moment.

        Raises:
            OSError: the other end is gone.
        """
        for index, queue in self._queues.items():
            connection = self._streams[index][1]
            connection.setblocking(is_patient)
            while queue:
                run, taken = queue[0]
                try:
                    if run.view is None:
                        taken += write(connection, run.slot, run.start + taken, run.start + run.num_bytes)
                    else:
                        taken += connection.send(run.view[taken:])
                except (BlockingIOError, InterruptedError):
                    break
                if taken == run.num_bytes:
                    queue.popleft()
                else:
                    queue[0] = (run, taken)
                    if is_patient:
                        break  # it waited already: look up

    def blocked(self) -> list[int]:
        """Descriptors of the streams that have more to write."""
        return [self._streams[index][1].fileno() for index, queue in self._queues.items() if queue]

    def close(self) -> None:
        """Close the streams; what was not written is gone."""
        for _, connection in self._streams.values():
            connection.close()
        self._streams.clear()
        self._queues.clear()
