"""`shm://NAME`: a queue for the processes of one host and user: tensors in shared memory, references on a socket."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from rl_tq._agent import Host
from rl_tq._shm_client import ShmQueue
from rl_tq._wire import socket_name

if TYPE_CHECKING:
    from pathlib import Path


def serve(name: str, *, timeout_s: float, snapshot: Path | None = None) -> ShmQueue:
    """See `rl_tq.serve`."""
    name = name or uuid.uuid4().hex[:12]
    address = f"shm://{name}"
    host = Host(address, socket_name(address), snapshot=snapshot)
    try:
        return ShmQueue(address, socket_name(address), timeout_s=timeout_s, host=host)
    except BaseException:
        host.close()
        raise


def connect(name: str, *, timeout_s: float) -> ShmQueue:
    """See `rl_tq.connect`."""
    address = f"shm://{name}"
    return ShmQueue(address, socket_name(address), timeout_s=timeout_s)
