"""`file:///DIRECTORY`: durable queue, as `shm` but with memory and metadata in files that outlive every process.

On tmpfs (`/dev/shm/...`) it is as fast; on a disk, the page cache buffers it. Serving the same directory again
continues where the last server ended.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from rl_tq.client.shm import ShmQueue
from rl_tq.durability import Journal
from rl_tq.errors import AddressError
from rl_tq.server.unix import serve_segments


def serve(name: str, *, timeout_s: float, snapshot: Path | None = None) -> ShmQueue:
    """See `rl_tq.serve`."""
    address, abstract, directory = _names(name)
    return serve_segments(address, abstract, Journal(directory), timeout_s=timeout_s, snapshot=snapshot)


def connect(name: str, *, timeout_s: float) -> ShmQueue:
    """See `rl_tq.connect`."""
    address, abstract, _ = _names(name)
    return ShmQueue(address, abstract, timeout_s=timeout_s)


def _names(name: str) -> tuple[str, str, Path]:
    if not name.startswith("/"):
        raise AddressError(f"'file://{name}' names no directory: write file:///an/absolute/path")
    directory = Path(name).resolve()
    return f"file://{directory}", "rl-tq-file/" + hashlib.sha256(str(directory).encode()).hexdigest()[:40], directory
