"""`shm://NAME`: queue for processes of one host and user, with tensors in shared memory and requests on a socket."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from rl_tq.client.shm import ShmQueue
from rl_tq.protocol.framing import socket_name
from rl_tq.server.unix import serve_segments

if TYPE_CHECKING:
    from pathlib import Path


def serve(name: str, *, timeout_s: float, snapshot: Path | None = None) -> ShmQueue:
    """See `rl_tq.serve`."""
    address = f"shm://{name or uuid.uuid4().hex[:12]}"
    return serve_segments(address, socket_name(address), timeout_s=timeout_s, snapshot=snapshot)


def connect(name: str, *, timeout_s: float) -> ShmQueue:
    """See `rl_tq.connect`."""
    address = f"shm://{name}"
    return ShmQueue(address, socket_name(address), timeout_s=timeout_s)
