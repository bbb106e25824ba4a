"""Where a receiver's buckets come from: the sender's ring, or streams that are read into memory of its own."""

from __future__ import annotations

import socket
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from rl_ckpt.protocol.channel import close_in_children
from rl_ckpt.protocol.messages import Session, Stream
from rl_ckpt._outbox import set_patience
from rl_ckpt.tensors.spec import memory_of
from rl_ckpt.protocol.messages import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from rl_ckpt.protocol.messages import Bucket
    from rl_ckpt._transport import ReceiveTransport, Waits


MAX_BUFFERS = 512
"""Most buffers of one scattering read; the kernel's limit is 1,024."""


class Inlet:
    """The `Memory` of a session. Owns its streams.

    Args:
        transport: Dials the streams, and knows the ring.
        session: What the sender said of it.
        slots: uint8 [bucket_bytes] each.
        waits: How to wait for payload.
    """

    def __init__(
        self,
        transport: ReceiveTransport,
        session: Session,
        slots: Sequence[Tensor],
        waits: Waits,
    ) -> None:
        self.slots = slots
        self.is_lent = transport.is_lent
        self._opened = 0
        self._transport = transport
        self._session = session
        self._waits = waits
        self._streams: list[socket.socket] = []

    @property
    def opened(self) -> int:
        """Number of the sync for which the streams were opened; or generation of the group."""
        return self._opened if self._session.num_streams else self._transport.generation

    def open(self, sync: int, timeout_s: float) -> None:
        """Open the streams if they are not.

        Raises:
            ConnectionError: the sender is gone.
        """
        if len(self._streams) == self._session.num_streams:
            return
        self.close()
        self._opened = sync
        for index in range(self._session.num_streams):
            stream = close_in_children(self._transport.dial_stream())
            self._streams.append(stream)
            stream.settimeout(timeout_s)
            stream.sendall(encode(Stream(self._session.ticket, index, sync), 0))
            set_patience(stream)

    def fetch(self, bucket: Bucket, contents: Callable[[], Sequence[Tensor]]) -> bool:
        """Read a bucket into memory. See `rl_ckpt._landing.Memory`."""
        if self._session.num_streams == 0:
            self._transport.pull(bucket.slot, self.slots[bucket.slot][: bucket.used_bytes], self._waits)
            return False
        stream = self._streams[bucket.sequence % len(self._streams)]
        views = deque(memory_of(content) for content in contents())
        while views:
            try:
                num_bytes = stream.recvmsg_into(islice(views, MAX_BUFFERS), 0, socket.MSG_WAITALL)[0]
            except (BlockingIOError, InterruptedError):
                self._waits.readable(stream.fileno())
                continue
            except OSError:  # reset, or the network is gone
                num_bytes = 0
            if num_bytes == 0:
                self._waits.ended()
            while num_bytes:
                view = views.popleft()
                if num_bytes < view.nbytes:
                    views.appendleft(view[num_bytes:])
                    break
                num_bytes -= view.nbytes
            if views:  # a slow sender: look up between two calls
                self._waits.readable(stream.fileno())
        return True

    def refresh(self, slot: int) -> bool:
        """Undo what this process has written to a slot. See `rl_ckpt._landing.Memory`."""
        return self._transport.refresh(slot)

    def close(self) -> None:
        """Close the streams. What was not read is gone; the next sync opens new ones."""
        for stream in self._streams:
            stream.close()
        self._streams = []
        self._transport.disband()
