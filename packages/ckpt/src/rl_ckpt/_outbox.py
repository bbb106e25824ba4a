"""The payload streams to one receiver, and the bytes that wait to be written to them."""

from __future__ import annotations

import socket
import struct
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from rl_ckpt._tensors import memory_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MAX_BUFFERS = 512
"""Most buffers of one gather write; the kernel's limit is 1,024."""
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


class Outbox:
    """Writes tensors to non-blocking sockets without copying them, as far as these take them. Owns the sockets."""

    def __init__(self) -> None:
        self._streams: dict[int, tuple[int, socket.socket]] = {}
        self._queues: dict[int, deque[tuple[memoryview, Tensor]]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether everything was taken by the kernel, so that the tensors may change."""
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

    def put(self, sequence: int, contents: Sequence[Tensor]) -> None:
        """Queue the payload of a bucket: uint8 CPU tensors that follow one another. They must not change meanwhile."""
        queue = self._queues[sequence % len(self._queues)]
        queue.extend((memory_of(content), content) for content in contents if content.numel())

    def flush(self, *, is_patient: bool) -> None:
        """Write what the sockets take now or, if patient, a moment later.

        Raises:
            OSError: the other end is gone.
        """
        flags = 0 if is_patient else socket.MSG_DONTWAIT
        for index, queue in self._queues.items():
            connection = self._streams[index][1]
            while queue:
                buffers = [view for view, _ in islice(queue, MAX_BUFFERS)]
                try:
                    sent = connection.sendmsg(buffers, [], flags)
                except (BlockingIOError, InterruptedError):
                    break
                is_full = sent < sum(view.nbytes for view in buffers)
                while sent:
                    view, keep = queue.popleft()
                    if sent < view.nbytes:
                        queue.appendleft((view[sent:], keep))
                        break
                    sent -= view.nbytes
                if is_full:
                    break

    def blocked(self) -> list[int]:
        """Descriptors of the streams that have more to write."""
        return [self._streams[index][1].fileno() for index, queue in self._queues.items() if queue]

    def close(self) -> None:
        """Close the streams; what was not written is gone."""
        for _, connection in self._streams.values():
            connection.close()
        self._streams.clear()
        self._queues.clear()
